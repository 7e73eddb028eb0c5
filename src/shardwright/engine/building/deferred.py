"""Groups that are cut in two or gathered late, where one would be gathered or reduced with nothing computed
beside it.

What no inner call of ``fully_shard`` has taken is the outermost module's: mostly an embedding, which a
forward reads first, and a head, which it reads last. In one group both would be gathered before anything is
computed, and reduced when the last gradient is there. The first block's all-gather begins a step, and its
reduce-scatter ends one: in two groups, one half hides behind the other half's computation.

The forward of the second group of such a pair begins when one of its parameters is first read, and its place
in the step is recorded from then on, as that of any group. The same holds for the only group of the outermost
module, if all of it is read last (the embedding is a group by itself).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from shardwright.engine.groups.gatherer import looks_up
from shardwright.params.param import ParamSite
from shardwright.policy import MixedPrecisionPolicy, SchedulePolicy
from shardwright.quantized import encodings
from shardwright.schedule.layout import ParamLayout
from shardwright.torch_private import parameters_of, replace_parameters_of


class _Placed(Protocol):
    """A parameter, known by the places that show it."""

    @property
    def sites(self) -> Sequence[ParamSite]: ...


class _Cuttable(_Placed, Protocol):
    """What is asked of a parameter of a group that is cut: a ``ShardedParam``, or one that a plan shards."""

    @property
    def layout(self) -> ParamLayout: ...
    @property
    def extended(self) -> bool: ...
    @property
    def members(self) -> Sequence[Any]: ...
    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype: ...


Param = TypeVar("Param", bound=_Cuttable)


# Hooks on the modules of the second group would not do: code of the root may read ``self.head.weight`` and
# not call the head (a chunked loss does), and of a block's halves either may be read first. Every such read
# goes by this table. What it wins was measured at 1 Gbit/s on 2 ranks, as seconds of a step by those without
# communication (docs/performance.md): 1.18 with the root in two groups, 1.15 with the first block in two too.
class Reads(dict[str, nn.Parameter | None]):
    """The table of a module's parameters, which calls ``on_read`` before a parameter is read through it."""

    on_read: Callable[[], None] | None = None

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if self.on_read is not None:
            self.on_read()
        return super().__getitem__(name)

    def values(self) -> Any:
        """See ``dict.values``; all parameters are read so."""
        if self.on_read is not None:
            self.on_read()
        return super().values()

    def items(self) -> Any:
        """See ``dict.items``; all parameters are read so."""
        if self.on_read is not None:
            self.on_read()
        return super().items()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy of the module is an ordinary one


class Deferred:
    """Tells when one of ``params`` is first read, while it ``waits``.

    was_read: whether one was since it last began to wait.
    """

    def __init__(self, params: Iterable[_Placed]) -> None:
        self.was_read = False
        self._places = tuple(dict.fromkeys(site.module for param in params for site in param.sites))
        self._reads: list[Reads] = []
        for module in self._places:
            reads = parameters_of(module)
            if not isinstance(reads, Reads):
                reads = Reads(reads)
                replace_parameters_of(module, reads)
            self._reads.append(reads)

    @property
    def waits(self) -> bool:
        """Whether it was told to wait, and none was read since."""
        return self._reads[0].on_read is not None

    def wait(self, on_read: Callable[[], None]) -> None:
        """Call ``on_read`` once, before one is read."""

        def first() -> None:
            self.stop()
            self.was_read = True
            on_read()

        self.was_read = False
        for reads in self._reads:
            reads.on_read = first

    def stop(self) -> None:
        """Don't call ``on_read`` any more."""
        for reads in self._reads:
            reads.on_read = None

    def leave(self) -> None:
        """Give the modules tables of their own again."""
        for module in self._places:
            replace_parameters_of(module, dict(parameters_of(module)))


def ends(
    params: Sequence[Param], root: nn.Module, inner: Iterable[nn.Module], policy: MixedPrecisionPolicy
) -> tuple[list[Param], list[Param]]:
    """``params`` of ``root`` in two groups: those to gather at its begin, and those that only modules show
    which come after the last of ``inner``, in the order of ``root.modules()``. The second is empty where
    nothing is to be won (it isn't large, see ``is_large``); the first where nothing else is left.
    """
    place = {id(module): number for number, module in enumerate(root.modules())}
    inside = [place[id(module)] for each in inner for module in each.modules() if id(module) in place]
    parts: tuple[list[Param], list[Param]] = [], []
    for param in params:
        modules = [site.module for site in param.sites]
        behind = bool(inside) and all(place.get(id(module), 0) > max(inside) for module in modules)
        parts[behind and _is_plain(param)].append(param)
    return parts if is_large(parts[1], policy) else (list(params), [])


def halves(
    params: Sequence[Param], block: nn.Module, policy: MixedPrecisionPolicy
) -> tuple[list[Param], list[Param]]:
    """``params`` of ``block`` in two groups of about as many bytes, in the order of ``block.modules()``, a
    module's own together. The second is empty where one is shown by modules outside of ``block`` too, and
    where nothing is to be won (one isn't large, see ``is_large``).
    """
    place = {id(module): number for number, module in enumerate(block.modules())}
    first_at: dict[Param, int] = {}
    for param in params:
        places = [place.get(id(site.module), -1) for site in param.sites]
        if min(places) < 0 or not _is_plain(param):
            return list(params), []
        first_at[param] = min(places)
    cuts = [
        ([p for p in params if first_at[p] < at], [p for p in params if first_at[p] >= at])
        for at in sorted({*first_at.values()})
    ]
    first, last = max(cuts, key=lambda cut: min(_nbytes(part, policy) for part in cut))
    return (first, last) if is_large(first, policy) and is_large(last, policy) else (list(params), [])


def hardly_computes(params: Sequence[_Cuttable], policy: MixedPrecisionPolicy) -> bool:
    """Whether ``params`` are the weights of lookups, and no more besides than may share a collective: their
    modules are no first block, whose computation would hide one."""
    looked_up = [any(looks_up(site.module) and site.name == "weight" for site in p.sites) for p in params]
    rest = [param for param, looks in zip(params, looked_up, strict=True) if not looks]
    return any(looked_up) and not is_large(rest, policy)


def _is_plain(param: _Cuttable) -> bool:
    """Whether every reading of it is one of its module's table of parameters."""
    return not (param.extended or param.members or any(encodings(site.module) for site in param.sites))


def _nbytes(params: Iterable[_Cuttable], policy: MixedPrecisionPolicy) -> int:
    """Bytes of ``params``, gathered."""
    return sum(p.layout.numel * p.compute_dtype(policy).itemsize for p in params)


def is_large(params: Iterable[_Cuttable], policy: MixedPrecisionPolicy) -> bool:
    """Whether ``params`` are more than what may share a collective with others
    (``SchedulePolicy.bucket_cap_mb`` by default)."""
    return _nbytes(params, policy) > SchedulePolicy().bucket_cap_nbytes


def shown_by(params: Iterable[_Placed], root: nn.Module) -> str:
    """The modules that show ``params``, by their names in ``root``."""
    names = {id(module): name for name, module in root.named_modules()}
    return "+".join(dict.fromkeys(names[id(param.sites[0].module)] for param in params))
