"""``shardwright checkpoint`` shows what it finds and says so by its exit code."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import save
from shardwright.cli import main
from tests.ranks.pool import run_ranks
from tests.ranks.top import printed_by_top, said_by_top


def write(rank, world, folder, step, value):
    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
    with torch.no_grad():
        model[1].bias.add_(value)
    save(folder, model=model, step=step)


@pytest.fixture
def folder(tmp_path):
    run_ranks(2, write, str(tmp_path / "run"), 1, 0.0)
    run_ranks(2, write, str(tmp_path / "run"), 2, 0.5)
    return tmp_path


def test_inspect_lists_every_tensor(folder, capsys):
    assert main(["checkpoint", "inspect", str(folder / "run")]) == 0
    out = capsys.readouterr().out
    for shown in ("step 2", "model/0.weight", "[3, 5]", "model/1.bias", "F32"):
        assert shown in out


def test_verify_finds_a_flipped_bit_and_names_the_file(folder, capsys):
    assert main(["checkpoint", "verify", str(folder / "run")]) == 0
    victim = max((folder / "run" / "step-000002").glob("*.safetensors"))
    damaged = bytearray(victim.read_bytes())
    damaged[-1] ^= 1
    victim.write_bytes(damaged)
    assert main(["checkpoint", "verify", str(folder / "run")]) == 1
    assert victim.name in capsys.readouterr().out


def test_diff_names_what_changed(folder, capsys):
    first, second = (str(folder / "run" / f"step-00000{n}") for n in (1, 2))
    assert main(["checkpoint", "diff", first, first]) == 0
    assert main(["checkpoint", "diff", first, second]) == 1
    assert "changed: model/1.bias" in capsys.readouterr().out


def test_what_is_found_is_printed_as_an_object_for_scripts(folder, capsys):
    def found(*arguments, code=0):
        assert main(["checkpoint", *arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    first, second = (str(folder / "run" / f"step-00000{n}") for n in (1, 2))
    inspected = found("inspect", first)
    assert (inspected["path"], inspected["step"], inspected["suspicious"]) == (first, 1, [])
    shapes = {tensor["key"]: tensor["shape"] for tensor in inspected["tensors"]}
    assert shapes["model/0.weight"] == [3, 5]
    verified = found("verify", second)
    assert (verified["faults"], verified["num_tensors"]) == ([], len(shapes))
    assert list(found("diff", first, second, code=1)["changed"]) == ["model/1.bias"]


def test_a_table_in_a_pipe_is_never_cut(tmp_path, capsys):
    name = "a_layer_with_a_long_name_" * 8
    save(tmp_path / name, model=nn.ModuleDict({name: nn.Linear(2, 2)}), step=1)
    assert main(["checkpoint", "inspect", str(tmp_path / name)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(f"model/{name}.weight" in line and "[2, 2]" in line for line in lines) == 1
    assert any(line.startswith(str(tmp_path / name)) and line.endswith("step 1") for line in lines)


def ask(rank, world):
    fully_shard(nn.Linear(2, 2))
    return said_by_top(rank)


def ask_while_one_waits(rank, world):
    model, said = fully_shard(nn.Linear(2, 2)), ""
    while rank == 1 and not (said and json.loads(said)["answers"]["0"]["waits"]):
        said = printed_by_top()
    model(torch.ones(1, 2))
    return said


@pytest.mark.parametrize("ask", [ask, ask_while_one_waits])
def test_top_prints_what_each_rank_says_as_an_object(ask):
    line = run_ranks(2, ask)[1]
    said = json.loads(line)
    assert (said["world"], said["answers"].keys(), said["ended"], line.count("\n")) == (2, {"0", "1"}, [], 1)
    assert {answer["rank"] for answer in said["answers"].values()} == {0, 1}


def test_consolidate_writes_plain_safetensors(folder):
    out = folder / "out"
    assert main(["checkpoint", "consolidate", str(folder / "run"), str(out), "--dtype", "bfloat16"]) == 0
    weights = load_file(out / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in weights.items()} == {
        "0.weight": (3, 5),
        "0.bias": (3,),
        "1.weight": (2, 3),
        "1.bias": (2,),
    }
    assert all(t.dtype == torch.bfloat16 for t in weights.values())


def test_convert_writes_the_files_of_ranks_and_refuses_to_overwrite(folder, capsys):
    command = ["checkpoint", "convert", str(folder / "run"), str(folder / "out"), "--to", "fairscale"]
    assert main([*command, "--ranks", "3"]) == 0
    assert len(list((folder / "out").iterdir())) == 3
    assert main(["checkpoint", "inspect", str(folder / "out")]) == 0
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        main([*command[:-1], "no such format"])
    assert refused.value.code == 2


def test_nan_and_damage_exit_with_1(folder, capsys):
    bad = nn.Linear(2, 2)
    nn.init.constant_(bad.weight, float("nan"))
    save(folder / "bad", model=bad, step=1)
    assert main(["checkpoint", "inspect", str(folder / "bad")]) == 1
    assert main(["checkpoint", "inspect", str(folder / "bad"), "--no-values"]) == 0
    (folder / "bad" / "step-000001" / "shard-00000.safetensors").unlink()
    for verb in ("inspect", "verify"):
        assert main(["checkpoint", verb, str(folder / "bad")]) == 1
        assert "shard-00000.safetensors is missing" in capsys.readouterr().err


def test_what_cannot_be_opened_is_told_and_exits_with_1(tmp_path, capsys):
    assert main(["checkpoint", "inspect", str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


def test_an_unknown_argument_is_refused_with_the_help_to_see(tmp_path, capsys):
    assert main(["checkpoint", "verify", str(tmp_path), "--fast"]) == 2
    assert "unknown option --fast (see shardwright checkpoint verify --help)" in capsys.readouterr().err
