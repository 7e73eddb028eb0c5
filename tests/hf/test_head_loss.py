"""The loss of fine-tuning at the model's head: that of all its logits, without them."""

import copy

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

import torch
import transformers
from torch.nn import functional as F

from shardwright import MixedPrecisionPolicy, hf
from shardwright.finetune.head import HeadLoss
from tests.hf.models import SIZES
from tests.ranks.pool import on_ranks

AT_HEAD = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "gemma": transformers.GemmaConfig(**SIZES, head_dim=8),
    "mistral": transformers.MistralConfig(**SIZES),
    "phi": transformers.PhiConfig(**SIZES),  # its head has a bias
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
CHANGED_AFTERWARDS = {
    "gemma2": transformers.Gemma2Config(**SIZES, head_dim=8),  # caps its logits
    "granite": transformers.GraniteConfig(**SIZES, logits_scaling=8.0),
}


def batch():
    torch.manual_seed(1)
    inputs = torch.randint(3, SIZES["vocab_size"], (2, 24))
    targets = inputs.roll(-1, 1)
    targets[:, :5] = -100
    return inputs, targets


def trained(model, loss):
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("kind", [*AT_HEAD, *CHANGED_AFTERWARDS])
def test_loss_and_gradients_are_those_of_the_models_logits(kind, caplog):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config((AT_HEAD | CHANGED_AFTERWARDS)[kind])
    twin = copy.deepcopy(model)
    inputs, targets = batch()
    logits = twin(input_ids=inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    wanted, grads = trained(twin, loss)
    found, ours = trained(model, HeadLoss(model)(inputs, targets))
    assert found == pytest.approx(wanted, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-5)
    assert ("changes what its head returns" in caplog.text) == (kind in CHANGED_AFTERWARDS)
    assert model(input_ids=inputs).logits.shape == logits.shape  # whoever else calls it gets its logits


def test_where_the_cap_of_logits_is_reached_the_loss_is_that_of_the_capped_ones(caplog):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CHANGED_AFTERWARDS["gemma2"])
    with torch.no_grad():  # a tied head that gives each token itself, so the first tokens have almost no loss
        for name, param in model.named_parameters():
            param.mul_(100 if "embed_tokens" in name else 0)
    inputs, targets = batch()
    logits = copy.deepcopy(model)(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
    wanted = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    assert F.cross_entropy(logits[:8], inputs[0, :8], reduction="sum") < 1 and logits.max() > 29
    assert HeadLoss(model)(inputs, targets).item() == pytest.approx(wanted.item(), rel=1e-6)
    assert "changes what its head returns" in caplog.text


@pytest.mark.parametrize("kind", ["llama", "phi"])
@on_ranks(2)
def test_so_they_are_where_the_head_is_sharded_and_shows_the_embeddings_weight(kind):
    torch.manual_seed(0)
    config = AT_HEAD[kind]
    config.tie_word_embeddings = True
    model = transformers.AutoModelForCausalLM.from_config(config)
    twin = copy.deepcopy(model)
    inputs, targets = batch()
    logits = twin(input_ids=inputs, use_cache=False).logits
    _, grads = trained(twin, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    hf.shard(model, mp_policy=MixedPrecisionPolicy())
    _, ours = trained(model, HeadLoss(model)(inputs, targets))
    for name, grad in grads.items():
        torch.testing.assert_close(ours[name].full_tensor(), grad, rtol=1e-4, atol=1e-5)
