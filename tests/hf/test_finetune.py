"""`shardwright train` with [base]: the exported Llama, runs that are resumed elsewhere, and bad input."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

import numpy as np
import tomli_w
import torch
import transformers
from safetensors.torch import load_file, save_file

import shardwright
from shardwright import cli
from shardwright.checkpoint.folder import complete_steps, step_folder
from shardwright.data.feed import pad_of
from shardwright.data.windows import packed
from shardwright.errors import CheckpointError, ConfigError, DataError, InputError
from shardwright.finetune.engine import build_model
from shardwright.finetune.job import FineTuning, fingerprint
from shardwright.hf import library
from shardwright.recipe.config import ModelConfig, Recipe
from shardwright.recipe.resolve import Resolved, resolve
from shardwright.train.folder import RunFolder
from shardwright.train.models import Transformer
from shardwright.train.ranks import RankPlace, mesh_of
from shardwright.train.report import Screen
from shardwright.train.run import _train
from tests.hf import models
from tests.ranks.pool import run_ranks

SIZES = {"num_layers": 2, "dim": 64, "num_heads": 2, "hidden_dim": 96}


def a_run(root, tied=False):
    """A finished run of the byte-level model, with weights that no part of the mapping leaves alone."""
    run, config = RunFolder(root), ModelConfig(**SIZES, tied_embedding=tied)
    root.mkdir(parents=True)
    model = Transformer(config)
    model.reset_parameters(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.05)
    run.write_model(dict(model.state_dict()))
    sizes = "".join(f"{key} = {value}\n" for key, value in SIZES.items())
    model_section = f"[model]\n{sizes}tied_embedding = {str(tied).lower()}\n"
    run.write_config(f"{model_section}[training]\nsequence_length = 32\n")
    return model.eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An exported Llama, text and chats."""
    root = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(3)
    a_run(root / "run")
    assert cli.main(["export", str(root / "run"), str(root / "llama")]) == 0
    (root / "text").mkdir()
    for i in range(8):
        lines = (f"def function_{i}_{j}(x):\n    return x + {i * j}\n" for j in range(20))
        (root / "text" / f"{i}.py").write_text("\n".join(lines))
    write_chats(root / "chats.jsonl", 60)
    return root


def write_chats(path, count):
    said = [(("user", f"{i} + 1?"), ("assistant", str(i + 1))) for i in range(count)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in said]
    path.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))


@pytest.mark.parametrize("tied", [False, True])
def test_the_exported_llama_has_our_logits_and_a_tokenizer_of_bytes(tmp_path, tied):
    torch.manual_seed(1)
    ours = a_run(tmp_path / "run", tied)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "llama")]) == 0
    theirs = models.loaded_whole(tmp_path / "llama")
    tokens = torch.randint(0, 256, (3, 32))
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = ours.to(dtype), theirs.to(dtype)
        with torch.no_grad():
            a, b = ours(tokens), theirs(tokens).logits
        assert (a - b).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05) * a.abs().max()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "llama")
    text = "".join(map(chr, range(1, 0x180))) + "\0 a  b\r\n\t\U0001f600Ā"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 0, 256)


def test_an_export_overwrites_nothing_and_needs_a_finished_run(tmp_path, capsys):
    torch.manual_seed(1)
    a_run(tmp_path / "run")
    (tmp_path / "there").mkdir()
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "there")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), str(tmp_path / "new")]) == 1
    assert "holds no finished run" in capsys.readouterr().err
    (tmp_path / "run").rename(tmp_path / "run.1")
    for other in ("run", "run.2"):  # those of jobs that have begun in its folder since
        (tmp_path / other).mkdir()
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "new")]) == 1
    assert f"give the folder of one (the run before it is in {tmp_path / 'run.1'})" in capsys.readouterr().err
    (tmp_path / "run" / "config.toml").write_text('[base]\nfolder = "models/llama"\n')
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "new")]) == 1
    assert "run holds no fine-tuned model (no exported/step-N/" in capsys.readouterr().err


class StopAfter:
    """Asks to stop once the loop has asked so often."""

    def __init__(self, steps):
        self.left = steps

    @property
    def reason(self):
        self.left -= 1
        return "the test" if self.left < 0 else ""


