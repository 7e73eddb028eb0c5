"""One loop: the follower decides, the executor does. What fails in it, what comes from inside of it and from
other threads; what the follower derives of its own actions, against what is so."""

import copy
import threading

import pytest
import torch
from torch import nn

from shardwright import SchedulePolicy, fully_shard, stats
from shardwright.engine.step.runtime import Runtime
from shardwright.engine.unit import unit_of
from shardwright.errors import StageError
from shardwright.schedule.following import Mode
from shardwright.schedule.schedule import ActionKind, Phase
from tests.ranks.models import full, sharded
from tests.ranks.pool import on_ranks, run_ranks

WIDTH = 8


class Net(nn.Module):
    """Blocks, of which a forward runs the first ``depth``."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x, depth=None):
        for block in self.blocks[:depth]:
            x = block(x).relu()
        return x


def built(agreement="strict", blocks=4, **options):
    torch.manual_seed(0)
    model = Net(blocks)
    sharded(model).set_schedule_policy(SchedulePolicy(agreement=agreement, bucket_cap_mb=0, **options))
    return model


def trained(model, rank, step, depth=None):
    torch.manual_seed(10 * step + rank)
    loss = model(torch.randn(3, WIDTH), depth).square().mean()
    loss.backward()
    return loss.detach()


class Failing:
    """Raises at the ``at``-th action or sync from now on."""

    def __init__(self, runtime, error):
        self.error, self.at, self.count = error, -1, 0
        do = runtime.executor.do
        for kind, act in do.items():
            do[kind] = lambda action, act=act: (self.pass_one(), act(action))
        exchange = runtime._consensus.exchange
        runtime._consensus.exchange = lambda sync: (self.pass_one(), exchange(sync))[1]

    def pass_one(self):
        self.count += 1
        if self.count - 1 == self.at:
            raise self.error

    def start(self, at):
        self.at, self.count = at, 0


def fails_anywhere(rank, world, error, steps):
    model, whole = built(), built()
    for step in range(steps):
        trained(model, rank, step)
        trained(whole, rank, step)
        model.zero_grad(), whole.zero_grad()
    whole_loss = trained(whole, rank, 9)
    model(torch.ones(1, WIDTH)) if not steps else None
    failing = Failing(unit_of(model).runtime, error)
    number = 0
    while True:
        failing.start(number)
        try:
            trained(model, rank, 8)
        except type(error):
            pass
        else:
            break
        failing.start(-1)
        model.zero_grad()
        assert torch.equal(trained(model, rank, 9), whole_loss)
        for param, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(full(param.grad), full(other.grad)), number
        model.zero_grad()
        number += 1
    assert number > 20
    return number


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_error_at_any_action_or_sync_leaves_the_next_step_clean_on_all_ranks(error):
    assert len(set(run_ranks(2, fails_anywhere, error, 2))) == 1


@pytest.mark.parametrize("agreement", ["strict", "off"])
@on_ranks(2)
def test_what_the_follower_derives_of_its_actions_is_what_is_so(rank, agreement):
    model, checked = built(agreement, keep_last=2), []
    at = Runtime.at

    def checking(self, *event):
        at(self, *event)
        follower = copy.copy(self._follower)
        follower._leave_exact()
        assert follower.groups.states.held == self.executor.local(Phase.FORWARD).held
        checked.append(bool(self._follower._exact))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "at", checking)
        for step, depth in enumerate((None, None, 2, None, 3, None)):
            trained(model, rank, step, depth)
            model.blocks[1].unshard() if step == 3 else None
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
        trained(model, rank, 7)
    assert any(checked)
    assert not all(checked)


@on_ranks(2)
def test_what_runs_inside_of_an_action_may_unshard_and_rest_but_not_run_the_model(rank):
    model = built()
    trained(model, rank, 0)
    done = []

    def hook(param):
        model.unshard()  # waits in a queue until the backward's action is done
        model.state_dict()
        done.append(unit_of(model).runtime.executor.asked)
        with pytest.raises(StageError, match=r"at event .*ran the model itself"):
            model(torch.ones(1, WIDTH))

    handle = model.blocks[0].weight.register_post_accumulate_grad_hook(hook)
    trained(model, rank, 1)
    assert done
    handle.remove()
    trained(model, rank, 2)


@on_ranks(1)
def test_an_event_from_another_thread_waits_for_the_action_to_end(rank):
    model = built("off")
    trained(model, rank, 0)
    runtime = unit_of(model).runtime
    inside, go_on, log = threading.Event(), threading.Event(), []
    wait = runtime.executor.do[ActionKind.WAIT]

    def slow(action):
        if not inside.is_set():
            inside.set()
            go_on.wait(5)
        wait(action)
        log.append("action")

    runtime.executor.do[ActionKind.WAIT] = slow

    def other():
        inside.wait(5)
        go_on.set()
        model.blocks[3].reshard()
        log.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    thread.join()
    assert log.index("other") > log.index("action")


@on_ranks(2)
def test_without_agreement_an_early_exit_gathers_no_more_than_it_runs_and_one_ahead(rank):
    model = built("off", blocks=8, backward_prefetch="none")
    for step in range(2):
        trained(model, rank, step)
    gathered, held = [], []
    runtime = unit_of(model).runtime
    unshard = runtime.executor.do[ActionKind.UNSHARD]

    def counted(action):
        unshard(action)
        gathered.extend(action.groups)
        held.append(runtime.executor.memory.now_nbytes)

    runtime.executor.do[ActionKind.UNSHARD] = counted
    with torch.no_grad():
        model(torch.ones(1, WIDTH), 2)  # an evaluation, of which there is no schedule yet
        gathered.clear()
        model(torch.ones(1, WIDTH), 8)
        gathered.clear()
        held.clear()
        model(torch.ones(1, WIDTH), 2)
    assert len(gathered) == 3, gathered  # the two that run, and the one that was gathered ahead
    assert max(held) == 2 * runtime.groups[0].unsharded_nbytes
    assert stats(model).unsharded_nbytes == 0


class Gan(nn.Module):
    """Two modules that each run by themselves."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = Net(3), Net(3)


