"""Sequences that ranks share (Ulysses): training equals that of one process that has whole sequences."""

import copy
import sys
import types
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

import shardwright
from shardwright import clip_grad_norm_, context_parallel, fully_shard
from shardwright.errors import InputError, StageError
from shardwright.observe.steps.recording import ring
from shardwright.parallel import document_positions, mean_over_tokens, shift_labels
from tests.ranks.models import Run, both_step
from tests.ranks.pool import on_ranks, run_ranks

TOLERANCE = 1e-12
VOCAB, LENGTH = 19, 12


class Attention(nn.Module):
    """Grouped key/value heads; ``mask``: given to torch, of the whole sequence, for each head."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.into = nn.Linear(width, (heads + 2 * groups) * self.size)
        self.out = nn.Linear(width, width)
        self.mask = None

    def forward(self, x):
        heads = self.into(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.groups, self.groups], 1)
        given = {"is_causal": True} if self.mask is None else {"attn_mask": self.mask}
        seen = F.scaled_dot_product_attention(q, k, v, scale=0.4, enable_gqa=True, **given)
        return self.out(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, groups)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, position_ids=None):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Causal; ``gives``: whether its blocks are given the positions; ``around``: how a block is called."""

    def __init__(self, heads=4, groups=2, width=16, gives=False):
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)
        self.gives, self.around = gives, lambda block, *args: block(*args)

    def forward(self, tokens, position_ids):
        x = self.embedding(tokens) + self.places(position_ids)
        for block in self.blocks:
            x = self.around(block, x, position_ids) if self.gives else self.around(block, x)
        return self.head(x)


def build(**options):
    torch.manual_seed(3)
    return Transformer(**options).double()


def sharded(model, mesh, attention="ulysses"):
    context_parallel(model, mesh, attention)
    for block in model.blocks:
        fully_shard(block, mesh=mesh.shard)
    return fully_shard(model, mesh=mesh.shard)


