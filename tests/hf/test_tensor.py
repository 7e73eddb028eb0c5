"""Models of transformers whose layers ranks share: losses, gradients and steps are those of one process."""

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright
from shardwright import fully_shard
from shardwright.errors import InputError
from shardwright.lora import Lora, add_lora
from shardwright.parallel import tensor_parallel
from shardwright.plan import Choice, estimate
from shardwright.plan.cluster import Cluster, device
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


class Reduced(TorchDispatchMode):
    """Bytes that are all-reduced, there and back."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.nbytes += 2 * args[0].nbytes
        return func(*args, **(kwargs or {}))


def exchanges(rank, world, kind):
    model = tensor_parallel(build(kind).bfloat16(), shardwright.mesh(tp=2)).train()
    with Reduced() as counted:
        loss_of(model, torch.ones(2, 12, dtype=torch.int64)).backward()
    parts = (getattr(param, "to_local", lambda p=param: p)() for param in model.parameters())
    return counted.nbytes, sum(part.numel() for part in parts)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_plan_of_ranks_that_share_layers_has_the_bytes_that_they_exchange_and_hold(kind):
    model, ids = build(kind), torch.ones(2, 12, dtype=torch.int64)
    before = dict(model.named_parameters())
    sample = {"input_ids": ids, "labels": ids, "use_cache": False}
    cluster = Cluster(device("H100"), 2, 2)
    alone, shared = (estimate(model, sample, cluster, Choice(tp=tp)) for tp in (1, 2))
    found = run_ranks(2, exchanges, kind)
    assert found == [(shared.exchanged["tp"], shared.workload.numel)] * 2
    assert shared.workload.parameters == alone.workload.numel
    assert shared.peak.total < alone.peak.total and shared.model_flops < alone.model_flops
    assert all(param is before[name] for name, param in model.named_parameters())


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