def tune(rank, world, recipe, resume=False, steps=10**6, shown=False):
    """A run of the recipe, as ``shardwright train`` does it."""
    place = RankPlace(rank, world, torch.device("cpu"), mesh_of(recipe.mesh, "cpu"))
    if resume:
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"resume": "last"})})
    resolved = Resolved(recipe, "test.toml", resolve_origins())
    _train(resolved, place, Screen(shown=shown), StopAfter(steps), FineTuning)


def resolve_origins():
    return {f"{s}.{k}": "file" for s, section in Recipe() for k in type(section).model_fields}


def recipe_of(place, folder, **sections):
    """A small QLoRA run of two epochs; ``sections`` are merged in."""
    values = {
        "run": {"folder": str(folder)},
        "base": {"folder": str(place / "llama"), "quantise": "nf4"},
        "adapter": {"rank": 4, "dropout": 0.0},
        "data": {"path": str(place / "chats.jsonl"), "heldout_share": 0.1},
        "training": {"epochs": 2, "batch_size": 6, "sequence_length": 32, "log_every": 1},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.0},
        "heldout": {"at_start": True, "every": 1000},
        "checkpoint": {"every": 1000, "keep": 3},
        "sample": {"num_bytes": 5},
        "schedule": {"transport": "auto"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return Recipe.model_validate(values)


def losses(folder, key="loss"):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[key] for row in rows if key in row}


def test_qlora_from_a_recipe_is_resumed_at_other_world_sizes_after_its_first_epoch(place, tmp_path):
    whole = recipe_of(place, tmp_path / "whole")
    run_ranks(2, tune, whole)
    expected = losses(tmp_path / "whole")
    steps = max(expected)
    half = steps // 2
    assert steps >= 4 and steps % 2 == 0
    heldout = losses(tmp_path / "whole", "heldout_loss")
    assert list(heldout) == [0, half, steps]
    assert heldout[steps] < heldout[half] < heldout[0]
    exported = tmp_path / "whole" / "exported"
    assert sorted(p.name for p in exported.iterdir()) == [f"step-{n:06d}" for n in (half, steps)]
    for folder in exported.iterdir():
        assert {p.name for p in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary["unit"], summary["steps"]) == ("token", steps)
    with pytest.raises(InputError, match=r"is a run of fine-tuning, and its models are in .*exported"):
        RunFolder(tmp_path / "whole").read_model()
    # An epoch leaves a checkpoint that trains on, though none was due by steps.
    assert complete_steps(RunFolder(tmp_path / "whole").checkpoint) == [steps, half]
    run_ranks(2, tune, recipe_of(place, tmp_path / "begun"), False, half)
    assert max(losses(tmp_path / "begun")) == half
    ended = RunFolder(tmp_path / "of-an-epoch")  # a run that was stopped by force after its first epoch
    shutil.copytree(tmp_path / "begun", ended.root, ignore=shutil.ignore_patterns("checkpoint"))
    epoch = step_folder(RunFolder(tmp_path / "whole").checkpoint, half)
    shutil.copytree(epoch, step_folder(ended.checkpoint, half))
    for world, begun in ((1, tmp_path / "begun"), (3, ended.root)):
        folder = tmp_path / str(world)
        shutil.copytree(begun, folder)
        run_ranks(world, tune, recipe_of(place, folder), True)
        found = losses(folder)
        assert found.keys() == expected.keys()
        assert max(abs(found[n] - expected[n]) for n in expected) < 1e-4
        last = load_file(folder / "exported" / f"step-{steps:06d}" / "adapter_model.safetensors")
        same = load_file(exported / f"step-{steps:06d}" / "adapter_model.safetensors")
        assert last.keys() == same.keys()
        assert all(torch.allclose(last[name], same[name], atol=2e-3) for name in same)


def test_checkpoints_of_adapters_leave_the_base_where_it_is(place, tmp_path):
    run_ranks(2, tune, recipe_of(place, tmp_path / "run", training={"epochs": 1}))
    stored = {name for p in (tmp_path / "run" / "checkpoint").rglob("*.safetensors") for name in load_file(p)}
    assert any("lora_A.weight/exp_avg" in name for name in stored)
    others = [name for name in stored if "lora_" not in name and not name.startswith("rng/")]
    assert not others


