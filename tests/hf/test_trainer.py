"""ShardedTrainer trains as transformers' Trainer does in one process, saves what it reads, and resumes."""

import json
import os
import shutil

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
pytest.importorskip("accelerate", reason="transformers.Trainer needs it (make test-hf)")

pytest.importorskip("peft", reason="carried by some of the models (make test-hf)")

import peft
import torch
import transformers
from safetensors.torch import load_file

from shardwright import hf
from shardwright.errors import CheckpointError, InputError
from shardwright.hf import library
from shardwright.lora import Lora
from tests.hf import models
from tests.ranks.pool import run_ranks

ADAPTER = "adapter_model.safetensors"


class Sharded(hf.ShardedTrainer, transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Whole(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def data():
    """Rows of one length, some of whose tokens aren't learned: more in some than in others."""
    rows = torch.randint(3, 96, (64, 12), generator=torch.Generator().manual_seed(5))
    labels = rows.clone()
    for i, row in enumerate(labels):
        row[: i % 7] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(rows, labels, strict=True)]


def heldout():
    """Ten rows, whole: Trainer weighs a rank's rows by what other ranks have at the same time."""
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in data()[:10]]


def arguments(folder, batch, **options):
    values = {
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": 2, "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "warmup_steps": 2, "eval_strategy": "no", "per_device_eval_batch_size": 1,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder), **{**values, **options})


def as_torchrun(rank, world):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29999",
    )  # fmt: skip


def figures(trainer):
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [(row["step"], row["loss"], row["grad_norm"], row["learning_rate"]) for row in rows]


def plain(rank, world, folder, out):
    trainer = Whole(models.whole(folder), arguments(out, 4), train_dataset=data(), eval_dataset=heldout())
    trainer.train()
    return figures(trainer), trainer.evaluate()["eval_loss"]


