"""The workload of a transformer from its architecture numbers: a row, and no module. Pure arithmetic.

Bytes of elementwise kernels are counted in passes over an activation, 2 bytes for each element and pass.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from shardwright.errors import InputError
from shardwright.plan.axes import ALONE, AxisSizes, of_attention, of_experts, of_layers, of_stages
from shardwright.plan.workload import GroupSize, Op, OpKind, Stretch, Workload
from shardwright.schedule.schedule import Event, EventKind, Phase

_BF16 = 2


class Recompute(StrEnum):
    """What a backward computes again. SELECTIVE: of each block all but every other matmul and attention."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


@dataclass(frozen=True)
class Architecture:
    """The numbers of a decoder: blocks of attention and a feed-forward network, embedding and head.
    ``estimate``, ``search`` and ``of_model`` take them in the place of a module.

    Args:
        n_layers: blocks.
        d_model: width of the activations between them.
        n_heads: heads of queries.
        n_kv_heads: heads of keys, and of values.
        head_dim: width of a head.
        ffn_dim: width inside of the feed-forward network.
        vocab_size: rows of the embedding and of the head.
        gated: the network has three matrices (SwiGLU), not two.
        tied: the head is the embedding.
        biases: matrices and layer norms have biases.
        rotary: positions are rotations of queries and keys, else rows of a table.
        rms: norms are of root mean squares, else layer norms.
        experts: of each block, each with a network of its own, ``ffn_dim`` wide; 0: one network.
        chosen: experts of each token, where there are any.
    """

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    gated: bool = True
    tied: bool = False
    biases: bool = False
    rotary: bool = True
    rms: bool = True
    experts: int = 0
    chosen: int = 1

    @property
    def q_dim(self) -> int:
        """Columns of the queries."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Columns of the keys, and of the values."""
        return self.n_kv_heads * self.head_dim

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the matmuls of a block, in their order; of experts those of one."""
        d, f = self.d_model, self.ffn_dim
        qkv = [(d, self.q_dim + 2 * self.kv_dim), (self.q_dim, d)]
        return [*qkv, *[(d, f)] * (1 + self.gated), (f, d)]

    @property
    def expert_numel(self) -> int:
        """Parameters of an expert."""
        return sum(k * n for k, n in self.matrices[2:])

    @property
    def block_numel(self) -> int:
        """Parameters of a block."""
        biases = sum(n for _, n in self.matrices) if self.biases else 0
        norms = 2 * self.d_model * (1 if self.rms else 1 + self.biases)
        others = self.expert_numel * (self.experts - 1) + self.d_model * self.experts if self.experts else 0
        return sum(k * n for k, n in self.matrices) + others + biases + norms

    def root_numel(self, sequence: int) -> int:
        """Parameters outside of blocks.

        Args:
            sequence: rows of the table of positions, if there is one.

        Returns:
            The number of elements.
        """
        positions = 0 if self.rotary else sequence * self.d_model
        norm = self.d_model * (1 if self.rms else 1 + self.biases)
        return self.vocab_size * self.d_model * (1 if self.tied else 2) + positions + norm


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of one rank, and how an ``Architecture`` computes it.

    Args:
        sequence: tokens of a row.
        sequences: rows.
        recompute: what a backward computes again, of rows of a table of runs; elsewhere ``Choice.recompute``
            says it.
        recompute_every: of so many blocks one; 1: all.
        compiled: elementwise kernels are fused, those of the loss too.
        fused_loss: the loss alone is one kernel, that reads logits as they are; else it is taken in float32.
        fused_norms: each norm is one kernel.
        float8: the matmuls of blocks are in 8 bits.
    """

    sequence: int
    sequences: int
    recompute: Recompute = Recompute.NONE
    recompute_every: int = 1
    compiled: bool = False
    fused_loss: bool = False
    fused_norms: bool = False
    float8: bool = False

    @property
    def tokens(self) -> int:
        """Of one microbatch on one rank."""
        return self.sequence * self.sequences