def test_all_weights_are_trained_and_exported_as_transformers_saves_them(place, tmp_path):
    whole = {"base": {"quantise": "none"}, "adapter": {"rank": 0}, "data": {"path": str(place / "text")}}
    whole["training"] = {"epochs": 1, "activation_checkpointing": True, "offload_activations": True}
    more = {"optimizer": {"lr": 1e-3}, "track": {"peak_tflops": 0.01}}
    recipe = recipe_of(place, tmp_path / "run", **whole, **more)
    run_ranks(2, tune, recipe)
    heldout = losses(tmp_path / "run", "heldout_loss")
    assert heldout[max(heldout)] < heldout[0]
    assert all(0 < mfu < 1 for mfu in losses(tmp_path / "run", "mfu").values())
    (folder,) = (tmp_path / "run" / "exported").iterdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    job = FineTuning(recipe, alone())
    batch = job.feed.heldout.batch(job.feed.heldout_rows)
    with torch.no_grad():
        logits = model(batch.inputs, position_ids=batch.positions).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert loss.item() == pytest.approx(heldout[max(heldout)], abs=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(folder)("a")["input_ids"] == [97]


def alone():
    return RankPlace(0, 1, torch.device("cpu"), SimpleNamespace(sample_rank=0, num_samples=1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_examples_that_share_a_window_do_not_see_each_other(place, attention):
    data = FineTuning(recipe_of(place, place / "none"), alone()).feed.sources[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "llama", attn_implementation=attention)
    results = []
    for several, width in ((True, 0), (False, 0), (False, 64)):  # the last is padded as far as it may be long
        windows = packed(data.examples, np.arange(9), 64, 0, several=several)
        batch = padded_to(width, windows.batch(range(len(windows))))
        model.zero_grad()
        logits = model(batch.inputs, position_ids=batch.positions, use_cache=False).logits
        options = {"ignore_index": -100, "reduction": "sum"}
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), **options)
        loss.backward()
        results.append((len(windows), loss.item(), [p.grad.clone() for p in model.parameters()]))
    whole, *others = reversed(results)
    assert others[1][0] < others[0][0] == whole[0]
    for _, loss, grads in others:
        assert loss == pytest.approx(whole[1], rel=1e-5)
        for ours, theirs in zip(grads, whole[2], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


def padded_to(width, batch):
    """The batch with padding up to that width, which positions keep apart."""
    more = width - batch.inputs.shape[1]
    if more <= 0:
        return batch
    shape = len(batch.inputs), batch.inputs.shape[1]
    own = torch.arange(shape[1]).expand(shape) if batch.positions is None else batch.positions
    positions = torch.cat([own, torch.arange(more).expand(len(own), more)], dim=1)
    inputs = torch.nn.functional.pad(batch.inputs, (0, more), value=0)
    targets = torch.nn.functional.pad(batch.targets, (0, more), value=-100)
    return replace(batch, inputs=inputs, targets=targets, positions=positions)


def test_ranks_whose_records_differ_in_length_take_the_steps_of_one_and_count_no_padding(place, tmp_path):
    said = [(("user", "a" * (i % 7 * 9)), ("assistant", "b" * (i % 5))) for i in range(48)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in said]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    data = {"path": str(tmp_path / "chats.jsonl"), "heldout_share": 0.25, "packing": False}
    told = []
    for world, accumulation in ((1, 4), (2, 2)):
        training = {"epochs": 1, "batch_size": 1, "accumulation": accumulation, "sequence_length": 128}
        recipe = recipe_of(place, tmp_path / f"run{world}", data=data, training=training)
        run_ranks(world, tune, recipe)
        told.append((losses(tmp_path / f"run{world}"), losses(tmp_path / f"run{world}", "tokens")))
    (one, tokens), (two, same) = told
    assert tokens == same
    assert one == pytest.approx(two, rel=1e-4)
    feed = FineTuning(recipe_of(place, tmp_path / "none", data=data, training=training), alone()).feed
    lengths = (feed.sources[0].examples.ends - feed.sources[0].examples.begins)[~feed.sources[0].heldout] - 1
    steps = max(tokens)
    assert steps == len(lengths) // 4 and len({*lengths}) > 10
    assert lengths.sum() - 4 * lengths.max() <= tokens[steps] <= lengths.sum() < 128 * len(lengths) / 2


# ---- bad input, before any training


@pytest.fixture
def broken(place, tmp_path):
    """A copy of the Llama in several files, and of the chats, to break."""
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "llama")
    model.save_pretrained(tmp_path / "llama", max_shard_size="100KB")
    for name in ("chats.jsonl", "llama/tokenizer.json", "llama/tokenizer_config.json"):
        shutil.copy2(place / name, tmp_path / name)
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 2
    return tmp_path


def refused(rank, world, recipe, kind, message):
    with pytest.raises(kind, match=message):
        tune(rank, world, recipe)


def refuse(broken, kind, message, **sections):
    """Both ranks refuse, and nothing of a run is there."""
    run_ranks(2, refused, recipe_of(broken, broken / "run", **sections), kind, message)
    assert not (broken / "run").exists()


@pytest.mark.parametrize("spoil", models.SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_base_that_lacks_a_file_or_lies_is_refused_by_name(broken, spoil):
    refuse(broken, CheckpointError, spoil(broken / "llama"))


def without_pad_token(llama):
    path = llama / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))


