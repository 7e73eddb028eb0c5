"""Ranks of different memory and speed: rows and batches dealt in proportion, trained as by one process."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import shardwright
from shardwright import Blocks, checkpoint, fully_shard, loss_weights
from tests.ranks.pool import run_ranks

SHARES, ROWS = (2, 1, 1), (6, 3, 3)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)).double()


def loader(rows, rank, first_step):
    """The rows of this rank, of global batches of 12, from a step on: as docs/memory.md shows it."""
    data = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)).double())
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(2))
    batches = [each.split(rows)[rank].tolist() for each in order.split(sum(rows)) if len(each) == sum(rows)]
    return DataLoader(data, batch_sampler=batches[first_step:])


def steps_of(model, optimizer, batches):
    for (batch,) in batches:
        loss = (model(batch) - batch).square().mean()
        if isinstance(model[0].weight, DTensor):
            (share,) = loss_weights(model, [len(batch)])
            loss = loss * share
        loss.backward()
        shardwright.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def made(shares):
    model = net()
    for module in (model[0], model[2], model):
        fully_shard(module, layout=Blocks(shares=shares))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def nbytes_at_rest(model, optimizer):
    states = [each for state in optimizer.state.values() for each in state.values() if each.ndim]
    return sum(t.to_local().untyped_storage().nbytes() for t in (*model.parameters(), *states))


def mixed_train(rank, world, transport, folder):
    shardwright.set_transport(transport)
    one = net()
    steps_of(one, torch.optim.AdamW(one.parameters(), lr=0.1), loader([12], 0, 0))
    model, optimizer = made(SHARES)
    steps_of(model, optimizer, list(loader(list(ROWS), rank, 0))[:2])
    kept = nbytes_at_rest(model, optimizer)
    whole = 3 * sum(p.numel() * p.element_size() for p in one.parameters())
    assert kept * sum(SHARES) == whole * SHARES[rank]
    assert model.memory().by_category["states"] == kept + 4 * len(optimizer.state)  # AdamW counts its steps
    checkpoint.save(folder, model=model, optimizer=optimizer, step=2)
    # The third step on other machines: the last one has the most memory, the first one is the fastest still.
    model, optimizer = made(SHARES[::-1])
    checkpoint.load(folder, model=model, optimizer=optimizer)
    steps_of(model, optimizer, loader(list(ROWS), rank, 2))
    for ours, theirs in zip(model.parameters(), one.parameters(), strict=True):
        assert float((ours.full_tensor() - theirs).abs().max()) < 1e-12


def test_three_steps_of_ranks_with_rows_and_batches_in_proportion_are_those_of_one_process(tmp_path):
    for transport in ("auto", "sockets"):
        run_ranks(3, mixed_train, transport, str(tmp_path / transport))
