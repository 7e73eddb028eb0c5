"""Weights that others saved load into shards, and our state dicts work with torch's own checkpoints."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.tensor import DTensor

from shardwright import full_state_dict, fully_shard
from shardwright.checkpoint import load
from shardwright.errors import CheckpointError
from shardwright.wrapper import FSDP, ModuleWrapPolicy, StateDictType
from tests.ranks.pool import on_ranks, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6)
        self.register_buffer("scale", torch.rand(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embed(x))))


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def sharded(seed: int) -> nn.Module:
    model = net(seed)
    fully_shard(model.up)
    return fully_shard(model)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    return {k: v.detach().clone() for k, v in state.items()}


def assert_is_net(state: dict[str, torch.Tensor], seed: int) -> None:
    expected = net(seed).state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def load_into_shards(rank: int, world: int, path: str) -> tuple[dict[str, torch.Tensor], int]:
    model = sharded(100 + rank)
    restored = load(path, model=model)
    return whole(model), restored.read_nbytes


def as_hugging_face(path: Path) -> Path:
    """Two files and an index; of the tied pair only one name, as its libraries save it."""
    state = {k: v for k, v in net(1).state_dict().items() if k != "head.weight"}
    names = sorted(state)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: state[n] for n in names if files[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return path


def as_one_safetensors_file(path: Path) -> Path:
    state = {k: v for k, v in net(1).state_dict().items() if k != "head.weight"}
    save_file(state, path / "model.safetensors")
    return path / "model.safetensors"


def as_bin_files(path: Path) -> Path:
    state = net(1).state_dict()
    files = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(sorted(state))}
    files["head.weight"] = files["embed.weight"]
    for file in set(files.values()):
        torch.save({n: v for n, v in state.items() if files[n] == file}, path / file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return path


def as_torch_save(path: Path) -> Path:
    torch.save(net(1).state_dict(), path / "model.pt")
    return path / "model.pt"


def as_nested_torch_save(path: Path) -> Path:
    state = {f"module.{k}": v for k, v in net(1).state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state, "other": torch.ones(2)}, path / "model.pt")
    return path / "model.pt"


@pytest.mark.parametrize(
    "write",
    [as_hugging_face, as_bin_files, as_one_safetensors_file, as_torch_save, as_nested_torch_save],
    ids=lambda f: f.__name__,
)
def test_weights_of_others_load_into_shards_by_byte_ranges(tmp_path, write):
    path = write(tmp_path)
    results = run_ranks(3, load_into_shards, str(path))
    for state, _ in results:
        assert_is_net(state, 1)
    nbytes = sum(v.nbytes for k, v in net(1).state_dict().items() if k != "head.weight")
    scale_nbytes = 3 * 4  # a plain buffer is read by each rank
    assert sum(read for _, read in results) == nbytes + 2 * scale_nbytes


def save_with_dcp(rank: int, world: int, path: str) -> None:
    model = sharded(1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(11)).sum().backward()
    optimizer.step()
    model.load_state_dict(sharded(1).state_dict())
    state = {"model": model.state_dict(), "optimizer": torchs.get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def test_a_directory_of_torch_dcp_loads_at_another_world_size(tmp_path):
    run_ranks(2, save_with_dcp, str(tmp_path))
    for state, _ in run_ranks(3, load_into_shards, str(tmp_path)):
        assert_is_net(state, 1)


class Boom:
    def __reduce__(self):
        return os.mkdir, ("boom",)


def test_a_dcp_directory_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Boom()))
    with pytest.raises(CheckpointError, match="refused"):
        load(tmp_path / "evil", model=net(1))
    torch.save({"w": Boom()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="weights_only"):
        load(tmp_path / "evil.pt", model=net(1))
    assert not (tmp_path / "boom").exists()


def test_what_cannot_be_read_says_why(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"12345678{}")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: not a readable safetensors file"):
        load(tmp_path / "a.safetensors", model=net(1))
    torch.save({"w": torch.ones(2, 3).t()}, tmp_path / "t.pt")
    with pytest.raises(CheckpointError, match=r"w is stored with stride .*contiguous"):
        load(tmp_path / "t.pt", model=net(1))
    path = as_hugging_face(tmp_path)
    os.truncate(path / "model-00001-of-00002.safetensors", 300)
    with pytest.raises(CheckpointError, match=r"model-00001.*truncated"):
        load(path, model=net(1))


# ---- torch's own tools on our models


def stepped(seed: int, wrapper: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of either API with the weights of ``seed``, and an optimizer with state."""
    model = sharded(seed)
    if wrapper:
        model = FSDP(net(seed), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for p in model.parameters():
        p.grad = torch.cos(p.detach())
    optimizer.step()
    return model, optimizer


def torch_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = torchs.get_optimizer_state_dict(model, optimizer)
    return {"model": torchs.get_model_state_dict(model), "optimizer": state}


def dcp_round_trip(rank: int, world: int, path: str, wrapper: bool, saving: bool) -> None:
    model, optimizer = stepped(1 if saving else 100, wrapper)
    saved, its = stepped(1, wrapper)
    expected = {name: its.state[p]["exp_avg"].full_tensor() for name, p in saved.named_parameters()}
    for kind in ("sync", "async"):
        state = torch_state(model, optimizer)
        if saving and kind == "sync":
            dcp.save(state, checkpoint_id=f"{path}/{kind}")
        elif saving:
            dcp.async_save(state, checkpoint_id=f"{path}/{kind}").result()
        else:
            dcp.load(state, checkpoint_id=f"{path}/{kind}")
            torchs.set_model_state_dict(model, state["model"])
            torchs.set_optimizer_state_dict(model, optimizer, state["optimizer"])
            assert_is_net(whole(model), 1)
            for name, p in model.named_parameters():
                assert torch.equal(optimizer.state[p]["exp_avg"].full_tensor(), expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [False, True], ids=["fully_shard", "wrapper"])
def test_our_models_go_through_torch_dcp_at_other_world_sizes(tmp_path, wrapper):
    run_ranks(2, dcp_round_trip, str(tmp_path), wrapper, True)
    run_ranks(3, dcp_round_trip, str(tmp_path), wrapper, False)


@on_ranks(2)
def test_torch_state_dict_functions_work_on_our_models(rank):
    model, other = sharded(1), sharded(100)
    torchs.set_model_state_dict(other, torchs.get_model_state_dict(model))
    assert_is_net(whole(other), 1)
    options = torchs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = torchs.get_model_state_dict(model, options=options)
    if rank == 0:
        assert_is_net(full, 1)
        assert_is_net(full_state_dict(model), 1)
    else:
        full_state_dict(model)
    third = sharded(101)
    options = torchs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    torchs.set_model_state_dict(third, full if rank == 0 else {}, options=options)
    assert_is_net(whole(third), 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(11)).sum().backward()
    optimizer.step()
    resumed = torch.optim.AdamW(other.parameters())
    torchs.set_optimizer_state_dict(other, resumed, torchs.get_optimizer_state_dict(model, optimizer))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"].to_local(), resumed.state[q]["exp_avg"].to_local())
