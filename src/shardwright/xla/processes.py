"""The processes of an XLA job: joining them, and the few numbers that they exchange."""
# pyright: reportMissingImports=false

import jax
import numpy as np
from jax.experimental import multihost_utils


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
    rows = multihost_utils.process_allgather(np.frombuffer(np.array(values).tobytes(), np.uint8))
    return [np.frombuffer(row.tobytes()).tolist() for row in np.asarray(rows)]


def own_devices() -> list[int]:
    """Places, among the devices of all processes, of those that belong to this process."""
    return [i for i, device in enumerate(jax.devices()) if device.process_index == process_index()]


def num_devices() -> int:
    """Devices of all processes."""
    return len(jax.devices())