def batch_of(step, samples, positions=None):
    """All samples, and labels that are learned: more of them in some parts of a sequence than in others."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (samples, 2, LENGTH), generator=generator)
    learned = torch.rand(tokens.shape, generator=generator) < torch.linspace(0.05, 0.95, LENGTH)
    labels = tokens.masked_fill(~learned, -100)
    positions = torch.arange(LENGTH)[None] if positions is None else positions
    return tokens, torch.stack([shift_labels(each, positions) for each in labels]), positions


def sum_of(model, tokens, labels, positions):
    logits = model(tokens, positions).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def blocked(documents, rows):
    """For the reference: a causal mask of documents that are packed, as attention of one process takes it."""
    same = documents[:, :, None] == documents[:, None, :]
    return (same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()).expand(rows, -1, -1)[:, None]


def train_beside(model, mesh, reference, positions=None, steps=3):
    """Clipped steps with momentum; losses, norms and parameters equal those of one process."""
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(steps):
        tokens, labels, whole = batch_of(step, mesh.num_samples, positions)
        own = {"tokens": tokens[mesh.sample_rank], "labels": labels[mesh.sample_rank], "position_ids": whole}
        part = mesh.split(own)
        total = sum_of(model, part["tokens"], part["labels"], part["position_ids"])
        loss = mean_over_tokens(total, (part["labels"] != -100).sum(), mesh)
        loss.backward()
        expected = sum(sum_of(reference, *pair, whole) for pair in zip(tokens, labels, strict=True))
        expected = expected / (labels != -100).sum()
        expected.backward()
        norm, norm_of_one = (clip_grad_norm_(each.parameters(), 0.1) for each in (model, reference))
        torch.testing.assert_close(loss, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(norm, norm_of_one, atol=TOLERANCE, rtol=0)
        both_step(ours, theirs, TOLERANCE)
    return loss.item()


def trains(rank, world, sizes, options):
    mesh = shardwright.mesh(**sizes)
    return train_beside(sharded(build(**options), mesh), mesh, build(**options))


@pytest.mark.parametrize(
    ("world", "sizes", "options"),
    [
        (2, {"cp": 2}, {}),
        (4, {"cp": 2}, {}),
        (4, {"cp": 4}, {"groups": 4}),
        (4, {"cp": 4}, {"groups": 1}),
        (3, {"cp": 3}, {"heads": 6, "groups": 2, "width": 12}),
        (4, {"replicate": 2, "dp": 1, "cp": 2}, {}),
        (4, {"cp": 4, "ep": 2}, {}),
    ],
    ids=str,
)
def test_steps_over_sequences_that_ranks_share_are_those_of_one_process(world, sizes, options):
    losses = run_ranks(world, trains, sizes, options)
    assert len(set(losses)) == 1, "the loss is equal on all ranks"


def trains_by_a_ring(rank, world, sizes, options):
    mesh = shardwright.mesh(**sizes)
    model, reference = build(**options), build(**options)
    model.around = partial(recompute, use_reentrant=False)
    loss = train_beside(sharded(model, mesh, "ring"), mesh, reference)
    axes = {each.axis for each in ring().records if each.kind == "wait" and each.action == "all-to-all"}
    return loss, axes


@pytest.mark.parametrize(
    ("world", "sizes", "options"),
    [
        (4, {"cp": 2}, {"heads": 3, "groups": 1, "width": 12}),  # heads that no all-to-all could spread
        (4, {"cp": 4}, {"heads": 2, "groups": 2}),
        (3, {"cp": 3}, {}),
    ],
    ids=str,
)
def test_steps_by_a_ring_are_those_of_one_process_whatever_the_heads_are(world, sizes, options):
    found = run_ranks(world, trains_by_a_ring, sizes, options)
    assert found == [(found[0][0], {"cp" if sizes["cp"] < world else ""})] * world


@on_ranks(2)
def test_what_a_ring_does_not_take_is_refused_with_what_does(rank, world):
    mesh = shardwright.mesh(cp=2)
    with pytest.raises(InputError, match=r"attention is 'rings', expected \"ulysses\" or \"ring\""):
        context_parallel(build(), mesh, "rings")
    model = context_parallel(build(), mesh, "ring")
    tokens, ids = torch.zeros(1, 4, dtype=torch.long), torch.arange(4)[None] + 4 * rank
    with pytest.raises(InputError, match=r"packed documents or dropout.*attention=\"ulysses\""):
        model(tokens, torch.arange(4)[None])  # the second rank's begin again
    model.blocks[0].attention.mask = torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(InputError, match="has a mask"):
        model(tokens, ids)
    model = context_parallel(build(heads=1, groups=1), mesh)
    with pytest.raises(InputError, match='choose another cp, or attention="ring"'):
        model(tokens, ids)


def trains_with_tensor_parallelism(rank, world):
    mesh = shardwright.mesh(cp=2, tp=2)
    model, reference = build(groups=4), build(groups=4)
    for block in model.blocks:  # attention stays whole on each rank: its layout isn't what is tested
        parallelize_module(block, mesh.tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train_beside(sharded(model, mesh), mesh, reference)


def test_sequences_are_shared_beside_tensor_parallelism():
    run_ranks(4, trains_with_tensor_parallelism)


def collectives(monkeypatch):
    """The sizes in bytes of all-to-alls and all-gathers of this rank, as they are called."""
    seen = {"all_to_all_single": [], "all_gather": []}
    for name, sizes in seen.items():
        real = getattr(dist, name)

        def counted(output, given, real=real, sizes=sizes, **options):
            sizes.append(given.nbytes)
            real(output, given, **options)

        monkeypatch.setattr(dist, name, counted)
    return seen


def packed(rows):
    """Positions of rows of packed documents, each row cut otherwise; one begins at a border between ranks."""
    cuts = [[0, 5, 6, 12], [0, 3, 12]]
    return torch.cat([document_positions(torch.tensor(cut)) for cut in cuts[:rows]])


def trains_packed(rank, world, rows, gives, recomputed):
    positions = packed(rows)
    mesh = shardwright.mesh(cp=world)
    model, reference = build(gives=gives), build()
    documents = (positions == 0).cumsum(1)
    for block in reference.blocks:
        block.attention.mask = blocked(documents, 2)
    if recomputed:
        model.around = partial(recompute, use_reentrant=False)
    with pytest.MonkeyPatch.context() as patched:
        seen = collectives(patched)
        train_beside(sharded(model, mesh), mesh, reference, positions, steps=2)
    # 2 steps of 2 blocks: q, k and v together, and back; the same in the backward, and recomputed.
    assert len(seen["all_to_all_single"]) == 2 * 2 * (6 if recomputed else 4)
    assert len(seen["all_gather"]) == 2, "positions are gathered once in a step"


@pytest.mark.parametrize(
    ("rows", "gives", "recomputed"), [(1, False, False), (2, True, False), (2, True, True)], ids=str
)
def test_packed_documents_do_not_see_each_other_and_each_attention_takes_two_all_to_alls(
    rows, gives, recomputed
):
    run_ranks(2, trains_packed, rows, gives, recomputed)


@on_ranks(2)
def test_recomputed_packed_documents_whose_place_is_not_known_raise(rank, world):
    mesh = shardwright.mesh(cp=world)
    model = context_parallel(build(), mesh)
    model.around = partial(recompute, use_reentrant=False)
    part = mesh.split({"tokens": torch.zeros(1, LENGTH, dtype=torch.long), "position_ids": packed(1)})
    loss = model(**part).sum()
    with pytest.raises(StageError, match="give position_ids to each module that is checkpointed"):
        loss.backward()


@on_ranks(2)
def test_masks_of_whole_sequences_and_heads_of_their_own_are_applied_and_others_refused(rank, world):
    mesh = shardwright.mesh(cp=world)
    model, reference = build(), build()
    bias = torch.randn(1, 4, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for block in (*model.blocks, *reference.blocks):
        block.attention.mask = bias
    for block in model.blocks:
        fully_shard(block)
    context_parallel(fully_shard(model), mesh)  # in this order, too
    train_beside(model, mesh, reference, steps=1)
    model.blocks[0].attention.mask = bias[..., :6, :6]
    with pytest.raises(InputError, match=r"attn_mask is \[1, 4, 6, 6\], expected \[..., 12, 12\]"):
        model(**mesh.split({"tokens": torch.zeros(1, LENGTH, dtype=torch.long)}))


@on_ranks(2)
def test_a_copy_of_a_model_and_one_module_of_it_exchange_too_and_a_second_call_raises(rank, world):
    mesh = shardwright.mesh(cp=world)
    model = context_parallel(build(), mesh)
    other = copy.deepcopy(model)
    part = mesh.split({"tokens": torch.zeros(1, LENGTH, dtype=torch.long)})
    with torch.no_grad():
        other.head.weight.zero_()
        assert model(**part).std(-1).min() > 0
        torch.testing.assert_close(other(**part), other.head.bias.expand(1, LENGTH // 2, VOCAB))
        whole = torch.randn(1, LENGTH, 16, dtype=torch.float64)
        torch.testing.assert_close(
            model.blocks[0](whole.chunk(world, 1)[rank]), build().blocks[0](whole).chunk(world, 1)[rank]
        )
    with pytest.raises(InputError, match="Transformer is context-parallel already"):
        context_parallel(model, mesh)


def held(model, *args):
    """Bytes that a forward keeps for its backward, beside parameters; a storage counts once."""
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    found = {}

    def keep(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model(*args)
    return sum(size for pointer, (size, _) in found.items() if pointer not in params), result


@on_ranks(8)
def test_eight_ranks_hold_less_than_a_seventh_of_one_ranks_activations_each(rank, world):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(64, 8, 8) for _ in range(2)))
    x = torch.randn(1, 256, 64)
    whole, expected = held(blocks, x)
    context_parallel(blocks, shardwright.mesh(cp=8))
    own, found = held(blocks, x.chunk(8, 1)[rank].clone())
    torch.testing.assert_close(found, expected.chunk(8, 1)[rank])
    assert own <= whole / 7


@on_ranks(2)
def test_torchs_own_layers_exchange_also_compiled_and_other_functions_compile_whole(rank, world):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask
    x = torch.randn(2, 8, 32)
    expected = layer(x, mask(8), is_causal=True).chunk(2, 1)[rank]
    context_parallel(layer, shardwright.mesh(cp=2))
    part = x.chunk(2, 1)[rank]
    for call in (layer, torch.compile(layer, backend="eager")):
        torch.testing.assert_close(call(part, mask(4), is_causal=True), expected)
    layer.eval()  # where torch has a kernel of the whole layer, in which nothing can be exchanged
    with torch.no_grad(), pytest.raises(InputError, match="called no attention that was exchanged"):
        layer(part, mask(4), is_causal=True)

    def other(q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 4, 8, 8)
    assert torch.equal(torch.compile(other, backend="eager", fullgraph=True)(q), other(q))


class Crossed(nn.Module):
    def forward(self, x, position_ids):
        return F.scaled_dot_product_attention(x, *[x.repeat(1, 1, 2, 1)] * 2)


class ByName(nn.Module):
    """Of a file that imports the attention by its name."""


@on_ranks(2)
def test_models_whose_attention_is_not_exchanged_raise(rank, world):
    mesh = shardwright.mesh(cp=2)
    file = types.ModuleType("by_name")
    file.attention = sys.modules["shardwright.parallel.ulysses"]._torchs
    sys.modules["by_name"], ByName.__module__ = file, "by_name"
    with pytest.raises(InputError, match="by_name imports scaled_dot_product_attention by its name"):
        context_parallel(nn.Sequential(nn.Linear(2, 2), ByName()), mesh)
    model = context_parallel(nn.Sequential(nn.Linear(2, 2)), mesh)
    with pytest.raises(
        InputError, match="Sequential is context-parallel, and its forward called no attention"
    ):
        model(torch.ones(1, 2))
    crossed, x = context_parallel(Crossed(), mesh), torch.ones(1, 2, LENGTH // 2, 4)
    assert crossed(x, torch.arange(LENGTH)[None].chunk(2, 1)[rank]).shape == x.shape
    with pytest.raises(InputError, match="an attention of 12 tokens to 24 others"):
        crossed(x, packed(1).chunk(2, 1)[rank])
    odd = context_parallel(Block(9, 3, 3), mesh)
    with pytest.raises(InputError, match=r"query is \[1, 3, 4, 3\], expected .* that cp=2 divides"):
        odd(torch.ones(1, 4, 9))


@on_ranks(2)
def test_tokens_of_one_rank_alone_and_none_at_all_give_the_loss_and_gradients_of_the_whole(rank, world):
    mesh = shardwright.mesh(cp=2)
    total = torch.full((), 3.0 * rank, requires_grad=True)
    loss = mean_over_tokens(total, 2 * rank, mesh)
    loss.backward()
    assert (loss.item(), total.grad.item()) == (1.5, 1.0)  # 2 ranks / 2 tokens
    parts = [mean_over_tokens(total * share, 2 * rank, mesh) for share in (0.25, 0.75)]  # microbatches
    assert sum(parts).item() == 1.5
    assert mean_over_tokens(total * 0, 0, mesh).item() == 0
    with pytest.raises(InputError, match=r"loss_sum is \[1\], expected the sum"):
        mean_over_tokens(total[None], 1, mesh)


class Functions(dict):
    """As transformers' table of attention functions."""

    register = dict.__setitem__


