"""What a script does inside of ``summon_full_params`` and ``unsharded``: as one process does it."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from shardwright import MixedPrecisionPolicy, fully_shard
from shardwright.errors import StageError
from shardwright.wrapper import FSDP, MixedPrecision
from tests.ranks.models import full
from tests.ranks.pool import on_ranks

CASES = [
    {"recurse": recurse, "writeback": writeback, "rank0_only": first, "offload_to_cpu": offload}
    for recurse, writeback, first, offload in product((False, True), repeat=4)
    if not (writeback and first)
]
ROWS = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))


def plain(dtype=None):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model if dtype is None else model.to(dtype)


def edit(layer):
    """In the ways that scripts do, one of which leaves no mark."""
    layer.weight.data.mul_(2)
    with torch.no_grad():
        layer.bias.add_(1)


def run(model):
    with torch.no_grad():
        return [model(ROWS).float() for _ in range(2)]


def equal(found, expected, exact=True):
    assert len(found) == len(expected)
    same = torch.equal if exact else partial(torch.allclose, atol=0.03)
    return all(map(same, found, expected))


def wrapped(flat, half):
    model = plain()
    options = {"use_orig_params": not flat}
    if half:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    model[2] = FSDP(model[2], **options)
    return FSDP(model, **options)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "mixed"])
@pytest.mark.parametrize("flat", [False, True], ids=["parameters", "flat"])
@on_ranks(2)
def test_a_forward_inside_of_summon_full_params_computes_with_what_it_shows(rank, flat, half):
    for case in CASES:
        model, alone = wrapped(flat, half), plain()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        reference = torch.optim.SGD(alone.parameters(), 0.1)
        before = {name: value.clone() for name, value in alone.state_dict().items()}
        shows = rank == 0 or not case["rank0_only"]
        with FSDP.summon_full_params(model, **case):
            assert equal(run(model), run(alone), not half), case
            own = dict(model.module.named_parameters())
            if shows:
                assert type(own["0.weight"]) is nn.Parameter
                assert torch.equal(own["0.weight"], before["0.weight"]), case
            if shows and (case["recurse"] or not case["rank0_only"]):
                found = model.state_dict()
                assert found.keys() == before.keys(), case
                assert equal([found[name] for name in before], list(before.values())), case
            if not case["rank0_only"]:
                edit(model.module[0])
                edit(alone[0])
            assert equal(run(model), run(alone), not half), case
            assert not shows or torch.equal(own["0.weight"], alone[0].weight)
            loss = model(ROWS).float().square().mean()
            with pytest.raises(StageError, match=r"a backward .* inside of summon_full_params"):
                loss.backward()
        if not case["writeback"]:
            alone.load_state_dict(before)
        assert equal(list(model.state_dict().values()), list(alone.state_dict().values())), case
        for each, step in ((model, optimizer), (alone, reference)):
            step.zero_grad()
            each(ROWS).float().square().mean().backward()
            step.step()
        assert equal(list(model.state_dict().values()), list(alone.state_dict().values()), False), case


@pytest.mark.parametrize("half", [False, True], ids=["float32", "mixed"])
@pytest.mark.parametrize("recurse", [False, True])
@on_ranks(2)
def test_a_forward_inside_of_unsharded_computes_with_what_it_shows(half, recurse):
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if half else {}
    model, alone = plain(), plain()
    fully_shard(model[2], **options)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reference = torch.optim.SGD(alone.parameters(), 0.1)
    with model.unsharded(recurse):
        assert equal(run(model), run(alone), not half)
        for layer in (0, 2) if recurse else (0,):
            assert type(model[layer].weight) is nn.Parameter
            edit(model[layer])
            edit(alone[layer])
        assert equal(run(model), run(alone), not half)
        loss = model(ROWS).float().square().mean()
        if recurse:
            loss.backward()
    edit_is_kept = [full(value).float() for value in model.state_dict().values()]
    assert equal(edit_is_kept, list(alone.state_dict().values()), not half)
    if not recurse:
        loss.backward()
    alone(ROWS).square().mean().backward()
    optimizer.step()
    reference.step()
    found = [full(value) for value in model.state_dict().values()]
    assert equal(found, list(alone.state_dict().values()), False)