def sharded(rank, world, folder, out, options, resume=None, lora=None):
    as_torchrun(rank, world)
    model = hf.load(folder, lora=lora)
    args = arguments(out, 4 // world, **options)
    trainer = Sharded(model, args, train_dataset=data(), eval_dataset=heldout())
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return figures(trainer), trainer.evaluate()["eval_loss"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return models.write("llama", tmp_path_factory.mktemp("trainer") / "llama")


def test_losses_norms_and_evaluation_are_those_of_one_process(llama, tmp_path):
    ((expected, loss),) = run_ranks(1, plain, llama, tmp_path / "plain")
    for found, other in run_ranks(2, sharded, llama, tmp_path / "out", {}):
        assert [row[0] for row in found] == [1, 2, 3, 4]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-4)
        assert other == pytest.approx(loss, rel=1e-4)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        rows = [{key: value[None] for key, value in row.items()} for row in heldout()]
        assert sum(read(**row).loss.item() for row in rows) / 10 == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("lora", [None, Lora(("q_proj", "down_proj"), 4)], ids=["all", "adapters"])
def test_a_run_is_resumed_at_another_number_of_ranks(llama, tmp_path, lora):
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
    whole = run_ranks(2, sharded, llama, tmp_path / "out", options, None, lora)[0]
    names = {path.name for path in (tmp_path / "out" / "checkpoint-2").iterdir()}
    begin = "adapter_" if lora else ""
    files = {f"{begin}config.json", f"{begin}model.safetensors"}
    assert {"shardwright", "trainer_state.json", *files} <= names
    for world in (1, 4):
        shutil.copytree(tmp_path / "out" / "checkpoint-2", tmp_path / str(world) / "checkpoint-2")
        resume = str(tmp_path / str(world) / "checkpoint-2")
        (found, loss), *_ = run_ranks(world, sharded, llama, tmp_path / str(world), options, resume, lora)
        assert [row[0] for row in found] == [1, 2, 3, 4]  # the first two were read
        for ours, theirs in zip(found, whole[0], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-4)
        assert loss == pytest.approx(whole[1], rel=1e-4)


def with_peft(folder, seed):
    """Adapters, and a head that is trained whole; each rank draws them for itself."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(models.whole(folder), config)


def plain_peft(rank, world, folder, out):
    trainer = Whole(with_peft(folder, 0), arguments(out, 4), train_dataset=data(), eval_dataset=heldout())
    trainer.train()
    trainer.save_model()
    return figures(trainer), trainer.evaluate()["eval_loss"]


def sharded_peft(rank, world, folder, out, resume=None):
    as_torchrun(rank, world)
    args = arguments(out, 4 // world, save_strategy="steps", save_steps=2)
    trainer = Sharded(with_peft(folder, rank), args, train_dataset=data(), eval_dataset=heldout())
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    blocks = [group.name for group in trainer.model._unit().runtime.groups if ".layers." in group.name]
    return figures(trainer), trainer.evaluate()["eval_loss"], len(blocks)


def test_a_model_of_pefts_trains_as_in_one_process_resumes_and_is_saved_as_peft_saves_it(llama, tmp_path):
    ((expected, loss),) = run_ranks(1, plain_peft, llama, tmp_path / "plain")
    halfway = str(tmp_path / "out" / "checkpoint-2")
    for world, out, resume in ((2, tmp_path / "out", None), (1, tmp_path / "more", halfway)):
        for found, other, blocks in run_ranks(world, sharded_peft, llama, out, resume):
            assert blocks == 2
            assert other == pytest.approx(loss, rel=1e-4)
            for ours, theirs in zip(found, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=2e-4)
        for folder in (out, out / "checkpoint-4"):
            made, theirs = load_file(folder / ADAPTER), load_file(tmp_path / "plain" / ADAPTER)
            assert made.keys() == theirs.keys()
            assert all(torch.allclose(made[name], value, atol=1e-5) for name, value in theirs.items())
            read = peft.PeftModel.from_pretrained(models.whole(llama), folder)
            with torch.no_grad():
                rows = [{key: value[None] for key, value in row.items()} for row in heldout()]
                assert sum(read(**row).loss.item() for row in rows) / 10 == pytest.approx(loss, rel=1e-3)


def best(rank, world, folder, out):
    options = {
        "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
        "learning_rate": 3.0,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2,
    }  # fmt: skip
    as_torchrun(rank, world)
    args = arguments(out, 2, **options)
    trainer = Sharded(hf.load(folder), args, train_dataset=data(), eval_dataset=heldout())
    trainer.train()
    return trainer.state.best_metric, trainer.evaluate()["eval_loss"], len(os.listdir(out))


def test_the_best_model_is_loaded_at_the_end(llama, tmp_path):
    for metric, loss, count in run_ranks(2, best, llama, tmp_path / "out"):
        assert loss == pytest.approx(metric, rel=1e-5)
        assert count == 2


def wrong(rank, world, folder, out):
    as_torchrun(rank, world)
    with pytest.raises(InputError, match="got no model; give it one, whole or sharded"):
        Sharded(args=arguments(out, 2), model_init=lambda: models.whole(folder))
    model = hf.load(folder)
    late = peft.get_peft_model(hf.load(folder), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(InputError, match="PeftModel got adapters after it was sharded"):
        Sharded(late, arguments(out, 2))
    (out / "checkpoint-1").mkdir(parents=True, exist_ok=True)
    (out / "checkpoint-1" / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    with pytest.raises(CheckpointError, match="has no folder shardwright/"):
        Sharded(model, arguments(out, 2), train_dataset=data()).train(str(out / "checkpoint-1"))
    library.transformers.__version__ = "6.0.1"
    with pytest.raises(InputError, match=r"from 5\.23 up to before 5\.25, this is 6\.0"):
        Sharded(model, arguments(out, 2))


def test_what_it_cannot_train_is_refused(llama, tmp_path):
    run_ranks(1, wrong, llama, tmp_path / "out")
