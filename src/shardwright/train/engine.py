"""What the loop and the run ask of a backend, and of the kind of training.

``eager`` trains rank by rank, ``compiled`` in one XLA program. Both take the same recipe and the same corpus
in the same order, and write the same files: a run that one began can be resumed by the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardwright.checkpoint import Restored
from shardwright.checkpoint.url import Location
from shardwright.data.text import Share
from shardwright.plan.memory import HeldBytes
from shardwright.recipe.config import Recipe, TrainingConfig
from shardwright.train.folder import RunFolder


@dataclass(frozen=True)
class Reading:
    """Reads what a step has measured, which waits for the device. Every rank calls one of these, or none.

    values: the loss (nats per byte, mean over ranks), the gradient's norm before clipping, and further
    figures by their keys in ``metrics.jsonl``. norm: that norm alone. first_nonfinite: the first parameter
    whose gradient isn't finite; "" where none is known.
    """

    values: Callable[[], tuple[float, float, dict[str, float]]]
    norm: Callable[[], float]
    first_nonfinite: Callable[[], str] = str


class TrainingProcess(Protocol):
    """Where this process stands among those that train, and the few numbers that they exchange.

    world: ranks. num_samples: of these, those that have a ``batch_size`` of their own; others read the same
    sequences as one of them. device: kind and number of threads or so, for people.
    """

    @property
    def world(self) -> int: ...

    @property
    def num_samples(self) -> int: ...

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

    communication_s: seconds that the collectives of one step take alone. exposed_is_known: whether
    the time in which they were waited for is.
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
    def place(self) -> TrainingProcess: ...

    @property
    def exposed_s(self) -> float | None:
        """Seconds so far that the host, or the device's compute stream, has waited for collectives; None
        where nothing counts it."""
        ...

    data_s: float
    """Seconds so far in which this process got its batches ready."""

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a trained token, as ``train.flops`` counts them."""
        ...

    def tokens(self, first: int, end: int) -> int:
        """Tokens of the windows of all ranks from one position up to another, without padding."""
        ...

    def step(self, number: int, position: int) -> Reading:
        """Train by optimizer step ``number`` (from 1) on the windows from ``position`` on."""
        ...

    def heldout_loss(self) -> float:
        """Mean nats per byte, or token, over what is held out."""
        ...

    def save(self, path: Location, extra: dict[str, Any], step: int) -> None:
        """Publish a resumable checkpoint below ``path``; below a URL in the background, until
        ``checkpoint.background.finish``."""
        ...

    def restore(self, path: Location) -> Restored:
        """Go on from the latest checkpoint below ``path``. Raises: CheckpointError, nothing restored then."""
        ...

    @property
    def peak_nbytes(self) -> int | None:
        """Bytes that this process held at most in training: of an accelerator what torch's allocator counted,
        of a CPU what tensors held at the events of its second step. None where nothing has counted them."""
        ...

    def sizes(self) -> Sizes:
        """Measures; see ``Sizes``."""
        ...


class Job(Protocol):
    """One kind of training: its data, its engine and what is left at the end. Every process makes one.

    recipe: with ``training.steps`` in place of epochs. unit: what a loss is the mean of, "byte", "token" or
    "pair". epoch_steps: optimizer steps of an epoch. identity: what must not change between the parts of one
    run, by the name that an error gives it. corpus_sha256, unigram_entropy: of the training data.
    """

    recipe: Recipe
    unit: str
    epoch_steps: int
    corpus_sha256: str

    @property
    def identity(self) -> dict[str, Any]: ...

    @property
    def unigram_entropy(self) -> float: ...

    def expected_peak(self) -> HeldBytes | None:
        """The moment of a step at which a rank is expected to hold most (``train.expected``); None on a
        backend that has no prices. Of one process. Raises: InputError for what can't be traced."""
        ...

    def opening(self) -> Sequence[str]:
        """Lines for people: the corpus, what is trained."""
        ...

    def engine(self) -> Engine:
        """The sharded model with its optimizer. Every process calls, once."""
        ...

    def export(self, engine: Any, folder: RunFolder, *, step: int, last: bool) -> str:
        """Leave the model of ``engine`` in the run's folder, after an epoch or, if ``last``, at the end. Then
        returns a text that it writes, for people, on the first process; else "". Every process calls."""
        ...


def steps_of(training: TrainingConfig, epoch_steps: int) -> TrainingConfig:
    """``training`` with as many steps as its epochs take, if it has any."""
    return (
        training.model_copy(update={"steps": training.epochs * epoch_steps}) if training.epochs else training
    )
