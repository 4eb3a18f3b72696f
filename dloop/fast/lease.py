"""Stores and graphs outlive a call: a session leases one, and an ended session's is taken over by the next."""

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar


class Leased:
    """What one session at a time may use."""

    user: "weakref.ref[object] | None" = None

    @property
    def is_free(self) -> bool:
        """Whether no session uses it; one that nobody refers to has ended."""
        return self.user is None or self.user() is None


M = TypeVar("M", bound=Leased)
S = TypeVar("S")
LEASING = threading.RLock()  # two threads must not find the same member free


def lease(pool: list[M], fits: Callable[[M], bool], create: Callable[[], M], use: Callable[[M], S]) -> S:
    """A session on the first free member of the pool that fits, or on a new one."""
    with LEASING:
        member = next((member for member in pool if member.is_free and fits(member)), None)
        if member is None:
            member = create()
            pool.append(member)
        session = use(member)
        member.user = weakref.ref(session)
        return session
