"""Adapters on a frozen base, plain or quantised, on any number of ranks; peft's files."""

import copy
import json
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import SchedulePolicy, checkpoint, fully_shard, quantize_, stats
from shardwright.errors import CheckpointError, InputError
from shardwright.lora import Lora, add_lora, load_adapter, merge_lora, read_lora, save_adapter
from tests.ranks.models import Run, full, sharded, train_on_parts
from tests.ranks.pool import on_ranks, run_ranks

LORA = Lora(("up", "down"), rank=3, alpha=6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(70, 37)
        self.down = nn.Linear(37, 70)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def build(codec="nf4", lora=LORA):
    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(70))
    if codec:
        quantize_(model, codec)
    torch.manual_seed(2)
    assert add_lora(model, lora) == ["0.up", "0.down", "1.up", "1.down"]
    return model


def shard(model):
    return sharded(model, model[:2])


def save_base(rank, world, folder, codec):
    checkpoint.save(f"{folder}/base", model=shard(build(codec)), step=0)


def trains(rank, world, folder, codec):
    model = shard(build(codec))
    for p in model.parameters():
        p.detach().zero_()
    checkpoint.load(f"{folder}/base", model=model)
    base = {name: full(p).clone() for name, p in model.named_parameters() if "lora" not in name}
    losses = train_on_parts(model, rank, world, width=70, lr=3.0, steps=4, target=2.0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    assert all("lora_" in name for name in trained)
    assert all(torch.equal(full(p), base[n]) for n, p in model.named_parameters() if n in base)
    save_adapter(f"{folder}/{world}", model, base="tiny")
    dist.barrier()
    fresh = shard(build(codec))
    load_adapter(f"{folder}/{world}", fresh)
    x = torch.randn(3, 70)
    assert torch.equal(fresh(x), model(x))
    return losses


@pytest.mark.parametrize("codec", [None, "nf4"])
def test_qlora_has_the_same_losses_on_1_to_4_ranks_and_its_adapter_loads_anywhere(tmp_path, codec):
    run_ranks(2, save_base, str(tmp_path), codec)
    expected = run_ranks(1, trains, str(tmp_path), codec)[0]
    assert expected[-1] < 0.98 * expected[0]
    for world in (2, 3, 4):
        for losses in run_ranks(world, trains, str(tmp_path), codec):
            assert losses == pytest.approx(expected, abs=1e-4)
        model, alone = build(codec), build(codec)
        load_adapter(tmp_path / str(world), model)
        load_adapter(tmp_path / "1", alone)
        x = torch.randn(3, 70)
        assert torch.allclose(model(x), alone(x), atol=1e-5)


@pytest.mark.each_case
@pytest.mark.parametrize("codec", [None, "nf4"])
@pytest.mark.parametrize("order", ["adapters", "layers"])
@on_ranks(3)
def test_adapters_that_are_groups_inside_of_blocks_train_as_in_one_process(rank, world, codec, order):
    """As torchtune shards QLoRA: adapters (or their layers), blocks, the model; against the plain model."""
    model, alone = build(codec), build(codec)
    for block in model[:2]:
        for layer in (block.up, block.down):
            for part in (layer.lora_A, layer.lora_B) if order == "adapters" else (layer,):
                fully_shard(part)
    shard(model)
    ours, theirs = Run.of(model, lr=3.0, momentum=0.9), Run.of(alone, lr=3.0, momentum=0.9)
    for step in range(4):
        batch = torch.randn(12, 70, generator=torch.Generator().manual_seed(step))
        (model(batch.chunk(world)[rank]) - 2).square().mean().backward()
        (alone(batch) - 2).square().mean().backward()
        for run in (ours, theirs):
            run.step()
    expected = dict(alone.named_parameters())
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert torch.allclose(full(param), expected[name], atol=1e-5), name
            assert full(param).count_nonzero()
    assert torch.allclose(model(batch), alone(batch), atol=1e-4)


def perturb(model):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
            elif "magnitude" in name:
                p.mul_(1.5)
    return model


@pytest.mark.parametrize("options", [{"rslora": True}, {"dora": True}])
def test_merging_into_a_plain_base_changes_no_output_and_leaves_plain_layers(options):
    model = build(None, Lora(("up", "down"), 4, **options))
    torch.manual_seed(1)
    base = nn.Sequential(Block(), Block(), nn.LayerNorm(70))
    y = torch.randn(2, 70)
    assert torch.allclose(model(y), base(y), atol=1e-6)  # at first nothing changes
    perturb(model)
    assert not torch.allclose(model(y), base(y), atol=1e-2)
    x = torch.randn(5, 70)
    expected = model(x)
    merge_lora(model)
    assert type(model[0].up) is nn.Linear
    assert not any("lora" in name for name in model.state_dict())
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_merging_into_a_quantised_base_is_asked_for():
    model = perturb(build())
    with pytest.raises(InputError, match="requantise=True"):
        merge_lora(model)
    expected = model[0].up.weight + model[0].up.lora_B.weight @ model[0].up.lora_A.weight * LORA.scaling
    merge_lora(model, requantise=True)
    assert (model[0].up.weight - expected).norm() < 0.1 * expected.norm()


def test_bad_adapters_are_refused_before_anything_changes(tmp_path):
    plain = nn.Sequential(Block())
    with pytest.raises(InputError, match=r"'q_proj' matches no nn.Linear .* \['down', 'up'\]"):
        add_lora(plain, Lora(("up", "q_proj")))
    assert all(p.requires_grad for p in plain.parameters())
    with pytest.raises(InputError, match="rank"):
        Lora(("up",), rank=0)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: can.t be read: No such file"):
        read_lora(tmp_path)
    save_adapter(tmp_path, build(None))
    other = build(None, Lora(("up", "down"), rank=5))
    with pytest.raises(CheckpointError, match="8 tensors don't fit"):
        load_adapter(tmp_path, other)
    with pytest.raises(CheckpointError, match=r"scaled by 2\.0"):
        load_adapter(tmp_path, build(None, Lora(("up", "down"), rank=3, alpha=9)))
    assert read_lora(tmp_path).rank == 3
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"


class Language(nn.Module):
    """Embedding, blocks, and norm and output that share a group."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 70)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(70)
        self.output = nn.Linear(70, 11, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


@pytest.mark.parametrize("dora", [False, True])
@on_ranks(2)
def test_norm_and_output_share_a_group_and_only_adapters_have_gradients_and_state(rank, world, dora):
    torch.manual_seed(rank // world)  # the same on all
    plain = Language()
    quantize_(plain, where="layers.*.weight")
    add_lora(plain, Lora(("up", "down", "output"), rank=2, dora=dora))
    model = copy.deepcopy(plain)
    sharded(model, [model.embedding, *model.layers, [model.norm, model.output]])
    assert stats(model).num_groups == 4
    tokens = torch.arange(6).view(2, 3)
    runs = [(m, torch.optim.AdamW([p for p in m.parameters() if p.requires_grad])) for m in (plain, model)]
    for _ in range(3):
        losses = []
        for each, optimizer in runs:
            loss = each(tokens).square().mean()
            loss.backward()
            assert all((p.grad is None) != p.requires_grad for p in each.parameters())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert len(runs[1][1].state) == (15 if dora else 10)


def decoder(embedding, head):
    """An end is a group by itself or the root's. head: its ``reshard_after_forward``, or "root"."""
    model = Language()
    quantize_(model, where="layers.*.weight")
    add_lora(model, Lora(("up", "down", "output"), rank=2))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True)
    if embedding == "apart":
        fully_shard(model.embedding)
    if head != "root":
        fully_shard([model.norm, model.output], reshard_after_forward=head)
    fully_shard(model)
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=0, keep_last=0))
    return model


