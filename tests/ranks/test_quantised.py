"""Quantised bases over ranks: the same bits everywhere, few bytes on the wire, and states that survive.

What other libraries can't save, load or shard is in test_quantised_states.py.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardwright import (
    MixedPrecisionPolicy,
    explain,
    full_state_dict,
    fully_shard,
    quantize_,
    set_transport,
    stats,
    stream_state_dict,
)
from shardwright.errors import InputError, StageError
from tests.ranks.live import PeakStorages, storages_here
from tests.ranks.models import full, train_on_parts
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.quantised import COLS, QUANTISED, ROWS, build, shard

WORLDS = [1, 2, 3, 4]


@pytest.mark.sampled
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("codec", "dequantise"), [("nf4", "group"), ("nf4", "layer"), ("int8", "group")])
@on_ranks()
def test_a_quantised_base_trains_alike_on_any_number_of_ranks(rank, world, codec, dequantise):
    reference = build(codec, dequantise)
    model = shard(copy.deepcopy(reference))
    codes = {name: p for name, p in reference.state_dict().items() if "adapter" not in name}
    expected = train_on_parts(reference, 0, 1, COLS, lr=0.1)
    losses = train_on_parts(model, rank, world, COLS, lr=0.1)
    assert all(abs(a - b) <= 1e-4 for a, b in zip(losses, expected, strict=True))
    for name, value in model.state_dict().items():
        if name in codes:
            assert torch.equal(full(value), codes[name]), name
        else:
            assert torch.allclose(full(value), reference.state_dict()[name], atol=1e-6)
    assert [p.grad for p in model.parameters() if not p.requires_grad] == [None] * 14
    return losses


@pytest.mark.parametrize(
    ("codec", "dequantise"), [("nf4", "group"), ("nf4", "layer"), ("nf4-double", "group")]
)
@on_ranks(1, 3)
def test_a_sharded_model_is_quantised_to_the_same_bits_and_trains_alike(rank, world, codec, dequantise):
    reference, model = build(codec, dequantise), build(codec=None)
    fully_shard(model[0].up)  # a layer that is a group of its own, and an FSDPModule itself
    shard(model)
    early = torch.optim.SGD(model.parameters(), lr=1)
    x = torch.randn(4, COLS)
    plain = model(x)
    assert quantize_(model, codec, QUANTISED, dequantise) == [
        f"{layer}.{name}" for layer in "01" for name in ("experts", "up.weight", "down.weight")
    ]
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), reference.state_dict()[name]), name
    assert stats(model).at_rest_nbytes < 0.45 * 4 * stats(model).param_numel / world + 3000
    with pytest.raises(StageError, match="or quantize_"):
        early.step()
    assert torch.equal(model(x), reference(x))
    assert not torch.equal(model(x), plain)
    twin = copy.deepcopy(model)
    expected = train_on_parts(reference, 0, 1, COLS, lr=0.1)
    for each in (model, twin):
        assert train_on_parts(each, rank, world, COLS, lr=0.1) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(4)
def test_ranks_without_rows_and_columns_cut_inside_a_block_are_quantised_alike(dim):
    plain = nn.Linear(COLS, 2)
    model = fully_shard(copy.deepcopy(plain), shard_placement_fn=lambda p: Shard(dim % p.ndim))
    with torch.device("meta"):
        empty = fully_shard(nn.Linear(COLS, 2))
    for each in (plain, model, empty):
        quantize_(each)
    assert empty.weight_absmax.shape == (2, 2)
    x = torch.randn(3, COLS)
    assert torch.equal(model(x), plain(x))
    for name, value in plain.state_dict().items():
        assert torch.equal(full(model.state_dict()[name]), value), name


@on_ranks(2)
def test_what_cant_be_quantised_leaves_a_sharded_model_as_it_was():
    model = shard(build(codec=None))
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=r"'0.up.bias' is torch.float32 of shape \[37\]"):
        quantize_(model, where=["*.up.weight", "*.bias"])
    assert all(torch.equal(full(value), before[name]) for name, value in model.state_dict().items())
    model[0].register_forward_hook(lambda *_: quantize_(model))
    with pytest.raises(StageError, match="between steps"):
        model(torch.randn(2, COLS))


def wire(rank, world):
    set_transport("sockets")  # ranks of one host share memory otherwise, and send nothing
    sent = {}
    for codec in (None, "nf4", "int8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 256, bias=False), nn.Linear(256, 512, bias=False))
        model.requires_grad_(False)
        if codec:
            quantize_(model, codec)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        before = stats(model).sent_nbytes
        with torch.no_grad():
            model(torch.randn(2, 512))
        sent[codec] = stats(model).sent_nbytes - before
        assert stats(model).param_numel == 2 * 512 * 256
    return sent


@pytest.mark.parametrize("world", [2, 3])
def test_the_all_gather_carries_codes_in_at_most_0_30_of_the_bytes_of_bf16(world):
    of_ranks = run_ranks(world, wire)
    assert sum(sent[None] for sent in of_ranks) >= 2 * 2 * 512 * 256 * (world - 1)
    for sent in of_ranks:
        assert sent["nf4"] <= 0.30 * sent[None]
        assert sent["int8"] <= 0.52 * sent[None]


def held(rank, world, dequantise):
    model = shard(
        build("nf4", dequantise, layers=1), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    dense = 2 * (2 * ROWS * COLS + 3 * COLS * COLS)
    with torch.no_grad():
        model(torch.randn(2, COLS))
    peak = stats(model).peak_unsharded_nbytes
    model[0].unshard()
    at_use = stats(model).unsharded_nbytes
    model[0].reshard()
    said = explain(model).groups[0].unsharded_nbytes
    assert 0 <= at_use - said < (1024 if dequantise == "group" else 6000)  # padding: experts, of codes only
    assert f"nf4 of [{ROWS}, {COLS}], decoded to bfloat16" in str(explain(model))
    assert stats(model).unsharded_nbytes == 0
    codes = sum(p.numel() * p.itemsize for p in model.parameters() if p.dtype is torch.uint8)
    return peak, at_use, dense, codes


def test_decoding_per_use_holds_codes_only_and_nothing_is_left_after_reshard():
    for peak, at_use, dense, codes in run_ranks(2, held, "layer"):
        assert codes <= at_use <= peak < 0.7 * dense
    for peak, at_use, dense, codes in run_ranks(2, held, "group"):
        assert dense <= at_use
        assert at_use + codes <= peak  # both are there while it decodes


def most(rank, world, dequantise):
    """Bytes of a third step beside what is at rest, at most, and those of one layer's decoded weights."""
    others = storages_here()
    model = shard(build("nf4", dequantise, layers=6))
    x = torch.randn(2, COLS)
    for _ in range(2):
        model(x).sum().backward()
    with PeakStorages(others) as live:
        before = live.nbytes
        model(x).sum().backward()
    return live.most_nbytes - before, 4 * (2 * ROWS * COLS + 3 * COLS * COLS)


