"""The XLA backend: the same sharding for TPUs and every other XLA device, from one compiled step.

    from shardwright import xla

    for block in model.blocks:
        xla.fully_shard(block)
    xla.fully_shard(model)
    step = xla.make_train_step(model, lambda model, x, y: F.cross_entropy(model(x), y), xla.AdamW(lr=1e-3))
    loss = step(x, y)

It needs the extra ``shardwright[xla]``. This package imports neither jax nor torchax until one of its names
is used; ``shardwright.xla.files`` (the files of XlaFullyShardedDataParallel) never does.
"""

import os
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.extras import from_extra

if TYPE_CHECKING:
    from shardwright.xla.mesh import make_mesh
    from shardwright.xla.optim import SGD, AdamW
    from shardwright.xla.shard import fully_shard
    from shardwright.xla.state import full_state_dict, load_full_state_dict, materialize, stats
    from shardwright.xla.step import TrainStep, make_train_step
    from shardwright.xla.wrap import size_based_policy

_NAMES = {
    "mesh": "make_mesh",
    "optim": "AdamW SGD",
    "shard": "fully_shard",
    "state": "full_state_dict load_full_state_dict materialize stats",
    "step": "TrainStep make_train_step",
    "wrap": "size_based_policy",
}
_FILE_OF = {name: file for file, names in _NAMES.items() for name in names.split()}

__all__ = [
    "SGD",
    "AdamW",
    "TrainStep",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "make_mesh",
    "make_train_step",
    "materialize",
    "size_based_policy",
    "stats",
]


def _give_threads() -> None:
    """Have XLA's CPU client start more threads than it has virtual devices; where it can't any more, no-op.

    A device that waits in a collective holds its thread, and the others run on what is left. With a thread
    per core, two devices on two cores hung for good after some hundred steps of a convnet (XLA then ends
    the process: "Expected 2 threads to join the rendezvous"). The client reads the number when it is made.
    """
    devices = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if devices and int(devices[1]) > 1:
        os.environ.setdefault("NPROC", str((os.cpu_count() or 1) + 8 * int(devices[1])))


_give_threads()


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with from_extra("xla"):
        return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
