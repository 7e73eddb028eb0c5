"""Groups given as lists, or chosen: the model itself owns nothing that another module can hold."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright import FSDPModule, Grouping, explain, fully_shard
from shardwright.engine.unit import unit_of
from shardwright.errors import InputError
from shardwright.plan.cluster import DEVICES, Cluster
from shardwright.plan.file import Plan, PlannedGroup
from tests.ranks.cases import AUTO, groups_of
from tests.ranks.models import Run, batches, build, loss_of, shard_decoder, train_beside
from tests.ranks.pool import on_ranks, run_ranks


@on_ranks(1)
def test_groups_that_cannot_be_are_refused_before_anything_is_sharded():
    model = build()
    cases = [
        (
            ["blocks.0.upp.weight"],
            "no module or parameter 'blocks.0.upp.weight'.*did you mean 'blocks.0.up.weight'",
        ),
        ([nn.Linear(2, 2)], "a Linear that is not inside Decoder"),
        (["head", "head"], r"\['head'\] more than once"),
        ([], "an empty list"),
        (["blocks.0", "blocks.0.up"], "inside another of its modules"),
    ]
    for group, message in cases:
        with pytest.raises(InputError, match=message):
            fully_shard(model, groups=[["embedding"], group])
    with pytest.raises(InputError, match=r"no module of \['LSTM'\], which Grouping.classes lists.*'Block'"):
        fully_shard(model, groups=Grouping(classes=(nn.LSTM,)))
    with pytest.warns(UserWarning, match="nothing in LSTM says how to group it"):
        alone = fully_shard(nn.LSTM(2, 2), groups="auto")
    assert [group.name for group in unit_of(alone).groups] == ["LSTM"]
    layers = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)), groups="auto")
    assert [name for name, module in layers.named_modules() if isinstance(module, FSDPModule)] == [
        "",
        "0",
        "2",
    ]
    with pytest.raises(InputError, match='must be "auto"'):
        fully_shard(model, groups="automatic")
    with pytest.raises(InputError, match="takes one model, got list"):
        fully_shard([model], groups="auto")
    assert not any(hasattr(param, "placements") for param in model.parameters())  # nothing is half done


@on_ranks(2)
def test_explain_says_when_the_root_is_resharded_and_the_schedule_does_so(rank, world):
    """Whether the root is gathered once or twice a step, told None, True or False."""
    for asked, gathers, said in (
        (None, 1, "after backward"),
        (True, 2, "after forward and after backward"),
        (False, 1, "after backward"),
    ):
        model = shard_decoder(build(), fully_shard)
        root = fully_shard(nn.Sequential(model, nn.Linear(17, 3)), reshard_after_forward=asked)
        for step in range(2):
            root(batches(step, world)[rank]).sum().backward()
        row = explain(root).groups[-1]
        assert row.resharded == said, asked
        assert any("reshard_after_forward" in change for change in row.changed) == (asked is not None)
        number = len(explain(root).groups) - 1
        unshards = re.findall(r"unshard ([\d+]+)", str(replace(root.schedule(), names=())))
        assert sum(str(number) in each.split("+") for each in unshards) == gathers, asked


@on_ranks(2)
def test_what_a_plan_recomputes_is_not_kept_and_gives_the_same_bits_under_the_same_names(rank, world):
    found = []
    for again in ((), ("blocks.0", "blocks.1")):
        model = build()
        groups = tuple(PlannedGroup((f"blocks.{index}",)) for index, _ in enumerate(model.blocks))
        fully_shard(model, plan=Plan(world, world, groups, modules_to_recompute=again))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t.nbytes) or t, lambda t: t
        ):
            loss = loss_of(model, batches(0, world)[rank])
        loss.backward()
        grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        found.append((sum(kept), list(model.state_dict()), loss.item(), grads))
    plain, again = found
    assert again[0] < plain[0]
    assert again[1:3] == plain[1:3]
    assert len(again[3]) == len(plain[3]) > 0
    assert all(map(torch.equal, again[3], plain[3]))


def grouped_for_a_cluster(rank, world):
    cluster = Cluster(DEVICES["H100"], 64)  # its ranks are those of the mesh
    model = fully_shard(build(), groups="auto", cluster=cluster, sample=batches(0, world)[rank])
    train_beside(Run.of(model), Run.of(build()), rank, world)
    return groups_of(model)


def test_groups_for_a_cluster_are_the_same_on_all_ranks_and_train_as_one_process_does():
    found = run_ranks(2, grouped_for_a_cluster)
    assert found[0] == found[1]
    assert len(found[0]) < len(AUTO)
    assert {name for group in found[0] for name in group} == {name for group in AUTO for name in group}
