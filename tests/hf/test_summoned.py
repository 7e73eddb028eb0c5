"""``generate`` inside of ``summon_full_params``, as scripts of reinforcement learning sample."""

import copy

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
import torch
import transformers

from shardwright import fully_shard
from shardwright.wrapper import FSDP, ModuleWrapPolicy
from tests.hf.models import config
from tests.ranks.pool import on_ranks


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("flat", [False, True], ids=["parameters", "flat"])
@on_ranks(2)
def test_generate_inside_of_summon_full_params_gives_the_tokens_of_one_process(flat, kind):
    torch.manual_seed(1)
    alone = transformers.AutoModelForCausalLM.from_config(config(kind)).eval()
    tokens = torch.randint(3, 90, (2, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = alone.generate(tokens, **options)
    whole = copy.deepcopy(alone)
    blocks = {type(alone.model.layers[0])}
    model = FSDP(alone, auto_wrap_policy=ModuleWrapPolicy(blocks), use_orig_params=not flat)
    for recurse, writeback in ((False, False), (True, False), (False, True)):
        with FSDP.summon_full_params(model, recurse=recurse, writeback=writeback):
            assert torch.equal(model.generate(tokens, **options), expected)
            assert torch.equal(model.lm_head.weight, whole.lm_head.weight)
    model.train()
    whole.train()
    for each in (model, whole):
        each(tokens, labels=tokens).loss.backward()
    norm = torch.stack([p.grad.norm() for p in whole.parameters()]).norm()
    assert torch.allclose(model.clip_grad_norm_(1e9), norm, rtol=1e-4)
    model = fully_shard(copy.deepcopy(whole), groups="auto").eval()
    with model.unsharded(recurse=False):
        assert torch.equal(model.generate(tokens, **options), expected)
