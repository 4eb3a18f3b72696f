"""What a gate that learns keeps beside the results of a set: every set begins anew, a run that was stopped goes on."""

import sys
from pathlib import Path

from dloop.bench.store import Store
from dloop.drafters.host import HostDrafter


def file_of(store: Store, rank: int) -> Path:
    """Where a rank keeps what its gates have learned from this set."""
    return store.folder / f"gate-rank-{rank}.json"


def begin(drafter: HostDrafter, store: Store, rank: int, given: Path | None) -> None:
    """Forget the warm-up and other sets; know what `given` keeps, or what the samples that are on record taught."""
    drafter.learned.forget()
    path, recorded = file_of(store, rank), bool(store.recorded())
    if recorded and path.is_file():
        drafter.learned.load(path)
        print(
            f"dloop bench: {store.folder}: the gate goes on with what it learned from {drafter.learned.rounds} rounds",
            file=sys.stderr,
        )
    elif given is not None:
        drafter.learned.load(given)
    elif recorded:
        print(f"dloop bench: {store.folder}: {path.name} is not there; the gate begins anew", file=sys.stderr)