def moments(rank, world, embedding, head):
    """Number of groups, and those gathered and freed in forward and backward, as it happened."""
    model = decoder(embedding, head)
    for _ in range(2):
        model(torch.arange(6).view(2, 3)).square().mean().backward()
    phases = str(model.trace().schedule()).split("backward\n")
    words = [(text, word) for text in phases for word in ("unshard", "reshard")]
    return stats(model).num_groups, *(
        re.findall(rf"\b{word} (.+?)(?:,|$)", text, re.M) for text, word in words
    )


@pytest.mark.parametrize("head", ["root", True])
def test_what_the_root_has_is_gathered_at_its_forward_and_freed_at_the_end_of_the_backward(head):
    own = [] if head == "root" else ["norm+output"]
    for groups, gathered, freed, gathered_again, freed_again in run_ranks(2, moments, "root", head):
        assert groups == 3 + len(own)
        assert gathered == ["Language", "layers.0", "layers.1", *own]  # all that is the root's in one
        assert freed == ["layers.0", "layers.1", *own]
        assert gathered_again == [*own, "layers.1", "layers.0"]
        assert freed_again[:-2] == [*own, "layers.1"]
        assert set(freed_again[-2:]) == {"layers.0", "Language"}


@pytest.mark.parametrize("stays", [True, False])
def test_norm_and_output_are_gathered_at_the_end_of_the_forward_and_again_only_if_they_were_freed(stays):
    for groups, gathered, freed, gathered_again, freed_again in run_ranks(2, moments, "apart", not stays):
        own = [] if stays else ["norm+output"]
        assert groups == 4  # the root has none
        assert gathered == ["embedding", "layers.0", "layers.1", "norm+output"]
        assert freed == ["embedding", "layers.0", "layers.1", *own]
        assert gathered_again == [*own, "layers.1", "layers.0"]
        assert freed_again == ["norm+output", "layers.1", "layers.0"]
