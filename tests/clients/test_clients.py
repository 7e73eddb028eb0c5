"""Clients that import torch.distributed.fsdp by themselves train with our names as with torch's own."""

import importlib.util

import pytest
import torch.distributed as dist

import shardwright
from shardwright.checkpoint import agree
from shardwright.errors import CheckpointError, InputError
from tests.clients import cases
from tests.clients.table import ROOT, ROWS, TABLE
from tests.ranks.pool import run_ranks

PACKAGES = {"lightning-fabric": "lightning_fabric"}  # else what stands before the hyphen


@pytest.mark.parametrize("case", cases.CASES)
def test_a_client_trains_with_our_names_as_with_torchs_own(case, tmp_path):
    package = PACKAGES.get(case, case.partition("-")[0])
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, in an environment of its own: make clients")
    found = {}
    for ours in (False, True):
        folder = tmp_path / ("ours" if ours else "torchs")
        folder.mkdir()
        world = cases.WORLDS.get(case, 2)
        found[ours] = run_ranks(world, cases.run, case, ours, folder, limit_s=150.0, timeout_s=60.0)
    for (theirs, count, none), (mine, same, all_of_them) in zip(found[False], found[True], strict=True):
        assert len(theirs) > 3
        assert mine == pytest.approx(theirs, rel=1e-4)
        assert none == 0
        assert same == all_of_them == count > 1


def saved_by_rank_0_alone(rank, world, folder):
    shardwright.install()
    model = cases.native_llama(rank, folder, {"fsdp_size": world})
    agree.ARRIVAL_TIMEOUT_S = 1.0
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"entered by ranks \[0\], not by ranks \[1\] within"):
            model.save_pretrained(folder / "alone", state_dict={})
    dist.barrier()
    assert not (folder / "alone").exists()
    model.save_pretrained(folder / "saved")
    cases.assert_holds(cases.read_llama(folder / "saved"), model)


def test_a_save_by_one_rank_alone_writes_nothing_and_names_who_is_missing(tmp_path):
    pytest.importorskip("transformers", reason="in an environment of its own: make clients")
    run_ranks(2, saved_by_rank_0_alone, tmp_path)


def trained_by_both_trainers(rank, world, folder):
    cases.as_launched(rank, world)
    import transformers  # noqa: PLC0415 - after install()

    from shardwright import hf  # noqa: PLC0415

    class Ours(hf.ShardedTrainer, transformers.Trainer):
        pass

    saves = {"save_strategy": "steps", "save_steps": 2}
    model = cases.native_llama(rank, folder, {"fsdp_size": 2, "tp_size": 2})
    args = cases.arguments(transformers.TrainingArguments, folder / "theirs")
    expected = cases.logged(cases.trained_by_trainer(model, args))
    for name, resume in (("ours", None), ("resumed", str(folder / "ours/checkpoint-2"))):
        model = cases.read_llama(folder / "llama", model.config.distributed_config)
        args = cases.arguments(transformers.TrainingArguments, folder / name, **saves)
        trainer = cases.trained_by_trainer(model, args, Ours, resume)
        assert cases.logged(trainer) == pytest.approx(expected, rel=1e-4)
    trainer.save_model()
    cases.assert_holds(cases.read_llama(folder / "resumed"), model)


def test_sharded_trainer_resumes_what_transformers_has_sharded(tmp_path):
    pytest.importorskip("transformers", reason="in an environment of its own: make clients")
    run_ranks(4, trained_by_both_trainers, tmp_path, limit_s=150.0, timeout_s=60.0)


def with_spmd_types(rank, world):
    shardwright.install()
    with pytest.raises(InputError, match=r"Got plain tensor for parameter .* parallelism\.spmd_backend"):
        cases.torchtitan_llama3("spmd_types", 1, rank, world, None)


def test_plain_parameters_with_spmd_types_are_refused_with_torchtitans_remedy():
    pytest.importorskip("torchtitan", reason="in an environment of its own: make clients")
    run_ranks(2, with_spmd_types, limit_s=150.0)


def test_the_table_names_the_versions_that_are_installed_for_it():
    makefile = (ROOT / "Makefile").read_text()
    rows = [
        line for line in TABLE.read_text().splitlines() if line.startswith("| ") and "client |" not in line
    ]
    assert len(rows) == len(ROWS)
    for row, (client, package, what, _) in zip(rows, ROWS, strict=True):
        shown, version, said, result = (cell.strip() for cell in row.strip("|").split(" | "))
        assert (shown, said, result) == (client, what, "passes")
        assert package == "torch" or f"{version.replace(' ', '==')}" in makefile
