"""Ctrl-C during training: the run ends where weights and step count agree, and never inside a save."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager

from dloop.train.parallel import any_of

INSIST = 3  # times: two quick ones are a nervous finger, three are meant


class Interrupt:
    """Ctrl-C asks for an end at the next step's boundary; the third one ends at once, in the midst of a step.

    Takes over SIGINT from its making to `restore`, in the main thread only.
    """

    def __init__(self) -> None:
        self.times = 0
        self.insisted = False  # weights may be half updated
        self.agreed = False  # all processes end here
        self.saving = False
        self.before = signal.getsignal(signal.SIGINT)
        self.in_main_thread = threading.current_thread() is threading.main_thread()
        if self.in_main_thread:
            signal.signal(signal.SIGINT, self._ask)

    def check(self) -> None:
        """Raise KeyboardInterrupt if an end was asked for, of any process: all end at the same step."""
        self.agreed = any_of(self.times)
        if self.agreed:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Generator[None]:
        """Inside, Ctrl-C is only noted."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False

    def restore(self) -> None:
        """Give SIGINT back."""
        if self.in_main_thread:
            signal.signal(signal.SIGINT, self.before)

    def _ask(self, _signal: int, _frame: object) -> None:
        self.times += 1
        if self.times >= INSIST and not self.saving:
            self.insisted = True
            raise KeyboardInterrupt
