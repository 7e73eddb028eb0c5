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
    full_state_dict,
    fully_shard,
    quantize_,
    stats,
    stream_state_dict,
)
from shardwright.errors import InputError
from tests.ranks.models import full, train_on_parts
from tests.ranks.pool import run_ranks
from tests.ranks.quantised import COLS, ROWS, build, shard

WORLDS = [1, 2, 3, 4]


def parity(rank, world, codec, dequantise):
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


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("codec", "dequantise"), [("nf4", "group"), ("nf4", "layer"), ("int8", "group")])
def test_a_quantised_base_trains_alike_on_any_number_of_ranks(world, codec, dequantise):
    run_ranks(world, parity, codec, dequantise)


def wire(rank, world):
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
    for sent in run_ranks(world, wire):
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
    assert stats(model).unsharded_nbytes == 0
    return peak, at_use, dense


def test_decoding_per_use_holds_codes_only_and_nothing_is_left_after_reshard():
    for peak, at_use, dense in run_ranks(2, held, "layer"):
        assert at_use <= peak < 0.7 * dense
    for peak, at_use, dense in run_ranks(2, held, "group"):
        assert dense <= at_use <= peak


def states(rank, world):
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


@pytest.mark.parametrize("world", WORLDS)
def test_nf4_a_full_upcast_state_dict_is_streamed_and_a_plain_one_is_taken(world):
    run_ranks(world, states)


def on_dim_1(rank, world):
    torch.manual_seed(0)
    plain = nn.Linear(COLS, ROWS, bias=False)
    quantize_(plain)
    model = fully_shard(copy.deepcopy(plain), shard_placement_fn=lambda p: Shard(1))
    x = torch.randn(3, COLS)
    assert torch.equal(model(x), plain(x))
    with model.unsharded():
        model.weight.mul_(4)
    assert torch.equal(full(model.state_dict()["weight"]), plain._parameters["weight"])


def test_nf4_weights_may_be_cut_by_columns():
    run_ranks(3, on_dim_1)
