"""Ranks that begin with different weights are told so, before they train a model that nobody has built."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwright import fully_shard
from shardwright.errors import Diverged
from shardwright.wrapper import FSDP
from tests.ranks.models import sharded
from tests.ranks.pool import on_ranks, run_ranks


def model_of(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(70, 300), nn.Tanh(), nn.Linear(300, 4), nn.BatchNorm1d(4))
    return sharded(model, [model[0]], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def train(model):
    model(torch.ones(3, 70)).sum().backward()


def nothing(model, rank):
    """The ranks have seeded differently, as ``torch.manual_seed(seed + rank)`` before the model does."""


def load(model, rank):
    model.load_state_dict({name: torch.ones(value.shape) for name, value in model.state_dict().items()})


def initialise(model, rank):
    for param in model.parameters():
        nn.init.normal_(param, 0.02)


def initialise_data(model, rank):
    for param in model.parameters():
        param.data.normal_(0, 0.02)


def write_locals(model, rank):
    for param in model.parameters():
        param.to_local().data.fill_(1.0)


def rest_of_a_model(model, rank):
    """All of it but one bias."""
    for name, param in model.named_parameters():
        if name != "2.bias":
            param.data.fill_(1.0)


def began(rank, world, same, written, fails):
    model = model_of(0 if same else rank)
    written(model, rank)
    if fails is None:
        train(model)
        return None
    with pytest.raises(Diverged) as error:
        train(model)
    return str(error.value)


@pytest.mark.each_case
@pytest.mark.parametrize("written", [load, initialise, initialise_data, write_locals])
def test_weights_that_are_written_after_sharding_may_have_been_others(written):
    run_ranks(2, began, False, written, None)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("written", "named"),
    [(nothing, "'weight' of group '0'"), (rest_of_a_model, "'2.bias' of group 'Sequential'")],
)
def test_weights_that_differ_are_named_with_both_ranks_and_the_remedy(written, named):
    for told in run_ranks(3, began, False, written, named):
        assert (
            told.startswith(f"parameter {named} had other") and "than on rank 1 when it was sharded" in told
        )
        assert "torch.manual_seed" in told and "sync_module_states=True" in told


def test_equal_weights_are_equal():
    run_ranks(3, began, True, nothing, None)


@on_ranks(2)
def test_weights_that_only_rank_0_has_loaded_are_told(rank):
    """nanoGPT's and others': rank 0 alone reads the pretrained weights, as under DistributedDataParallel."""
    torch.manual_seed(0)
    model = nn.Linear(400, 400)
    if rank == 0:
        model.load_state_dict({"weight": torch.ones(400, 400), "bias": torch.zeros(400)})
    fully_shard(model)
    with pytest.raises(Diverged, match="parameter 'weight' of group 'Linear' had other values on rank 0"):
        model(torch.ones(1, 400))


@on_ranks(2)
def test_what_was_on_the_meta_device_is_not_compared(rank):
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    fully_shard(model).to_empty(device="cpu")
    torch.manual_seed(rank)
    model.reset_parameters()
    model(torch.ones(1, 8)).sum().backward()


@pytest.mark.each_case
@pytest.mark.parametrize(("kind", "times"), [("own", 1), ("same", 0), ("none", 0)])
@on_ranks(2)
def test_statistics_that_differ_at_an_evaluation_are_told_once(rank, kind, times):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4) if kind != "none" else nn.LayerNorm(4)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), norm))
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(3):
            seed = step + (rank if kind == "own" else 0)
            batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
            model.train()(batch).sum().backward()
            with torch.no_grad():
                model.eval()(batch)
    told = [str(each.message) for each in caught if "buffer " in str(each.message)]
    assert len(told) == times
    assert all("'1.running_mean' isn't the same on rank 0 as on rank 1" in each for each in told)


@on_ranks(2)
def test_buffers_that_differ_from_the_begin_are_told(rank):
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    model.register_buffer("scale", torch.full((1,), 1.0 + rank))
    with pytest.warns(UserWarning, match=r"'scale' isn't the same on rank 0 as on rank 1 .* this forward"):
        fully_shard(model)(torch.ones(1, 4))


class Given(nn.Module):
    def __init__(self, first, second, buffer=None):
        super().__init__()
        self.first, self.second = first, second
        if buffer is not None:
            self.register_buffer("buffer", buffer)


PAIRS = {  # of rank 0 and of the others; what is named
    "dtype": (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4).double(), "second.weight: "),
    "shape": (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 6), "second.weight: "),
    "presence": (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4, bias=False), "second.bias: "),
    "order": (
        lambda: nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(2, 2)}),
        lambda: nn.ModuleDict({"b": nn.Linear(2, 2), "a": nn.Linear(4, 4)}),
        "second.a.weight: ",
    ),
    "buffer": (
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        "second.running",
    ),
}


@pytest.mark.each_case
@pytest.mark.parametrize("kind", PAIRS)
@on_ranks(2)
def test_states_that_can_not_be_sent_are_named_before_any_is(rank, kind):
    of_first, of_others, named = PAIRS[kind]
    for wraps in (Given(nn.Linear(4, 4), (of_first if rank == 0 else of_others)()),):
        with pytest.raises(Diverged, match=f"ranks 0 and 1 of the mesh:\n  rank 0: {named}") as error:
            FSDP(wraps, sync_module_states=True)
        assert "rank 1: " in str(error.value)
        assert not any(isinstance(param, DTensor) for param in wraps.parameters())


@on_ranks(2)
def test_states_that_rank_0_has_sent_are_equal(rank):
    torch.manual_seed(rank)
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), sync_module_states=True)
    model(torch.ones(3, 4)).sum().backward()


@on_ranks(2)
def test_a_parameter_may_have_any_name(rank):
    """A name that the comparison's own words might be taken for."""
    model = nn.Module()
    model.values = nn.Parameter(torch.ones(8, 3 + rank))
    model.forward = lambda x: x * model.values.sum()
    fully_shard(model)
    with pytest.raises(Diverged, match=r"different models.*\n.*parameter values of group .*shape \[8, 3\]"):
        model(torch.ones(1))
