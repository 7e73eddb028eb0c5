"""``[mesh]`` in recipes of fine-tuning: however ranks share the work, losses and models are one process's."""

import json
import shutil

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

import torch
import transformers
from safetensors.torch import load_file

import shardwright
from shardwright.errors import InputError
from shardwright.finetune.stages import cut_model
from shardwright.recipe.inputs import check_inputs
from shardwright.train.folder import RunFolder
from tests.hf import models
from tests.hf.models import EXPERTS, SIZES
from tests.hf.test_finetune import losses, recipe_of, tune
from tests.hf.test_finetune import place as place  # a fixture
from tests.ranks.pool import run_ranks

CONFIGS = {
    "qwen3": lambda sizes: transformers.Qwen3Config(**sizes, head_dim=8),
    "qwen3_moe": lambda sizes: transformers.Qwen3MoeConfig(**sizes, **EXPERTS, head_dim=8),
    "mixtral": lambda sizes: transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2),
}
FULL = {"base": {"quantise": "none"}, "adapter": {"rank": 0}, "optimizer": {"lr": 1e-3}}


@pytest.fixture(scope="module")
def bases(place):
    """Folders of random models by their kinds, with the tokenizer of bytes."""
    sizes = SIZES | {"vocab_size": 256, "num_key_value_heads": 4}
    folders = {kind: place / kind for kind in CONFIGS}
    for kind, folder in folders.items():
        torch.manual_seed(7)
        transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](sizes)).save_pretrained(folder)
        for file in (place / "llama").glob("tokenizer*"):
            shutil.copy(file, folder)
    return folders


def trained(place, folder, world, sections, resume=False, steps=10**6, **mesh):
    """Losses by steps, held-out losses, and the exported model, of a run of twelve sequences a step."""
    num_samples = world // (mesh.get("cp", 1) * mesh.get("tp", 1) * mesh.get("pp", 1))
    each = 12 // num_samples
    times = 2 - each % 2
    training = {"batch_size": each // times, "accumulation": times, **sections.get("training", {})}
    recipe = recipe_of(place, folder, **{**sections, "training": training, "mesh": mesh})
    run_ranks(world, tune, recipe, resume, steps)
    found = losses(folder)
    last = RunFolder(folder).exported(max(found))
    tensors = {name: t for file in last.glob("*.safetensors") for name, t in load_file(file).items()}
    return found, losses(folder, "heldout_loss"), tensors


def assert_same(found, expected):
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert found[2].keys() == expected[2].keys()
    for name, tensor in found[2].items():
        assert (tensor - expected[2][name]).abs().max() < 2e-3, name


@pytest.mark.parametrize("kind", ["full", "one record each", "nf4"])
def test_ranks_that_share_sequences_learn_what_one_process_learns(place, tmp_path, kind):
    sections = {} if kind == "nf4" else FULL
    if kind == "one record each":
        sections = {**sections, "data": {"packing": False}, "training": {"sequence_length": 30}}
    expected = trained(place, tmp_path / "one", 1, sections)
    assert_same(trained(place, tmp_path / "cp", 2, sections, cp=2), expected)
    summary = json.loads((tmp_path / "cp" / "summary.json").read_text())
    assert "shardwright sample RUN" in summary["sample"]
    assert losses(tmp_path / "cp", "tokens") == losses(tmp_path / "one", "tokens")


def test_a_run_whose_ranks_shared_sequences_goes_on_without_and_back(place, tmp_path):
    expected = trained(place, tmp_path / "one", 1, FULL)
    steps = max(expected[0])
    for size, first, then in ((6, {"cp": 2}, {}), (3, {}, {"cp": 2})):  # both ask for it, and keep the batch
        tune_part = (place, tmp_path / str(size), 2, {**FULL, "training": {"batch_size": size}})
        trained(*tune_part, steps=steps // 2, **first)
        assert_same(trained(*tune_part, resume=True, **then), expected)


def test_a_run_whose_ranks_shared_layers_goes_on_without_and_back(place, tmp_path):
    steps = max((expected := trained(place, tmp_path / "one", 1, FULL))[0])
    for first, then in ((2, 1), (1, 2)):
        folder = tmp_path / str(first)
        trained(place, folder, first, FULL, steps=steps // 2, tp=first)
        assert_same(trained(place, folder, then, FULL, resume=True, tp=then), expected)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"cp": 4}, "mesh: cp=4 doesn't divide 2 heads of .*llama: 1 or 2 would"),
        ({"tp": 4}, "mesh: tp=4 doesn't divide 2 heads of .*llama: 1 or 2 would"),
        (
            {"tp": 2, "cp": 2},
            "mesh: cp=2 doesn't divide 1 heads of each of tp=2 ranks of .*llama: 1 would",
        ),
    ],
)
def test_heads_that_a_mesh_can_not_share_are_refused_before_anything_is_read(place, tmp_path, mesh, words):
    with pytest.raises(InputError, match=words):
        check_inputs(recipe_of(place, tmp_path / "run", **FULL, mesh=mesh))


