"""Files written by torch_xla's own XlaFullyShardedDataParallel (fixtures/make.py) are read exactly."""

from pathlib import Path

import pytest
import torch

from shardwright.xla import files

FOLDER = Path(__file__).parent / "fixtures"
LAYOUTS = sorted(path.name.partition("_")[0] for path in FOLDER.glob("*_consolidated.pth"))
WORLD = 2


def train() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """What fixtures/make.py trains, in plain torch: each device has BatchNorm statistics of its own rows."""
    block = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7), torch.nn.Tanh())
    model = torch.nn.Sequential(block, torch.nn.Linear(7, 3, bias=False))
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=numbers) * 0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        for rows in torch.randn(WORLD, 4, 6, generator=numbers):
            (model(rows).square().mean() / WORLD).backward()
        optimizer.step()
    return model, optimizer


def test_there_are_fixtures():
    assert "params" in LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reading_gives_what_the_original_consolidator_gives(layout):
    found = files.read(str(FOLDER / f"{layout}_rank"))
    theirs = torch.load(FOLDER / f"{layout}_consolidated.pth", weights_only=True)["model"]
    assert found.model.keys() == theirs.keys() == train()[0].state_dict().keys()
    for name, value in theirs.items():
        assert torch.equal(found.model[name], value), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_momentum_are_those_of_the_same_training_in_plain_torch(layout):
    plain, optimizer = train()
    found = files.read(str(FOLDER / f"{layout}_rank"))
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found.model[name], param.detach(), atol=1e-6, rtol=1e-5)
        momentum = found.optimizer[name]["momentum_buffer"]
        torch.testing.assert_close(momentum, optimizer.state[param]["momentum_buffer"], atol=1e-6, rtol=1e-5)
