"""What becomes of a fine-tuned run: merged, exported, sampled, chatted with; by the command."""

import errno
import os
import weakref

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

import torch
import transformers
from safetensors.torch import load_file, save_file

from shardwright import cli
from shardwright.checkpoint import shardfile
from shardwright.finetune import tuned
from shardwright.finetune.job import FineTuning
from shardwright.hf.load import encoded_names
from shardwright.lora import Lora, add_lora, save_adapter
from shardwright.quantized.codecs import codec_of
from shardwright.recipe.config import Recipe
from shardwright.recipe.resolve import Resolved
from shardwright.train.folder import RunFolder
from tests.hf import models
from tests.hf.test_finetune import alone, losses, recipe_of, resolve_origins, tune
from tests.hf.test_finetune import place as place  # a fixture
from tests.ranks.pool import run_ranks
from tests.ranks.test_lora import perturb

peft = pytest.importorskip("peft")


def a_tuned_run(root, base, sections, lora):
    """What a run of fine-tuning on ``base`` leaves, with adapters that no part of the sum leaves alone."""
    sections = {"base": {"folder": str(base), **sections}, "adapter": {"rank": lora.rank}}
    run = RunFolder(root)
    exported = run.exported(3)
    exported.mkdir(parents=True)
    run.write_config(Resolved(Recipe.model_validate(sections), "test.toml", resolve_origins()).to_toml())
    model = models.whole(base)
    add_lora(model, lora, torch.float32)
    save_adapter(exported, perturb(model), base=str(base))
    return exported


@torch.no_grad()
def decoded(model, codec):
    """The whole model with weights as a run reads them that has encoded its base."""
    for name, param in model.named_parameters():
        if codec != "none" and name in encoded_names(model):
            codes = codec_of(codec).encode(param)
            param.copy_(codec_of(codec).decode(*codes, tuple(param.shape), param.dtype))
    return model


def merged_by_peft(base, adapter, codec, dtype):
    """What ``merge_and_unload`` makes of the base as transformers loads it, encoded and decoded."""
    model = decoded(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype), codec)
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()


@pytest.mark.parametrize(
    ("kind", "codec", "dtype", "options"),
    [
        ("llama", "none", "fp32", {}),
        ("llama", "nf4", "bf16", {"rslora": True}),
        ("qwen3", "int8", "fp32", {"dora": True}),
        ("mixtral", "nf4-double", "fp32", {}),
        ("gemma", "nf4", "fp32", {}),  # tied
    ],
)
def test_a_merged_model_is_bit_for_bit_what_peft_merges(tmp_path, capsys, kind, codec, dtype, options):
    base = models.write(kind, tmp_path / "base")
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    stacked = ("experts.gate_up_proj", "experts.down_proj") if kind == "mixtral" else ()
    lora = Lora(("q_proj", "o_proj", *stacked), 3, 6, **options)
    exported = a_tuned_run(tmp_path / "run", base, {"quantise": codec, "dtype": dtype}, lora)
    assert cli.main(["merge", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert str(exported) in capsys.readouterr().out
    model = models.loaded_whole(tmp_path / "out")
    theirs = dict(merged_by_peft(base, exported, codec, wanted).named_parameters())
    plain = dict(models.whole(base).named_parameters())
    changed = set()
    for name, param in model.named_parameters():
        assert param.dtype == wanted
        if (options.get("dora") and "_proj" in name) or ".experts." in name:  # in another order
            assert torch.allclose(param, theirs[name], rtol=1e-6, atol=1e-7), name
        else:
            assert torch.equal(param, theirs[name]), name
        changed |= {name.split(".")[-2]} if not torch.equal(param, plain[name].to(wanted)) else set()
    assert {"q_proj", "o_proj"} <= changed
    assert bool(stacked) == ("experts" in changed)
    assert codec != "none" or changed == {"q_proj", "o_proj"}


def test_the_merged_model_of_each_epoch_of_qlora_has_its_held_out_loss_and_is_sampled_and_chatted_with(
    place, tmp_path, capsys, monkeypatch
):
    recipe = recipe_of(place, tmp_path / "run", sample={"prompt": "1", "num_bytes": 7})
    run_ranks(1, tune, recipe)
    run = str(tmp_path / "run")
    job = FineTuning(recipe, alone())
    batch = job.feed.heldout.batch(job.feed.heldout_rows)
    heldout = losses(tmp_path / "run", "heldout_loss")
    _, first, last = heldout  # before training, after each of two epochs
    assert heldout[first] - heldout[last] > 1e-3
    for merged, step in ((RunFolder(tmp_path / "run").exported(first), first), (run, last)):
        out = tmp_path / f"merged-{step}"
        assert cli.main(["merge", str(merged), str(out)]) == 0
        model = transformers.AutoModelForCausalLM.from_pretrained(out)
        with torch.no_grad():
            logits = model(batch.inputs, position_ids=batch.positions).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        assert loss.item() == pytest.approx(heldout[step], abs=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template

    said = "3 + 1?"
    asked = [{"role": "user", "content": said}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    likeliest = written(model, tokenizer, text, 6)  # all that the model has positions for
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", iter_lines([said, "/new", said]))
    assert cli.main(["chat", run, "--temperature", "0", "--num-tokens", "6"]) == 0
    assert capsys.readouterr().out == (likeliest + "\n") * 2
    assert cli.main(["sample", run, "--temperature", "0"]) == 0
    begun = tokenizer.bos_token + "1" if tokenizer.bos_token else "1"
    assert capsys.readouterr().out == "1" + written(model, tokenizer, begun, 7) + "\n"

    assert cli.main(["export", run, str(tmp_path / "adapter")]) == 0
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert cli.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "of-plain")]) == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "of-plain")
    with torch.no_grad():
        assert torch.allclose(loaded(batch.inputs).logits, plain(batch.inputs).logits, atol=1e-4)