def test_ranks_that_share_layers_learn_what_one_process_learns_and_export_it_whole(place, tmp_path):
    expected = trained(place, tmp_path / "one", 1, FULL)
    assert_same(trained(place, tmp_path / "tp", 2, FULL, tp=2), expected)
    one, tp = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("one", "tp"))
    assert tp["sample"] == one["sample"]
    assert [tp[key] for key in ("parameters", "full_nbytes")] == [one["parameters"], one["full_nbytes"]]
    assert tp["at_rest_nbytes"] < one["at_rest_nbytes"]
    for run in (one, tp):
        assert run["peak_nbytes"] == pytest.approx(run["expected_peak_nbytes"], rel=0.2)
    assert losses(tmp_path / "tp", "tokens") == losses(tmp_path / "one", "tokens")
    assert losses(tmp_path / "tp", "grad_norm") == pytest.approx(
        losses(tmp_path / "one", "grad_norm"), rel=1e-4
    )


def assert_goes_on_elsewhere(place, folder, world, sections, mesh):
    """A run that is begun on a mesh, goes on in one process and ends on the mesh is that of one process."""
    expected = trained(place, folder / "one", 1, sections)
    parts = folder / "parts"
    trained(place, parts, world, sections, steps=2, **mesh)
    trained(place, parts, 1, sections, resume=True, steps=2)
    assert_same(trained(place, parts, world, sections, resume=True, **mesh), expected)


@pytest.mark.parametrize(
    ("adapter", "mesh"),
    [
        ({"rank": 0}, {"tp": 2, "replicate": 2}),
        ({"rank": 0}, {"tp": 2, "cp": 2}),
        ({"rank": 4}, {"tp": 2}),
        ({"rank": 4, "dora": True}, {"tp": 2, "cp": 2}),
    ],
    ids=str,
)
def test_layers_are_shared_beside_sequences_and_copies_and_with_adapters(
    place, bases, tmp_path, adapter, mesh
):
    sections = {"base": {"quantise": "none", "folder": str(bases["qwen3"])}, "adapter": adapter}
    assert_goes_on_elsewhere(place, tmp_path, 4, sections, mesh)


@pytest.mark.parametrize(("key", "what"), [("tp", "layers"), ("ep", "experts")])
def test_a_base_in_codes_is_not_shared(place, tmp_path, key, what):
    with pytest.raises(ValueError, match=rf"mesh.{key}: ranks can't share {what} of a base in nf4"):
        recipe_of(place, tmp_path / "run", mesh={key: 2})


@pytest.mark.parametrize(
    ("kind", "rank", "world", "mesh"),
    [
        ("mixtral", 0, 2, {"ep": 2}),
        ("qwen3_moe", 0, 4, {"ep": 2, "replicate": 2}),
        ("mixtral", 4, 4, {"ep": 4, "cp": 2}),
    ],
    ids=str,
)
def test_experts_are_shared_and_the_balance_of_their_tokens_is_logged(
    place, bases, tmp_path, kind, rank, world, mesh
):
    sections = {"base": {"quantise": "none", "folder": str(bases[kind])}, "adapter": {"rank": rank}}
    assert_goes_on_elsewhere(place, tmp_path, world, sections, mesh)
    for key in ("experts/largest", "experts/idle", "grad_norm"):
        found, expected = (losses(tmp_path / run, key) for run in ("parts", "one"))
        assert len(expected) == 8 and expected[1] > 0 - (key == "experts/idle")
        assert found == pytest.approx(expected, rel=1e-3), key
    one, parts = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("one", "parts"))
    assert [parts[key] for key in ("parameters", "full_nbytes")] == [one["parameters"], one["full_nbytes"]]


@pytest.mark.parametrize(
    ("kind", "world", "mesh"),
    [
        ("qwen3", 2, {"pp": 2}),
        ("qwen3", 4, {"pp": 2, "pp_schedule": "GPipe"}),
        ("mixtral", 4, {"pp": 2, "cp": 2}),
        ("qwen3", 4, {"pp": 2, "tp": 2}),
    ],
    ids=str,
)
def test_stages_train_as_one_process_and_export_the_whole_model(place, bases, tmp_path, kind, world, mesh):
    sections = {"base": {"quantise": "none", "folder": str(bases[kind])}, "adapter": {"rank": 0}}
    assert_goes_on_elsewhere(place, tmp_path, world, sections, mesh)
    one, parts = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("one", "parts"))
    assert [parts[key] for key in ("parameters", "full_nbytes")] == [one["parameters"], one["full_nbytes"]]
    assert parts["at_rest_nbytes"] < one["at_rest_nbytes"]
    assert losses(tmp_path / "parts", "grad_norm") == pytest.approx(
        losses(tmp_path / "one", "grad_norm"), rel=1e-3
    )


def refuses_to_cut(rank, world):
    mesh = shardwright.mesh(pp=2)
    for config, words in (
        (models.config("gpt2"), "GPT2LMHeadModel has no plan of stages"),
        (models.config("gemma"), r"lm_head.weight of GemmaForCausalLM is the embedding's weight"),
        (transformers.GraniteConfig(**SIZES, embedding_multiplier=2.0), "changes hidden states"),
        (transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1}), "has 1 blocks; 1 to 1 would fit"),
    ):
        with torch.device("meta"):
            model, other = (transformers.AutoModelForCausalLM.from_config(config) for _ in range(2))
        before = [*model.state_dict()]
        with pytest.raises(InputError, match=words):
            cut_model(model, other, mesh)
        assert [*model.state_dict()] == before


def test_models_that_can_not_be_cut_into_stages_are_refused_and_left_alone():
    run_ranks(2, refuses_to_cut)
