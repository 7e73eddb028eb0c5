"""Attention over sequences that are cut over ranks: heads are exchanged for parts of the sequence.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509): before an attention each rank has a part of the sequence and
all heads, in it the whole sequence and some heads. Everything else of a model is local to a token.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from math import gcd
from threading import get_ident
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import InputError, StageError
from shardwright.parallel.exchange import exchange, mean_of_all, ring
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.recorded import calling, see_torchs

M = TypeVar("M", bound=nn.Module)

_torchs = F.scaled_dot_product_attention
_HEADS, _SEQUENCE = 1, 2

Documents = list[list[tuple[int, int]]]
"""Of each row of a batch: where documents that are packed in it begin and end."""


def context_parallel(model: M, mesh: Mesh, attention: Literal["ulysses", "ring"] = "ulysses") -> M:
    """Let a model compute sequences that are cut over the ranks of ``mesh.cp``, with exact attention.

    DeepSpeed-Ulysses (Jacobs et al. 2023): around each attention two all-to-alls exchange heads for parts of
    the sequence, and two in the backward. Each rank of ``mesh.cp`` then calls the model with its part
    (``mesh.split``) and computes the loss by ``mean_over_tokens``. Every rank calls it once, before or after
    ``fully_shard(..., mesh=mesh.shard)``; no communication. The model is changed in place: forwards of its
    modules are wrapped. Activations take 1 / cp of the memory; of an attention, all tokens of 1 / cp heads.

    Attention is what calls ``torch.nn.functional.scaled_dot_product_attention`` with [batch, heads, sequence
    / cp, head size] and, if any, an ``attn_mask`` of the whole sequence; or a transformers model with
    ``attn_implementation`` "sdpa" or a FlashAttention. If key/value heads are fewer than cp, or cp doesn't
    divide them, they are repeated. Documents packed into a row are kept apart if ``position_ids`` say where
    they begin: those given to the innermost module that has them. Under activation checkpointing packed
    documents need them in each module that is recomputed.

    Args:
        model: its forward takes [batch, sequence / cp] tokens and their ``position_ids``.
        mesh: what ``mesh(cp=...)`` returned. With cp=1 nothing is changed.
        attention: "ring" sends keys and values round the ranks instead (torch's ring attention, which is
            experimental), for heads that cp doesn't divide; sdpa without masks, packed documents or dropout.
            Of a causal attention the first rank computes least, and waits for the others.

    Returns:
        The argument ``model``.

    Raises:
        InputError: the model calls attention by a name or implementation that can't be exchanged, or is
            context-parallel already, or there is no such ``attention``. Nothing is changed then.
    """
    if attention not in ("ulysses", "ring"):
        raise InputError(f'context_parallel: attention is {attention!r}, expected "ulysses" or "ring"')
    if mesh.cp is None:
        return model
    modules = [*model.modules()]
    for module in modules:
        if getattr(getattr(module, "forward", None), "is_context_parallel", False):
            raise InputError(f"{type(module).__name__} is context-parallel already; leave one call out")
    # Sharded modules are of a class of their own, so files of bases are looked at.
    files = {cls.__module__ for module in modules for cls in type(module).__mro__ if cls is not object}
    for file in files:
        if any(value is _torchs for value in vars(sys.modules.get(file, object)).values()):
            raise InputError(
                f"{file} imports scaled_dot_product_attention by its name, where it can't be exchanged; call "
                "it as torch.nn.functional.scaled_dot_product_attention"
            )
    ulysses = _Ulysses(mesh.cp.get_group(), _take_over_library(modules), attention == "ring")
    if ulysses.is_ring:
        see_torchs(tensor_parallel=True, pipeline=False)  # its messages are functional collectives
    for module in modules:
        # A recomputed module, which is called outside of the model's forward, has to know too. Leaves of
        # torch are left out: they call no attention.
        is_leaf = next(module.children(), None) is None
        if module is model or not is_leaf or not type(module).__module__.startswith("torch.nn."):
            _enter(ulysses, module, module is model)
    F.scaled_dot_product_attention = _attention
    return model


@contextmanager
def exchanged_by(group: Any) -> Iterator[None]:
    """Meanwhile ``group`` exchanges each attention of this thread, of documents that fill their rows."""
    thread, before = get_ident(), F.scaled_dot_product_attention
    _running[thread], F.scaled_dot_product_attention = _Running(_Ulysses(group, False)), _attention
    try:
        yield
    finally:
        del _running[thread]
        F.scaled_dot_product_attention = before


def mean_over_tokens(loss_sum: Tensor, num_tokens: Tensor | int, mesh: Mesh) -> Tensor:
    """The mean loss over the tokens of all ranks that have different ones, however uneven their numbers are.

    Every rank of ``mesh.loss_group`` calls it; 16 bytes are all-reduced. Its gradient is as many times
    larger as the group has ranks, so that the mean of gradients over ranks that ``fully_shard`` takes is the
    gradient of this loss. Leave ``set_gradient_averaging`` as it is. Gradients of experts that are not
    distributed by ``expert_parallel`` are to be divided by ``mesh.loss_group.size()``
    (``set_gradient_divide_factor``).

    Args:
        loss_sum: the sum over this rank's tokens, of shape () in any floating point dtype.
        num_tokens: how many these are: an int, or a tensor of shape () in any integer dtype. With several
            microbatches in a step those of all of them, in each call: losses and gradients then add up.
        mesh: what ``mesh()`` returned.

    Returns:
        The mean, of shape () in the dtype of ``loss_sum``, equal on all ranks; 0 without any token.

    Raises:
        InputError: ``loss_sum`` has another shape.

    Examples:
        >>> loss_sum = torch.tensor(6.0, requires_grad=True)
        >>> shardwright.parallel.mean_over_tokens(loss_sum, 3, shardwright.mesh()).item()
        2.0
    """
    if loss_sum.shape:
        raise InputError(
            f"mean_over_tokens: loss_sum is {list(loss_sum.shape)}, expected the sum, of shape (): use "
            'reduction="sum"'
        )
    return mean_of_all(loss_sum, num_tokens, mesh.loss_group)


@dataclass(frozen=True)
class _Running:
    """What a forward knows of its sequences; ``given``: the position ids of this rank, of which ``gathered``
    are those of all, if documents are packed."""

    ulysses: "_Ulysses"
    given: Tensor | None = None
    gathered: Tensor | None = None
    documents: Documents | None = None


_running: dict[int, _Running] = {}
"""By thread: a backward on a device recomputes in a thread of its own."""


class _Ulysses:
    """The exchange of one model."""

    def __init__(self, group: dist.ProcessGroup, is_librarys: bool, is_ring: bool = False) -> None:
        self.group, self.world, self.is_librarys = group, group.size(), is_librarys
        self.num_attentions, self.was_packed, self.is_ring = 0, False, is_ring
        self.last: _Running | None = None

    def running(self, given: Tensor | None, is_root: bool) -> _Running:
        """What a module that begins is to know. Raises: InputError, StageError."""
        before = _running.get(get_ident())
        if before is not None and (given is None or given is before.given):
            return before
        if given is not None:
            # What is recomputed has those of its forward again, layer by layer: they are gathered once.
            if is_root or self.last is None or given is not self.last.given:
                self.last = self._of_positions(given)
            return self.last
        if self.was_packed and not is_root:
            raise StageError(
                "a module is recomputed after packed documents, and doesn't know where they begin; give "
                "position_ids to each module that is checkpointed"
            )
        return _Running(self)

    def _of_positions(self, given: Tensor) -> _Running:
        if given.ndim != 2:
            raise InputError(f"position_ids are {list(given.shape)}, expected [batch or 1, sequence / cp]")
        parts = [torch.empty_like(given) for _ in range(self.world)]
        with calling(self.group, "all-gather", given.device, axis="cp"):
            dist.all_gather(parts, given.contiguous(), group=self.group)
        gathered = torch.cat(parts, 1)
        begins = (gathered.diff() != 1).nonzero().tolist()
        if not begins:
            return _Running(self, given, gathered)
        self.was_packed = True
        count, length = gathered.shape
        edges = [[0, *(at + 1 for row, at in begins if row == each), length] for each in range(count)]
        return _Running(self, given, gathered, [[*pairwise(row)] for row in edges])

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """[batch, heads, sequence / cp, size] -> [batch, heads / cp, sequence, size]. Raises: InputError."""
        if query.ndim != 4 or query.shape[_HEADS] % self.world:
            raise InputError(
                f"context_parallel: an attention's query is {list(query.shape)}, expected [batch, heads, "
                f"sequence / cp, head size] with heads that cp={self.world} divides; choose another cp, or "
                'attention="ring"'
            )
        self.num_attentions += 1
        times = self.world // gcd(self.world, key.shape[_HEADS])
        if times > 1:  # each rank needs those of its own heads
            key, value = (each.repeat_interleave(times, _HEADS) for each in (key, value))
        return exchange((query, key, value), self.group, _HEADS, _SEQUENCE)

    def ring(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        """[batch, heads, sequence / cp, size] -> the same. Raises: InputError."""
        if query.ndim != 4 or query.shape[_SEQUENCE] != key.shape[_SEQUENCE]:
            raise InputError(
                f"context_parallel: a query is {list(query.shape)} and its key {list(key.shape)}, expected "
                "[batch, heads, sequence / cp, head size], as many tokens in both for a ring"
            )
        self.num_attentions += 1
        times = query.shape[_HEADS] // key.shape[_HEADS]
        key, value = (each.repeat_interleave(times, _HEADS) if times > 1 else each for each in (key, value))
        return ring(query, key, value, self.group, is_causal, scale)

    def mask_of(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """A mask of the whole sequence for this rank's heads, 4-D. Raises: InputError."""
        if mask is None:
            return None
        mask = mask[(None,) * (4 - mask.ndim)]
        expected = query.shape[_SEQUENCE], key.shape[_SEQUENCE]
        if mask.shape[2] not in (1, expected[0]) or mask.shape[3] != expected[1]:
            raise InputError(
                f"context_parallel: an attn_mask is {list(mask.shape)}, expected [..., {expected[0]}, "
                f"{expected[1]}], of the whole sequence, which each rank has inside of an attention"
            )
        return mask if mask.shape[1] == 1 else mask.chunk(self.world, 1)[self.group.rank()]