def test_a_tokenizer_without_a_pad_token_pads_with_another_and_a_wrong_name_is_refused(broken):
    without_pad_token(broken / "llama")
    refuse(broken, InputError, "has no token 'none'", data={"pad_token": "none"})
    tokenizer = library.tokenizer(broken / "llama")
    assert tokenizer.pad_token_id is None
    assert pad_of(tokenizer, "a", "here") == ord("a")
    assert pad_of(tokenizer, "", "here") == tokenizer.eos_token_id


def test_the_padding_changes_no_loss(place):
    data = FineTuning(recipe_of(place, place / "none"), alone()).feed.sources[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "llama")
    losses = set()
    for pad in (0, 97):
        batch = packed(data.examples, np.arange(4), 64, pad, several=True).batch([0])
        with torch.no_grad():
            logits = model(batch.inputs, position_ids=batch.positions, use_cache=False).logits
        losses.add(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item())
    assert len(losses) == 1


START = (Path(__file__).parents[2] / "docs" / "start.md").read_text()
REAL = re.search(r"`(shardwright train finetune-qlora-real[^`]*)`", START)[1].split()


@pytest.mark.parametrize("count", [9, 2500])  # less than a step takes; 200 KB
def test_the_line_for_real_models_trains_on_any_chats(place, tmp_path, count):
    shutil.copytree(place / "llama", tmp_path / "models" / "llama")
    without_pad_token(tmp_path / "models" / "llama")
    config = tmp_path / "models" / "llama" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2048}))
    write_chats(tmp_path / "chats.jsonl", count)
    command = [sys.executable, "-m", *REAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"; {count:,} record(s)" in done.stdout
    assert (", one record in each (packed, they" in done.stdout) == (count == 9)
    run = tmp_path / "runs" / "finetune-qlora-real"
    heldout = losses(run, "heldout_loss")
    assert heldout[max(heldout)] < heldout[0]
    exported = load_file(run / "exported" / f"step-{max(heldout):06d}" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}


def at_rest_and_at_work(rank, world, folder):
    """{dtype: of what} of the recipe's model: at rest, of the inputs of its linear layers, and adapters."""
    overrides = [("base.folder", folder), ("training.sequence_length", "32")]
    recipe = resolve(REAL[2], overrides).recipe
    model = build_model(recipe, RankPlace(rank, world, torch.device("cpu"), shardwright.mesh()))
    seen = set()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, given: seen.add(given[0].dtype))
    loss = model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False).logits.float().sum()
    loss.backward()
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    grads = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    frozen = {p.dtype for n, p in model.named_parameters() if "embed" in n or "norm" in n}
    return seen, trained, grads, frozen


def test_the_recipe_for_real_models_computes_in_bfloat16_and_steps_in_float32(place):
    half, full = {torch.bfloat16}, {torch.float32}
    assert run_ranks(2, at_rest_and_at_work, str(place / "llama")) == [(half, full, full, half)] * 2


