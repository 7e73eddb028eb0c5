"""``[mesh]`` in recipes of the byte-level model: however ranks share the work, the losses are the same."""

import json
from types import SimpleNamespace

import pytest

from shardwright.cli import main
from shardwright.errors import ConfigError
from shardwright.recipe.resolve import resolve
from shardwright.train.expected import expected_of_bytes
from tests.ranks.pool import run_ranks
from tests.ranks.test_resume import train
from tests.ranks.test_train import RECIPE

EXACT = {"rel": 2e-6}  # losses are of fp32, summed in another order


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Six steps of four sequences; their number per rank follows from the mesh."""
    folder = tmp_path_factory.mktemp("mesh")
    (folder / "text").mkdir()
    for name in "ab":
        (folder / "text" / f"{name}.py").write_text("".join(f"{name}_{i} = {i}\n" for i in range(200)))
    text = RECIPE.format(text="text").replace("every = 15", "every = 3\nkeep = 3")
    text = text.replace("dropout = 0.1", "").replace("num_bytes = 20", "num_bytes = 1")
    (folder / "tiny.toml").write_text(text.replace("steps = 40", "steps = 6").replace("[launch]", MESH))
    return folder / "tiny.toml"


MESH = """
[optimizer]
warmup_steps = 2
[launch]"""


def losses(recipe, world, folder, *jobs):
    """Of the run in ``folder``, held-out ones too, after each of several jobs."""
    told = run_ranks(world, train, str(recipe), [({"run.folder": folder, **job}, {}) for job in jobs])[0]
    lines = (recipe.parent / folder / "metrics.jsonl").read_text().splitlines()
    return [row.get("loss", row.get("heldout_loss")) for row in map(json.loads, lines)], told


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
    more = {"optimizer.schedule": "constant", "run.resume": "auto"}
    expected, _ = losses(recipe, 2, "straight", of(cp=2, **more))
    parts = [of(cp, **more, **{"training.steps": steps}) for cp, steps in ((2, 2), (1, 4), (2, 6))]
    found, told = losses(recipe, 2, "parts", *parts)
    assert ["goes on after step" in each for each in told] == [False, True, True]
    assert [*found[:2], *found[3:5], *found[6:]] == pytest.approx(expected, **EXACT)


WRONG = {
    "mesh.cp: 3 ranks can't share training.sequence_length = 16 evenly; set it to 18": {"cp": 3},
    "mesh.cp: 4 ranks can't share model.num_heads = 2; take a divisor": {"cp": 4},
    "mesh.tp: it is for a model of [base]; take dp or cp": {"tp": 2},
    'mesh: ranks share more than parameters on "eager" only': {"cp": 2, "backend": "xla"},
    "mesh: a plan says how parameters are shared": {"replicate": 2, "plan": "plan.toml"},
    "mesh.dp (command line): got -1": {"dp": -1},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_a_mesh_can_not_share_is_refused_by_the_recipe(recipe, words):
    sections = {"backend": "launch", "plan": "training"}
    given = [(f"{sections.get(key, 'mesh')}.{key}", str(value)) for key, value in WRONG[words].items()]
    with pytest.raises(ConfigError) as caught:
        resolve(recipe, given)
    assert words in str(caught.value)


def test_stages_and_shared_experts_name_the_library_and_ranks_that_do_not_fit_leave_no_folder(recipe, capsys):
    other = recipe.with_name("other.toml")
    other.write_text("[mesh]\nep = 2\npp = 2\n")
    with pytest.raises(ConfigError, match=r"ep and pp: recipes share no experts.*write a script with shard"):
        resolve(other)
    assert main(["train", str(recipe), "--mesh.replicate", "4", "--run.folder", str(recipe.parent / "no")])
    said = capsys.readouterr().err
    assert "mesh: replicate=4 needs a multiple of 4 ranks, but the world has 2" in said
    assert not (recipe.parent / "no").exists()
