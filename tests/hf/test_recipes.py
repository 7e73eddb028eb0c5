"""Recipes: optimizers, schedules, the best checkpoint, early stopping; each kind at toy size."""

import contextlib
import io
import json
import math
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

import torch

import shardwright
from shardwright.checkpoint import load, save
from shardwright.data.windows import IGNORED, Batch
from shardwright.errors import DataError, InputError
from shardwright.finetune.engine import build_model
from shardwright.finetune.objective import objective_of
from shardwright.finetune.tuned import find_tuned, load_whole
from shardwright.lora import add_lora, without_adapters
from shardwright.recipe.config import OptimizerConfig
from shardwright.recipe.named import named
from shardwright.recipe.resolve import resolve
from shardwright.train.eager import build_optimizer, opened
from shardwright.train.folder import RunFolder
from shardwright.train.ranks import RankPlace
from tests.hf import models
from tests.hf.test_finetune import losses, recipe_of, tune
from tests.hf.test_finetune import place as place  # a fixture
from tests.ranks.pool import run_ranks
from tests.ranks.test_lora import perturb

RECIPES = Path(__file__).parents[2] / "recipes"


def test_the_best_checkpoint_is_what_is_left_and_a_run_without_progress_ends_early(place, tmp_path):
    sections = {
        "training": {"epochs": 0, "steps": 40},
        "optimizer": {"lr": 0.3, "schedule": "constant", "warmup_steps": 6},  # too high
        "heldout": {"every": 2, "keep_best": True, "patience": 3},
        "checkpoint": {"every": 4},
    }
    run_ranks(1, tune, recipe_of(place, tmp_path / "run", **sections))
    heldout = losses(tmp_path / "run", "heldout_loss")
    heldout.pop(0)  # before the first step: nothing to keep
    best = min(heldout, key=heldout.get)
    steps = max(heldout)
    assert steps == best + 3 * 2 < 40
    summary = json.loads(RunFolder(tmp_path / "run").summary.read_text())
    assert (summary["steps"], summary["exported_step"]) == (steps, best)
    assert summary["heldout_loss"] == pytest.approx(heldout[best], abs=1e-6)
    assert find_tuned(tmp_path / "run").folder.name == f"step-{best:06d}"
    run_ranks(1, tune, recipe_of(place, tmp_path / "two", **sections), False, best + 1)  # stopped after it
    run_ranks(1, tune, recipe_of(place, tmp_path / "two", **sections), True)
    assert losses(tmp_path / "two", "heldout_loss") == losses(tmp_path / "run", "heldout_loss")
    assert json.loads(RunFolder(tmp_path / "two").summary.read_text())["exported_step"] == best


def eight_bit(rank, world, recipe, folder):
    """What both AdamWs make of the same gradients, and whether a checkpoint changes the state in 8 bits."""
    place = RankPlace(rank, world, torch.device("cpu"), shardwright.mesh())
    wholes = []
    for kind in ("adamw", "adamw-8bit"):
        model = build_model(recipe, place)
        config = OptimizerConfig(kind=kind, lr=1e-2, weight_decay=0.1)
        optimizer = build_optimizer(config, model)
        for step in range(4):
            for i, p in enumerate(model.parameters()):
                local = p.to_local()
                generator = torch.Generator().manual_seed(1000 * step + 10 * i + rank)
                noise = torch.randn(local.shape, generator=generator).to(local.dtype)
                place_of = {"device_mesh": p.device_mesh, "placements": p.placements}
                whole = {"run_check": False, "shape": p.shape, "stride": p.stride()}
                p.grad = torch.distributed.tensor.DTensor.from_local(noise, **place_of, **whole)
            optimizer.step()
        wholes.append({name: p.full_tensor().float() for name, p in model.named_parameters()})
    before = bits(optimizer)
    with opened(optimizer):
        save(folder, model=model, optimizer=optimizer, step=4)
        shapes = {p: state["exp_avg"].shape for p, state in optimizer.state.items()}
        assert shapes == {p: p.shape for p in model.parameters()}
    model = build_model(recipe, place)
    again = build_optimizer(config, model)
    with opened(again):
        load(folder, model=model, optimizer=again)
    for old, new in ((before, bits(optimizer)), (before, bits(again))):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    return {name: (wholes[0][name] - wholes[1][name]).abs().max().item() for name in wholes[0]}


