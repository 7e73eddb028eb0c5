"""A load writes every element of what it allocates, and reads no byte that another rank owns."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import load, save
from shardwright.checkpoint.tools import consolidate
from tests.ranks.pool import run_ranks
from tests.ranks.test_checkpoint import assert_equal, everything


class Quantised(nn.Module):
    """Codes and scales whose shapes share no dim with each other, beside weights; small next to them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 509)
        self.register_buffer("codes", torch.arange(39, dtype=torch.uint8).reshape(13, 3))
        self.register_buffer("scales", torch.arange(1, 6).to(torch.bfloat16))
        self.register_buffer("signs", torch.tensor([-1, 1, -128], dtype=torch.int8))


def save_quantised(rank: int, world: int, path: str) -> dict:
    model = fully_shard(Quantised())
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    save(path, model=model, optimizer=optimizer, step=1)
    return everything(model, optimizer)


def load_poisoned(rank: int, world: int, path: str) -> tuple[dict, int]:
    # Every torch.empty is now NaN or the largest integer: an element that is not written is not equal.
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    with torch.device("meta"):
        model = Quantised()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    restored = load(path, model=model, optimizer=optimizer)
    return everything(model, optimizer), restored.read_nbytes


def test_each_element_of_a_meta_model_is_written_and_each_byte_read_once(
    tmp_path: Path,
) -> None:
    before = run_ranks(2, save_quantised, str(tmp_path))[0]
    found = run_ranks(3, load_poisoned, str(tmp_path))
    for after, _ in found:
        assert_equal(before, after)
    nbytes = sum(file.stat().st_size for file in (tmp_path / "step-000001").iterdir())
    assert sum(read for _, read in found) <= 1.05 * nbytes


def test_integer_codes_and_their_scales_consolidate_as_they_are(tmp_path: Path) -> None:
    before = run_ranks(2, save_quantised, str(tmp_path))[0]
    consolidate(tmp_path, tmp_path / "out", dtype=torch.float16)
    from_file = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("codes", "signs"):
        assert from_file[name].dtype == before[name].dtype
        assert torch.equal(from_file[name], before[name])
    assert torch.equal(from_file["scales"], before["scales"].half())
