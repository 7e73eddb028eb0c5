"""One parameter and its two faces: the shard at rest (a DTensor), and the whole tensor while unsharded.

    stage       module attribute                        bytes held
    at rest     ``sharded``: Parameter(DTensor)         this rank's rows
    unsharded   ``unsharded``: Parameter (plain)        a region of the group's buffer

Both are Parameter objects that live as long as the model (the optimizer holds the first, autograd the
second); sharding swaps which of them the module shows, never their identity.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError, StageError
from shardwright.params.at_rest import guard
from shardwright.params.placement import ParamPlacement, Split
from shardwright.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from shardwright.schedule.layout import FlatEntry, ParamLayout
from shardwright.torch_private import (
    DTensorSpec,
    TensorMeta,
    local_of,
    parameters_of,
    spec_of,
    take_over_hooks,
    version_of,
)
from shardwright.transport.base import Segment
from shardwright.transport.mesh import Axis

Versions = tuple[tuple[int, int], ...]
"""Of each shard: which tensor it is, and how often it was changed in place."""


def attributes_of(param: torch.Tensor) -> dict[str, Any]:
    """What the caller has set on a parameter (``param.expert = True``), without what its class has."""
    found = dict(vars(param))
    if found:
        found = {name: found[name] for name in found.keys() - vars(param.detach()).keys() - {"_is_param"}}
    return found


def give(attributes: Mapping[str, Any], face: Any) -> Any:
    """A face of a parameter, with the caller's attributes where it doesn't have them yet."""
    for name, value in attributes.items():
        vars(face).setdefault(name, value)
    return face


@dataclass(frozen=True)
class ParamSite:
    """A place in the module tree that shows the parameter: ``module.name``."""

    module: nn.Module
    name: str


@dataclass(eq=False)
class Member:
    """One parameter in a flat one: where it lies, the places that show it, what the caller had set on it."""

    entry: FlatEntry
    sites: list[ParamSite]
    attributes: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """Its names in the module of the flat parameter, one for each path to a place."""
        return (self.entry.name, *self.entry.aliases)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def fill(self, local: torch.Tensor, span: tuple[int, int], value: torch.Tensor) -> None:
        """Copy this one's part of ``local``, which is elements ``span`` of the flat parameter, from its whole
        value."""
        first, stop = self.entry.held(*span)
        place = self.entry.start + first - span[0]
        local[place : place + stop - first].copy_(value.detach().reshape(-1)[first:stop])


@dataclass
class Unsharded:
    """The unsharded face, bound to a buffer: the parameter that modules see, and where it is gathered."""

    param: nn.Parameter
    segment: Segment  # of the group's all-gather; others may travel in the same one
    own: (
        torch.Tensor
    )  # this rank's part of what is gathered, in the shape of the local shard: of the face or,
    # where that is filled on arrival (`Buffer.arrival`), of that, whose dtype may be another


class ShardedParam:
    """A parameter split over an axis. ``fqn`` is its name in the module that ``fully_shard`` was called on.

    sites: every place that shows it (more than one where modules share it).
    split: how it is sharded.
    place: where its shards lie. attributes: what the caller had set on it; every face has them.
    compared: its names, and by each the one to compare with other ranks' where that is another.
    kept_dtype: it is never cast (codes, scales, and what ``param_dtype_override_fn`` says).
    beginning: of its values; None where no other rank has them.
    bound: its unsharded face; None until it is made, before the first all-gather or by it.
    has_device_copy: what is gathered is a copy of the shard that stays on the device.
    extended: its class says itself what is gathered. shows_itself: to show it takes more than to write its
        sites. placed: refers to the shard that lies where its policy wants it, if any does (see
        ``place_shards``). kind: the class of its shards. members: of a flat parameter those that it is made
        of, one after another; else ().
    """

    members: Sequence[Member] = ()
    extended = False
    shows_itself = False
    placed: Any = None
    kind: type[DTensor] = DTensor

    def __init__(self, fqn: str, sites: list[ParamSite], param: nn.Parameter, split: Split) -> None:
        """Split ``param``, or take it over where it is a DTensor that was split like that before."""
        self.fqn = fqn
        self.sites = sites
        self.split = split
        offload = split.offload
        self.has_device_copy = isinstance(offload, CPUOffloadPolicy) and not offload.params and split.on_host
        inner = spec_of(param) if isinstance(param, DTensor) else None
        whole = local_of(param) if isinstance(param, DTensor) else param
        self.place = ParamPlacement(
            split, ParamLayout(tuple(whole.shape), split.axis.world, split.dim, split.sizes), inner
        )
        self.spec = self.place.spec(param)
        if split.sizes is not None:
            from shardwright.params.ragged import RaggedTensor  # noqa: PLC0415 chosen sizes

            self.kind = RaggedTensor
        guard(self.spec.mesh)
        self.attributes = attributes_of(param)
        self.compared: Mapping[str, str] = {}
        # bitsandbytes packs 4-bit codes into whatever dtype ``quant_storage`` names, also a floating one.
        self.kept_dtype = split.keeps_dtype or getattr(param, "quant_state", None) is not None
        self.bound: Unsharded | None = None
        self._device_copy: Any = None
        self.sharded = give(self.attributes, self._shard(whole.detach(), param.requires_grad))
        take_over_hooks(param, self.sharded)
        self.show(self.sharded)
        self.beginning: Any = None
        if self.axis.world * self.axis.num_copies > 1:
            from shardwright.params.first_weights import Beginning  # noqa: PLC0415 several ranks

            self.beginning = Beginning(whole, self.local)

    def twin(self, *places: list[ParamSite]) -> "ShardedParam":
        """A plain parameter, split in the same way, whose shard is what ``places`` show now."""
        twin = copy.copy(self)
        twin.sites = sites = places[0]
        shard: Any = parameters_of(sites[0].module)[sites[0].name]
        sharded = nn.Parameter(self.dtensor(shard.detach()), requires_grad=shard.requires_grad)
        twin.sharded = give(self.attributes, sharded)
        twin.show(twin.sharded)
        return twin

    def become(self, shape: tuple[int, ...], rows: torch.Tensor) -> None:
        """From now on be a frozen parameter of the local shape ``shape``, never cast; at rest.

        rows: this rank's shard of it, on the device of the shards. Cut on the same dim over the same ranks.
        """
        layout = self.layout.like(shape)
        self.place = ParamPlacement(self.split, layout, self.inner)
        self.spec = self.place.spec(torch.empty(shape, dtype=rows.dtype, device="meta"))
        self.bound = None
        self.kept_dtype = True
        self.sharded = give(self.attributes, nn.Parameter(self.dtensor(rows), requires_grad=False))
        self.show(self.sharded)

    def __copy__(self) -> "ShardedParam":
        """Split in the same way, and shown nowhere; the shard is still to come. Raises: InputError for a
        parameter that tensor parallelism splits, too."""
        if self.inner is not None:
            raise InputError(
                f"parameter {self.fqn!r} is split by tensor parallelism too, and can't be copied; save the "
                "model's state_dict() with a checkpoint, and load that into a model that you build again"
            )
        twin = object.__new__(type(self))
        twin.__dict__ = self.__dict__ | dict.fromkeys(("bound", "sharded"))
        twin.sites, twin._device_copy = [], None
        return twin

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all ranks that hold a part of it."""
        return not any(self.spec.mesh.get_coordinate() or ())

    @property
    def layout(self) -> ParamLayout:
        """The spans that it is cut into."""
        return self.place.layout

    @property
    def inner(self) -> DTensorSpec | None:
        """Its placement under tensor parallelism; what is split is then this rank's local tensor."""
        return self.place.inner

    @property
    def axis(self) -> Axis:
        """The axis that it is split over."""
        return self.split.axis

    # ---- at rest

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, a plain tensor: ``layout.shard_shape(rank)`` in the dtype at rest."""
        return local_of(self.sharded)  # type: ignore[attr-defined]

    @property
    def home(self) -> torch.device:
        """Where its shard lies or, while that is on the meta device, is to lie."""
        if not self.local.is_meta:
            return self.local.device
        return torch.device("cpu") if self.split.on_host else self.axis.device

    @property
    def trainable(self) -> bool:
        """Whether the parameter asks for a gradient now (it may be frozen and unfrozen at any time)."""
        return self.sharded.requires_grad

    def adopt(self) -> None:
        """Take over what the module shows at rest, where someone replaced it.

        ``to_empty``, ``load_state_dict(assign=True)`` and parametrisation code set new Parameter objects.
        Raises: StageError where the new one isn't a DTensor of this parameter's shape and placement.
        """
        site = self.sites[0]
        shown = parameters_of(site.module).get(site.name)
        if shown is not self.sharded:
            self._take_over(shown)

    def _take_over(self, shown: nn.Parameter | None) -> None:
        shape = self.spec.shape
        if not (
            isinstance(shown, DTensor)
            and shown.shape == shape
            and shown.placements == self.spec.placements
            and shown.device_mesh == self.spec.mesh
        ):
            got = "nothing" if shown is None else f"{type(shown).__name__} of shape {list(shown.shape)}"
            raise StageError(
                f"parameter {self.fqn!r} was replaced by {got}; a sharded parameter must stay a DTensor of "
                f"shape {list(shape)} placed {self.spec.placements}: copy into it, or load it with "
                "load_state_dict or shardwright.checkpoint.load"
            )
        self.sharded = give(self.attributes, shown)  # type: ignore[arg-type]
        self.show(self.sharded)

    def show(self, param: nn.Parameter) -> None:
        """Make every site show ``param``."""
        # Past ``nn.Module.__setattr__``, which costs 5 us a parameter.
        for site in self.sites:
            parameters_of(site.module)[site.name] = param

    def dtensor(self, local: torch.Tensor) -> DTensor:
        """A DTensor placed like this parameter over ``local``, which has the shape of the local shard."""
        # A gradient or a copy may be in another dtype than the parameter, and its spec says so.
        spec = self.spec
        if local.dtype != self.spec.tensor_meta.dtype:  # type: ignore[union-attr]
            meta = spec.tensor_meta._replace(dtype=local.dtype)  # type: ignore[union-attr]
            spec = DTensorSpec(spec.mesh, spec.placements, meta)
        # Not by from_local(), which costs 30 us and checks what is true by construction.
        return self.kind(local, spec, requires_grad=False)  # type: ignore[call-arg]

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole parameter (of the local one, under tensor parallelism): a view."""
        return self.place.rows_of(whole)

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a plain tensor of the logical shape: a view."""
        return self.place.shard_of(whole)

    def _shard(self, whole: torch.Tensor, trainable: bool) -> nn.Parameter:
        if whole.device.type != "meta":
            whole = whole.to("cpu" if self.split.on_host else self.axis.device)
        rows = self.rows_of(whole)
        if self.axis.world > 1 or not rows.is_contiguous():
            # A copy, so that the whole parameter's memory can go.
            rows = rows.clone(memory_format=torch.contiguous_format)
        return nn.Parameter(self.dtensor(rows), requires_grad=trainable)

    # ---- dtypes

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Dtype while unsharded. Integer parameters (packed weights) and their scales are never cast."""
        dtype = self.sharded.dtype
        casts = policy.param_dtype is not None and dtype.is_floating_point and not self.kept_dtype
        return policy.param_dtype or dtype if casts else dtype

    def sent_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Dtype in which it is gathered: that of compute, unless the policy says another."""
        # A scalar is on every rank and isn't sent; integers and what keeps its dtype would lose values.
        dtype = self.compute_dtype(policy)
        casts = dtype.is_floating_point and not self.kept_dtype and self.layout.dim is not None
        return policy.gather_dtype or dtype if casts else dtype

    def reduce_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Dtype in which the gradient is summed over ranks and over microbatches."""
        return policy.sum_dtype(self.sharded.dtype, self.compute_dtype(policy))

    # ---- unsharded

    @property
    def unsharded(self) -> nn.Parameter:
        """The parameter that modules see while unsharded; at rest its memory may be freed."""
        assert self.bound is not None, "bind() first"
        return self.bound.param

    def bind_to(self, whole: torch.Tensor, segment: Segment, own: torch.Tensor) -> None:
        """Make ``whole`` the unsharded face. segment: where it is gathered. own: this rank's place there."""
        if self.inner is not None:
            meta = TensorMeta(self.spec.shape, self.spec.stride, whole.dtype)
            spec = DTensorSpec(self.inner.mesh, self.inner.placements, meta)
            whole = DTensor(whole, spec, requires_grad=False)  # type: ignore[call-arg]
        param = nn.Parameter(whole, requires_grad=self.trainable)
        self.bound = Unsharded(give(self.attributes, param), segment, own)

    @property
    def own(self) -> torch.Tensor:
        """This rank's part of the buffer, in the shape of the local shard."""
        assert self.bound is not None, "bind() first"
        return self.bound.own

    @property
    def device_copy(self) -> torch.Tensor:
        """That copy, in the dtype of the unsharded face."""
        from shardwright.params.offload import DeviceCopy  # noqa: PLC0415 offloaded gradients

        pins = self.split.offload_streams is not None
        self._device_copy = self._device_copy or DeviceCopy()
        return self._device_copy.of(self.local, self.version, self.own, pins)

    def forget_device_copy(self) -> None:
        """Free it; the next gather makes it anew."""
        self._device_copy = None

    @property
    def version(self) -> int:
        """How often the shard was changed in place: an operation on a DTensor counts on it alone, one on its
        local tensor on that alone."""
        return version_of(self.local) + version_of(self.sharded)

    @property
    def rows(self) -> torch.Tensor:
        """This rank's rows of the unsharded parameter, as code has left them."""
        face = self.unsharded.detach()
        if self.layout.in_order and self.own.dtype == face.dtype:  # else they were gathered elsewhere
            return self.own
        return self.rows_of(local_of(face) if isinstance(face, DTensor) else face)

    def write_back(self) -> None:
        """Copy these rows into the shard."""
        self.local.copy_(self.rows)

    @property
    def differs(self) -> bool:
        """Whether these rows aren't the shard in the dtype that was sent, in theirs."""
        rows = self.rows.to(self.local.device)
        return not torch.equal(rows, self.local.to(self.own.dtype).to(rows.dtype))

    def gather_segment(self, layout: ParamLayout | None = None) -> Segment:
        """Its part in the group's all-gather; ``layout``: over another world, at most as large."""
        assert self.bound is not None, "bind() first"
        if layout is None:
            return self.bound.segment
        return Segment(self.bound.segment.flat[: layout.padded_numel], layout.spans)

    # ---- state dicts: the parameters of the model as it was, of which a flat parameter holds several

    def names(self, key: str) -> list[str]:
        """The first name of each in a state dict, where this parameter is called ``key``."""
        return [key]

    def entries(self, key: str, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` of each, from a whole tensor that lies like this parameter, which is called
        ``key``."""
        yield key, whole

    def parts(self, whole: torch.Tensor, grad: torch.Tensor | None) -> list[nn.Parameter]:
        """Each as a parameter over its part of ``whole``, for modules to show."""
        part = give(self.attributes, nn.Parameter(whole, requires_grad=self.trainable))
        part.grad = grad
        return [part]

    def show_parts(self, parts: Sequence[nn.Parameter]) -> None:
        """Have modules show these."""
        self.show(parts[0])

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A whole tensor that lies like this parameter, from one tensor for each."""
        return parts[0].detach()


def keep_attributes(param: ShardedParam) -> None:
    """Have what modules show at rest have the caller's: ``.to()`` and ``to_empty()`` take them away."""
    shown = parameters_of(param.sites[0].module).get(param.sites[0].name)
    if shown is not None:
        give(param.attributes, shown)
