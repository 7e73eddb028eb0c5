"""Experts that ranks share: tokens travel to the ranks of their experts by all-to-all, and results back."""

import inspect
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from shardwright.engine.building.build import ShardPlacementResult
from shardwright.engine.unit import is_sharded
from shardwright.errors import InputError
from shardwright.parallel.exchange import exchange_rows
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.recorded import calling

M = TypeVar("M", bound=nn.Module)

Experts = type[nn.Module] | tuple[type[nn.Module], ...]

_TAKEN = [
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],
]
"""What forwards of transformers' experts are called with."""


def expert_parallel(model: M, mesh: Mesh, experts: Experts | None = None) -> M:
    """Distribute a model's experts over the ranks of ``mesh.ep``, before ``fully_shard``.

    Each rank keeps its part of each stacked weight, as a DTensor ``Shard(0)`` on ``mesh.ep``. In a forward
    each token goes to the ranks of its experts by an all-to-all, and what they make of it comes back by
    another; two more are in the backward. Any number of tokens may go to any expert; none are dropped.
    ``fully_shard(..., mesh=mesh.shard)`` then shards what the rank has over ``mesh.experts``, and divides its
    gradients by the ranks of ``mesh.loss_group``, whose tokens they come from. Every rank calls it once, with
    the same weights, or on the meta device; no communication. The model is changed in place.

    An experts module holds weights whose dim 0 is the experts, and its forward takes ``hidden_states``
    [tokens, width], ``top_k_index`` [tokens, top_k] in int64 and ``top_k_weights`` [tokens, top_k], and
    returns [tokens, width], the weighted sum over a token's experts. It is then called with the rows that
    came to this rank, an index into its own experts, and weights of 1; ``num_experts``, if it has that, is
    the number of its own. Or it holds nothing but an ``nn.ModuleList`` of experts alike, [rows, width] ->
    [rows, width]: they are stacked, with any ep (``list.0.up.weight``, ... become ``list.up.weight``), and
    called one after another in place of the module's forward.

    Args:
        model: a transformers model with such modules (Mixtral, Qwen2-MoE and Qwen3-MoE, DeepSeek-V3, GPT-OSS
            and others, in any ``experts_implementation`` that trains), or any other.
        mesh: what ``mesh(ep=...)`` returned. With ep=1 tokens are counted only (``tokens_per_expert``).
        experts: classes of modules with such a forward, whatever it calls its arguments; None: those whose
            arguments have the names above, or those of GPT-OSS.

    Returns:
        The argument ``model``.

    Raises:
        InputError: the model has no such module, was sharded before, or has experts that ep doesn't divide
            or that can't be stacked. Nothing is changed then.

    Examples:
        >>> class Experts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = nn.Parameter(torch.ones(4, 8, 8))
        ...     def forward(self, hidden_states, top_k_index, top_k_weights):
        ...         each = torch.einsum("tw,tkwv->tkv", hidden_states, self.up[top_k_index])
        ...         return (each * top_k_weights.unsqueeze(-1)).sum(1)
        >>> mesh = shardwright.mesh(ep=1)
        >>> model = shardwright.expert_parallel(Experts(), mesh)
        >>> _ = shardwright.fully_shard(model, mesh=mesh.shard)
        >>> model(torch.ones(2, 8), torch.tensor([[0, 1], [1, 3]]), torch.ones(2, 2)).shape
        torch.Size([2, 8])
        >>> shardwright.parallel.tokens_per_expert(model, mesh)
        {'': tensor([1, 2, 0, 1])}
    """
    found = {name: module for name, module in model.named_modules() if _is_experts(module, experts)}
    if not found:
        listed = sorted({type(m).__name__ for m in model.modules() if "expert" in type(m).__name__.lower()})
        raise InputError(
            f"expert_parallel: {type(model).__name__} has no module "
            + (f"of {experts}" if experts else f"whose forward takes {', '.join(_TAKEN[0])}")
            + (f" (it has {', '.join(listed)})" if listed else "")
            + "; move the weights and the loop over experts into one module with such a forward, and pass "
            "its class as experts= if its arguments have other names"
        )
    for name, module in found.items():
        _check(name or type(module).__name__, module, mesh)
    for module in found.values():
        if listed := _listed(module):
            _stack(module, *listed)
        if mesh.ep is not None:
            _keep_own(module, mesh.ep, ShardPlacementResult(None, mesh.experts, mesh.loss_group.size()))
        _enter(module, mesh.ep, _one_by_one if listed else None)
    return model


