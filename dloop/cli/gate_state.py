"""--gate-state: what a gate that learns knows goes from one run to the next."""

from collections.abc import Generator
from contextlib import contextmanager

from dloop.cli.generate import Decoding
from dloop.drafters.host import HostDrafter


@contextmanager
def kept(command: Decoding, drafter: HostDrafter | None) -> Generator[None]:
    """Begin with what the file keeps, if it is there; write it anew at the end, however that comes."""
    path = command.gate_state
    if path is None or drafter is None:
        yield
        return
    if path.exists():  # a folder is told of before anything is decoded
        drafter.learned.load(path)
    try:
        yield
    finally:
        drafter.learned.save(path)
