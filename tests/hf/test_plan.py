"""``shardwright plan`` of models of transformers: traced as they are, on the meta device."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

import torch
import transformers

from shardwright import MixedPrecisionPolicy
from shardwright.cli import main
from shardwright.finetune.engine import adapted_model
from shardwright.finetune.expected import expected_peak, subject_of
from shardwright.hf.load import encoded_names
from shardwright.plan import Choice, Plan, estimate
from shardwright.plan.cluster import DEVICES, Cluster
from shardwright.plan.configs import architecture
from shardwright.plan.predict import price
from shardwright.plan.subject import of_architecture
from shardwright.plan.transformer import Microbatch
from shardwright.plan.workload import OpKind
from shardwright.quantized.codecs import codec_of
from shardwright.recipe.resolve import resolve
from shardwright.schedule.schedule import Phase
from tests.hf import models
from tests.hf.models import SIZES

EIGHT = Cluster(DEVICES["H100"], 8)
CONFIGS = {
    **{kind: models.config(kind) for kind in ("llama", "qwen2", "gemma", "mistral", "phi")},
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def matmuls(work):
    return sum(op.flops for _, s in work.phases[Phase.FORWARD] for op in s.ops if op.kind is OpKind.MATMUL)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_of_transformers_is_planned_as_it_is(kind, tmp_path, capsys):
    CONFIGS[kind].save_pretrained(tmp_path)
    sized = ("--device=H100", "--ranks=8", "--sequence=16", "--batch=2")
    assert main(["plan", str(tmp_path), *sized, "--trace", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    assert out["parameters"] == sum(param.numel() for param in model.parameters())
    assert (out["microbatches"], out["microbatch_tokens"]) == (1, 32)
    tokens = torch.empty(2, 16, dtype=torch.int64)
    found = estimate(model, {"input_ids": tokens, "labels": tokens, "use_cache": False}, EIGHT, Choice())
    names = [group.name for group in found.workload.groups]
    assert {"model.layers.0", "model.layers.1"} <= set(names)
    assert sum(group.numel for group in found.workload.groups) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma", "mixtral"])
def test_what_is_traced_are_the_matmuls_of_the_numbers_in_the_config(kind, tmp_path):
    CONFIGS[kind].save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    tokens = torch.empty(2, 16, dtype=torch.int64)
    found = estimate(model, {"input_ids": tokens, "labels": tokens, "use_cache": False}, EIGHT)
    row = of_architecture(architecture(tmp_path), Microbatch(16, 2)).workload
    assert matmuls(found.workload) == matmuls(row)


def test_the_experts_of_a_mixture_count_for_the_tokens_that_they_see():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS["mixtral"])
    tokens = torch.empty(2, 16, dtype=torch.int64)
    found = estimate(model, {"input_ids": tokens, "labels": tokens, "use_cache": False}, EIGHT)
    width, inner, layers, heads = 32, 48, 2, 4
    experts = 2 * 32 * 2 * 3 * width * inner * layers  # two for each of 32 tokens
    attention = 2 * 32 * (2 * width * width + 2 * width * width * 2 // heads) * layers
    rest = 2 * 32 * (width * 96 + layers * width * 4)  # head, and routers
    assert matmuls(found.workload) == experts + attention + rest
    sample = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    in_fp32 = estimate(model, sample, EIGHT, Choice(mp_policy=MixedPrecisionPolicy()))
    assert matmuls(in_fp32.workload) == matmuls(found.workload)


def test_a_type_that_has_no_numbers_is_traced_without_being_asked(tmp_path, capsys):
    CONFIGS["phi"].save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--device", "H100", "--ranks", "8", "--sequence", "16"]) == 0
    assert ") fits on 8 x H100" in capsys.readouterr().out


def tuned(folder, name, sizes=SIZES):
    """A recipe of the package, for a folder that has a config and no weights."""
    transformers.LlamaConfig(**sizes).save_pretrained(folder / "base")
    text = Path("recipes", f"finetune-{name}.toml").read_text()
    for given in ("runs/quickstart-llama", "models/llama"):
        text = text.replace(given, str(folder / "base"))
    (folder / "mine.toml").write_text(text)
    return folder / "mine.toml"


@pytest.mark.parametrize("name", ["full", "lora", "qlora", "qlora-real"])
def test_a_recipe_of_fine_tuning_holds_what_its_run_expects_to_hold(name, tmp_path, capsys):
    path = tuned(tmp_path, name)
    sized = ["--sequence", "32", "--batch", "2", "--microbatches", "1"]
    out = tmp_path / "plan.toml"
    on = ("--device", "H100", "--ranks", "8")
    assert main(["plan", str(path), *on, *sized, "--out", str(out), "--json"]) == 0
    sizes = [("training.sequence_length", "32"), ("training.batch_size", "2"), ("training.accumulation", "1")]
    recipe = resolve(path, sizes).recipe
    expected = expected_peak(recipe, SimpleNamespace(world=8, device_type="cuda"))
    plan, base = Plan.load(out), "nf4" if "qlora" in name else "plain"
    choice = Choice(mp_policy=plan.mp_policy, base=base)
    assert price(subject_of(recipe, choice).workload, EIGHT, choice).peak.total == expected.total
    recomputes = recipe.training.activation_checkpointing
    assert plan.peak_nbytes == (pytest.approx(expected.total, rel=0.1) if recomputes else expected.total)
    blocks = ("model.layers.0", "model.layers.1")
    assert (plan.base, plan.modules_to_recompute) == (base, blocks if recomputes else ())
    model = adapted_model(recipe)
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == sum(param.numel() for param in model.parameters())
    assert answer["fits"] and (answer["error"] is None) == (base == "nf4")


def test_a_base_decoded_per_use_is_expected_to_hold_its_largest_weight_and_no_decoded_group(tmp_path):
    path, place = tuned(tmp_path, "qlora"), SimpleNamespace(world=8, device_type="cuda")
    sizes = [("training.sequence_length", "8"), ("training.batch_size", "1")]
    by_group = expected_peak(resolve(path, sizes).recipe, place)
    by_layer = expected_peak(resolve(path, [*sizes, ("base.dequantise", "layer")]).recipe, place)
    assert by_layer.total < by_group.total
    recipe = resolve(path, [*sizes, ("base.dequantise", "layer")]).recipe
    work = subject_of(recipe, Choice()).workload
    params = dict(adapted_model(recipe).named_parameters())
    largest = max(params[name].numel() for name in encoded_names(adapted_model(recipe)))
    assert max(group.per_use for group in work.groups) == largest
    assert all(group.decoded(4) == 0 for group in work.groups)


def test_a_search_keeps_the_encoding_of_a_recipe(tmp_path, capsys):
    path, out = tuned(tmp_path, "qlora"), tmp_path / "plan.toml"
    on = ("--device", "H100", "--ranks", "8", "--batch", "1", "--sequence", "32")
    assert main(["plan", str(path), *on, "--search", "--out", str(out)]) == 0
    assert Plan.load(out).base == "nf4"


def test_codes_that_are_not_nf4_count_with_their_own_bytes(tmp_path, capsys):
    path = tuned(tmp_path, "qlora")
    path.write_text(path.read_text().replace('"nf4"', '"int8"'))
    recipe = resolve(path).recipe
    found = price(subject_of(recipe, Choice()).workload, EIGHT, Choice())
    names = encoded_names(adapted_model(recipe))
    params = dict(adapted_model(recipe).named_parameters())
    codes = sum(part.nbytes for name in names for part in codec_of("int8").encode(params[name].detach()))
    assert sum(group.coded[1] for group in found.workload.groups) == codes


def test_preferences_have_no_price_and_the_error_says_what_has(tmp_path, capsys):
    on = ("--device", "H100", "--ranks", "8")
    assert main(["plan", str(tuned(tmp_path, "dpo")), *on]) == 2
    assert "plan the recipe with 'cross-entropy'" in capsys.readouterr().err
