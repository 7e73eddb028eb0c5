"""The processes of an XLA job: joining them, and the few numbers that they exchange."""
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardwright.errors import CheckpointError

T = TypeVar("T")


def join(coordinator: str, num_processes: int, process_id: int) -> None:
    """Make ``num_processes`` processes one job: afterwards every one sees the devices of all.

    Every process calls it, before anything asks jax for its devices. coordinator: ``host:port``, where
    process 0 listens. On CPU devices collectives between processes go over Gloo.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_processes, process_id)


def process_index() -> int:
    """This process's number, from 0."""
    return jax.process_index()


def is_first_process() -> bool:
    """Whether this process is the one that writes what all have."""
    return process_index() == 0


def wait_for_all(name: str) -> None:
    """Return when every process has called it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def all_values(*values: float) -> list[list[float]]:
    """The values of each process, in order. Every process calls it."""
    if jax.process_count() == 1:
        return [list(values)]
    # As bytes: without jax's x64 mode an array of float64 would be rounded to float32 on the way.
    rows = multihost_utils.process_allgather(np.frombuffer(np.array(values, np.float64).tobytes(), np.uint8))
    return [np.frombuffer(row.tobytes()).tolist() for row in np.asarray(rows)]


def together(what: str, work: Callable[[], T]) -> T:
    """``work()``, which communicates with nobody, once it has succeeded on every process. Every process calls
    it.

    Raises: on every process if ``work`` failed on any: there its own error, elsewhere CheckpointError.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    failed = [process for process, (fault,) in enumerate(all_values(failure is not None)) if fault]
    if failure is not None:
        raise failure
    if failed:
        raise CheckpointError(
            f"{what} failed on process {failed[0]}, whose own error says why; nothing is changed"
        )
    return result  # type: ignore[possibly-unbound]


def own_devices() -> list[int]:
    """Places, among the devices of all processes, of those that belong to this process."""
    return [i for i, device in enumerate(jax.devices()) if device.process_index == process_index()]


def num_devices() -> int:
    """Devices of all processes."""
    return len(jax.devices())
