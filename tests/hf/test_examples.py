"""The example with a model of Hugging Face, by the command of docs/examples.md and with its other options."""

import math

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

import torch
import transformers
from safetensors.torch import load_file

from tests.fences import fences
from tests.ranks.test_examples import run_here


@pytest.fixture(scope="module")
def command():
    (command,) = [c for fence in fences("examples.md") for c in fence.commands if ".venv-hf/" in c]
    return command.removeprefix(".venv-hf/bin/")


def test_the_example_tunes_a_model_that_transformers_loads_and_reads_better(command, tmp_path):
    run_here(command, tmp_path)
    folder = tmp_path / "runs" / "huggingface"
    assert (folder / "picture.svg").stat().st_size > 3000
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokens = tokenizer("Args:\n    input: the input tensor of shape", return_tensors="pt")["input_ids"]
    losses = {}
    for name in ("base", "model"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
        with torch.no_grad():
            losses[name] = model(input_ids=tokens, labels=tokens).loss.item()
    assert losses["base"] == pytest.approx(math.log(512), abs=0.5)
    assert losses["model"] < losses["base"] - 1


def test_with_qlora_the_example_writes_adapters_of_every_matrix(command, tmp_path):
    run_here(f"{command} --qlora --bf16 --steps 3", tmp_path)
    adapters = load_file(tmp_path / "runs" / "huggingface" / "model" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 7  # two parts of each, two layers, seven matrices
    assert all(weight.abs().sum() > 0 for weight in adapters.values())