def test_a_line_that_is_no_json_is_named(broken):
    lines = (broken / "chats.jsonl").read_text().splitlines()
    lines[4] = lines[4][:-3]
    (broken / "chats.jsonl").write_text("\n".join(lines))
    refuse(broken, DataError, r"chats\.jsonl, line 5: not JSON")


def test_the_command_trains_and_tells_bad_input_in_one_line(place, tmp_path):
    training = {"epochs": 1, "batch_size": 12}
    recipe = recipe_of(place, tmp_path / "run", training=training, sample={"num_bytes": 2})
    path = tmp_path / "r.toml"
    given = {name: value for name, value in recipe.model_dump(mode="json").items() if name != "model"}
    path.write_text(tomli_w.dumps(given))
    command = [sys.executable, "-m", "shardwright", "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "adapters of rank 4 on all linear layers" in done.stdout
    assert "2 tokens that the model writes" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["peak_nbytes"] == pytest.approx(summary["expected_peak_nbytes"], rel=0.2)
    said, read = (done.stdout.index(words) for words in ("expected peak of memory: ", "step 1/"))
    assert said < read and "on each rank (activations" in done.stdout[said:read]
    (tmp_path / "cut.jsonl").write_text('{"text": "a"}\n{"text"\n')
    bad = [*command, "--data.path", str(tmp_path / "cut.jsonl"), "--run.folder", str(tmp_path / "bad")]
    done = subprocess.run(bad, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith("shardwright: cut.jsonl, line 2: not JSON")
    assert "Traceback" not in done.stderr


def test_a_target_that_matches_nothing_is_refused(broken):
    refuse(broken, InputError, "target 'qproj' matches no nn.Linear", adapter={"targets": ["qproj"]})


def test_a_folder_without_a_tokenizer_is_refused(broken):
    (broken / "llama" / "tokenizer.json").unlink()
    (broken / "llama" / "tokenizer_config.json").unlink()
    refuse(broken, InputError, "finds no tokenizer")


def test_resuming_with_another_base_is_refused(place, tmp_path):
    recipe = recipe_of(place, tmp_path / "run", training={"epochs": 1})
    run_ranks(1, tune, recipe)
    shutil.copytree(place / "llama", tmp_path / "llama")
    tensors = load_file(tmp_path / "llama" / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, tmp_path / "llama" / "model.safetensors", {"format": "pt"})
    assert fingerprint(tmp_path / "llama") != fingerprint(place / "llama")
    base = recipe.base.model_copy(update={"folder": str(tmp_path / "llama")})
    run_ranks(1, resumed_elsewhere, recipe.model_copy(update={"base": base}))


def resumed_elsewhere(rank, world, recipe):
    with pytest.raises(ConfigError, match=r"the base \(its files\): was"):
        tune(rank, world, recipe, resume=True)


def test_sections_that_contradict_each_other_are_refused(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[base]\nfolder = "x"\nquantise = "nf4"\n[model]\ndim = 64\n[launch]\nbackend = "xla"\n')
    with pytest.raises(ConfigError, match=r"(?s)leave \[model\] out.*set adapter\.rank.*trains on .eager"):
        resolve(path)
    path.write_text("[adapter]\nrank = 4\n")
    with pytest.raises(ConfigError, match=r"set base\.folder"):
        resolve(path)


def test_offload_adamw_in_8_bits_and_decoding_per_use_train_together_from_a_recipe(place, tmp_path):
    pytest.importorskip("bitsandbytes")
    together = {
        "base": {"folder": str(place / "llama"), "quantise": "nf4", "dequantise": "layer"},
        "training": {"epochs": 0, "steps": 6, "batch_size": 6, "sequence_length": 32, "offload": "optimizer"},
    }
    first = recipe_of(place, tmp_path / "run", **together, optimizer={"kind": "adamw-8bit"})
    run_ranks(2, tune, first, False, 3)
    run_ranks(2, tune, first, True)
    found = losses(tmp_path / "run")
    plain = {**together, "base": {"folder": str(place / "llama"), "quantise": "nf4"}}
    run_ranks(2, tune, recipe_of(place, tmp_path / "plain", **plain))
    expected = losses(tmp_path / "plain")
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    assert found[1] == pytest.approx(expected[1], rel=1e-5)  # before the optimizer has stepped
    assert found[6] < found[1] and found[6] == pytest.approx(expected[6], rel=0.05)
