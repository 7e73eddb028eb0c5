"""``[mesh]`` in recipes of the byte-level model: however ranks share the work, the losses are the same."""

import json
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from shardwright.cli import main
from shardwright.errors import ConfigError
from shardwright.recipe.resolve import resolve
from shardwright.train.expected import expected_of_bytes
from tests.ranks.pool import run_ranks
from tests.ranks.test_resume import tiny_recipe, train

EXACT = {"rel": 2e-6}  # losses are of fp32, summed in another order


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Six steps of four sequences; their number per rank follows from the mesh."""
    changes = {"every = 15": "every = 3\nkeep = 3", "dropout = 0.1": "", "[launch]": MESH}
    return tiny_recipe(tmp_path_factory.mktemp("mesh"), changes)


MESH = """
[optimizer]
warmup_steps = 2
[launch]"""


def losses(recipe, world, folder, *jobs):
    """Of the run in ``folder``, held-out ones too, after each of several jobs."""
    told = run_ranks(world, train, str(recipe), [({"run.folder": folder, **job}, {}) for job in jobs])[0]
    lines = (recipe.parent / folder / "metrics.jsonl").read_text().splitlines()
    return [row.get("loss", row.get("heldout_loss")) for row in map(json.loads, lines)], told


def summary(recipe, folder):
    return json.loads((recipe.parent / folder / "summary.json").read_text())


def of(cp=1, replicate=1, samples=1, **more):
    """Options of a run of four sequences a step."""
    sizes = {"mesh.cp": cp, "mesh.replicate": replicate, "training.batch_size": 4 // samples, **more}
    return {key: str(value) for key, value in sizes.items()}


def test_ranks_that_share_sequences_or_hold_copies_train_as_those_that_do_not(recipe):
    expected, _ = losses(recipe, 2, "dp", of(samples=2))
    assert len(expected) == 7
    for world, folder, options in [
        (2, "cp", of(cp=2)),
        (2, "recomputed", of(cp=2, **{"training.activation_checkpointing": "true"})),
        (2, "replicate", of(replicate=2, samples=2)),
        (4, "both", of(cp=2, replicate=2, samples=2)),
    ]:
        found, (told,) = losses(recipe, world, folder, options)
        assert found == pytest.approx(expected, **EXACT), folder
        assert "expected peak of memory: " in told and "not known" not in told
    first, second = (json.loads((recipe.parent / name / "summary.json").read_text()) for name in ("dp", "cp"))
    assert first["heldout_loss"] == pytest.approx(second["heldout_loss"], **EXACT)
    rows = [(recipe.parent / name / "metrics.jsonl").read_text().splitlines()[0] for name in ("dp", "cp")]
    assert [json.loads(row)["tokens"] for row in rows] == [64, 64]


def test_a_rank_of_each_mesh_holds_what_it_is_expected_to_hold(recipe):
    """Of a model whose tensors are more than what a process is seen to hold by chance."""
    sizes = {"model.dim": 128, "model.hidden_dim": 256, "training.sequence_length": 64, "training.steps": 3}
    sizes = {key: str(value) for key, value in sizes.items()}
    peaks = {}
    for world, folder, options in [
        (2, "held-cp", of(cp=2)),
        (2, "held-replicate", of(replicate=2, samples=2)),
        (4, "held-both", of(cp=2, replicate=2, samples=2)),
    ]:
        losses(recipe, world, folder, options | sizes)
        summary = json.loads((recipe.parent / folder / "summary.json").read_text())
        peaks[folder] = summary["expected_peak_nbytes"]
        assert summary["peak_nbytes"] == pytest.approx(peaks[folder], rel=0.2), folder
    assert peaks["held-both"] < peaks["held-cp"] < peaks["held-replicate"]


def test_a_plan_of_a_recipe_is_of_its_mesh_and_expects_what_its_run_does(recipe, capsys):
    words = ["plan", str(recipe), "--device=H100", "--ranks=8", "--json"]
    mesh = "\n[mesh]\ncp = 2\nreplicate = 2\n"
    (shared := recipe.with_name("shared.toml")).write_text(recipe.read_text() + mesh)
    found = []
    for path in (recipe, shared):
        assert main([words[0], str(path), *words[2:]]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [(each["mesh"], each["shards"]) for each in found] == [(None, 8), ("cp=2", 4)]
    assert found[0]["microbatch_tokens"] == found[1]["microbatch_tokens"]
    place = SimpleNamespace(world=8, device_type="cuda")
    expected = expected_of_bytes(resolve(shared).recipe, place).total
    assert found[1]["peak_nbytes"] == pytest.approx(expected, rel=0.02)
    shared.write_text(recipe.read_text() + mesh + "dp = 4\n")
    assert main([words[0], str(shared), *words[2:]]) == 1
    assert "mesh: dp=4 x replicate=2 x cp=2 are not the 8 ranks" in capsys.readouterr().err


def test_a_run_goes_on_on_another_mesh_and_back(recipe):
    """The options ask for the same batch_size, so that it is the global batch which is kept."""
    more = {"optimizer.schedule": "constant", "run.resume": "auto", "training.accumulation": 2}
    expected, _ = losses(recipe, 2, "straight", of(cp=2, samples=2, **more))
    for folder, axis in (("sequences", {"mesh.cp": 2}), ("stages", {"mesh.pp": 2})):
        turns = ((axis, 2), ({}, 4), (axis, 6))
        parts = [of(samples=2, **more, **sizes, **{"training.steps": steps}) for sizes, steps in turns]
        found, told = losses(recipe, 2, folder, *parts)
        assert ["goes on after step" in each for each in told] == [False, True, True]
        assert [*found[:2], *found[3:5], *found[6:]] == pytest.approx(expected, **EXACT), folder


WRONG = {
    "mesh.cp: 3 ranks can't share training.sequence_length = 16 evenly; set it to 18": {"cp": 3},
    "mesh.cp: 4 ranks can't share model.num_heads = 2; take a divisor": {"cp": 4},
    "mesh.tp: it is for a model of [base]; take dp or cp": {"tp": 2},
    "mesh.ep: it is for a model of [base]; take dp or cp": {"ep": 2},
    'mesh: ranks share more than parameters on "eager" only': {"cp": 2, "backend": "xla"},
    "mesh: a plan says how parameters are shared": {"replicate": 2, "plan": "plan.toml"},
    "mesh.dp (command line): got -1": {"dp": -1},
    "mesh.pp: 2 stages need as many microbatches or more, got training.accumulation = 1": {"pp": 2},
    "mesh.pp: 3 stages need a block each, and a head": {"pp": 3, "accumulation": 3},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_a_mesh_can_not_share_is_refused_by_the_recipe(recipe, words):
    sections = {"backend": "launch", "plan": "training", "accumulation": "training"}
    given = [(f"{sections.get(key, 'mesh')}.{key}", str(value)) for key, value in WRONG[words].items()]
    with pytest.raises(ConfigError) as caught:
        resolve(recipe, given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"replicate": 4},
            "mesh: replicate=4 needs a multiple of 4 ranks, but the world has 2: ",
        ),
        ({"dp": 3}, "mesh: dp=3 is 3 ranks, but the world has 2: start 3 ranks, or leave dp out"),
    ],
    ids=str,
)
def test_ranks_that_do_not_fit_are_not_started(recipe, capsys, monkeypatch, sizes, words):
    monkeypatch.setattr("shardwright.cli.train.launch", lambda *_: pytest.fail("ranks were started"))
    given = [part for key, size in sizes.items() for part in (f"--mesh.{key}", str(size))]
    assert main(["train", str(recipe), *given, "--run.folder", str(recipe.parent / "no")])
    assert words in capsys.readouterr().err
    assert not (recipe.parent / "no").exists()


STAGES = {"mesh.pp": 2, "training.accumulation": 2}


def test_stages_train_as_one_process_and_their_model_is_whole(recipe):
    expected, _ = losses(recipe, 1, "one", of(**{"training.batch_size": 2, "training.accumulation": 2}))
    one = (load_file(recipe.parent / "one" / "model.safetensors"), summary(recipe, "one"))
    for world, folder, options in [
        (2, "stages", of(**STAGES, **{"training.batch_size": 2})),
        (2, "filled", of(**STAGES, **{"training.batch_size": 2, "mesh.pp_schedule": "GPipe"})),
        (4, "beside dp", of(**STAGES, **{"training.batch_size": 1})),
        (4, "beside cp", of(cp=2, **STAGES, **{"training.batch_size": 2})),
    ]:
        found, _ = losses(recipe, world, folder, options)
        assert found == pytest.approx(expected, **EXACT), folder
        tensors, told = load_file(recipe.parent / folder / "model.safetensors"), summary(recipe, folder)
        assert tensors.keys() == one[0].keys()
        for name, tensor in tensors.items():
            assert (tensor - one[0][name]).abs().max() < 1e-5, name
        for key in ("parameters", "full_nbytes", "sample"):
            assert told[key] == one[1][key], key
        assert told["at_rest_nbytes"] < one[1]["at_rest_nbytes"]
