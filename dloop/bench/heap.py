"""Python's garbage collector, kept from pausing a measured response."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def still_heap() -> Generator[None]:
    """Inside, what is loaded already is not looked through again: with models that takes 0.2 s, in the midst of a text.

    Garbage that comes up is collected as always. Not for use within itself.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
