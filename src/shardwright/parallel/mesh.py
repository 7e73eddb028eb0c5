"""The mesh of a script in one call: which ranks share what."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.errors import InputError
from shardwright.mesh_sizes import check_model, fill
from shardwright.parallel.recorded import see_torchs
from shardwright.parallel.sequence import part_of
from shardwright.torch_private import concatenated, flattened
from shardwright.transport.mesh import default_mesh


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job as ``mesh`` arranges them. All meshes in it are parts of one.

    Attributes:
        device_mesh: all ranks, an axis for each size above 1, in the order pp, replicate, dp, cp, tp. Where
            ``ep`` is above 1, two axes stand for the one that it divides.
        shard: for ``fully_shard``: dp and cp as one axis, 2-D with replicate before it.
        experts: the same for experts' parameters: what ``ep`` leaves of dp and cp.
        ep: 1-D, over whose ranks experts are distributed; None if its size is 1, as of the following.
        tp: for tensor parallelism.
        cp: the ranks that share a sequence.
        pp: the stages of a pipeline.
        loss_group: the ranks over whose tokens a loss is a mean: replicate, dp and cp.
    """

    device_mesh: DeviceMesh
    shard: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh | None
    tp: DeviceMesh | None
    cp: DeviceMesh | None
    pp: DeviceMesh | None
    loss_group: dist.ProcessGroup

    @property
    def num_samples(self) -> int:
        """How many ranks, or sets of ranks, read different samples: replicate x dp."""
        return self.loss_group.size() // (1 if self.cp is None else self.cp.size())

    @property
    def sample_rank(self) -> int:
        """Which of ``num_samples`` this rank reads; the same on ranks that differ in cp, tp or pp alone."""
        return self.loss_group.rank() // (1 if self.cp is None else self.cp.size())

    def seed(self, base: int) -> int:
        """A seed for dropout and the like. Local.

        Args:
            base: the seed of the job.

        Returns:
            Another for each rank of ``loss_group``, since these have different tokens; ranks that differ in
                tp or pp alone get the same one.
        """
        return base + self.loss_group.rank()

    def split(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a batch that all ranks of ``cp`` have. Local.

        Args:
            batch: the first tensor is [batch, sequence, ...], of any dtype; each with as many elements on dim
                1 is cut there, others are left as they are. ``position_ids`` of packed documents are
                [batch or 1, sequence], int64, and begin again at 0 with each document.

        Returns:
            Tensors of the same names and dtypes, [batch, sequence / cp, ...], copied. ``position_ids`` are
                added, [1, sequence / cp] in int64, if there were none.

        Raises:
            InputError: the batch isn't one, or cp doesn't divide its sequences.

        Examples:
            >>> shardwright.mesh().split({"input_ids": torch.tensor([[5, 6]])})
            {'input_ids': tensor([[5, 6]]), 'position_ids': tensor([[0, 1]])}
        """
        return part_of(batch, *((0, 1) if self.cp is None else (self.cp.get_local_rank(), self.cp.size())))


def mesh(
    dp: int = -1,
    replicate: int = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    pp: int = 1,
    *,
    model: nn.Module | None = None,
    device_type: str | None = None,
) -> Mesh:
    """Arrange all ranks for sharding beside tensor, context, expert and pipeline parallelism.

    Every rank calls it once, with the same arguments, before ``fully_shard``; process groups of the axes are
    made, and nothing else is exchanged. A mistake raises before any is made. Without a launcher it is a world
    of one.

    Args:
        dp: ranks that read different samples and shard parameters; -1: those that the others leave. One of
            the sizes but ``ep`` may be -1.
        replicate: copies of all shards (hybrid sharding); their ranks read different samples too.
        tp: ranks that share each layer.
        cp: ranks that share each sequence (``context_parallel``), over which parameters are sharded too.
        ep: ranks that share the experts. These are ranks of dp and cp, so it adds none; a multiple or a
            divisor of ``cp``.
        pp: stages of a pipeline.
        model: its config, or itself, says how many heads, experts and layers there are, under Hugging Face's
            names; sizes that these can't be shared by are refused.
        device_type: of the tensors ("cpu", "cuda"); None: the accelerator, if the job has a backend for it.

    Returns:
        The ``Mesh``.

    Raises:
        InputError: a size isn't one, the sizes don't make up the world, or the model can't be shared so.

    Examples:
        >>> mesh = shardwright.mesh()
        >>> model = shardwright.fully_shard(nn.Linear(8, 4), mesh=mesh.shard)
        >>> mesh.num_samples, mesh.sample_rank, mesh.cp
        (1, 0, None)
    """
    sizes = {"dp": dp, "replicate": replicate, "tp": tp, "cp": cp, "ep": ep, "pp": pp}
    for name, size in sizes.items():
        if not isinstance(size, int) or not (size >= 1 or (size == -1 and name != "ep")):
            raise InputError(f"mesh: {name} is {size!r}, expected a number of ranks, 1 or more")
    whole = default_mesh()
    fill(sizes, whole.size())
    if model is not None:
        _check_model(sizes, model)
    see_torchs(tensor_parallel=sizes["tp"] > 1, pipeline=sizes["pp"] > 1)
    return _made(sizes, device_type or whole.device_type)


def _check_model(sizes: dict[str, int], model: nn.Module) -> None:
    """Whether ranks can share a model's heads, experts and layers, as far as it names them."""
    config = getattr(model, "config", model)
    places = [getattr(config, "text_config", None), config, model]

    def number(*names: str) -> int | None:
        found = (getattr(place, name, None) for name in names for place in places)
        return next((value for value in found if isinstance(value, int)), None)

    check_model(sizes, number)


def _made(sizes: dict[str, int], device_type: str) -> Mesh:
    dp, cp, ep = sizes["dp"], sizes["cp"], sizes["ep"]
    # Meshes of dense and of expert parameters are both made of the finest axes, so that they are of one mesh.
    if ep == 1:
        fine, of_dp, of_ep = {"dp": dp, "cp": cp}, ["dp", "cp"], []
    elif ep % cp == 0:
        fine = {"dp_outer": dp * cp // ep, "dp_inner": ep // cp, "cp": cp}
        of_dp, of_ep = ["dp_outer"], ["dp_inner", "cp"]
    else:
        fine = {"dp": dp, "cp_outer": cp // ep, "cp_inner": ep}
        of_dp, of_ep = ["dp", "cp_outer"], ["cp_inner"]
    axes = {"pp": sizes["pp"], "replicate": sizes["replicate"], **fine, "tp": sizes["tp"]}
    axes = {name: size for name, size in axes.items() if size > 1 or name == of_dp[0]}
    device_mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def part(name: str, of: Iterable[str]) -> DeviceMesh | None:
        """These axes as one; None if their size is 1."""
        of = tuple(axis for axis in of if axis in axes)
        if not of:
            return None
        return device_mesh[of[0]] if len(of) == 1 else flattened(device_mesh[of], name)

    replicate = part("replicate", ["replicate"])

    def with_copies(mesh: Any) -> DeviceMesh:
        return mesh if replicate is None else concatenated([replicate, mesh])

    shard = part("shard", fine)
    loss = part("loss", ["replicate", *fine]) if replicate else shard
    assert loss is not None
    return Mesh(
        device_mesh,
        with_copies(shard),
        with_copies(part("experts", of_dp) if ep > 1 else shard),
        part("ep", of_ep),
        part("tp", ["tp"]),
        part("cp", [name for name in fine if name.startswith("cp")]),
        part("pp", ["pp"]),
        loss.get_group(),
    )
