"""Models of transformers over sequences that ranks share: losses and parameters are those of one process."""

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
import torch
import transformers
from torch.nn import functional as F

import shardwright
from shardwright import context_parallel, fully_shard
from shardwright.errors import InputError
from shardwright.parallel import document_positions, mean_over_tokens, shift_labels
from tests.hf import models
from tests.ranks.models import Run, both_step
from tests.ranks.pool import run_ranks

LENGTH = 16


def build(kind, chosen="sdpa"):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(models.config(kind), attn_implementation=chosen)
    if kind == "mixtral":
        model.set_experts_implementation("eager")  # torch multiplies experts together in float32 at most
    return model.double()


def sum_of(model, input_ids, labels, position_ids):
    logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def trains(rank, world, kind, recomputed):
    model, reference = build(kind), build(kind)
    mesh = shardwright.mesh(cp=world, model=model)
    context_parallel(model, mesh)
    fully_shard(model, mesh=mesh.shard, groups="auto")
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ours, theirs = Run.of(model), Run.of(reference)
    for step, packed in enumerate((False, True)):
        cuts = torch.tensor([0, 5, LENGTH] if packed else [0, LENGTH])
        positions, generator = document_positions(cuts), torch.Generator().manual_seed(step)
        tokens = torch.randint(3, 96, (1, LENGTH), generator=generator)
        batch = {"input_ids": tokens, "labels": shift_labels(tokens, positions), "position_ids": positions}
        part = mesh.split(batch)
        loss = mean_over_tokens(sum_of(model, **part), (part["labels"] != -100).sum(), mesh)
        loss.backward()
        expected = sum_of(reference, **batch) / (batch["labels"] != -100).sum()
        expected.backward()
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
        both_step(ours, theirs, 1e-10)


@pytest.mark.parametrize(
    ("kind", "recomputed"), [("llama", False), ("llama", True), ("qwen3", False), ("mixtral", False)], ids=str
)
def test_models_of_transformers_train_over_shared_sequences_as_in_one_process(kind, recomputed):
    run_ranks(2, trains, kind, recomputed)


def refuses(rank, world):
    mesh = shardwright.mesh(cp=world)
    with pytest.raises(InputError, match="attn_implementation='eager', which can't be exchanged"):
        context_parallel(build("llama", "eager"), mesh)
    model = context_parallel(build("gemma3"), mesh)
    part = mesh.split({"input_ids": torch.ones(1, LENGTH, dtype=torch.long)})
    with pytest.raises(InputError, match="attends to 8 tokens"):
        model(**part)
    with pytest.raises(InputError, match="without position_ids"):
        model(input_ids=part["input_ids"])


def test_attention_that_can_not_be_exchanged_is_refused():
    run_ranks(2, refuses)
