"""A flat parameter: those of a group one after another in one, cut evenly over ranks whatever their borders.

    stage       ``module._flat_param``            ``layer.weight``, in each place
    at rest     Parameter(DTensor) of 1 dim       a meta tensor: its shape, no numbers
    unsharded   Parameter (plain) of 1 dim        a view of it, through which its gradient comes

For everything else it is a parameter like any other, of one dim. ``FlatLayout`` says what lies
where.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright.errors import InputError
from shardwright.params.binding import is_extended
from shardwright.params.load_plain import original_name
from shardwright.params.param import Member, ParamSite, ShardedParam, Split, attributes_of, give
from shardwright.quantized import encodings
from shardwright.schedule.layout import FlatEntry, FlatLayout, ParamLayout
from shardwright.torch_private import parameters_of
from shardwright.transport.mesh import Axis

NAME = "_flat_param"
Found = Mapping[nn.Parameter, tuple[str, list[ParamSite]]]


class FlatParam(ShardedParam):
    """The parameters of a group that have one dtype, and are all trained or all frozen, as one."""

    shows_itself = True

    def __init__(self, site: ParamSite, found: Found, split: Split) -> None:
        """Take the parameters out of the modules that show them; ``site`` shows the flat one."""
        names, start = _names_in(site.module), 0
        self.members: list[Member] = []
        for param, (_, sites) in found.items():
            own, *others = (name for s in sites for name in names[id(s.module), s.name])
            entry = FlatEntry(own, tuple(param.shape), start, tuple(others))
            self.members.append(Member(entry, sites, attributes_of(param)))
            start += entry.numel
        self.flat = FlatLayout(tuple(member.entry for member in self.members))
        first = next(iter(found))
        device = torch.device("cpu") if split.on_host else split.axis.device
        parts = [param.detach().reshape(-1) for param in found]
        whole = torch.cat(parts if first.is_meta else [part.to(device) for part in parts])
        for member in self.members:
            for each in member.sites:
                del parameters_of(each.module)[each.name]
        flat = nn.Parameter(whole, requires_grad=first.requires_grad)
        give(_shared([member.attributes for member in self.members]), flat)
        super().__init__(site.name, [site], flat, split)

    # ---- what modules show

    def show(self, param: nn.Parameter) -> None:
        """The flat parameter, and views of it where it is unsharded."""
        super().show(param)
        param.flat_layout = self.flat  # type: ignore[attr-defined]
        # Normal tensors whoever unshards: views made in inference mode would bring no gradient later.
        with torch.inference_mode(False), torch.enable_grad():
            if self.bound is not None and param is self.unsharded:
                views = self.parts_of(param)
            else:
                views = [torch.empty(m.shape, dtype=param.dtype, device="meta") for m in self.members]
        for member, view in zip(self.members, views, strict=True):
            give(member.attributes, view)
            for site in member.sites:
                parameters_of(site.module).pop(site.name, None)
                site.module.__dict__[site.name] = view

    def parts(self, whole: torch.Tensor, grad: torch.Tensor | None) -> list[nn.Parameter]:
        """See ``ShardedParam.parts``."""
        parts = []
        for index, (member, part) in enumerate(zip(self.members, self.parts_of(whole), strict=True)):
            parts.append(give(member.attributes, nn.Parameter(part, requires_grad=self.trainable)))
            parts[-1].grad = None if grad is None else self.parts_of(grad)[index]
        return parts

    def show_parts(self, parts: Sequence[nn.Parameter]) -> None:
        """See ``ShardedParam.show_parts``. No module shows the flat parameter then."""
        for site in self.sites:
            parameters_of(site.module).pop(site.name, None)
        for member, part in zip(self.members, parts, strict=True):
            for site in member.sites:
                site.module.__dict__.pop(site.name, None)
                parameters_of(site.module)[site.name] = part

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``ShardedParam.join``."""
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def parts_of(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """A view of each member's part of a row of numbers, in its shape."""
        parts = whole.split([entry.numel for entry in self.flat.entries])
        return [part.view(member.shape) for part, member in zip(parts, self.members, strict=True)]

    # ---- copies

    def twin(self, *places: list[ParamSite]) -> ShardedParam:
        """Another parameter split in the same way, as ``ShardedParam.twin``."""
        twin: Any = super().twin(places[0])  # whose members have no places yet
        pairs = zip(self.members, places[1:], strict=True)
        twin.members = [Member(member.entry, sites, member.attributes) for member, sites in pairs]
        twin.show(twin.sharded)
        return twin

    def __copy__(self) -> ShardedParam:
        twin: Any = super().__copy__()
        twin.members = [Member(member.entry, [], member.attributes) for member in self.members]
        return twin

    # ---- state dicts

    def entries(self, key: str, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``ShardedParam.entries``. Copies, under every name of each member."""
        prefix = key.removesuffix(self.sites[0].name)
        for member, part in zip(self.members, self.parts_of(whole), strict=True):
            # A view would keep the memory of all members for as long as one of them lives.
            own = part.clone()
            for name in member.names:
                yield prefix + name, own

    def names(self, key: str) -> list[str]:
        """See ``ShardedParam.names``."""
        prefix = key.removesuffix(self.sites[0].name)
        return [prefix + member.names[0] for member in self.members]


def _shared(attributes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Flags that are the same for all members."""
    return {
        name: value
        for name, value in attributes[0].items()
        if isinstance(value, bool | int | float | str | None)
        and all(name in other and other[name] == value for other in attributes)
    }


def cut_by_rows(whole: torch.Tensor, axis: Axis) -> DTensor:
    """A whole tensor as a DTensor cut by rows over an axis; of a member, as if it lay by itself. A copy."""
    layout = ParamLayout(tuple(whole.shape), axis.world, 0 if whole.ndim else None)
    start, stop = layout.row_range(axis.rank)
    local = (whole.narrow(0, start, stop - start) if whole.ndim else whole).clone()
    placements = axis.placements(Shard(0) if whole.ndim else Replicate())
    return DTensor.from_local(
        local, axis.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def places_of(param: ShardedParam) -> tuple[list[ParamSite], ...]:
    """The places that show a parameter, then those of each member of a flat one: what ``twin`` takes."""
    return (param.sites, *(member.sites for member in param.members))


def _names_in(module: nn.Module) -> dict[tuple[int, str], list[str]]:
    """The names in state dicts of each place that shows a parameter: one for each path to its module.

    Without what wrappers put in and leave out there themselves.
    """
    found: dict[tuple[int, str], list[str]] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        for name in parameters_of(each):
            whole = f"{path}.{name}" if path else name
            found.setdefault((id(each), name), []).append(original_name(whole))
    return found


def check_flat(found: Found) -> None:
    """Raises: InputError for a parameter that can't lie in a flat one."""
    for param, (fqn, sites) in found.items():
        reason = ""
        if isinstance(param, DTensor):
            reason = f"is a DTensor already ({param.placements})"
        elif is_extended(param):
            reason = f"is a {type(param.data).__name__} that says itself what is gathered"
        elif any(encodings(site.module) for site in sites):
            reason = "is part of a quantised weight, which is gathered as codes"
        if reason:
            raise InputError(
                f"use_orig_params=False: {fqn!r} {reason} and can't lie in a flat parameter; leave the "
                "argument out, or wrap that module by itself with use_orig_params=True"
            )
