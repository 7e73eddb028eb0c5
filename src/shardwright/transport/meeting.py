"""How the ranks of a transport meet: what each leaves in the job's store for the others, and who refuses.

A few keys of each rank, and no connection between them: how many that takes doesn't grow with the ranks.

    <what>/<place>      left by that rank, or for it
    <what>/refused      the first reason that a rank gave
    <what>/came         how many have come
    <what>/all          they all have
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from shardwright import clock
from shardwright.errors import CommError, printable
from shardwright.transport.launches import Launch, LaunchLog
from shardwright.transport.process import process_state

_POLL_S = 0.05
_NO_REASON = " "


class Meeting:
    """The ranks that make one transport: ``rank`` is this one's place among ``world``.

    store: theirs alone. log: of the transport.
    """

    def __init__(self, store: Store, log: LaunchLog, rank: int, timeout: timedelta) -> None:
        self.log = log
        self.rank = rank
        self.world = len(log.ranks)
        self.timeout_s = timeout.total_seconds()
        self._store = store

    def leave(self, what: str, data: str, at: int | None = None) -> None:
        """Leave something for the others; ``refusal`` follows before they ``read`` it. Or for the one at a
        place, which takes it by ``own``."""
        self._store.set(f"{what}/{self.rank if at is None else at}", data)

    def own(self, what: str) -> str:
        """What another rank leaves for this one, once it is there. Raises: as ``refusal``."""
        self._wait_for(f"{what}/{self.rank}", what)
        return self._store.get(f"{what}/{self.rank}").decode()

    def read(self, what: str, ranks: Iterable[int]) -> dict[int, str]:
        """What these ranks have left, all of which have come. One message, however many there are."""
        ranks = list(ranks)
        found = self._store.multi_get([f"{what}/{rank}" for rank in ranks]) if ranks else []
        return {rank: data.decode() for rank, data in zip(ranks, found, strict=True)}

    def refusal(self, what: str, own: str | None) -> str | None:
        """Return when all ranks have come here: why one of them refused, None where none did; the same on
        all.

        own: this rank's reason ("": it has none to tell), None where it doesn't refuse.
        Raises: CommError where they don't come within the time limit, or the watch found why they can't.
        """
        store = self._store
        if own is not None:
            store.compare_set(f"{what}/refused", "", own or _NO_REASON)
        if store.add(f"{what}/came", 1) == self.world:
            store.set(f"{what}/all", "")
        self._wait_for(f"{what}/all", what)
        if not store.check([f"{what}/refused"]):
            return None
        return printable(store.get(f"{what}/refused").decode().strip())

    def waiting(self, what: str) -> AbstractContextManager[Any]:
        """Around a wait for other ranks, which the watch then sees."""
        return self.log.waiting(
            Launch(0, f"make a transport ({what})", process_state.phase, process_state.step)
        )

    def _wait_for(self, key: str, what: str) -> None:
        began, pause = clock.monotonic(), 0.0005
        with self.waiting(what):
            while not self._store.check([key]):
                process_state.raise_diagnosis()
                if clock.monotonic() - began > self.timeout_s:
                    came = self._store.add(f"{what}/came", 0)
                    raise CommError(
                        f"waited {self.timeout_s:.0f} s for other ranks to make a transport, and {came} of "
                        f"{self.world} came: look at what the launcher says of the others"
                    )
                clock.sleep(pause)
                pause = min(2 * pause, _POLL_S)
