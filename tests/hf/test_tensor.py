"""Models of transformers whose layers ranks share: losses, gradients and steps are those of one process."""

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
import torch
from torch.nn import functional as F

import shardwright
from shardwright import fully_shard
from shardwright.errors import InputError
from shardwright.lora import Lora, add_lora
from shardwright.parallel import tensor_parallel
from tests.hf.test_context import build
from tests.ranks.models import Run, both_step
from tests.ranks.pool import run_ranks


def loss_of(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def trains(rank, world, kind):
    model, reference = build(kind), build(kind)
    mesh = shardwright.mesh(tp=2, model=model)
    fully_shard(tensor_parallel(model, mesh), mesh=mesh.shard, groups="auto")
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(3, 96, (mesh.num_samples, 2, 12), generator=generator)
        loss_of(model, tokens[mesh.sample_rank]).backward()
        torch.stack([loss_of(reference, each) for each in tokens]).mean().backward()
        both_step(ours, theirs, 1e-12)


@pytest.mark.parametrize(("kind", "world"), [("llama", 2), ("qwen3", 4), ("gemma", 2), ("phi3", 2)])
def test_models_train_by_their_plans_as_in_one_process(kind, world):
    run_ranks(world, trains, kind)


def refuses(rank, world):
    mesh = shardwright.mesh(tp=2)
    for kind, words in (
        ("mixtral", "its plan has .*experts"),
        ("gpt2", "has no plan"),
        ("llama", "sharded already"),
        ("qwen3", "q_proj has an adapter already; call tensor_parallel before add_lora"),
    ):
        model = build(kind)
        if kind == "llama":
            fully_shard(model, mesh=mesh.shard)
        if kind == "qwen3":
            add_lora(model, Lora())
        before = {name: type(param) for name, param in model.named_parameters()}
        with pytest.raises(InputError, match=words):
            tensor_parallel(model, mesh)
        assert {name: type(param) for name, param in model.named_parameters()} == before


def test_a_model_without_a_plan_that_is_known_is_refused_and_left_alone():
    run_ranks(2, refuses)
