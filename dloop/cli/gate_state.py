"""--gate-state: what a gate that learns knows goes from one run to the next."""

from collections.abc import Generator
from contextlib import contextmanager

from dloop.cli.generate import Decoding
from dloop.drafters.host import HostDrafter


@contextmanager
def kept(command: Decoding, drafter: HostDrafter | None) -> Generator[None]:
    """Begin with what the file keeps, if it is there; write it anew at the end, however that comes.

    Raises UserError before the end for a file that cannot be read or written.
    """
    path = command.gate_state
    if path is None or drafter is None:
        yield
        return
    if path.exists():
        drafter.learned.load(path)
    drafter.learned.save(path)  # a place that cannot be written to is told of before anything is decoded
    try:
        yield
    finally:
        drafter.learned.save(path)
