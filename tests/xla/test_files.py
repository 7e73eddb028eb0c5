"""Files of XlaFullyShardedDataParallel are read and written, and what is wrong with them is named."""

import subprocess
import sys

import pytest
import torch

from shardwright.cli import main
from shardwright.errors import CheckpointError
from shardwright.xla import files

SEP = files.SEPARATOR


def key(unit: str, name: str) -> tuple[str, str]:
    """``(key of the state dict, shard name)`` as the original writes them."""
    shard = f"_fsdp_shard.{name}".replace(".", SEP)
    return (f"{unit}.{shard}" if unit else shard), shard


def write(folder, world=2, rank=0, *, flat=False, rows=False, optimizer=False, **changes):
    """One rank's file as torch_xla 2.9.0 lays it out: a root with a bias of 5 and a nested unit of 3 x 2."""
    inner = "_fsdp_wrapped_module.block"
    weight, bias = torch.arange(6.0).view(3, 2), torch.arange(5.0) + 10
    names = ["_fsdp_wrapped_module.flat_param_0"] if flat else ["_fsdp_wrapped_module._fpw_module.weight"]
    sizes = [torch.Size([6]) if flat else torch.Size([3, 2])]
    (root_key, root_shard), (inner_key, inner_shard) = (
        key("", "_fsdp_wrapped_module.bias"),
        key(inner, names[0]),
    )
    pad = torch.zeros(4 * world - 3, 2)
    padded = torch.cat([weight, pad]) if rows else torch.cat([weight.flatten(), pad.flatten()])
    model = {
        root_key: torch.cat([bias, torch.zeros(8 * world - 5)]).chunk(world)[rank],
        inner_key: padded.chunk(world)[rank],
        "_fsdp_wrapped_module.norm.running_mean": torch.ones(2, dtype=torch.bfloat16) + rank,
    }
    flatten_info = {}
    if flat:
        flatten_info[f"{inner}.{names[0]}"] = (["a", "sub.b"], [torch.Size([2, 2]), torch.Size([2])], [4, 2])
    metadata = {
        "shard_info": {
            "": {root_shard: {"_orig_size": torch.Size([5]), "_orig_name": "_fsdp_wrapped_module.bias"}},
            inner: {inner_shard: {"_orig_size": sizes[0], "_orig_name": names[0]}},
        },
        "flatten_info": flatten_info,
        "buffer_info": {"_fsdp_wrapped_module._fpw_module.norm.running_mean": {"_orig_dtype": torch.float32}},
        "world_size": world,
        "rank": rank,
    }
    content = {"model": model, "shard_metadata": {**metadata, **changes.pop("metadata", {})}, **changes}
    if optimizer:
        state = {
            i: {"step": torch.tensor(3.0), "exp_avg": value * 2}
            for i, value in enumerate([model[root_key], model[inner_key]])
        }
        content["optimizer"] = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    path = folder / f"ckpt_rank-{rank:08d}-of-{world:08d}.pth"
    torch.save(content, path)
    return path


def prefix(folder) -> str:
    return str(folder / "ckpt")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("rows", [False, True])
def test_parts_of_all_ranks_are_joined_and_trimmed(tmp_path, world, rows):
    for rank in reversed(range(world)):
        write(tmp_path, world, rank, rows=rows)
    model = files.read(prefix(tmp_path)).model
    assert list(model) == ["bias", "block.weight", "norm.running_mean"]
    assert torch.equal(model["bias"], torch.arange(5.0) + 10)
    assert torch.equal(model["block.weight"], torch.arange(6.0).view(3, 2))


def test_buffers_come_from_rank_0_in_their_own_dtype(tmp_path):
    for rank in range(2):
        write(tmp_path, 2, rank)
    buffer = files.read(prefix(tmp_path)).model["norm.running_mean"]
    assert buffer.dtype == torch.float32
    assert torch.equal(buffer, torch.ones(2))


def test_flattened_parameters_are_taken_apart(tmp_path):
    for rank in range(2):
        write(tmp_path, 2, rank, flat=True)
    model = files.read(prefix(tmp_path)).model
    assert torch.equal(model["block.a"], torch.arange(4.0).view(2, 2))
    assert torch.equal(model["block.sub.b"], torch.tensor([4.0, 5.0]))