def _enter(ulysses: _Ulysses, module: nn.Module, is_root: bool) -> None:
    """Wrap a module's forward, as a method: copies of the module have one of their own."""
    own = vars(module).get("forward")
    forward: Callable[..., Any] = type(module).forward if own is None else lambda _, *a, **k: own(*a, **k)
    names = [*inspect.signature(own or MethodType(forward, module)).parameters]

    @wraps(own or forward)
    def entered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        positions = given.get("position_ids")
        if is_root and ulysses.is_librarys and (positions is None or given.get("attention_mask") is not None):
            raise InputError(
                "a context-parallel transformers model was called without position_ids or with an "
                "attention_mask; call it with what mesh.split gives of a batch, without its attention_mask: "
                "padding at the end changes nothing, and the loss leaves it out"
            )
        seen, thread = ulysses.num_attentions, get_ident()
        running, before = ulysses.running(positions, is_root), _running.get(thread)
        _running[thread] = running
        try:
            result = forward(self, *args, **kwargs)
        finally:
            if before is None:
                del _running[thread]
            else:
                _running[thread] = before
        if is_root and ulysses.num_attentions == seen:
            raise InputError(
                f"{type(self).__name__} is context-parallel, and its forward called no attention that was "
                "exchanged; call torch.nn.functional.scaled_dot_product_attention in it"
            )
        return result

    entered.is_context_parallel = True  # type: ignore[attr-defined]
    module.forward = MethodType(entered, module)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Torch's own, in whose place it is, and around it the exchange where a context-parallel model runs."""
    # The first is for torch.compile, which can't trace the second: a function of another model stays whole.
    if not _running or (running := _running.get(get_ident())) is None:
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, **options)
    ulysses, documents = running.ulysses, running.documents
    if ulysses.is_ring:
        if attn_mask is not None or documents is not None or dropout_p:
            raise InputError(
                "context_parallel: an attention has a mask, packed documents or dropout, which torch's ring "
                'doesn\'t take; choose attention="ulysses"'
            )
        return ulysses.ring(query, key, value, is_causal, options.get("scale"))
    query, key, value = ulysses.to_heads(query, key, value)
    mask = ulysses.mask_of(attn_mask, query, key)
    if documents is None:
        whole = _torchs(query, key, value, mask, dropout_p, is_causal, **options)
    else:
        # One by one: a mask of all would be [sequence, sequence], and most of its products for nothing.
        length, rows = query.shape[_SEQUENCE], []
        if key.shape[_SEQUENCE] != length:
            raise InputError(
                f"context_parallel: an attention of {length} tokens to {key.shape[_SEQUENCE]} others, in "
                "which packed documents aren't known; give such a model one document in each row"
            )
        documents = documents * len(query) if len(documents) == 1 else documents
        mask = mask if mask is None else mask.expand(len(query), -1, length, -1)
        for row, spans in enumerate(documents):
            parts = []
            for begin, end in spans:
                q, k, v = (each[row : row + 1, :, begin:end] for each in (query, key, value))
                of_mask = None if mask is None else mask[row : row + 1, :, begin:end, begin:end]
                parts.append(_torchs(q, k, v, of_mask, dropout_p, is_causal, **options))
            rows.append(torch.cat(parts, _SEQUENCE))
        whole = torch.cat(rows)
    return exchange((whole,), ulysses.group, _SEQUENCE, _HEADS)[0]