def tokens_per_expert(model: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """How many tokens each expert got in the last forward, over all ranks: for metrics and for balancing.

    Every rank of ``mesh.loss_group`` calls it, after a forward; the numbers are all-reduced.

    Args:
        model: one that ``expert_parallel`` was called on.
        mesh: the one it was called with.

    Returns:
        For each experts module, by its name in the model, int64 [experts]: zeros if it didn't run. Their sum
            is tokens times top_k.

    Raises:
        InputError: the model has no such module.
    """
    counts = counts_in(model)
    if not counts:
        raise InputError(f"tokens_per_expert: call expert_parallel on {type(model).__name__} first")
    total = torch.cat([each.to(mesh.shard.device_type) for each in counts.values()])  # unless it ran: the CPU
    dist.all_reduce(total, group=mesh.loss_group)
    return dict(zip(counts, total.split([len(each) for each in counts.values()]), strict=True))


def counts_in(model: nn.Module) -> dict[str, Tensor]:
    """The same of this rank's tokens; empty where ``expert_parallel`` was not called on ``model``. Local."""
    counts = ((name, getattr(module, "counted_tokens", None)) for name, module in model.named_modules())
    return {name: each for name, each in counts if each is not None}


def _is_experts(module: nn.Module, experts: Experts | None) -> bool:
    if experts is not None:
        return isinstance(module, experts)
    return [*inspect.signature(module.forward).parameters][:3] in _TAKEN


def _check(name: str, module: nn.Module, mesh: Mesh) -> None:
    """Raises: InputError for experts that can't be distributed."""
    params = dict(module.named_parameters())
    if getattr(module.forward, "is_expert_parallel", False):
        raise InputError(f"{name} is expert-parallel already; leave one call out")
    if is_sharded(module) or any(isinstance(param, DTensor) for param in params.values()):
        raise InputError(f"{name} is sharded already; call expert_parallel before fully_shard")
    listed = _listed(module)
    sizes = {of: len(param) if param.ndim else 0 for of, param in params.items()}
    number = len(listed[1]) if listed else getattr(module, "num_experts", next(iter(sizes.values()), 0))
    unstacked = [of for of, size in sizes.items() if size != number]
    if not listed and (unstacked or not params):
        raise InputError(
            f"expert_parallel: {name} holds {unstacked[0] if unstacked else 'no weight'}, expected weights "
            f"of [{number or 'experts'}, ...] only, or a ModuleList of experts alike without buffers; hold "
            "what they share in the module around them"
        )
    if mesh.ep is not None and number % mesh.ep.size():
        raise InputError(
            f"expert_parallel: ep={mesh.ep.size()} doesn't divide the {number} experts of {name}; choose "
            "another ep (mesh(model=...) says which would fit)"
        )


def _listed(module: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The list of experts alike that is all a module holds, and its name."""
    lists = [(name, child) for name, child in module.named_children() if isinstance(child, nn.ModuleList)]
    if len([*module.children()]) != 1 or not lists or [*module.buffers(), *module.parameters(recurse=False)]:
        return None
    kinds = [(type(e), [(of, p.shape, p.dtype) for of, p in e.named_parameters()]) for e in lists[0][1]]
    return lists[0] if kinds and kinds[0][1] and kinds == kinds[:1] * len(kinds) else None


def _stack(module: nn.Module, name: str, experts: nn.ModuleList) -> None:
    """Put one expert with the weights of all, [experts, ...], in the place of a list."""
    first = experts[0]
    for of, param in [*first.named_parameters()]:
        owner, _, leaf = of.rpartition(".")
        weights = torch.stack([expert.get_parameter(of).detach() for expert in experts])
        setattr(first.get_submodule(owner), leaf, nn.Parameter(weights, param.requires_grad))
    setattr(module, name, first)


def _one_by_one(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The forward of experts that were a list."""
    (expert,) = module.children()
    stacked = {of: _local(param) for of, param in expert.named_parameters()}
    said = torch.zeros_like(hidden)
    for number in range(len(next(iter(stacked.values())))):
        token, place = torch.where(index == number)
        if len(token):
            own = {of: param[number] for of, param in stacked.items()}
            answer = functional_call(expert, own, (hidden[token],)) * weights[token, place, None]
            said = said.index_add(0, token, answer.to(said.dtype))
    return said


def _keep_own(module: nn.Module, ep: DeviceMesh, where: ShardPlacementResult) -> None:
    """Leave a rank its part of each weight, and say where ``fully_shard`` is to shard it."""
    for inner in module.modules():
        vars(inner)["shard_placement"] = where
        for name, param in [*inner.named_parameters(recurse=False)]:
            mine = param.detach().chunk(ep.size())[ep.get_local_rank()].clone()  # frees the others
            placed = DTensor.from_local(mine, ep, [Shard(0)], run_check=False)
            setattr(inner, name, nn.Parameter(placed, param.requires_grad))


def _enter(module: nn.Module, ep: DeviceMesh | None, listed: Callable[..., Any] | None) -> None:
    """Wrap the forward of experts, as a method: copies of the module have one of their own."""
    number = len(next(module.parameters()))
    module.counted_tokens = torch.zeros(number, dtype=torch.int64)
    if ep is not None and hasattr(module, "num_experts"):
        vars(module)["num_experts"] = number // ep.size()
    bound: Any = module.forward
    function = getattr(bound, "__func__", None) or (lambda _, *args: bound(*args))
    forward = listed or function
    signature = inspect.signature(bound)

    @wraps(function)
    def entered(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if len(given) != len(_TAKEN[0]):
            raise InputError(
                f"the expert-parallel {type(self).__name__} was called with {', '.join(given)}, expected "
                "tokens, indices of experts and their weights alone; leave others out"
            )
        hidden, index, weights = given.values()
        counts = index.flatten().bincount(minlength=number)
        self.counted_tokens = counts
        if ep is None:
            return forward(self, hidden, index, weights)
        tokens, chosen = hidden.flatten(0, -2), index.flatten(0, -2)
        order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
        said = _ask(self, forward, tokens[order // chosen.shape[1]], counts, ep)
        said = said[order.argsort()].unflatten(0, chosen.shape) * weights.flatten(0, -2).unsqueeze(-1)
        return said.sum(1).to(hidden.dtype).view_as(hidden)

    entered.is_expert_parallel = True  # type: ignore[attr-defined]
    module.forward = MethodType(entered, module)


def _ask(module: nn.Module, forward: Callable[..., Any], rows: Tensor, counts: Tensor, ep: DeviceMesh) -> Any:
    """What the experts of all ranks say to rows [n, width], sorted by expert; counts: how many each gets."""
    group, world = ep.get_group(), ep.size()
    coming = torch.empty_like(counts)
    with calling(group, "all-to-all", counts.device, axis="ep"):
        dist.all_to_all_single(coming, counts, group=group)
    sent, received = torch.stack([counts, coming]).view(2, world, -1).sum(2).tolist()
    arrived = exchange_rows(rows, sent, received, group)
    own = torch.arange(len(counts) // world, device=rows.device).repeat(world)
    index = own.repeat_interleave(coming, output_size=len(arrived)).unsqueeze(1)
    weights = {f"module.{name}": _local(param) for name, param in module.named_parameters()}
    if len(arrived):
        # Not by `module(...)`, whose hooks run around this already.
        ones = arrived.new_ones(index.shape)
        said = functional_call(_WithWeights(module, forward), weights, (arrived, index, ones))
    else:
        # The backward's exchange waits for this rank, too, and its weights get a gradient of zeros.
        said = arrived + torch.stack([weight.flatten()[0] for weight in weights.values()]).sum()
        said = said.to(arrived.dtype)
    return exchange_rows(said, received, sent, group)


def _local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


class _WithWeights(nn.Module):
    """A forward of a module with other weights in it, meanwhile."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args: Any) -> Any:
        return self.call(self.module, *args)
