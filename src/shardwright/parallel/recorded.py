"""Records of waits in collectives of torch's, which no transport of ours sees: those of tensor, context and
expert parallelism, and messages between a pipeline's stages. On CPUs, where the host waits for them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright import clock
from shardwright.torch_private import see_collectives, see_messages
from shardwright.transport.process import process_state
from shardwright.transport.recorder import CALLED

_AXIS = "mesh_"  # begins what torch says of the group of a mesh's axis


class _Begun(NamedTuple):
    """What of a record is known before the wait; the first ones as in ``recorder.py``."""

    name: str
    axis: str
    ranks: tuple[int, ...]
    key: str
    number: int
    phase: str
    issue: float
    link: tuple[int, ...] = ()


def calling(
    group: ProcessGroup, key: str, device: torch.device, met: bool = True, axis: str = ""
) -> AbstractContextManager[None]:
    """A block in which this rank calls a collective of a group. met: whether no rank leaves it before all
    have called it. axis: what it is to be called, where the mesh has another name for the group's."""
    is_real = isinstance(group, ProcessGroup)  # and not what stands for one in a plan's trace
    if torch.compiler.is_compiling() or device.type != "cpu" or not is_real:
        return nullcontext()
    return _waiting([_begun(group, key, axis=axis)], met)


def see_torchs(tensor_parallel: bool, pipeline: bool) -> None:
    """Record from now on what DTensors exchange, and stages of ``torch.distributed.pipelining``."""
    if tensor_parallel:
        see_collectives(lambda group, key: [_begun(group, key)], _waiting)
    if pipeline:
        see_messages(_messages, lambda begun: _waiting(begun, met=False))


def _begun(group: ProcessGroup, key: str, link: tuple[int, ...] = (), axis: str = "") -> _Begun:
    ranks, described = tuple(dist.get_process_group_ranks(group)), group.group_desc
    axis = axis or (described.removeprefix(_AXIS) if described.startswith(_AXIS) else "")
    between = " to ".join(map(str, link)) or f"of {','.join(map(str, ranks))}"
    name = f"{axis or 'group'} {between}"
    process_state.num_called[name] += 1
    number = process_state.num_called[name]
    return _Begun(name, axis, ranks, key, number, str(process_state.phase), clock.perf_counter(), link)


def _messages(operations: Sequence[dist.P2POp]) -> list[_Begun]:
    """Those that are received first: they are waited for."""
    own = dist.get_rank()
    links = [(op.group, (own, op.peer) if op.op == dist.isend else (op.peer, own)) for op in operations]
    links.sort(key=lambda each: each[1][0] == own)
    return [_begun(group or dist.group.WORLD, "point-to-point", link) for group, link in links]


@contextmanager
def _waiting(begun: Sequence[_Begun], met: bool = True) -> Iterator[None]:
    start = clock.perf_counter()
    yield
    end = clock.perf_counter()
    for each in begun:
        waited = start if each is begun[0] else None
        process_state.recorder.write((CALLED, *each[:-1], waited, end, met, each.link))
