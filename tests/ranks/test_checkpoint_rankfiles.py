"""Files of fairscale's and torch_xla's sharded runtimes, one per rank, load into shards by byte ranges."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import load, save
from shardwright.checkpoint.sources import open_source
from shardwright.checkpoint.tools import Reader, read_tensor
from shardwright.errors import CheckpointError
from tests.ranks.models import full
from tests.ranks.pool import run_ranks
from tests.ranks.test_checkpoint import assert_equal

FAIRSCALE = Path(__file__).parent / "fairscale"
XLA = Path(__file__).parents[1] / "xla" / "fixtures"


class Net(nn.Module):
    """As fairscale/make.py has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2, bias=False))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)) * self.scale


def load_sharded(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    torch.use_deterministic_algorithms(True)
    model = fully_shard(Net())
    load(path, model=model)
    return {name: full(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["flat", "apart"])
def test_files_of_fairscale_load_into_shards_as_it_joins_them(kind):
    whole = torch.load(FAIRSCALE / f"{kind}-whole.pt", weights_only=True)
    whole["head.weight"] = whole["embed.weight"]  # its own consolidation loses the tied name here
    for found in run_ranks(2, load_sharded, str(FAIRSCALE / f"{kind}-rank*.pt")):
        assert_equal(whole, found)


@pytest.mark.parametrize("layout", ["params", "flat", "rows"])
def test_files_of_torch_xla_are_pieces_of_what_its_consolidator_makes(layout):
    whole = torch.load(XLA / f"{layout}_consolidated.pth", weights_only=True)["model"]
    source = open_source(XLA / f"{layout}_rank*.pth")
    with Reader(source.folder) as reader:
        tensors = source.manifest.tensors.items()
        found = {key.removeprefix("model/"): read_tensor(reader, key, entry) for key, entry in tensors}
    assert_equal(dict(whole), found)


def test_files_of_others_beside_our_own_checkpoints_are_not_taken_for_them(tmp_path):
    """Theirs hold weights only: a run would go on without its optimizer's state, from another step."""
    model = Net()
    save(tmp_path, model=model, step=4)
    for rank in (0, 1, 2):
        shutil.copy(FAIRSCALE / f"flat-rank{rank}.pt", tmp_path)
    other = Net()
    assert load(tmp_path, model=other).step == 4
    assert_equal(model.state_dict(), other.state_dict())


def test_rank_files_that_are_missing_too_many_or_alone_are_an_error(tmp_path):
    for rank in (0, 1):
        shutil.copy(FAIRSCALE / f"flat-rank{rank}.pt", tmp_path)
    with pytest.raises(CheckpointError, match=r"flat_param_0 in 2 files have 60 elements, expected 90"):
        load(tmp_path, model=Net())
    with pytest.raises(CheckpointError, match=r"flat-rank1.pt: holds one rank's part"):
        load(tmp_path / "flat-rank1.pt", model=Net())
    shutil.copy(XLA / "flat_rank-00000001-of-00000002.pth", tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"flat_param_0 is not in the files of all ranks"):
        load(tmp_path, model=Net())
    with pytest.raises(CheckpointError, match=r"files of ranks \[0\] of 2 are missing"):
        load(tmp_path / "x*.pth", model=Net())
