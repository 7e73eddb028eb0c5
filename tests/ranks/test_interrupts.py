"""After Ctrl-C at any instruction of a step, caught by the caller, the next step or load is right; and ranks
that don't match any more are told so at once."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwright import (
    MixedPrecisionPolicy,
    SchedulePolicy,
    clip_grad_norm_,
    fully_shard,
    quantize_,
    set_transport,
)
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.groups.reducer import Reducer
from shardwright.engine.unit import unit_of
from shardwright.errors import CommError, Diverged, RankFailed
from shardwright.observe.watch.lifecycle import leave
from shardwright.params.binding import Bound
from shardwright.schedule.layout import equal_spans
from shardwright.transport.base import Segment
from shardwright.transport.cpu.arena import MemorySegment
from shardwright.transport.cpu.connection import Connection
from shardwright.transport.cpu.shm import _ShmGather
from shardwright.transport.process_group import ProcessGroupComm
from tests.interrupts import Interrupt, is_free
from tests.ranks.models import full
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.test_sockets import comm_over

WIDTH = 6
KINDS = {
    "float32": {},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "dim 1": {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
    "without agreement": {},
    "nf4": {},
}
FEW, ALL = 199, pytest.param(1, marks=pytest.mark.exhaustive)
"""Every which place is tried."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)
        )

    def forward(self, x):
        x = self.begin(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def built(kind):
    torch.manual_seed(0)
    model = Net()
    if kind == "nf4":
        model.blocks[1][0].weight.requires_grad_(False)
        quantize_(model, "nf4", where=["blocks.1.0.weight"])
    for module in (*model.blocks, model):
        fully_shard(module, **KINDS[kind])
    if kind == "without agreement":
        model.set_schedule_policy(SchedulePolicy(agreement="off"))
    return model


def trained(model, rank=0):
    model(torch.arange(4.0 * WIDTH).view(4, WIDTH).sin() + rank).square().mean().backward()


def evaluated(model):
    with torch.no_grad():
        model(torch.ones(1, WIDTH))


def grads_of(model):
    grads = [full(param.grad) for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return grads


def stepped_and_clipped(model):
    trained(model)
    clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), 0.0).step()


def check_load(model, state):
    for shift in (1, 0):
        model.load_state_dict({name: value + shift for name, value in state.items()})
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor), name
            assert torch.equal(full(param), state[name] + shift), name


def check_save(model, state):
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor), name
        assert torch.equal(full(value), state[name]), name


def check_nothing(model, state):
    pass


def interrupted_anywhere(rank, world, kind, every, interrupted, check, anew=False):
    model = built(kind)
    state = {name: full(param).clone() for name, param in model.named_parameters()}
    trained(model)
    grads_of(model)
    trained(model)
    wanted, number = grads_of(model), 1
    while True:
        model = built(kind) if anew else model
        with Interrupt(number) as interrupt:
            interrupted(model)
        if interrupt.place is None:
            return number
        model.zero_grad()
        try:
            check(model, state)
            for _ in range(2):
                trained(model)
                assert all(map(torch.equal, grads_of(model), wanted)), "other gradients"
            runtime = unit_of(model).runtime
            assert is_free(runtime._turn), "the lock of the runtime isn't free"
            held_nbytes = sum(group.held_nbytes for group in runtime.groups)
            assert runtime.executor.memory.now_nbytes == held_nbytes, "memory is counted wrongly"
        except BaseException as error:
            raise AssertionError(f"interrupted at place {number}, {interrupt.place}") from error
        number += every


@pytest.mark.parametrize("every", [FEW, ALL])
@pytest.mark.parametrize("kind", KINDS)
def test_after_ctrl_c_at_any_place_of_a_step_the_next_step_is_right(kind, every):
    assert run_ranks(1, interrupted_anywhere, kind, every, trained, check_nothing, limit_s=600.0)[0] > 1000


