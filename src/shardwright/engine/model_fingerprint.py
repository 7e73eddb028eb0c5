"""Do the ranks of an axis hold the same model? Asked once, before the first collective on that axis.

Ranks that built other models would pair collectives of other sizes: wrong numbers on one transport, a dead
process on another.
"""

from collections.abc import Sequence
from itertools import zip_longest

from shardwright.engine.group import ParamGroup
from shardwright.errors import Diverged
from shardwright.params.flat_param import FlatParam
from shardwright.policy import Agreement
from shardwright.transport.base import Comm
from shardwright.transport.channel import compare


def check_same_model(comm: Comm, groups: Sequence[ParamGroup], agreement: Agreement) -> None:
    """Every rank of the axis calls it with its groups that use ``comm``; one exchange of 16 bytes.

    Compares names, shapes, sharded dims, dtypes and precision policies, in order; before them whether ranks
    agree on what they launch, since one that does waits for words that another never sends.
    Raises: Diverged on every rank of the axis where they differ, with both sides of the first difference.
    """
    lines = [f'agreement="{agreement}"', *(line for group in groups for line in _lines(group))]
    texts = compare(comm, "\n".join(lines), "compare models")
    if not texts:
        return
    sides = [text.splitlines() for text in texts]
    other = next(rank for rank, side in enumerate(sides) if side != sides[0])
    nothing = "nothing: its model ends before"
    pairs = zip_longest(sides[0], sides[other], fillvalue=nothing)
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    raise Diverged(_told(first, second, other, sides[0][0] != sides[other][0]))


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
    for param in group.params:
        layout = param.layout
        name = param.compared.get(param.fqn, param.fqn)
        lines.append(
            f"parameter {name} of group {group.name}: shape {list(layout.shape)}, sharded on dim "
            f"{layout.dim}, {param.sharded.dtype}{'' if param.rows is None else ', rows in use'}"
        )
        if isinstance(param, FlatParam):
            names = [(member.names[0], list(member.shape)) for member in param.members]
            lines += [
                f"  its member {param.compared.get(name, name)}: shape {shape}" for name, shape in names
            ]
    return lines