class PreTrained(Transformer):
    """What a model of transformers has; ``choose``: its attention goes by a name of the table."""

    def __init__(self, functions, chosen, **options):
        super().__init__(**options)
        self.functions, self.config = functions, types.SimpleNamespace(_attn_implementation=chosen)
        for block in self.blocks:
            block.attention.forward = partial(self.attend, block.attention)

    def set_attn_implementation(self, name):
        self.config._attn_implementation = name

    def attend(self, attention, x):
        heads = attention.into(x).unflatten(-1, (-1, attention.size)).transpose(1, 2)
        q, k, v = heads.split([attention.heads, attention.groups, attention.groups], 1)
        attended = self.functions[self.config._attn_implementation]
        return attention.out(attended(attention, q, k, v, None, **self.given)[0].flatten(2))

    def forward(self, tokens, position_ids=None, attention_mask=None, **given):
        self.given = given | {"position_ids": position_ids}
        return super().forward(tokens, position_ids)


def as_sdpa(module, query, key, value, mask, *, position_ids, sliding_window=None):
    seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.4, enable_gqa=True)
    return seen.transpose(1, 2), None


def as_flash(module, query, key, value, mask, *, position_ids, s_aux=None):
    """Takes documents from positions, as FlashAttention's function does."""
    assert position_ids.shape[1] == query.shape[2] == LENGTH
    own = blocked((position_ids == 0).cumsum(1), 1)
    attention = sys.modules["shardwright.parallel.ulysses"]._torchs
    return attention(query, key, value, own, scale=0.4, enable_gqa=True).transpose(1, 2), None