@pytest.mark.parametrize("every", [FEW, ALL])
@pytest.mark.parametrize("kind", ["float32", "dim 1"])
def test_after_ctrl_c_at_any_place_of_a_step_full_tensors_are_loaded_whole(kind, every):
    run_ranks(1, interrupted_anywhere, kind, every, stepped_and_clipped, check_load, limit_s=600.0)


@pytest.mark.parametrize("every", [FEW, ALL])
def test_after_ctrl_c_at_any_place_of_an_evaluation_what_is_saved_is_right(every):
    run_ranks(1, interrupted_anywhere, "bfloat16", every, evaluated, check_save, limit_s=600.0)


@pytest.mark.parametrize("every", [701, ALL])
@pytest.mark.parametrize("kind", ["float32", "nf4"])
def test_after_ctrl_c_at_any_place_of_the_first_step_the_next_one_is_right(kind, every):
    run_ranks(1, interrupted_anywhere, kind, every, trained, check_nothing, True, limit_s=600.0)


def once(monkeypatch, owner, name):
    """The next call of ``owner.name`` raises what Ctrl-C does; of an attribute, the next time it is set."""

    def set_it(*_):
        monkeypatch.delattr(owner, name)
        raise KeyboardInterrupt

    if not hasattr(owner, name):  # of instances
        kept = property(lambda self: vars(self)[name], set_it)
        monkeypatch.setattr(owner, name, kept, raising=False)
        return
    function = getattr(owner, name)

    def interrupted(*args, **options):
        monkeypatch.setattr(owner, name, function)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


def goes_on(rank, world, transport, owner, name):
    """What each rank is told, where one was interrupted and goes on with the next step."""
    set_transport(transport)
    model = built("float32")
    for _ in range(2):
        trained(model)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            once(patch, owner, name)
            with pytest.raises(KeyboardInterrupt):
                trained(model)
    try:
        for _ in range(2):
            trained(model)
    except (CommError, Diverged, RankFailed) as error:
        leave(error)
        return str(error)
    raise AssertionError("nothing was said")


@pytest.mark.parametrize(
    ("transport", "owner", "name"),
    [
        ("auto", MemorySegment, "write_record"),  # launched, and not announced
        ("auto", Bound, "show"),
        ("sockets", Connection, "receive"),
        ("sockets", Connection, "send"),
        ("collectives", ProcessGroupComm, "_launch_gather"),
    ],
)
def test_a_rank_that_goes_on_after_ctrl_c_and_the_others_are_told_at_once(transport, owner, name):
    said = run_ranks(2, goes_on, transport, owner, name, limit_s=15.0)
    assert all("different" in each or "rank 1" in each for each in said), said


@pytest.mark.parametrize(
    ("transport", "owner", "name"),
    [
        ("auto", MemorySegment, "write_record"),
        ("auto", ParamGroup, "gather"),
        ("auto", Bound, "show"),
        ("auto", Reducer, "send"),
        ("sockets", ParamGroup, "gather"),
        ("sockets", Reducer, "send"),
        ("collectives", ParamGroup, "gather"),
    ],
)
@on_ranks(2, limit_s=15.0)
def test_ranks_that_were_all_interrupted_at_one_place_go_on_together(transport, owner, name):
    set_transport(transport)
    model = built("float32")
    for _ in range(2):
        trained(model)
        wanted = grads_of(model)
    with pytest.MonkeyPatch.context() as patch:
        once(patch, owner, name)
        with pytest.raises(KeyboardInterrupt):
            trained(model)
    model.zero_grad()
    for _ in range(2):
        trained(model)
        assert all(map(torch.equal, grads_of(model), wanted))


@on_ranks(2, limit_s=15.0)
def test_ranks_that_were_interrupted_before_they_read_wait_for_each_other_no_more(rank):
    comm = comm_over("auto")
    segment = Segment(torch.ones(2), equal_spans(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        once(patch, _ShmGather, "__init__")
        with pytest.raises(KeyboardInterrupt):
            comm.all_gather([segment], "gather")
    for _ in range(600):
        comm.exchange([rank], "words")
