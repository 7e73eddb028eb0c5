"""What other kinds of parallelism add to a step beside sharding: parts of a model, and exchanges. Pure.

Exchanges of tp, cp, ep and pp are waited for, since the next operation reads what they bring; those of
sharding run beside compute. Ranks are laid out as ``shardwright.mesh`` does: of tp's, each is the next one.
"""

from collections import Counter
from dataclasses import dataclass, fields
from math import gcd

from shardwright.errors import InputError
from shardwright.options import check, limited
from shardwright.plan.workload import Op, OpKind, Workload

_BF16 = 2


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """How many ranks share what, as ``shardwright.mesh`` has it; the others are of sharding.

    Args:
        tp: ranks that share each layer, and between its matmuls the tokens (sequence parallelism).
        cp: ranks that share each sequence (``context_parallel``); parameters are sharded over them too.
        ep: of the ranks that parameters are sharded over so many share the experts.
        pp: stages of a pipeline.
        chunks: stages that each rank has, of an interleaved pipeline; 1: 1F1B.

    Raises:
        InputError: one of these is below 1.
    """

    tp: int = limited(1, ge=1)
    cp: int = limited(1, ge=1)
    ep: int = limited(1, ge=1)
    pp: int = limited(1, ge=1)
    chunks: int = limited(1, ge=1)

    def __post_init__(self) -> None:
        check(self)

    @property
    def axes(self) -> "AxisSizes":
        """These sizes alone, of what may be a ``Choice``."""
        return AxisSizes(**{each.name: getattr(self, each.name) for each in fields(AxisSizes)})

    @property
    def sharing(self) -> int:
        """Ranks that work on the same samples."""
        return self.tp * self.cp * self.pp

    def place(self, axis: str, ranks: int) -> tuple[int, int]:
        """Who exchanges on an axis.

        Args:
            axis: "tp", "cp", "ep" or "pp".
            ranks: of all.

        Returns:
            How many ranks, and how far the next one is from each.
        """
        return getattr(self, axis), {"tp": 1, "pp": ranks // self.pp}.get(axis, self.tp)

    def data_ranks(self, ranks: int) -> int:
        """What the axes leave to sharding, and to copies of shards.

        Args:
            ranks: of all.

        Returns:
            The number of ranks.

        Raises:
            InputError: ``ranks`` can't be divided so.
        """
        if ranks % self.sharing or ranks // (self.tp * self.pp) % self.ep:
            raise InputError(
                f"a mesh of {self.axes} needs a multiple of {self.sharing} ranks, of which ep divides those "
                f"of dp and cp, and there are {ranks}"
            )
        if self.ep % self.cp and self.cp % self.ep:
            raise InputError(f"ep={self.ep} is neither a multiple nor a divisor of cp={self.cp}")
        return ranks // (self.tp * self.pp)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "pp": self.pp}
        return " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp alone"


ALONE = AxisSizes()
"""Sharding alone."""


def _exchange(axis: str, nbytes: float, times: int = 1) -> Op:
    return Op(OpKind.EXCHANGE, nbytes=nbytes * times, kernels=times, axis=axis)


def of_layers(axes: AxisSizes, tokens: float, d_model: int, times: int) -> tuple[Op, ...]:
    """All-gathers and reduce-scatters of activations, [tokens, d_model], over tp.

    With sequence parallelism a block has two of each in its forward, around attention and around the
    feed-forward network, and in its backward, where each is the other's (Korthikanti et al. 2022, section
    4.2.2). torch's ``parallelize_module`` keeps what was gathered, so no third one is in the backward. What
    is computed again has three of the four: no one reads the last one's result.
    """
    return (_exchange("tp", _BF16 * tokens * d_model, times),) if axes.tp > 1 else ()


def of_attention(axes: AxisSizes, tokens: float, q_dim: int, kv_dim: int, head_dim: int) -> tuple[Op, ...]:
    """Two all-to-alls over cp, of queries, keys and values, and of what attention gives, each of the bytes
    that a rank has (``parallel/ulysses.py``). Those of a backward are as many and as large. Heads of keys and
    values are repeated until cp divides them."""
    if axes.cp == 1:
        return ()
    repeated = kv_dim * axes.cp // gcd(axes.cp, kv_dim // head_dim)
    return tuple(_exchange("cp", _BF16 * tokens * size) for size in (q_dim + 2 * repeated, q_dim))


def of_experts(axes: AxisSizes, tokens: float, d_model: int, chosen: int) -> tuple[Op, ...]:
    """Two all-to-alls over ep, of each token to the ``chosen`` experts and back, where routing is balanced
    (Lepikhin et al. 2020); a backward has the same two."""
    return (_exchange("ep", _BF16 * tokens * d_model * chosen, 2),) if axes.ep > 1 else ()


def of_stages(axes: AxisSizes, tokens: float, d_model: int) -> tuple[Op, ...]:
    """What a stage receives from the one before or after it: activations, or their gradient, of this rank's
    tokens; once for each of its chunks."""
    nbytes = _BF16 * tokens * d_model / axes.tp
    return (_exchange("pp", nbytes, axes.chunks),) if axes.pp > 1 else ()


def exchanged(work: Workload) -> dict[str, int]:
    """Bytes of a rank's tensors that are exchanged in one microbatch, by axis: of an all-to-all what goes
    in, its own part too, of an all-gather what comes out, of a reduce-scatter what goes in."""
    found = Counter[str]()
    for entries in work.phases.values():
        for _, stretch in entries:
            for op in stretch.ops:
                if op.kind is OpKind.EXCHANGE:
                    found[op.axis] += int(op.nbytes)
    return dict(found)


def in_flight(axes: AxisSizes, stage: int, microbatches: int) -> float:
    """Microbatches whose activations a rank of ``stage`` holds at most, in all of its blocks: of 1F1B one for
    each stage from it on (Narayanan et al. 2019), of interleaved 1F1B those of its warm-up and one more, each
    of a chunk (Narayanan et al. 2021, as torch's ``ScheduleInterleaved1F1B`` has it)."""
    if axes.chunks == 1:
        return min(microbatches, axes.pp - stage)
    warm = (axes.chunks - 1) * axes.pp + 2 * (axes.pp - 1 - stage)
    return min(microbatches, (warm + 1) / axes.chunks)