def part_of(arch: Architecture, axes: AxisSizes) -> Architecture:
    """The numbers of what a rank of tp computes, of a stage's blocks: heads, columns of the feed-forward
    network and rows of the vocabulary are cut (Megatron-LM, Shoeybi et al. 2019). Where stages have different
    numbers of blocks, those of the largest.

    Raises: InputError where these can't be cut so.
    """
    cut = {"n_heads": arch.n_heads, "n_kv_heads": arch.n_kv_heads, "ffn_dim": arch.ffn_dim}
    wrong = [f"{name}={size}" for name, size in cut.items() if size % axes.tp]
    if wrong:
        raise InputError(f"tp={axes.tp} doesn't divide {', '.join(wrong)} of the model")
    if arch.n_heads // axes.tp % axes.cp:
        raise InputError(f"cp={axes.cp} doesn't divide the {arch.n_heads // axes.tp} heads of a rank")
    if axes.ep > 1 and (not arch.experts or arch.experts % axes.ep):
        raise InputError(f"ep={axes.ep} doesn't divide the {arch.experts} experts of a block")
    if axes.pp * axes.chunks > arch.n_layers:
        raise InputError(f"{axes.pp * axes.chunks} stages are more than the {arch.n_layers} blocks")
    parts = {name: size // axes.tp for name, size in cut.items()}
    layers, vocabulary = -(-arch.n_layers // axes.pp), -(-arch.vocab_size // axes.tp)
    return replace(arch, n_layers=layers, vocab_size=vocabulary, **parts)


def matmul(tokens: float, k: int, n: int, times: int = 1) -> Op:
    """``tokens`` rows of ``k`` columns become ``n`` columns, so many times."""
    nbytes = _BF16 * (tokens * (k + n) + k * n)
    return Op(OpKind.MATMUL, 2.0 * tokens * k * n * times, nbytes * times, min(tokens, k, n), times)


def attention(arch: Architecture, batch: Microbatch, times: float = 1.0) -> Op:
    """Causal attention, of which half is computed. Its backward is 2.5 times the forward."""
    flops = 2.0 * batch.tokens * batch.sequence * arch.q_dim * times
    return Op(OpKind.ATTENTION, flops, 2 * _BF16 * batch.tokens * (arch.q_dim + arch.kv_dim) * times)


def passes(batch: Microbatch, columns: float, kernels: int) -> Op:
    """Elementwise kernels that read and write ``columns`` columns in all."""
    return Op(OpKind.MEMORY, nbytes=_BF16 * batch.tokens * columns, kernels=kernels)


def _elementwise(arch: Architecture, batch: Microbatch, axes: AxisSizes) -> tuple[Op, Op]:
    """Count a block's, forward and backward. Ranks of tp share the tokens of norms and sums."""
    d, f, rope = arch.d_model / axes.tp, arch.ffn_dim * arch.chosen, arch.q_dim + arch.kv_dim
    sorted_by_expert = 4 * arch.d_model * arch.chosen if arch.experts else 0  # there and back
    if batch.compiled:
        forward = 2 * (2 + 3) * d + (3 * f if arch.gated else 2 * f) + (2 * rope if arch.rotary else 0)
        forward += sorted_by_expert
        return passes(batch, forward, 6), passes(batch, 1.7 * forward, 10)
    norm = 10 if _slow_norms(arch, batch) else 2  # several kernels in float32
    forward = 2 * (norm + 3) * d + (5 * f if arch.gated else 2 * f) + (6 * rope if arch.rotary else 0)
    forward += sorted_by_expert
    return passes(batch, forward, 14 + 8 * arch.rms), passes(batch, 1.7 * forward, 30 + 16 * arch.rms)


def _slow_norms(arch: Architecture, batch: Microbatch) -> bool:
    """Whether a norm of root mean squares is several kernels, in float32."""
    return arch.rms and not (batch.compiled or batch.fused_norms)


def block_saved(arch: Architecture, batch: Microbatch, axes: AxisSizes = ALONE) -> int:
    """Bytes of activations that a block keeps for its backward, all of it. Of tp's ranks each has all tokens
    of what a norm gives, which matmuls read."""
    d, f = arch.d_model, arch.ffn_dim
    norms = 2 * (d + (3 if _slow_norms(arch, batch) else 1) * d // axes.tp)
    qkv = 3 * arch.q_dim  # keys and values are repeated for the queries that share them
    hidden = (3 if arch.gated else 2) * f + (f if arch.gated and not batch.compiled else 0)
    routed = d * arch.chosen if arch.experts else 0  # what experts are given, and hidden once for each
    return int(_BF16 * batch.tokens * (norms + qkv + arch.q_dim + hidden * arch.chosen + routed))


def _matmuls(arch: Architecture, tokens: int, axes: AxisSizes, times: int) -> list[Op]:
    """Those of a block. Tokens go to experts evenly, so that each rank of ep has as many rows as before."""
    if not arch.experts:
        return [matmul(tokens, k, n, times) for k, n in arch.matrices]
    rows, of_each = tokens * arch.chosen, tokens * arch.chosen * axes.ep / arch.experts
    experts = [matmul(rows, k, n, times) for k, n in arch.matrices[2:]]
    return [
        *(matmul(tokens, k, n, times) for k, n in arch.matrices[:2]),
        matmul(tokens, arch.d_model, arch.experts, times),
        *(op._replace(narrowest=min(op.narrowest, of_each)) for op in experts),
    ]


def _block(arch: Architecture, batch: Microbatch, axes: AxisSizes) -> tuple[Stretch, Stretch]:
    """Forward and backward of one block: a rank's part of it. The last reduce-scatter of the forward isn't in
    it: a backward that computes the block again stops before that (torch's ``checkpoint``)."""
    tokens = batch.tokens
    dtype = "float8" if batch.float8 else "bfloat16"
    matmuls, matmuls_back = (
        [op._replace(dtype=dtype) for op in _matmuls(arch, tokens, axes, times)] for times in (1, 2)
    )
    elementwise, elementwise_back = _elementwise(arch, batch, axes)
    exchanges = (
        *of_layers(axes, tokens, arch.d_model, 3),
        *of_attention(axes, tokens, arch.q_dim, arch.kv_dim, arch.head_dim),
        *of_experts(axes, tokens, arch.d_model, arch.chosen),
    )
    # Its queries are of a rank's tokens and all heads, or of all tokens and a part of the heads.
    attend = attention(arch, batch, axes.cp)._replace(nbytes=attention(arch, batch).nbytes)
    forward = (*matmuls, attend, elementwise, *exchanges)
    backward = (
        *matmuls_back,
        attend._replace(flops=2.5 * attend.flops, nbytes=2.5 * attend.nbytes),
        elementwise_back,
        *exchanges,
        *of_layers(axes, tokens, arch.d_model, 1),
    )
    whole, entry = block_saved(arch, batch, axes), _BF16 * tokens * arch.d_model // axes.tp
    saved = whole
    if batch.recompute is Recompute.FULL:
        saved, backward = entry, forward + backward
    elif batch.recompute is Recompute.SELECTIVE:
        kept = sum(n for _, n in arch.matrices[::2]) + arch.q_dim
        saved, backward = (
            int(entry + _BF16 * tokens * kept),
            (*matmuls[1::2], elementwise, *exchanges, *backward),
        )
    inside = _BF16 * tokens * (3 if arch.rms else 1) * arch.d_model
    back = _BF16 * tokens * (2 if arch.gated else 1) * arch.ffn_dim * arch.chosen
    return Stretch(forward, saved, inside), Stretch(backward, -saved, whole - saved + back)


def _head(arch: Architecture, batch: Microbatch, axes: AxisSizes) -> tuple[Stretch, Stretch]:
    """The last norm, logits and the loss, forward and backward. In float32 the loss holds three copies. Over
    tp logits stay cut by the vocabulary (``loss_parallel``); what is reduced then, three numbers of each
    token, isn't counted."""
    tokens, d, vocab = batch.tokens, arch.d_model, arch.vocab_size
    logits = _BF16 * tokens * vocab
    fused = batch.fused_loss or batch.compiled
    kept, more = (logits, logits) if fused else (3 * logits, 4 * logits)
    exchange = of_layers(axes, tokens, d, 1)
    forward = (matmul(tokens, d, vocab), passes(batch, vocab * (2 if fused else 9), 4), *exchange)
    backward = (matmul(tokens, d, vocab, 2), passes(batch, vocab * (2 if fused else 7), 6), *exchange)
    return Stretch(forward, kept, more // 2, True), Stretch(backward, -kept, more, True)


def workload(arch: Architecture, batch: Microbatch, axes: AxisSizes = ALONE) -> Workload:
    """Each block is a group; the embedding, the last norm and the head are the root's, the last group.

    axes: that ranks share this microbatch over; what is returned is of one rank, of the last stage of a
    pipeline, with one before it as ``earlier``. Raises: InputError where it can't be shared so.
    """
    part = part_of(arch, axes)
    if batch.sequence % axes.cp:
        raise InputError(f"cp={axes.cp} doesn't divide the {batch.sequence} tokens of a sequence")
    own = replace(batch, sequence=batch.sequence // axes.cp)
    whole = arch.n_layers * arch.block_numel + arch.root_numel(batch.sequence)
    last = _stage(part, own, axes, axes.pp == 1, True)
    earlier = _stage(part, own, axes, True, False) if axes.pp > 1 else None
    return replace(last, tokens=batch.tokens, parameters=whole, earlier=earlier)


def _stage(arch: Architecture, batch: Microbatch, axes: AxisSizes, embeds: bool, ends: bool) -> Workload:
    """``embeds``: it has the embedding; ``ends``: it has the head."""
    root, d, tokens = arch.n_layers, arch.d_model, batch.tokens
    without = _block(arch, replace(batch, recompute=Recompute.NONE), axes)
    blocks = [
        _block(arch, batch, axes) if (index + 1) % batch.recompute_every == 0 else without
        for index in range(min(arch.n_layers, batch.recompute_every))
    ]
    received, entry = of_stages(axes, tokens, d), _BF16 * tokens * d // axes.tp
    looked_up = (passes(batch, 3 * d, 3), *of_layers(axes, tokens, d, 1)) if embeds else ()
    # Of a pipeline each stage but the first receives activations, and each but the last gradients.
    embedding = Stretch((*looked_up, *received), entry)
    looked_up = (passes(batch, 4 * d, 3), *of_layers(axes, tokens, d, 1)) if embeds else ()
    embedding_back = Stretch(looked_up, -entry)
    nothing, scattered = Stretch(), Stretch(of_layers(axes, tokens, d, 1))
    head_forward, head_backward = _head(arch, batch, axes) if ends else (nothing, Stretch(received))
    head_forward = head_forward._replace(ops=scattered.ops + head_forward.ops)
    forward = [(Event(EventKind.FORWARD_BEGIN, root), embedding)]
    for index in range(arch.n_layers):
        last = index == arch.n_layers - 1
        forward.append((Event(EventKind.FORWARD_BEGIN, index), blocks[index % len(blocks)][0]))
        forward.append((Event(EventKind.FORWARD_END, index), head_forward if last else scattered))
    forward.append((Event(EventKind.FORWARD_END, root), nothing))
    backward = [(Event(EventKind.BACKWARD_BEGIN, root), head_backward)]
    for index in reversed(range(arch.n_layers)):
        backward.append((Event(EventKind.BACKWARD_BEGIN, index), blocks[index % len(blocks)][1]))
        backward.append((Event(EventKind.GRADS_READY, index), nothing))
        backward.append((Event(EventKind.BACKWARD_END, index), nothing if index else embedding_back))
    backward += [
        (Event(EventKind.GRADS_READY, root), nothing),
        (Event(EventKind.BACKWARD_END, root), nothing),
        (Event(EventKind.STEP_END), nothing),
    ]
    elsewhere = arch.expert_numel * (arch.experts - arch.experts // axes.ep)
    numel = arch.block_numel - elsewhere
    block = GroupSize("", numel, numel, entry, elsewhere=elsewhere)
    outside = arch.root_numel(batch.sequence * axes.cp)
    if not (embeds and ends) and not arch.tied:
        outside -= arch.vocab_size * d
    named = (block._replace(name=f"layers.{index}") for index in range(arch.n_layers))
    groups = (*named, GroupSize("root", outside, outside))
    return Workload(
        groups, {Phase.FORWARD: tuple(forward), Phase.BACKWARD: tuple(backward)}, root, tokens=batch.tokens
    )
