"""``[mesh]`` in recipes of fine-tuning: however ranks share the work, losses and models are one process's."""

import json

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

from safetensors.torch import load_file

from shardwright.errors import InputError
from shardwright.recipe.inputs import check_inputs
from shardwright.train.folder import RunFolder
from tests.hf.test_finetune import losses, recipe_of, tune
from tests.hf.test_finetune import place as place  # a fixture
from tests.ranks.pool import run_ranks

FULL = {"base": {"quantise": "none"}, "adapter": {"rank": 0}, "optimizer": {"lr": 1e-3}}


def trained(place, folder, world, sections, resume=False, steps=10**6, **mesh):
    """Losses by steps, held-out losses, and the exported model, of a run of twelve sequences a step."""
    num_samples = world // (mesh.get("cp", 1) * mesh.get("tp", 1))
    training = {"batch_size": 6 // num_samples, "accumulation": 2, **sections.get("training", {})}
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
        ({"cp": 4}, "mesh.cp = 4: 2 heads of .*llama can't be shared evenly; 1 or 2 would"),
        ({"tp": 4}, "mesh.tp = 4: 2 heads"),
        (
            {"tp": 2, "cp": 2},
            "mesh.cp = 2: 1 heads of each of tp = 2 ranks of .* can't be shared evenly; 1 would",
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
