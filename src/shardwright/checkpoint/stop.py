"""Being told to stop (pre-emption, a time limit), and every rank hearing of it at the same step."""

import signal
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwright.errors import InputError
from shardwright.transport.attempt import new_group
from shardwright.transport.mesh import TIMEOUT


class StopRequest:
    """From now on ``signals`` are remembered instead of ending this process; ``agreed`` tells the loop.

    A scheduler may tell one rank, or all, at any moment of a step; a save needs all ranks at the same step.
    So each rank asks once a step, and all get the same answer: the step in which the signal arrived is the
    one that all save. The checkpoint is there at most one step and one save after the signal, in a loop as
    docs/checkpoint.md shows. Every rank makes one, in the main thread of its process, before or after
    ``init_process_group``. A second signal changes nothing: torchrun and the scheduler may both send one,
    and what ends a loop that doesn't ask is SIGKILL. Also a context manager: it calls ``close``.

    Raises: InputError outside of the main thread, where Python takes no signal handlers.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InputError(
                "StopRequest must be made in the main thread: Python takes signal handlers there only"
            )
        self.reason = ""
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._received) for number in signals
        }
        self._group: dist.ProcessGroup | None = None

    def agreed(self) -> bool:
        """Whether any rank was asked to stop, the same answer on every rank. Every rank calls, once a step.

        Sends one integer, over a Gloo group of its own that the first call makes: it waits for no GPU, and
        queues behind no gradient. Without a process group it answers for this process.
        """
        if not dist.is_initialized():
            return bool(self.reason)
        if self._group is None:
            self._group = new_group(range(dist.get_world_size()), "gloo", TIMEOUT)
        asked = torch.tensor([bool(self.reason)], dtype=torch.int32)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        return bool(asked.item())

    def ask(self, reason: str) -> None:
        """Ask for a stop from this process' own code, as a signal does. Local; any thread may call it."""
        self.reason = self.reason or reason

    def close(self) -> None:
        """Signals do again what they did before. Local."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _received(self, number: int, _: Any) -> None:
        self.ask(signal.Signals(number).name)
