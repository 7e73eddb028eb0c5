"""What the loop and the run ask of a backend. ``eager`` trains rank by rank, ``compiled`` in one XLA program.

Both take the same recipe and the same corpus in the same order, and write the same files: a run that one
began can be resumed by the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from shardwright.checkpoint import Restored
from shardwright.train.data import Share

Reading = Callable[[], tuple[float, float]]
"""Reads the loss of a step (nats per byte, mean over ranks) and the gradient's norm before clipping, which
waits for the device. Every rank calls it or none."""


class Place(Protocol):
    """Where this process stands among those that train, and the few numbers that they exchange.

    world: ranks, each with a ``batch_size`` of its own. device: kind and number of threads or so, for people.
    """

    @property
    def world(self) -> int: ...

    @property
    def device_type(self) -> str: ...

    @property
    def is_first(self) -> bool:
        """Whether this process prints, and writes the whole files."""
        ...

    @property
    def store_address(self) -> str:
        """Where ``shardwright top`` can ask the ranks; "" where nobody can be asked."""
        ...

    def shares(self, batch_size: int) -> Sequence[Share]:
        """The parts of every microbatch that this process feeds."""
        ...

    def total(self, *values: float) -> list[float]:
        """The sums over all processes of each value. Every process calls."""
        ...

    def largest(self, *values: float) -> list[float]:
        """The maximum over all processes of each value. Every process calls."""
        ...

    def wait_for_all(self) -> None:
        """Return when every process has called this."""
        ...


@dataclass(frozen=True)
class Sizes:
    """What a run's summary says of the sharded model, the largest rank's: None where nothing counts it.

    communication_s: seconds that the collectives of one step take alone. exposed_s: False where no time that
    the host waits is known.
    """

    parameters: int
    at_rest_nbytes: int
    full_nbytes: int
    peak_unsharded_nbytes: int | None
    communication_s: float | None
    exposed_is_known: bool


class Engine(Protocol):
    """A sharded model with its optimizer on one backend. Every process calls every method."""

    @property
    def place(self) -> Place: ...

    @property
    def exposed_s(self) -> float:
        """Seconds so far that the host has waited for collectives; 0 where it never does."""
        ...

    def step(self, number: int, position: int) -> Reading:
        """Train by optimizer step ``number`` (from 1) on the windows from ``position`` on."""
        ...

    def heldout_loss(self, windows: Tensor) -> float:
        """Mean nats per byte over ``windows`` (n, sequence_length + 1)."""
        ...

    def save(self, path: Path, extra: dict[str, Any], step: int) -> None:
        """Publish a resumable checkpoint below ``path``."""
        ...

    def restore(self, path: Path) -> Restored:
        """Go on from the latest checkpoint below ``path``. Raises: CheckpointError, nothing restored then."""
        ...

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model on the host of the first process, under plain names; elsewhere perhaps nothing."""
        ...

    def sizes(self) -> Sizes:
        """Measures; see ``Sizes``."""
        ...
