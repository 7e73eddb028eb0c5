"""Muon for the hidden matrices of a model and AdamW for the rest, in one optimizer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from shardwright.engine.building.grouping import hints_of, suggested
from shardwright.errors import InputError
from shardwright.lora import stacked_in
from shardwright.params.ragged import Balanced

__all__ = ["Muon", "hidden_matrices"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_BATCH_NUMEL = 1 << 24  # one 4096 x 4096; smaller ones alone don't keep a device busy
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_NOT_WEIGHTS = ("bias", "embed", "token")  # in names of experts' biases, of positions, of a class token


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` for matrices and stacks of experts, in batches, and AdamW for all else.

    Each matrix moves along the orthogonalised mean of its gradients: all singular values become about one, by
    Newton-Schulz iterations. Matrices of one shape are iterated together, in batches of about 16 million
    elements. No communication: a rank steps the whole matrices that it has, as
    ``fully_shard(..., layout="owner")`` gives them, or the whole experts of a stack that is sharded on its
    first dim. Each rank builds it with what it has, which may be nothing. A group is Muon's, unless
    it has ``use_muon=False`` as that of ``rest``. Its state: ``momentum_buffer``, and of the rest that of
    ``torch.optim.AdamW``.

    Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024;
    ``"match_rms_adamw"``: Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982. Weight decay is
    decoupled (Loshchilov and Hutter, arXiv:1711.05101).

    Args:
        params: floating-point matrices [out, in] and stacks [experts, out, in], or groups of them. In stacks
            that lie as [experts, in, out] "original" would take one side for the other.
        lr: learning rate, with "match_rms_adamw" that of AdamW; as a tensor of shape () and any dtype.
        weight_decay: share of a weight, times ``lr``, that is subtracted in a step.
        momentum: decay of the gradients' mean.
        nesterov: whether the newest gradient counts once more.
        ns_coefficients: a, b and c of an iteration, a X + (b X X^T + c (X X^T)^2) X.
        eps: least norm that a matrix is divided by.
        ns_steps: iterations.
        adjust_lr_fn: factor of ``lr``: "original" (as is None), ``sqrt(max(1, out / in))``; or
            "match_rms_adamw", ``0.2 * sqrt(max(out, in))``.
        ns_dtype: name of the dtype of the iterations, whatever that of the matrices. "bfloat16" as torch's,
            where the size of a batch may decide the last bits on some devices; with "float32" or "float64"
            different numbers of ranks agree to its precision.
        rest: everything else: parameters of any shape, sharded in any way, or groups of them.
        rest_lr: learning rate of the rest; as ``lr``, of shape () and any dtype if it is a tensor.
        rest_betas: decays of the means of its gradients and of their squares.
        rest_eps: added to the root of the latter.
        rest_weight_decay: as ``weight_decay``, of the rest.

    Raises:
        InputError: a value out of range, or in ``params`` something that isn't such a matrix or of which this
            rank has rows only; by ``step``, a sparse gradient. Nothing is changed then.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16))
        >>> names = shardwright.optim.hidden_matrices(model)
        >>> names
        ['1.weight']
        >>> rest = [p for name, p in model.named_parameters() if name not in names]
        >>> optimizer = shardwright.optim.Muon([model.get_parameter(n) for n in names], lr=0.02, rest=rest)
        >>> model(torch.arange(4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str = "bfloat16",
        rest: Params | None = None,
        rest_lr: float | Tensor = 3e-4,
        rest_betas: tuple[float, float] = (0.9, 0.95),
        rest_eps: float = 1e-8,
        rest_weight_decay: float = 0.0,
    ) -> None:
        of_rest = {
            "lr": rest_lr,
            "betas": rest_betas,
            "eps": rest_eps,
            "weight_decay": rest_weight_decay,
            "foreach": None,
            "use_muon": False,
        }
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "use_muon": True,
            # Here, where pickling and copying keep it, for groups that are added later.
            "rest": of_rest,
        }
        others = [] if rest is None else _groups(rest)
        super().__init__([*_groups(params), *({**group, "use_muon": False} for group in others)], defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # as loaded: those of torch.optim.Muon lack these
            if "use_muon" not in group:
                group.update(use_muon=True, ns_dtype=self.defaults["ns_dtype"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of Muon's, or with ``use_muon=False`` one of AdamW's; local.

        Args:
            param_group: ``params`` (a rank may have none), and any of the arguments above that differ; of a
                group of AdamW's ``lr``, ``betas``, ``eps`` and ``weight_decay``.

        Raises:
            InputError: as the class does.
        """
        rest, is_muon = self.defaults["rest"], param_group.get("use_muon", True)
        super().add_param_group(dict(param_group) if is_muon else {**rest, **param_group})
        group = self.param_groups[-1]
        for name in {"rest"} if is_muon else self.defaults.keys() - rest.keys():
            del group[name]
        try:
            _check_values(group)
            for param in group["params"] if is_muon else ():
                _check_matrix(param)
        except InputError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient; local.

        Args:
            closure: computes the loss and the gradients first.

        Returns:
            What ``closure`` returns.

        Raises:
            InputError: a gradient is sparse. Nothing is stepped then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.is_sparse:
                    raise InputError(
                        f"Muon: the gradient of a parameter of shape {list(param.shape)} is sparse, expected "
                        "a dense one: build its nn.Embedding with sparse=False, or give it to SparseAdam"
                    )
        for group in self.param_groups:
            if group["use_muon"]:
                self._step_matrices(group)
            else:
                self._step_rest(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        alike: dict[Any, list[tuple[Tensor, ...]]] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param.grad)
            part = tuple(map(_stack_of, (param, param.grad, state["momentum_buffer"])))
            if not part[0].numel():  # of a stack of which this rank has no expert
                continue
            alike.setdefault((part[0].shape[1:], part[0].dtype, part[0].device), []).append(part)
        lr, momentum, dtype = float(group["lr"]), group["momentum"], getattr(torch, group["ns_dtype"])
        for (shape, *_), parts in alike.items():
            adjusted = lr * _adjustment(group["adjust_lr_fn"], *shape)
            for batch in _batches(parts, max(1, _BATCH_NUMEL // shape.numel())):
                moved = []
                for _, grad, mean in batch:
                    mean.lerp_(grad, 1 - momentum)
                    moved.append((grad.lerp(mean, momentum) if group["nesterov"] else mean).to(dtype))
                orthogonal = _orthogonalised(torch.cat(moved), group)
                updates = orthogonal.split([len(each) for each in moved])
                for (param, _, _), update in zip(batch, updates, strict=True):
                    param.mul_(1 - lr * group["weight_decay"])
                    param.add_(update, alpha=-adjusted)

    def _step_rest(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            if not self.state[param]:
                self.state[param].update(
                    step=torch.zeros((), dtype=torch.float32),  # on the host, as AdamW's
                    exp_avg=torch.zeros_like(param),
                    exp_avg_sq=torch.zeros_like(param),
                )
        states = [self.state[param] for param in params]
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [param.grad for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def hidden_matrices(model: nn.Module) -> list[str]:
    """Names of the parameters of a model that Muon is for: weights between its embeddings and its head.

    They are the trained weights [out, in] and stacks of experts [experts, out, in] (or [experts, in, out]),
    routers' too, without

    - what an ``nn.Embedding`` holds, and what is tied to it;
    - the head: ``get_output_embeddings()`` of a model of transformers, else, where none is tied, the last
      ``nn.Linear`` outside of its blocks with as many outputs as an embedding has rows. A classifier's head
      isn't known by that: take it out yourself;
    - convolution kernels (an optimizer would take [out, in, length] for a stack), vectors in the form of
      matrices, and parameters of norms, with "bias", "embed" or "token" in their own name, or with a true
      attribute ``_no_weight_decay`` (Mamba's);
    - LoRA's factors, whose product is the matrix: step them by AdamW.

    Local, and the same on every rank.

    Args:
        model: sharded or not.

    Returns:
        Names as ``named_parameters()`` has them, in its order.

    Examples:
        >>> model = nn.ModuleDict({"in": nn.Embedding(9, 4), "up": nn.Linear(4, 8), "head": nn.Linear(8, 9)})
        >>> shardwright.optim.hidden_matrices(model)
        ['up.weight']
    """
    modules = {name: module for name, module in model.named_modules() if "lora_" not in name}
    tables = [module for module in modules.values() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    apart = {id(table.weight) for table in tables}
    said = hints_of(model).head
    if said is not None:
        apart |= {id(param) for param in model.get_submodule(said).parameters()}
    elif not any(id(linear.weight) in apart for linear in linears.values()):
        rows = {table.num_embeddings for table in tables}
        inside = tuple(f"{block}." for block in suggested(model).apart)
        heads = [m for n, m in linears.items() if m.out_features in rows and not n.startswith(inside)]
        apart |= {id(head.weight) for head in heads[-1:]}
    stacks = {*stacked_in(model)}
    found = []
    for name, param in model.named_parameters():
        path, _, own = name.rpartition(".")
        is_matrix = (param.ndim == 2 or name in stacks) and min(param.shape[-2:]) > 1 and param.requires_grad
        is_weight = path in modules and "Norm" not in type(modules[path]).__name__
        is_weight = is_weight and not any(word in own for word in _NOT_WEIGHTS)
        # Mamba's mark of rates that lie in a matrix.
        is_weight = is_weight and not getattr(param, "_no_weight_decay", False)
        if is_matrix and is_weight and id(param) not in apart:
            found.append(name)
    return found


def balanced(given: Any) -> Balanced:
    """The hidden matrices of the module, or modules, that one call of ``fully_shard`` is given, to be spread
    over their owners."""
    modules = list(given) if isinstance(given, list | tuple) else [given]
    return Balanced.of(p for m in modules for p in map(m.get_parameter, hidden_matrices(m)))


def _groups(params: Params) -> list[dict[str, Any]]:
    """As groups; parameters alone are one, also where there are none."""
    listed: list[Any] = list(params)
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def _check_values(group: dict[str, Any]) -> None:
    numbers = {name: group[name] for name in ("lr", "eps", "weight_decay")}
    wrong = [f"{name}={value}, expected 0 or more" for name, value in numbers.items() if not value >= 0]
    decays = group["betas"] if "betas" in group else [group["momentum"]]
    wrong += [f"a decay of {value}, expected 0 <= it < 1" for value in decays if not 0 <= value < 1]
    if group["use_muon"]:
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            wrong.append(f"adjust_lr_fn={group['adjust_lr_fn']!r}, expected one of {_ADJUSTMENTS}")
        if len(group["ns_coefficients"]) != 3:
            wrong.append(f"ns_coefficients={group['ns_coefficients']}, expected 3 numbers")
        if not 1 <= group["ns_steps"] < 100:
            wrong.append(f"ns_steps={group['ns_steps']}, expected 1 to 99")
        if group["ns_dtype"] not in ("bfloat16", "float32", "float64"):
            wrong.append(f'ns_dtype={group["ns_dtype"]!r}, expected "bfloat16", "float32" or "float64"')
    if wrong:
        raise InputError("Muon: " + "; ".join(wrong))


def _check_matrix(param: Tensor) -> None:
    """Raises: InputError for what has no matrices, or not whole on this rank."""
    if param.ndim not in (2, 3) or not param.is_floating_point():
        raise InputError(
            f"Muon: a parameter of shape {list(param.shape)} in {param.dtype}, expected floating-point "
            "matrices [out, in] or stacks [experts, out, in]; pass it in rest=, for AdamW"
        )
    if isinstance(param, DTensor):
        sizes = zip(param.placements, param.device_mesh.shape, strict=True)
        whole = [p.is_replicate() or (param.ndim == 3 and p.is_shard(0)) for p, size in sizes if size > 1]
        if not all(whole):
            raise InputError(
                f"Muon: of a matrix of shape {list(param.shape)} this rank has a part only "
                f"({param.placements}), expected a whole one: shard its module by fully_shard(..., "
                'layout="owner") and pass what shardwright.owned_params(model) gives, or pass it in rest=, '
                "for AdamW"
            )


def _stack_of(tensor: Tensor) -> Tensor:
    """This rank's matrices [number, out, in], in the same memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.unsqueeze(0) if local.ndim == 2 else local


def _batches(parts: Iterable[Sequence[Tensor]], most: int) -> Iterator[list[tuple[Tensor, ...]]]:
    """Stacks [number, ...] cut and put together, so that there are at most ``most`` matrices in each."""
    batch: list[tuple[Tensor, ...]] = []
    count = 0
    for part in parts:
        for piece in zip(*(tensor.split(most) for tensor in part), strict=True):
            if count + len(piece[0]) > most:
                yield batch
                batch, count = [], 0
            batch.append(piece)
            count += len(piece[0])
    if count:
        yield batch


def _orthogonalised(stack: Tensor, group: dict[str, Any]) -> Tensor:
    """[number, out, in] after Newton-Schulz iterations of each matrix, in the same dtype."""
    a, b, c = group["ns_coefficients"]
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if is_tall else stack  # so that X X^T is the smaller of the two
    # The spectral norm is at most the Frobenius norm: 1 afterwards, where the iterations converge.
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _adjustment(kind: str | None, out: int, into: int) -> float:
    return 0.2 * sqrt(max(out, into)) if kind == "match_rms_adamw" else sqrt(max(1, out / into))