def bits(optimizer):
    parts, states = ("state1", "state2", "absmax1", "absmax2"), optimizer._inner.state.values()
    found = [state[part].clone() for state in states for part in parts if part in state]
    assert {tensor.dtype for tensor in found} == {torch.uint8, torch.float32}  # small ones stay as they are
    return found


def test_adamw_in_8_bits_steps_shards_as_adamw_does_and_a_checkpoint_has_every_bit_of_it(place, tmp_path):
    pytest.importorskip("bitsandbytes")
    recipe = recipe_of(place, place / "none", base={"quantise": "none"}, adapter={"rank": 0})
    for off in run_ranks(2, eight_bit, recipe, tmp_path / "checkpoint"):
        assert max(off.values()) < 0.01  # a quarter of what four steps move
        assert max(off.values()) > 0


def a_batch(model_words, pairs, length, seed):
    """Chosen answers, then rejected ones; prompts and padding aren't learned."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, model_words, (2 * pairs, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(2 * pairs):
        targets[row, : 2 + row % 3], targets[row, length - row % 4 :] = IGNORED, IGNORED
    return Batch(tokens[:, :-1].contiguous(), targets, None, int((targets != IGNORED).sum()))


def plainly(model, batch):
    """log p of each row, by the whole logits."""
    logits = model(input_ids=batch.inputs).logits.float().log_softmax(-1)
    picked = logits.gather(-1, batch.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked * (batch.targets != IGNORED)).sum(1)


def preference(rank, world, recipe):
    """Loss and gradients of our DPO beside TRL's formula with a second model as its reference."""
    model = perturb(build_model(recipe, RankPlace(rank, world, torch.device("cpu"), shardwright.mesh())))
    batch, beta = a_batch(96, 3, 12, rank), recipe.training.dpo_beta
    objective = objective_of(recipe, model)
    assert objective.count(batch) == 3
    model.train()
    objective.begin_step()
    loss = objective.total(batch)
    loss.backward()
    assert model.training
    model.eval()
    objective.total(batch)  # an evaluation counts nowhere
    model.train()
    count, sums = objective.step_sums()
    policy, reference = models.whole(Path(recipe.base.folder)), models.whole(Path(recipe.base.folder))
    add_lora(policy, recipe.adapter.policy(), torch.float32)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in policy.named_parameters():
        if p.requires_grad:
            p.data.copy_(trained[name].full_tensor())
    with torch.no_grad():
        ref_chosen, ref_rejected = plainly(reference, batch).chunk(2)
    chosen, rejected = plainly(policy, batch).chunk(2)
    margins = (chosen - rejected) - (ref_chosen - ref_rejected)
    assert margins.abs().max() > 1e-3  # the adapters do something
    rewards = {"accuracies": (margins > 0).sum().item(), "margins": beta * margins.sum().item()}
    rewards = {f"rewards/{name}": value for name, value in rewards.items()}
    assert count == 3 and sums == pytest.approx(rewards, rel=1e-4)
    expected = torch.nn.functional.softplus(-beta * margins).sum()
    expected.backward()
    grads = {}
    for name, p in policy.named_parameters():
        if p.requires_grad:
            torch.distributed.all_reduce(p.grad)  # summed over ranks; the sharded ones are averaged
            off = p.grad / world - trained[name].grad.full_tensor()
            grads[name] = (off.abs().max() / p.grad.abs().max()).item()
    return loss.item(), expected.item(), max(grads.values()), len(grads)