def test_a_step_that_decodes_per_use_holds_fewer_bytes_than_one_that_decodes_by_group():
    for (by_layer, dense), (by_group, _) in zip(
        run_ranks(2, most, "layer"), run_ranks(2, most, "group"), strict=True
    ):
        assert by_layer < by_group
        assert dense < by_group  # so the count sees decoded weights


@on_ranks(*WORLDS)
def test_nf4_a_full_upcast_state_dict_is_streamed_and_a_plain_one_is_taken(rank):
    model = shard(build())
    reference = build()
    state = full_state_dict(model)
    decoded = dict(stream_state_dict(model, torch.float32))
    if rank == 0:
        assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items())
        assert decoded["0.up.weight"].shape == (ROWS, COLS)
        assert torch.equal(decoded["0.up.weight"], reference[0].up.weight)
        assert torch.equal(decoded["1.experts"], reference[1].experts)
        assert not any("absmax" in name for name in decoded)
    with model.unsharded():
        assert torch.equal(model[0].up.weight, reference[0].up.weight)
        model[0].up.weight.mul_(2)
    assert torch.equal(full(model.state_dict()["0.up.weight"]), reference.state_dict()["0.up.weight"])
    assert torch.equal(full(model.state_dict()["0.up.weight_absmax"]), 2 * reference[0].up.weight_absmax)
    model.load_state_dict(build(codec=None).state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), reference.state_dict()[name]), name
    model[0].up.weight_absmax.requires_grad_(True)
    with pytest.raises(InputError, match=r"'up.weight' is quantised \(nf4\), it can't be trained"):
        model(torch.randn(2, COLS))


@on_ranks(3)
def test_nf4_weights_may_be_cut_by_columns():
    torch.manual_seed(0)
    plain = nn.Linear(COLS, ROWS, bias=False)
    quantize_(plain)
    model = fully_shard(copy.deepcopy(plain), shard_placement_fn=lambda p: Shard(1))
    x = torch.randn(3, COLS)
    assert torch.equal(model(x), plain(x))
    with model.unsharded():
        model.weight.mul_(4)
    assert torch.equal(full(model.state_dict()["weight"]), plain._parameters["weight"])
