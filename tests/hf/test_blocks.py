"""Block-wise 8-bit optimizers of two libraries, where blocks of 256 elements are never cut."""

import pytest
import torch
from torch import nn

import shardwright
from shardwright import Blocks, checkpoint, fully_shard
from tests.ranks.pool import run_ranks

torchao = pytest.importorskip("torchao.optim")
pytest.importorskip("bitsandbytes")
eight_bit = pytest.importorskip("shardwright.train.eight_bit")
BLOCKS = Blocks(elements=256)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 192), nn.ReLU(), nn.Linear(192, 100))


def sharded(layout):
    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, layout=layout)
    return model


def optimizer_of(model, library):
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps, which takes a minute
    params = list(model.parameters())
    if library == "torchao":
        if isinstance(model, shardwright.FSDPModule):
            params = shardwright.owned_params(model)
        return torchao.AdamW8bit(params, lr=1e-2)
    return eight_bit.AdamW8bit([{"params": params}], 1e-2, (0.9, 0.99))


def train(model, optimizer, steps):
    for step in steps:
        # The same on all ranks, so that gradients are those of one process bit for bit.
        x = torch.randn(4, 100, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def blocks_beside_one_process(rank, world, library):
    one, model = net(), sharded(BLOCKS)
    for each in (one, model):
        train(each, optimizer_of(each, library), range(4))
    for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_an_8_bit_optimizer_over_blocks_that_are_never_cut_is_bit_for_bit_that_of_one_process(library):
    run_ranks(2, blocks_beside_one_process, library, limit_s=120.0)


def blocks_go_on(rank, world, folder, steps):
    model = sharded(BLOCKS)
    optimizer = optimizer_of(model, "torchao")
    if steps[0]:
        checkpoint.load(folder, model=model, optimizer=optimizer)
    train(model, optimizer, steps)
    checkpoint.save(folder, model=model, optimizer=optimizer, step=steps[-1] + 1)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_8_bit_state_in_blocks_goes_on_in_any_world_bit_for_bit(tmp_path):
    one = net()
    train(one, optimizer_of(one, "torchao"), range(6))
    for world, steps in ((2, [0, 1]), (4, [2, 3]), (1, [4, 5])):
        found = run_ranks(world, blocks_go_on, str(tmp_path), steps, limit_s=120.0)
    for name, value in one.state_dict().items():
        assert torch.equal(found[0][name], value), name