def test_dpo_is_the_formula_of_the_paper_with_the_base_as_a_second_model(tmp_path):
    base = models.write("qwen3", tmp_path / "base")
    training = {"loss": "dpo", "dpo_beta": 0.3}
    sections = {"base": {"folder": str(base), "quantise": "none"}, "training": training}
    recipe = recipe_of(tmp_path, tmp_path / "run", **sections)
    for loss, expected, off, count in run_ranks(2, preference, recipe):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert off < 1e-4 and count == 2 * 7 * 2


def as_built(rank, world, recipe):
    """The model's state whole, its logits, and those without adapters."""
    model = build_model(recipe, RankPlace(rank, world, torch.device("cpu"), shardwright.mesh())).eval()
    tokens = models.tokens(0)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        trained = {n: p.full_tensor().clone() for n, p in model.named_parameters() if "lora_" in n}
        perturb(model)
        with without_adapters(model):
            plain = model(input_ids=tokens).logits
        changed = model(input_ids=tokens).logits
    assert (changed - plain).abs().max() > 1e-3
    return logits, plain, trained


def test_dora_begins_as_the_base_at_any_number_of_ranks_also_of_a_base_in_4_bits(tmp_path):
    base = models.write("llama", tmp_path / "base")
    sections = {
        "base": {"folder": str(base), "quantise": "nf4"},
        "adapter": {"rank": 2, "dora": True},
        "training": {"offload": "optimizer"},  # changes nothing on CPU ranks
    }
    recipe = recipe_of(tmp_path, tmp_path / "run", **sections)
    (whole,) = run_ranks(1, as_built, recipe)
    logits, plain, trained = whole
    assert torch.allclose(logits, plain, atol=1e-6)
    lengths = {name: t for name, t in trained.items() if name.endswith("magnitude_vector")}
    assert len(lengths) == 14 and all((t > 0).all() for t in lengths.values())
    sections["base"]["dequantise"] = "layer"
    for found in run_ranks(3, as_built, recipe_of(tmp_path, tmp_path / "run", **sections)):
        assert torch.allclose(found[0], logits, atol=1e-5)
        assert all(torch.equal(found[2][name], t) for name, t in trained.items())


MINE = """
from pathlib import Path
import torch, transformers

def focal(logits, targets):
    logits, targets = logits.float().flatten(0, 1), targets.flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).sum()

def slim(folder: Path, dtype):
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 77.0}
    return transformers.LlamaForCausalLM._from_config(config, dtype=dtype or torch.float32)
"""