@pytest.mark.parametrize("flat", [False, True])
def test_consolidating_joins_the_optimizer_too(tmp_path, flat):
    for rank in range(2):
        write(tmp_path, 2, rank, flat=flat, optimizer=True)
    path = files.consolidate(prefix(tmp_path))
    assert path.name == "ckpt_consolidated.pth"
    content = torch.load(path, weights_only=True)
    state = content["optimizer"]["state"]
    assert state.keys() == {name for name in content["model"] if "norm" not in name}
    for name, value in state.items():
        assert torch.equal(value["exp_avg"], content["model"][name] * 2)
        assert value["step"] == 3
    assert content["optimizer"]["param_groups"][0]["params"] == list(state)
    assert files.consolidate(prefix(tmp_path)) == path  # its own result is no rank's file


def test_prefix_suffix_and_save_path_are_those_that_users_know(tmp_path):
    for rank in range(2):
        write(tmp_path, 2, rank)
    target = tmp_path / "all.pth"
    assert files.consolidate(prefix(tmp_path), "_rank-*-of-00000002.pth", str(target)) == target
    assert "optimizer" not in torch.load(target, weights_only=True)
    with pytest.raises(CheckpointError, match=r"no file matches .*ckpt\*\.pt "):
        files.consolidate(prefix(tmp_path), "*.pt")


def other_tensors(folder):
    write(folder, 2, 0)
    content = torch.load(write(folder, 2, 1), weights_only=True)
    content["model"].pop("_fsdp_wrapped_module.norm.running_mean")
    torch.save(content, folder / "ckpt_rank-00000001-of-00000002.pth")


def damaged(folder):
    path = write(folder, 1, 0)
    path.write_bytes(path.read_bytes()[:200])


HALF = {"model": {}, "shard_metadata": {"shard_info": {}, "world_size": 1}}
FAULTS = {
    "missing": (lambda f: write(f, 3, 1), r"ranks \[0, 2\] of 3 are missing \(found \[1\]\)"),
    "twice": (lambda f: (write(f), write(f).rename(f / "ckpt_b.pth"), write(f)), "are both rank 0"),
    "of two runs": (lambda f: (write(f, 2, 0), write(f, 3, 1)), "of a run of 3 ranks"),
    "impossible": (lambda f: write(f, 1, 0, metadata={"rank": 5}), "rank 5 of 1"),
    "no metadata": (lambda f: torch.save({"model": {}}, f / "ckpt.pth"), "not the file of one rank"),
    "half metadata": (
        lambda f: torch.save({"model": {}, "shard_metadata": {}}, f / "ckpt.pth"),
        "lacks flatten",
    ),
    "damaged": (damaged, "not a file that torch.load reads"),
    "other tensors": (other_tensors, "rank 1 has other tensors than rank 0.*running_mean"),
    "unknown": (lambda f: write(f, 1, 0, metadata={"shard_info": {}}), "says nothing of _fsdp_shard"),
}


@pytest.mark.parametrize(("make", "match"), FAULTS.values(), ids=FAULTS)
def test_what_is_wrong_with_the_files_is_named(tmp_path, make, match):
    make(tmp_path)
    with pytest.raises(CheckpointError, match=match):
        files.read(prefix(tmp_path))


def test_the_command_takes_the_options_that_users_know(tmp_path, capsys):
    for rank in range(2):
        write(tmp_path, 2, rank, optimizer=True)
    target = tmp_path / "all.pth"
    arguments = [
        "--ckpt_prefix",
        prefix(tmp_path),
        "--ckpt-suffix",
        "_rank-*.pth",
        "--save-path",
        str(target),
    ]
    assert main(["checkpoint", "consolidate", *arguments]) == 0
    assert str(target) in capsys.readouterr().out
    assert set(torch.load(target, weights_only=True)) == {"model", "optimizer"}
    (tmp_path / "ckpt_rank-00000001-of-00000002.pth").unlink()
    assert main(["checkpoint", "consolidate", "--ckpt-prefix", prefix(tmp_path)]) == 1
    assert "ranks [1] of 2 are missing" in capsys.readouterr().err
    assert main(["checkpoint", "consolidate"]) == 2
    assert main(["checkpoint", "consolidate", "a", "b", "--ckpt-prefix", "c"]) == 2


@pytest.mark.slow
def test_reading_needs_neither_jax_nor_torchax():
    code = (
        "import sys, shardwright; from shardwright.xla import files; "
        "assert not {'jax', 'torchax', 'optax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