def written(model, tokenizer, text, count):
    """The likeliest ``count`` tokens after ``text``, as transformers alone writes them."""
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = model.generate(tokens, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True)


def iter_lines(lines):
    """stdin, when it is a pipe with these lines."""
    read, write = os.pipe()
    with open(write, "w") as file:
        file.write("\n".join(lines) + "\n")
    return open(read)


def test_merging_holds_two_tensors_at_most_and_leaves_nothing_half_written(tmp_path, monkeypatch, capsys):
    base = models.write("llama", tmp_path / "base")
    a_tuned_run(tmp_path / "run", base, {}, Lora(("*_proj",), 2))
    alive, most, real = weakref.WeakSet(), [], tuned.read_tensor

    def counted(*given):
        tensor = real(*given)
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(tuned, "read_tensor", counted)
    command = ["merge", str(tmp_path / "run"), str(tmp_path / "out")]
    assert cli.main(command) == 0
    assert max(most) <= 2 and len(most) == len(load_file(tmp_path / "out" / "model.safetensors"))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert cli.main(command) == 2
    assert "exists already" in capsys.readouterr().err
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    writes = iter(range(5))

    def full(*given):
        if next(writes, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shardfile, "write_all", full)
    assert cli.main([*command[:2], str(tmp_path / "full")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "run"]


def refusal(capsys, *command):
    assert cli.main([str(word) for word in command]) == 1
    return capsys.readouterr().err


def test_what_cannot_be_merged_is_refused_with_the_remedy(place, tmp_path, capsys):
    base, out = models.write("gemma", tmp_path / "base"), tmp_path / "out"
    exported = a_tuned_run(tmp_path / "run", base, {}, Lora(("q_proj",), 2))
    assert "is a whole model already" in refusal(capsys, "merge", base, out)
    assert "holds no fine-tuned model" in refusal(capsys, "merge", place / "text", out)
    base.rename(tmp_path / "moved")
    assert "with --base" in refusal(capsys, "merge", tmp_path / "run", out)
    assert cli.main(["merge", str(exported), str(tmp_path / "found"), "--base", str(tmp_path / "moved")]) == 0
    capsys.readouterr()
    other = models.write("gpt2", tmp_path / "other")
    assert "don't fit in" in refusal(capsys, "merge", tmp_path / "run", out, "--base", other)
    head = a_tuned_run(tmp_path / "tied", tmp_path / "moved", {}, Lora(("q_proj",), 2))
    tensors = load_file(head / "adapter_model.safetensors")
    ends = {n.rpartition("q_proj.")[2]: t for n, t in tensors.items()}
    ends = {f"base_model.model.lm_head.{name}": tensor for name, tensor in ends.items()}
    save_file(ends, head / "adapter_model.safetensors")
    assert "untie them in the base" in refusal(capsys, "merge", tmp_path / "tied", out)
    (head / "adapter_model.safetensors").write_bytes(b"cut")
    assert "adapter_model.safetensors: not readable" in refusal(capsys, "merge", tmp_path / "tied", out)
    assert not out.exists()


WRITES = """
import pathlib, transformers

pathlib.Path("marker").touch()

def build(folder, dtype):
    (folder / "marker").touch()
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
"""


def test_the_function_that_a_folder_names_for_its_model_runs_only_if_the_command_names_it_too(
    tmp_path, capsys, monkeypatch
):
    base, run, out = models.write("llama", tmp_path / "base"), tmp_path / "run", tmp_path / "out"
    (tmp_path / "theirs.py").write_text(WRITES)
    monkeypatch.chdir(tmp_path)
    exported = a_tuned_run(run, base, {"build": "theirs:build"}, Lora(("q_proj",), 2))
    assert cli.main(["export", str(run), str(tmp_path / "adapter")]) == 0  # copies; needs no model
    for command in (["merge", run, out], ["merge", exported, out], ["sample", run], ["chat", run]):
        told = refusal(capsys, *command)
        assert "'theirs:build'" in told and "--build theirs:build" in told, told
    other = refusal(capsys, "merge", run, out, "--build", "shutil:rmtree")
    assert "'theirs:build'" in other and "'shutil:rmtree'" in other
    assert not list(tmp_path.rglob("marker")) and not out.exists()
    assert cli.main(["merge", str(run), str(out), "--build", "theirs:build"]) == 0
    assert (base / "marker").exists() and (out / "model.safetensors").exists()
    a_tuned_run(tmp_path / "plain", base, {}, Lora(("q_proj",), 2))
    told = refusal(capsys, "merge", tmp_path / "plain", tmp_path / "new", "--build", "theirs:build")
    assert "leave --build out" in told