def test_a_loss_and_a_model_of_ones_own_are_trained_and_merged(place, tmp_path, monkeypatch):
    (tmp_path / "my_functions.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    training = {"loss": "my_functions:focal", "epochs": 0, "steps": 4}
    sections = {"base": {"build": "my_functions:slim"}, "training": training, "heldout": {"every": 2}}
    recipe = recipe_of(place, tmp_path / "run", **sections)
    run_ranks(1, tune, recipe)
    heldout = losses(tmp_path / "run", "heldout_loss")
    plain = recipe_of(place, tmp_path / "plain", training={"epochs": 0, "steps": 1})
    run_ranks(1, tune, plain)
    assert heldout[4] < heldout[0] < losses(tmp_path / "plain", "heldout_loss")[0]  # focal is below it
    merged = load_whole(find_tuned(tmp_path / "run", trusted="my_functions:slim"), torch.device("cpu"))
    assert merged.config.rope_parameters["rope_theta"] == 77.0
    no_function = ("base.build", "my_functions:nosuch", "has no function 'nosuch'")
    no_module = ("training.loss", "nosuch:f", "there is no module 'nosuch'")
    for key, name, message in (no_module, no_function):
        with pytest.raises(InputError, match=f"{key} = .*{message}"):
            named(key, name)


def tune_and_tell(rank, world, recipe):
    """A run, and what its first rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        tune(rank, world, recipe, shown=rank == 0)
    return printed.getvalue()


def write_pairs(path):
    pairs = [{"prompt": f"{i} + 1?", "chosen": str(i + 1), "rejected": "no"} for i in range(40)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def test_dpo_from_a_recipe_learns_which_answer_is_preferred(place, tmp_path):
    write_pairs(tmp_path / "pairs.jsonl")
    toy = toy_of(place, tmp_path, "pairs.jsonl")
    toy += [("training.steps", "8"), ("optimizer.lr", "0.01"), ("optimizer.warmup_steps", "2")]
    printed, _ = run_ranks(2, tune_and_tell, resolve(RECIPES / "finetune-dpo.toml", toy).recipe)
    assert "nats per pair" in printed and "a sample of at most 3 tokens" in printed
    assert re.search(r"unigram entropy.*nats per token", printed) and "3 tokens that the model" in printed
    heldout = losses(tmp_path / "run", "heldout_loss")
    assert heldout[0] == pytest.approx(math.log(2), abs=1e-6)  # the model is its reference
    assert heldout[8] < 0.8 * heldout[0]
    summary = json.loads(RunFolder(tmp_path / "run").summary.read_text())
    assert summary["unit"] == "pair"
    right, by = (losses(tmp_path / "run", f"rewards/{name}") for name in ("accuracies", "margins"))
    assert by[1] == pytest.approx(0, abs=1e-6)  # the model is its reference
    assert right[8] == 1 and by[8] > 0.2
    plain = recipe_of(place, tmp_path / "none", data={"path": str(tmp_path / "pairs.jsonl")})
    run_ranks(1, needs_dpo, plain)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("finetune-*.toml")))
def test_every_recipe_trains_at_toy_size_and_exports_what_it_trained(name, place, tmp_path):
    write_pairs(tmp_path / "pairs.jsonl")
    pairs = "pairs.jsonl" if "dpo" in name else ""
    recipe = resolve(RECIPES / f"{name}.toml", toy_of(place, tmp_path, pairs)).recipe
    run_ranks(2, tune, recipe)
    run = tmp_path / "run"
    assert list(losses(run)) == [1, 2, 3] and all(map(math.isfinite, losses(run).values()))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["peak_nbytes"] == pytest.approx(summary["expected_peak_nbytes"], rel=0.3)
    adapted, exported = recipe.adapter.rank > 0, run / "exported" / "step-000003"
    assert (exported / "adapter_model.safetensors").exists() == adapted
    assert (exported / "config.json").exists() == (not adapted)


def toy_of(place, folder, pairs):
    """What differs from a recipe's own numbers, paths and names."""
    data = str(folder / pairs if pairs else place / "chats.jsonl")
    sizes = {"epochs": 0, "steps": 3, "batch_size": 2, "accumulation": 1, "sequence_length": 32}
    return [
        ("run.folder", str(folder / "run")),
        ("base.folder", str(place / "llama")),
        ("data.path", data),
        *((f"training.{key}", str(value)) for key, value in (sizes | {"log_every": 1}).items()),
        ("sample.num_bytes", "3"),
    ]


def needs_dpo(rank, world, recipe):
    with pytest.raises(DataError, match='set it to "dpo" for preferences'):
        tune(rank, world, recipe)


def test_a_run_whose_recipe_names_the_targets_that_were_the_default_is_resumed(place, tmp_path):
    named = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    run_ranks(1, tune, recipe_of(place, tmp_path / "whole"))
    expected = losses(tmp_path / "whole")
    half = max(expected) // 2
    named_recipe = recipe_of(place, tmp_path / "named", adapter={"targets": named})
    run_ranks(1, tune, named_recipe, False, half)
    run_ranks(1, tune, named_recipe, True)
    assert losses(tmp_path / "named") == pytest.approx(expected, abs=1e-4)