def in_turns(rank, world, agreement):
    torch.manual_seed(0)
    gan = Gan()
    for part in (gan.generator, gan.critic):
        sharded(part)
    fully_shard(gan)
    gan.set_schedule_policy(SchedulePolicy(agreement=agreement, bucket_cap_mb=0))
    ahead = []
    for step in range(4):
        for part in (gan.critic, gan.generator):
            part(torch.ones(2, WIDTH)).sum().backward()
            for phase, entries in gan.trace().phases.items():
                issued = sum(
                    action.kind is ActionKind.UNSHARD and entry.event.group not in action.groups
                    for entry in entries
                    for action in entry.actions
                )
                ahead.append((step, str(phase), issued))
    assert (unit_of(gan).runtime._follower.mode is Mode.LOCAL) == (agreement == "off")
    return [entry[1:] for entry in ahead if entry[0] == 3]


def test_two_entry_modules_in_turns_prefetch_without_agreement_as_with_it():
    off, strict = (run_ranks(2, in_turns, agreement) for agreement in ("off", "strict"))
    assert off == strict
    assert all(issued == 2 for _, issued in off[0] if _ == "forward"), off[0]


class Interrupted(nn.Linear):
    """Raises what Ctrl-C raises, in the forward of user code."""

    interrupts = False

    def forward(self, x):
        if self.interrupts:
            raise KeyboardInterrupt
        return super().forward(x)


def trained_sequential(model):
    model.zero_grad()
    model(torch.ones(2, WIDTH)).square().sum().backward()
    return full(model[0].weight.grad)


@on_ranks(2)
def test_a_forward_that_ctrl_c_has_ended_is_followed_by_a_clean_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Interrupted(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    sharded(model)
    expected = trained_sequential(model)
    for grad_mode in (torch.enable_grad, torch.no_grad):
        model[1].interrupts = True
        with grad_mode(), pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, WIDTH))
        model[1].interrupts = False
        assert torch.equal(trained_sequential(model), expected)