def _take_over_library(modules: list[nn.Module]) -> bool:
    """Whether it is a model of transformers; its attention is then one of ours. Raises: InputError."""
    library = sys.modules.get("transformers.modeling_utils")  # where it isn't imported there is no such model
    of_it = [module for module in modules if library and isinstance(module, library.PreTrainedModel)]
    if library is None or not of_it:
        return False
    model: Any = of_it[0]
    functions, chosen = library.ALL_ATTENTION_FUNCTIONS, model.config._attn_implementation
    if chosen != "sdpa" and not chosen.startswith("flash_attention"):
        raise InputError(
            f"{type(model).__name__} has attn_implementation={chosen!r}, which can't be exchanged; load it "
            'with attn_implementation="sdpa" or "flash_attention_2"'
        )
    # No mask function has this name, so transformers makes no masks, which would be those of a part. For a
    # FlashAttention it makes none, and imports it by its name.
    name, inner = "ulysses_sdpa" if chosen == "sdpa" else chosen, functions[chosen]
    if not getattr(inner, "is_exchanged", False):
        functions.register(name, _librarys_attention(inner, chosen == "sdpa"))
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise InputError(f"{type(model).__name__} has attention of its own, which can't be exchanged")
    return True


def _librarys_attention(inner: Callable[..., Any], is_sdpa: bool) -> Callable[..., Any]:
    """An attention function of transformers: [batch, heads, sequence / cp, size] -> [batch, sequence / cp,
    heads, size], and weights or None."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        if (running := _running.get(get_ident())) is None:
            return inner(module, query, key, value, attention_mask, **options)
        window = options.get("sliding_window")
        if is_sdpa:
            if query.shape[_SEQUENCE] == 1:  # transformers takes it for decoding, where nothing is masked
                raise InputError("a rank has one token of a sequence; choose a smaller cp")
            if window is not None and window < query.shape[_SEQUENCE] * running.ulysses.world:
                raise InputError(
                    f"{type(module).__name__} attends to {window} tokens, which transformers tells sdpa by a "
                    'mask of all; load the model with attn_implementation="flash_attention_2"'
                )
            return inner(module, query, key, value, None, **options)  # calls `_attention`
        if running.ulysses.is_ring:
            raise InputError('attention="ring" takes a model with attn_implementation="sdpa"')
        if options.get("s_aux") is not None:
            raise InputError(f"{type(module).__name__} has attention sinks, which aren't exchanged")
        options["position_ids"] = running.gathered
        query, key, value = running.ulysses.to_heads(query, key, value)
        whole, weights = inner(module, query, key, value, None, **options)
        return exchange((whole,), running.ulysses.group, 1, 2)[0], weights

    attend.is_exchanged = True  # type: ignore[attr-defined]
    return attend