def trains_as_library(rank, world, chosen):
    functions = Functions(sdpa=as_sdpa, flash_attention_2=as_flash, flex_attention=None)
    library = types.ModuleType("transformers.modeling_utils")
    library.PreTrainedModel, library.ALL_ATTENTION_FUNCTIONS = PreTrained, functions
    sys.modules["transformers.modeling_utils"] = library
    torch.manual_seed(3)
    model, reference = PreTrained(functions, chosen).double(), build()
    documents = (packed(1) == 0).cumsum(1)
    for block in reference.blocks:
        block.attention.mask = blocked(documents, 2)
    mesh = shardwright.mesh(cp=world)
    train_beside(sharded(model, mesh), mesh, reference, packed(1), steps=1)
    part = mesh.split({"tokens": torch.zeros(1, LENGTH, dtype=torch.long)})
    refused = {"sdpa": ({"sliding_window": 8}, "attends to 8 tokens")}
    refused["flash_attention_2"] = {"s_aux": torch.ones(4)}, "has attention sinks"
    given, expected = refused[chosen]
    for words, message in ((part | given, expected), ({"tokens": part["tokens"]}, "without position_ids")):
        with pytest.raises(InputError, match=message):
            model(**words)
    PreTrained.set_attn_implementation = lambda self, name: None
    if chosen == "sdpa":
        with pytest.raises(InputError, match="PreTrained has attention of its own"):
            context_parallel(PreTrained(functions, chosen), mesh)
    with pytest.raises(InputError, match="attn_implementation='flex_attention', which can't be exchanged"):
        context_parallel(PreTrained(functions, "flex_attention"), mesh)


@pytest.mark.parametrize("chosen", ["sdpa", "flash_attention_2"])
def test_attention_functions_of_transformers_are_exchanged_or_refused(chosen):
    """Over a stand-in for its table of functions: tests/hf has the library itself."""
    run_ranks(2, trains_as_library, chosen)
