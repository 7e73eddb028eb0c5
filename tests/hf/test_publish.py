"""Published models of transformers: what it loads, and the worked example of docs/publish.md."""

import re
import sys

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

import torch
import transformers

from shardwright import full_state_dict, fully_shard, publish
from tests.fences import ROOT, fences, run_command
from tests.hf.models import config
from tests.ranks.pool import run_ranks


def writes(rank, world, folder, kind):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(kind))
    fully_shard(model, groups="auto")
    with publish(model, folder, dtype=torch.bfloat16) as publisher:
        publisher.send()
    return {name: tensor.to(torch.bfloat16) for name, tensor in full_state_dict(model).items()}


@pytest.mark.each_case
@pytest.mark.parametrize("kind", ["llama", "gemma", "mixtral"])  # plain, tied, with experts in one tensor
def test_transformers_loads_a_version_bit_for_bit(kind, tmp_path):
    whole = run_ranks(2, writes, str(tmp_path / "published"), kind)[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "published" / "step-000001", dtype="auto"
    )
    state = loaded.state_dict()
    assert loaded.dtype == torch.bfloat16 and state.keys() == whole.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in whole.items())


@pytest.mark.slow
def test_the_example_learns_from_what_its_sampler_writes():
    (command,) = [c for fence in fences("publish.md") for c in fence.commands if ".venv-hf/" in c]
    start = f"{sys.executable} -m torch.distributed.run --standalone"
    wrote = run_command(f"{command.replace('.venv-hf/bin/torchrun', start)} --steps 12", ROOT, limit_s=300.0)
    rewards = [float(found) for found in re.findall(r"version \d+: (\S+) of", wrote)]
    assert len(rewards) == 12 and sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
