"""Whether all ranks hold the same model: the same groups, which begin with the same values. Buffers aren't
sharded: each rank keeps its own, where DistributedDataParallel sends rank 0's before each forward. Loaded
where there are several ranks.
"""

from collections.abc import Sequence

from torch import nn

from shardwright.engine.groups.group import ParamGroup
from shardwright.errors import Diverged, warn
from shardwright.params.first_weights import differing, hash_of
from shardwright.policy import Agreement
from shardwright.schedule.schedule import Phase
from shardwright.transport.base import Comm
from shardwright.transport.channel import compare, first_difference


def check_same_model(comm: Comm, groups: Sequence[ParamGroup], agreement: Agreement) -> None:
    """Every rank of the axis calls it with its groups that use ``comm``; one exchange of 16 bytes.

    Compares names, shapes, sharded dims, dtypes and precision policies, in order; before them whether ranks
    agree on what they launch, since one that does waits for words that another never sends; after them hashes
    of the values that parameters and buffers began with.
    Raises: Diverged on every rank of the axis where they differ, with both sides of the first difference.
    """
    lines = [f'agreement="{agreement}"', *(line for group in groups for line in _lines(group))]
    values = [line for group in groups for line in _values(group)]
    texts = compare(comm, "\n".join([*lines, _RULE, *values]), "compare models")
    if not texts:
        return
    parts = [text.partition(_RULE) for text in texts]
    sides = [names.splitlines() for names, _, _ in parts]
    differs = first_difference(sides)
    if differs is not None:
        raise Diverged(_told(*differs, sides[0][0] != sides[differs[2]][0]))
    found = differing([values.splitlines()[1:] for _, _, values in parts])
    if found is not None:
        raise Diverged(_other_values(*found))


_RULE = "\x1f"  # which no name has


def _other_values(name: str, other: int) -> str:
    return (
        f"{name} had other values on rank 0 of the mesh than on rank {other} when it was sharded, so the "
        "model would be made of rows of different models. Give every rank the same seed before the model is "
        "built (torch.manual_seed), load the same weights on every rank, broadcast rank 0's first "
        "(FullyShardedDataParallel has sync_module_states=True), or initialise or load after fully_shard"
    )


def _told(first: str, second: str, other: int, by_option: bool) -> str:
    if by_option:
        return (
            f"ranks differ in whether they agree on what they launch: {first} on rank 0 of the mesh, "
            f"{second} on rank {other}. Give every rank the same SchedulePolicy(agreement=...), or the same "
            "value of the environment variable SHARDWRIGHT_AGREEMENT"
        )
    return (
        f"ranks have sharded different models, first seen between ranks 0 and {other} of the mesh:\n"
        f"  rank 0: {first}\n  rank {other}: {second}\n"
        "Build the same model on every rank, and call fully_shard on the same modules in the same order"
    )


def _lines(group: ParamGroup) -> list[str]:
    lines = [f"group {group.name} with {group.policy}"]
    by_rows = "" if group.gatherer.rows is None else ", rows in use"
    for param in group.params:
        layout = param.layout
        kept = ", which the policy leaves in it" if param.split.keeps_dtype else ""
        name = param.compared.get(param.fqn, param.fqn)
        rows = "" if layout.sizes is None else f" in rows {list(layout.sizes)}"
        lines.append(
            f"parameter {name} of group {group.name}: shape {list(layout.shape)}, sharded on dim "
            f"{layout.dim}{rows}, {param.sharded.dtype}{kept}{by_rows}"
        )
        names = [(member.names[0], list(member.shape)) for member in param.members]
        lines += [f"  its member {param.compared.get(name, name)}: shape {shape}" for name, shape in names]
    return lines


def _values(group: ParamGroup) -> list[str]:
    """What ranks compare of the values that its parameters began with."""
    pairs = [(param.compared.get(param.fqn, param.fqn), param) for param in group.params]
    told = [(name, each.beginning.told(each.local)) for name, each in pairs if each.beginning is not None]
    return [f"parameter {name!r} of group {group.name!r} {value}" for name, value in told]


def compare_buffers(module: nn.Module, comms: Sequence[Comm], phase: Phase) -> None:
    """Warn where buffers differ between ranks; every rank calls it."""
    lines = [f"{name} {hash_of(buffer)}" for name, buffer in module.named_buffers()]
    for comm in comms if lines else ():
        texts = compare(comm, "\n".join(lines), f"compare buffers {phase}")
        found = differing([text.splitlines() for text in texts]) if texts else None
        if found is not None:
            name, other = found
            warn(
                f"buffer {name!r} isn't the same on rank 0 as on rank {other} of the mesh in this {phase}: "
                "each rank keeps its own, where DistributedDataParallel sends rank 0's. Running statistics "
                "are those of a rank's own batches: use nn.SyncBatchNorm, or dist.broadcast(buffer, src=0) "
                "each of model.buffers() before an evaluation (this warning is given once)",
            )
            return
