"""The families that people fine-tune, tiny and random: loaded, tuned by two ranks, saved, merged, read back.

Beside each runs transformers alone, in one process, with peft's adapters on the base as it was decoded.
"""

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")
import torch
import transformers
from safetensors.torch import load_file

from shardwright import hf
from shardwright.finetune import afterwards
from shardwright.finetune.apart import keeps_apart
from shardwright.finetune.head import HeadLoss
from shardwright.finetune.tuned import find_tuned
from shardwright.lora import add_lora, save_adapter
from shardwright.recipe.config import AdapterConfig, Recipe
from shardwright.recipe.resolve import Resolved
from shardwright.train.folder import RunFolder
from tests.hf import models
from tests.hf.test_afterwards import decoded, merged_by_peft
from tests.hf.test_finetune import resolve_origins
from tests.ranks.pool import run_ranks

peft = pytest.importorskip("peft")

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral", "phi", "phi3")
FAMILIES += ("mixtral", "qwen2_moe", "qwen3_moe")
STEPS, LR, CPU = 3, 0.5, torch.device("cpu")


def tune(rank, world, root):
    """What a rank finds of each family: losses, the last logits, and how far those of the base are off."""
    return {kind: tune_one(rank, world, root, kind) for kind in FAMILIES}


def tune_one(rank, world, root, kind):
    base, exported, mine = root / kind, RunFolder(root / f"{kind}-run").exported(STEPS), models.tokens(rank)
    with torch.no_grad():
        whole = models.whole(base)(mine).logits
        off = (hf.load(base)(mine).logits - whole).abs().max() / whole.abs().max()
    lora = AdapterConfig(rank=4, alpha=8).policy()
    model = hf.load(base, quantise="nf4", lora=lora)
    save_adapter(root / f"{kind}-first", model, base=str(base))
    apart, loss = keeps_apart(model, model.config.vocab_size, CPU), HeadLoss(model.train())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        mean = loss(mine[:, :-1], mine[:, 1:]) / mine[:, 1:].numel()
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total := mean.detach().clone())
        losses.append(total.item() / world)
    save_adapter(exported, model, base=str(base))
    with torch.no_grad():
        logits = model.eval()(models.tokens(9)).logits
    return {"off": off.item(), "losses": losses, "logits": logits, "apart": apart, "at_head": loss.is_at_head}


def tuned_by_peft(root, kind, world):
    """Losses and adapter of one process on the batches of all ranks."""
    plain = decoded(models.whole(root / kind), "nf4")
    model = peft.PeftModel.from_pretrained(plain, root / f"{kind}-first", is_trainable=True).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)
    batch = torch.cat([models.tokens(rank) for rank in range(world)])
    losses = []
    for _ in range(STEPS):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, peft.get_peft_model_state_dict(model)


@pytest.mark.parametrize("kind", FAMILIES)
def test_by_default_a_familys_adapters_are_on_all_linear_layers_except_head_and_routers(kind):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(models.config(kind))
        theirs = transformers.AutoModelForCausalLM.from_config(models.config(kind))
    chosen = add_lora(model, AdapterConfig(rank=4).policy())
    peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    found = {name for name, module in theirs.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
    assert set(chosen) == {name for name in found if not name.endswith("shared_expert_gate")}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with each family's base, and its run of fine-tuning; and what two ranks found."""
    root = tmp_path_factory.mktemp("families")
    for kind in FAMILIES:
        base, run = models.write(kind, root / kind), RunFolder(root / f"{kind}-run")
        run.exported(STEPS).mkdir(parents=True)
        sections = {"base": {"folder": str(base), "quantise": "nf4"}, "adapter": {"rank": 4}}
        run.write_config(Resolved(Recipe.model_validate(sections), "", resolve_origins()).to_toml())
    return root, run_ranks(2, tune, root, limit_s=120.0)


@pytest.mark.slow  # all families in one start of ranks: about 30 s
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_is_loaded_tuned_saved_merged_and_read_as_by_one_process(tuned, kind, tmp_path):
    root, ranks = tuned
    exported = RunFolder(root / f"{kind}-run").exported(STEPS)
    losses, adapter = tuned_by_peft(root, kind, len(ranks))
    for found in (rank[kind] for rank in ranks):
        assert found["off"] < 1e-5
        assert found["losses"] == pytest.approx(losses, rel=1e-4)
        assert found["apart"] and found["at_head"] == (kind != "gemma2")  # whose logits are capped
    assert losses[-1] < losses[0]
    saved = load_file(exported / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    for name, tensor in saved.items():
        assert torch.allclose(tensor, adapter[name], rtol=1e-3, atol=1e-5), name
    afterwards.merge(find_tuned(root / f"{kind}-run"), tmp_path / "merged")
    model = models.loaded_whole(tmp_path / "merged")
    theirs = dict(merged_by_peft(root / kind, exported, "nf4", torch.float32).named_parameters())
    assert all(torch.equal(param, theirs[name]) for name, param in model.named_parameters())
    with torch.no_grad():
        logits = model(models.tokens(9)).logits
    assert (logits - ranks[0][kind]["logits"]).abs().max() < 1e-5 * logits.abs().max()
