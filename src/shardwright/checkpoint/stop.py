"""Being told to stop (pre-emption, a time limit), and every rank hearing of it at the same step."""

import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright.errors import InputError
from shardwright.transport.attempt import new_group
from shardwright.transport.mesh import TIMEOUT
from shardwright.transport.process import LaunchLog


class StopRequest:
    """Remembers signals instead of ending this process, so that all ranks can stop at the same step.

    A scheduler may signal one rank, or all, at any moment of a step; a save needs all ranks at the same step.
    So each rank calls ``agreed`` once a step, and all get the same answer: all save the step in which the
    signal arrived. With the loop of docs/checkpoint.md, the checkpoint is complete at most one step and one
    save after the signal. Every rank creates one, in the main thread of its process, before or after
    ``init_process_group``. A second signal changes nothing, because torchrun and the scheduler may both send
    one; only SIGKILL ends a loop that doesn't call ``agreed``. As a context manager it calls ``close`` at the
    end.

    Args:
        signals: which signals, such as ``signal.SIGTERM``.

    Raises:
        InputError: it was created outside the main thread, where Python can't set signal handlers.

    Examples:
        >>> with shardwright.checkpoint.StopRequest() as stop:
        ...     for step in range(1000):
        ...         if step == 2:
        ...             stop.ask("a time limit")
        ...         if stop.agreed():
        ...             break  # after shardwright.checkpoint.save(...)
        >>> step, stop.reason
        (2, 'a time limit')
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
        self._log: LaunchLog

    def agreed(self) -> bool:
        """Whether any rank was asked to stop, with the same answer on every rank. Every rank calls it, once a
        step.

        It sends one integer over a separate Gloo group, which the first call creates, so it doesn't wait for
        a GPU or for gradients in flight. Without a process group it answers for this process alone.

        Returns:
            True from the step in which a rank was asked to stop.

        Raises:
            CommError: the first call's group can't be created, since a rank ended or never arrived.
        """
        if not dist.is_initialized():
            return bool(self.reason)
        if self._group is None:
            self._group = new_group(range(dist.get_world_size()), "gloo", TIMEOUT)
            self._log = LaunchLog(range(dist.get_world_size()), "stop ")
            self._log.travels_on(self._group)
        asked = torch.tensor([bool(self.reason)], dtype=torch.int32)
        with self._log.waiting(self._log.launch("whether to stop")):
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        return bool(asked.item())

    def ask(self, reason: str) -> None:
        """Ask for a stop from this process' own code, as a signal does. Local; any thread may call it.

        Args:
            reason: kept as ``reason``, unless there is one already.
        """
        self.reason = self.reason or reason

    def close(self) -> None:
        """Restore the previous handlers of the signals. Local."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _received(self, number: int, _: Any) -> None:
        self.ask(signal.Signals(number).name)
