"""``shardwright plan MODEL``: a config, a recipe or a row of numbers in; a table and a plan's file out."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.rankzero import rank_zero_of
from shardwright import MixedPrecisionPolicy, fully_shard
from shardwright.cli import main
from shardwright.errors import ConfigError
from shardwright.plan import Choice, Plan, largest_batch
from shardwright.plan.cluster import DEVICES, GIB, Cluster
from shardwright.plan.configs import architecture
from shardwright.plan.file import OFFLOADS
from shardwright.plan.memory import reserved
from shardwright.plan.predict import price
from shardwright.plan.subject import of_architecture
from shardwright.plan.transformer import Architecture, Microbatch
from shardwright.recipe.resolve import resolve
from shardwright.train.eager import plan_of

LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
ROW = (
    "model_id,n_layers,d_model,n_heads,n_kv_heads,head_dim,ffn_dim,ffn_gated,vocab_size,tied_embeddings,biases,"
    "norm,pos\neight,32,4096,32,8,128,14336,1,128256,0,0,rmsnorm,rope\n"
)
EIGHT = Architecture(32, 4096, 32, 8, 128, 14336, 128256)
H100 = DEVICES["H100"]
ON = ("--device", "H100", "--ranks", "64")


def config_in(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    return folder


def plan(capsys, *words, code=0):
    """What was printed by the command, in lines; of a refusal what standard error says."""
    assert main(["plan", *map(str, words)]) == code
    said = capsys.readouterr()
    return said.err if code else said.out.splitlines()


def test_numbers_of_a_config_are_those_of_its_type(tmp_path):
    assert architecture(config_in(tmp_path / "llama")) == EIGHT
    assert architecture(tmp_path / "llama" / "config.json") == EIGHT
    gemma = config_in(tmp_path / "gemma", model_type="gemma2", head_dim=256)
    assert architecture(gemma) == replace(EIGHT, head_dim=256, tied=True)
    tied = config_in(tmp_path / "qwen", model_type="qwen3", tie_word_embeddings=True)
    assert architecture(tied) == replace(EIGHT, tied=True)
    first = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    (tmp_path / "first.json").write_text(json.dumps(first))
    assert architecture(tmp_path / "first.json") == replace(EIGHT, n_kv_heads=32)


def test_a_config_and_a_row_of_the_same_numbers_give_the_same_table(tmp_path, capsys):
    config_in(tmp_path / "llama")
    (tmp_path / "models.csv").write_text(ROW)
    size = ("--sequence", 4096, "--batch", 1, "--microbatches", 3, "--price", 2.5)
    ours = plan(capsys, tmp_path / "llama", *ON, *size)
    row = plan(capsys, "eight", "--models", tmp_path / "models.csv", *ON, *size)
    assert [row[0].partition(" ")[2], *row[1:]] == [ours[0].partition(" ")[2], *ours[1:]]
    work = of_architecture(EIGHT, Microbatch(4096, 1)).workload
    found = price(work, Cluster(H100, 64), Choice(microbatches=3))
    fits = "(8.03 billion parameters) fits on 64 x H100 in 8 hosts with 3 x 4,096"
    assert ours[0].startswith(f"{tmp_path / 'llama'} {fits}")
    assert ours[1:] == [*found.table(2.5).splitlines()[1:], "", *found.by_phase().splitlines()]
    numel, phases = 8_030_261_248, found.phases
    held = {name: phase.total for name, phase in phases.items()}
    assert list(held) == ["load", "first step", "step", "evaluation", "save", "resume"]
    assert held["load"] == numel // 64 * 4
    assert held["save"] == held["resume"] == numel // 64 * 12
    assert phases["step"].nbytes == found.peak.nbytes
    assert held["first step"] == held["step"] - numel // 64 * 8
    logits = 4096 * 128256 * 2
    assert held["save"] + 2 * logits < held["evaluation"] < held["step"]
    assert phases["save"].disk == phases["resume"].disk == numel * 12
    assert phases["save"].host == numel * 12 // 64 and not phases["step"].host
    assert found.reserved_nbytes == int(reserved(found.peak.total, H100))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(x)


class LikeTransformers(nn.Module):
    """The names that modules have in a model of transformers."""

    def __init__(self, layers, tied):
        super().__init__()
        blocks = nn.ModuleList(Block() for _ in range(layers))
        model = {"embed_tokens": nn.Embedding(100, 64), "layers": blocks, "norm": nn.LayerNorm(64)}
        self.model = nn.ModuleDict(model)
        self.lm_head = nn.Linear(64, 100, bias=False)
        if tied:
            self.lm_head.weight = self.model["embed_tokens"].weight

    def forward(self, tokens):
        hidden = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            hidden = layer(hidden)
        return self.lm_head(self.model["norm"](hidden)).sum()


@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_of_a_config_is_applied_to_the_model_by_its_names(tied, tmp_path, capsys):
    config_in(tmp_path / "llama", tie_word_embeddings=tied)
    searched, asked = tmp_path / "searched.toml", tmp_path / "asked.toml"
    lines = plan(capsys, tmp_path / "llama", *ON, "--batch", 4, "--search", "--budget", 30, "--out", searched)
    assert "of 30.0 GiB (its budget)" in lines[0] and any(line.endswith("(chosen)") for line in lines)
    found = Plan.load(searched)
    assert found.peak_nbytes <= 30 * GIB
    assert found.microbatches * found.microbatch_tokens == 4 * 2048
    plan(capsys, tmp_path / "llama", *ON, "--batch", 4, "--out", asked)
    assert len(Plan.load(asked).groups) == 33
    for path in (searched, asked):
        with rank_zero_of(64):
            model = fully_shard(LikeTransformers(32, tied), plan=path)
            for _ in range(2):
                model(torch.zeros(2, 8, dtype=torch.int64)).backward()
            groups = Plan.load(path).groups
            assert str(model.schedule()).count("F+") == len(groups)
            assert groups[-1].modules == ("model.embed_tokens", "model.norm", "lm_head")
            assert not groups[-1].reshard_after_forward


RECIPE = """
[model]
num_layers = 4
dim = 64
num_heads = 4
hidden_dim = 96
[training]
batch_size = 8
sequence_length = 32
accumulation = 2
dtype = "bf16"
"""


def test_the_plan_of_a_recipe_is_for_its_batch_and_dtype(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(RECIPE)
    path = tmp_path / "plan.toml"
    lines = plan(capsys, tmp_path / "mine.toml", "--device", "A100", "--ranks", 2, "--out", path)
    assert "with 2 x 256 tokens on each a step" in lines[0]
    assert lines[-1] == f'{path}: fully_shard(model, plan="{path}") applies it'
    found = Plan.load(path)
    assert (found.ranks, found.microbatches, found.microbatch_tokens) == (2, 2, 256)
    assert found.mp_policy.param_dtype is torch.bfloat16
    assert ("blocks.0",) in [group.modules for group in found.groups]
    recipe = resolve(tmp_path / "mine.toml", [("training.plan", str(path))]).recipe
    assert plan_of(recipe) == found
    other = [("training.plan", str(path)), ("training.batch_size", "4"), ("training.dtype", "fp32")]
    says = r"sequence_length: got 128, expected 256; .*dtype: got fp32, expected"
    with pytest.raises(ConfigError, match=says):
        plan_of(resolve(tmp_path / "mine.toml", other).recipe)
    again = "training.activation_checkpointing"
    for says, key, value in (("schedule", "schedule.depth", "2"), (again, again, "true")):
        with pytest.raises(ConfigError, match=f"{says}: the plan "):
            resolve(tmp_path / "mine.toml", [("training.plan", str(path)), (key, value)])
    halved = plan(capsys, tmp_path / "mine.toml", "--device", "A100", "--ranks", 2, "--batch", 4)
    assert "with 2 x 128 tokens on each a step" in halved[0]


def test_the_plan_of_a_recipe_recomputes_what_the_recipe_does(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(RECIPE + "activation_checkpointing = true\n")
    words = (tmp_path / "mine.toml", "--device", "A100", "--ranks", 2, "--out", tmp_path / "plan.toml")
    for given, blocks in (((), 4), (("--recompute", 0), 0), (("--recompute", 0.5), 2)):
        plan(capsys, *words, *given)
        found = Plan.load(tmp_path / "plan.toml")
        (tmp_path / "plan.toml").unlink()
        assert found.modules_to_recompute == tuple(f"blocks.{n}" for n in range(blocks))


def test_a_cluster_of_a_file_is_in_place_of_a_device_and_ranks(tmp_path, capsys):
    config_in(tmp_path / "llama")
    Cluster(H100, 64).save(tmp_path / "cluster.toml")
    named = plan(capsys, tmp_path / "llama", *ON)
    assert plan(capsys, tmp_path / "llama", "--cluster", tmp_path / "cluster.toml") == named
    slower = replace(H100, matmul=0.4)
    Cluster(slower, 64).save(tmp_path / "cluster.toml")
    assert plan(capsys, tmp_path / "llama", "--cluster", tmp_path / "cluster.toml") != named


def test_the_command_asks_what_a_choice_in_python_asks(tmp_path, capsys):
    config_in(tmp_path)
    work = of_architecture(architecture(tmp_path), Microbatch(2048, 1)).workload
    cluster = Cluster(H100, 64)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for words, choice in (
        (("--runtime", "fsdp2"), Choice("fsdp2")),
        (("--shards", 8), Choice(shards=8)),
        (("--reshard-after-forward", "false"), Choice(reshard_after_forward=False)),
        (("--reshard-after-forward", "8"), Choice(reshard_after_forward=8)),
        (("--keep", "0.5"), Choice(keep=0.5)),
        (("--recompute", "0.5"), Choice(recompute=0.5)),
        (("--offload", "all"), Choice(offload=OFFLOADS["all"])),
        (("--reduce-dtype", "bfloat16"), Choice(mp_policy=half)),
    ):
        found = price(replace(work, name=str(tmp_path)), cluster, choice)
        assert plan(capsys, tmp_path, *ON, *words) == f"{found}\n\n{found.by_phase()}".splitlines()
    for words, says in (
        (("--recompute", 2), "Choice.recompute must be a number >= 0 and <= 1, got 2.0"),
        (("--shards", 3), "Choice.shards must divide the cluster's 64 ranks, got 3"),
    ):
        assert says in plan(capsys, tmp_path, *ON, *words, code=1)
    both = plan(capsys, tmp_path, *ON, "--runtime", "shardwright", "--runtime", "fsdp2")
    answers = [line for line in both if "fits on 64 x H100" in line]
    assert ["by fsdp2" in line for line in answers] == [False, True]


def test_a_recipe_is_traced_in_the_dtype_of_the_command(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(RECIPE)
    asked = (tmp_path / "mine.toml", "--device", "A100", "--ranks", 2, "--out", tmp_path / "plan.toml")
    plan(capsys, *asked, "--param-dtype", "float32")
    assert Plan.load(tmp_path / "plan.toml").mp_policy.param_dtype is torch.float32


def test_a_step_is_drawn_on_demand(tmp_path, capsys):
    config_in(tmp_path)
    plan(capsys, tmp_path, *ON, "--draw", tmp_path / "step.html")
    assert f"A step of {tmp_path} on 64 x H100" in (tmp_path / "step.html").read_text()


def test_a_drawing_that_cannot_be_saved_is_refused_before_anything_is_priced(tmp_path, capsys):
    says = plan(capsys, tmp_path, *ON, "--draw", "x.gif", code=1)
    assert "a drawing is saved as .html, .png or .svg, got 'x.gif'" in says


def test_the_answer_says_what_is_assumed_between_hosts(tmp_path, capsys):
    config_in(tmp_path / "llama")
    says = "Assumed between hosts: 200 GB/s in one direction, as usual for A100-80GB; write yours"
    lines = plan(capsys, tmp_path / "llama", "--device", "A100", "--ranks", 64)
    assert any(line.startswith(says) for line in lines)
    Cluster(DEVICES["A100-80GB"], 64, host_bandwidth=50e9).save(tmp_path / "cluster.toml")
    for words in (("--cluster", tmp_path / "cluster.toml"), ("--device", "A100", "--ranks", 8)):
        assert not any("Assumed" in line for line in plan(capsys, tmp_path / "llama", *words))


def test_the_answer_is_data_as_well_with_days_and_money(tmp_path, capsys):
    config_in(tmp_path)
    words = (tmp_path, *ON, "--tokens", "15e12", "--price", 2.5)
    (line,) = plan(capsys, *words, "--json")
    found = json.loads(line)
    assert (found["fits"], found["ranks"], found["hosts"], found["tokens"]) == (True, 64, 8, 15e12)
    assert found["days"] == pytest.approx(15e12 / found["tokens_per_s"] / 86400)
    assert found["cost"] == pytest.approx(found["days"] * 24 * 64 * 2.5)
    assert found["host_nbytes"] == 0 and found["network_assumed"]
    days = float(format(found["days"], ".3g"))
    assert f"15 trillion tokens in {days:,.10g} days" in plan(capsys, *words)[0]
    both = plan(capsys, *words, "--json", "--runtime", "shardwright", "--runtime", "fsdp2")
    assert [json.loads(line)["runtime"] for line in both] == ["shardwright", "fsdp2"]
    (searched,) = plan(capsys, *words, "--json", "--search", "--out", tmp_path / "plan.toml")
    assert json.loads(searched)["ways"][0]["step_s"] == Plan.load(tmp_path / "plan.toml").step_s
    (levers,) = plan(capsys, *words, "--json", "--savings")
    assert all(lever["nbytes"] > 0 for lever in json.loads(levers)["levers"])


def test_ranks_that_are_not_whole_hosts_are_refused_with_those_that_are(tmp_path, capsys):
    config_in(tmp_path)
    says = plan(capsys, tmp_path, "--device", "H100", "--ranks", 12, code=2)
    assert "12 ranks aren't whole hosts of 8: take 8 or 16, or describe hosts of another size" in says
    (tmp_path / "cluster.toml").write_text('ranks = 12\nranks_per_host = 6\ndevice = "H100"\n')
    assert "12 x H100 in 2 hosts" in plan(capsys, tmp_path, "--cluster", tmp_path / "cluster.toml")[0]


def test_what_does_not_fit_says_by_how_much_what_holds_it_and_what_to_try(tmp_path, capsys):
    config_in(tmp_path)
    found = largest_batch(of_architecture(EIGHT, Microbatch(128, 1)), Cluster(H100, 64))
    room = 0.867 * 80 * GIB
    for rows, fits in ((found.value, True), (found.value + 1, False)):
        lines = plan(capsys, tmp_path, *ON, "--sequence", 128, "--batch", rows)
        assert (") fits on " in lines[0], ") doesn't fit on " in lines[0]) == (fits, not fits)
        assert "of 69.4 GiB (80.0 less a reserve of 10.6)" in lines[0]
    over = (found.beyond.peak.total - room) / GIB
    assert f", {over:.1f} GiB too many (activations " in lines[0] and "tokens/s" not in lines[0]
    assert lines[1:] == [
        "",
        "It doesn't fit as it is: --search looks for a way that does; --budget GIB sets another limit.",
    ]
    words = ("--sequence", 128, "--batch", found.value + 1, "--budget", 75)
    assert ") fits on " in plan(capsys, tmp_path, *ON, *words)[0]


def test_a_recipe_whose_base_is_not_there_says_how_to_get_it(capsys):
    said = plan(capsys, "finetune-lora-real", *ON, code=1)
    assert "base.folder = 'models/llama': no such folder; it is a local folder" in said
    assert "`make finetune` makes it" in plan(capsys, "finetune-qlora", *ON, code=1)


HF = "transformers, which is not installed: pip install 'shardwright[hf]'"
NO_FOLDER = "can't be written: there is no folder no; make it first"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "takes a MODEL or --runs CSV"),
        (("nosuch", *ON), "MODEL 'nosuch' is neither a folder with a config.json"),
        (("nosuch.json", *ON), "MODEL 'nosuch.json' is neither a folder with a config.json nor such a file"),
        (("{}",), "needs --device NAME and --ranks N, or --cluster FILE"),
        (("{}", "--device", "H100"), "--ranks is missing"),
        (("{}", "--device", "abacus", "--ranks", 8), "no device 'abacus' is in the library"),
        (("{}", *ON, "--batch", 0), "--batch must be more than 0, got 0"),
        (("{}", *ON, "--tokens", 0), "--tokens must be more than 0, got 0"),
        (("{}", *ON, "--savings", "--recompute", 1), "--savings tries every --recompute by itself"),
        (("{}", *ON, "--search", "--keep", 1), "--search tries every --keep by itself"),
        (("{}", *ON, "--search", "--offload", "all"), "--search tries every --offload by itself"),
        (("{}", *ON, "--runtime", "fsdp1", "--runtime", "fsdp2", "--search"), "--search is of one --runtime"),
        (("{}", *ON, "--param-dtype", "float32"), "priced in 16 bits; --trace traces"),
        (("{}", *ON, "--base", "nf4"), "has no frozen weights, so none would be in 4 bits"),
        (("other", *ON, "--models", "{}/models.csv"), "has no model 'other'; it has eight"),
        (("eight", *ON, "--models", "{}/models.csv", "--out", "x"), "--out: a row of numbers has no names"),
        (("--runs", "x.csv"), "--runs needs --models CSV and --out CSV"),
        (
            ("--runs", "x", "--models", "y", "--out", "z", "--device", "H100", "--price=2"),
            "--device, --price: of no effect with --runs, which takes --models and --out alone; leave it out",
        ),
        (("{}", *ON, "--draw", "no/x.html"), f"no/x.html {NO_FOLDER}"),
        (("{}", *ON, "--out", "no/x.toml"), f"no/x.toml {NO_FOLDER}"),
        (("{}/phi", *ON), f"this needs {HF}"),
        (("{}/none", *ON), "vocab_size is None, expected a whole number above 0; a llama needs num_hidden"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_to_do(words, says, tmp_path, capsys):
    config_in(tmp_path)
    config_in(tmp_path / "phi", model_type="phi")
    config_in(tmp_path / "none", vocab_size=None)
    (tmp_path / "models.csv").write_text(ROW)
    assert says in plan(capsys, *(str(word).replace("{}", str(tmp_path)) for word in words), code=2)
