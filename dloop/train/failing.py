"""A process that fails ends the others: they wait in a sum that it never joins, for as long as they are told to."""

import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from dloop.errors import UserError
from dloop.train.parallel import Share

EVERY_S = 0.5  # the others are listened to
GRACE_S = 5.0  # for a process to end by itself, with its own words, once another has failed


@dataclass
class Listener:
    """Hears, in a thread of its own, that another process has failed; ends this one if it does not end by itself."""

    store: TCPStore
    key: str
    over: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        """Until `over`."""
        while not self.over.wait(EVERY_S):
            try:
                if not self.store.check([self.key]):
                    continue
                reason = self.store.get(self.key).decode()
            except RuntimeError:  # who keeps the store is gone without a word
                reason = "another process has gone"
            if not self.over.wait(GRACE_S):
                print(f"dloop train: failed: {reason}", file=sys.__stderr__, flush=True)
                os._exit(1)  # the main thread waits in a sum, where no exception reaches it

    def told(self, mine: str) -> str:
        """Why the first process failed: this one's reason, unless another was before it."""
        try:
            first = self.store.compare_set(self.key, "", mine).decode()
        except RuntimeError:  # its keeper is gone
            return mine
        if first == mine:
            time.sleep(2 * EVERY_S)  # the store may go with this process: let the others hear it
        return first


@contextmanager
def ending_together(share: Share) -> Generator[None]:
    """Inside, what ends one process ends all. Raises RuntimeError with the reason of the one that failed first."""
    if share.world == 1:
        yield
        return
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    listener = Listener(store, f"dloop/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}")
    thread = threading.Thread(target=listener.listen, daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        mine = f"process {share.rank} of {share.world} has failed ({type(error).__name__}: {error})"
        first = listener.told(mine)
        if first == mine or isinstance(error, UserError | KeyboardInterrupt):
            raise
        raise RuntimeError(first) from error
    finally:
        listener.over.set()
        thread.join()
