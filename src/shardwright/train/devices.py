"""The XLA devices that a run trains on, and its processes: one, or under torchrun one per rank of it.

On CPU one process has as many virtual devices as the recipe has ranks (see ``launch.xla_environment``).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.data.text import Share
from shardwright.recipe.config import Recipe
from shardwright.xla import processes


class DevicePlace:
    """A ``TrainingProcess`` that is one process with all its devices; each is a rank of the recipe."""

    device_type = "xla"

    def __init__(self, local_world: int | None) -> None:
        self.world = local_world or processes.num_devices()
        self._own = [device for device in processes.own_devices() if device < self.world]

    @property
    def num_samples(self) -> int:
        """See ``TrainingProcess``: all devices."""
        return self.world

    @property
    def is_first(self) -> bool:
        """Whether this is process 0."""
        return processes.is_first_process()

    @property
    def store_address(self) -> str:
        """Nowhere: the ranks are devices of one program."""
        return ""

    def shares(self, batch_size: int) -> list[Share]:
        """A share for each device of this process."""
        return [Share(device, self.world, batch_size) for device in self._own]

    def total(self, *values: float) -> list[float]:
        """See ``TrainingProcess``."""
        return [sum(column) for column in zip(*processes.all_values(*values), strict=True)]

    def largest(self, *values: float) -> list[float]:
        """See ``TrainingProcess``."""
        return [max(column) for column in zip(*processes.all_values(*values), strict=True)]

    def wait_for_all(self) -> None:
        """See ``TrainingProcess``."""
        processes.wait_for_all("shardwright train")


@contextmanager
def joined(recipe: Recipe) -> Iterator[DevicePlace]:
    """Join the other processes of torchrun, if there are any, for the length of the block."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        # torchrun's own store listens on MASTER_PORT.
        port = int(os.environ["MASTER_PORT"]) + 1
        processes.join(f"{os.environ['MASTER_ADDR']}:{port}", world, rank)
    yield DevicePlace(recipe.launch.ranks if world == 1 else None)
