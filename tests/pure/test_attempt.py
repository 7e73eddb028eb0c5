"""Ranks of one attempt meet over a store with another's keys in it, and make transports; who doesn't come is
named."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import DistNetworkError, HashStore, PrefixStore, Store

from shardwright import clock
from shardwright.errors import CommError
from shardwright.transport import attempt, liveness
from shardwright.transport.attempt import Attempt, Meeting, met
from shardwright.transport.jobstore import pause_s
from shardwright.transport.process import LaunchLog, process_state

ROOM = timedelta(seconds=3)


@pytest.fixture
def pauses(monkeypatch):
    """Simulated seconds, as they are slept."""
    slept = []
    monkeypatch.setattr(clock, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(clock, "sleep", slept.append)
    return slept


def counted(name):
    def call(self, *arguments):
        self.num += 1
        if self.fails:
            raise DistNetworkError("broken pipe")
        return getattr(self.inner, name)(*arguments)

    return call


class Counted(Store):
    """Counts the calls. fails: they raise."""

    def __init__(self):
        super().__init__()
        self.inner, self.num, self.fails = HashStore(), 0, False

    set, get, add = counted("set"), counted("get"), counted("add")
    check, multi_get, multi_set = counted("check"), counted("multi_get"), counted("multi_set")


def meet(*attempts):
    for _ in range(3):
        for each in attempts:
            each.meet()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_ranks_of_an_attempt_share_a_token_and_keys_that_no_attempt_before_had(order):
    store, tokens = HashStore(), set()
    for _ in range(3):
        now = {}
        for rank in order:  # each sees the old hellos and welcomes of all that come later
            now[rank] = Attempt(store, rank, 3)
            meet(*now.values())
            if len(now) < 3:
                assert not (0 in now and now[0].meet()), "an old hello was taken for a new one"
        assert now[0].missing == [] and all(each.meet() for each in now.values())
        tokens |= {each.token for each in now.values()}
        assert not now[2].keys().check(["said"])
        now[1].keys().set("said", "by 1")
        assert now[2].keys().get("said") == b"by 1"
    assert len(tokens) == 3 and {len(token) for token in tokens} == {16}


def test_who_has_said_hello_has_begun_and_whose_process_is_gone_has_ended():
    store = HashStore()
    first, other = Attempt(store, 0, 3), Attempt(store, 1, 3)
    assert first.began({0, 1, 2}) == {0, 1} and first.began({1, 2}) == {1}
    meet(first, other)
    assert first.ended([0, 1, 2]) == []
    own = PrefixStore("shardwright/attempt", store)
    assert (
        own.get(met(0, first.token)).decode() == own.get(met(1, first.token)).decode() == liveness.identity()
    )
    own.set(met(1, first.token), f"{liveness.identity()}1")  # the id of a process that began at another time
    assert first.ended([0, 1, 2]) == [1] and first.ended([0, 2]) == []


def test_a_host_that_tells_nothing_of_its_processes_is_met_too(monkeypatch):
    monkeypatch.setattr(liveness, "identity", lambda: None)
    store = HashStore()
    first, other = Attempt(store, 0, 2), Attempt(store, 1, 2)
    assert first.missing == [1] and other.missing == [0]
    assert [each.meet() for each in (first, other, first)] == [False, True, True]
    assert first.ended([0, 1]) == []


def test_ranks_that_come_late_are_waited_for_and_then_named(pauses):
    store = HashStore()
    first, second = Attempt(store, 0, 3), Attempt(store, 2, 3)
    assert not first.meet_within(5.0) and first.missing == [1, 2]
    assert second.meet_within(5.0) and not first.meet() and first.missing == [1]
    assert 5.0 < sum(pauses) < 5.2 and max(pauses) == pause_s(0.02, 1) and pauses[0] == max(pauses) / 20
    del pauses[:]
    alone = Attempt(HashStore(), 1, 10_000)
    assert not alone.meet_within(30.0) and alone.token == ""
    assert max(pauses) == pause_s(0.02, 80_000) == 8.0


def test_of_ranks_that_have_not_come_none_is_looked_for():
    store = Counted()
    first = Attempt(store, 0, 10_000)

    def calls(rank):
        before = store.num
        assert not rank.meet()
        return store.num - before

    assert calls(first) <= 1
    other = Attempt(store, 77, 10_000)
    assert calls(other) == 3, "who has said hello says it once"
    assert [calls(first), calls(first)] == [8, 6], "who was welcomed is welcomed once"


@pytest.mark.parametrize("agents", ["True", "False"])
def test_only_torchruns_store_is_read_by_keys_of_this_attempt(monkeypatch, agents):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents)
    asked = []

    def torchs(url, timeout, **options):
        asked.append((url, timeout, options))
        yield HashStore(), 0, 1

    for is_ours in (True, False):
        monkeypatch.setattr(attempt, "process_is_ours", lambda is_ours=is_ours: is_ours)
        [(store, rank, world)] = attempt._of_this_attempt(torchs)("env://", ROOM, rank=0)
        assert isinstance(store, PrefixStore) == (is_ours and agents == "True") and (rank, world) == (0, 1)
    assert asked == [("env://", ROOM, {"rank": 0})] * 2


@pytest.mark.parametrize(("platform", "over"), [("linux", "TCP"), ("darwin", "TCP"), ("linux", "X")])
def test_a_job_is_joined_by_keys_of_its_attempt_and_gloo_connects_as_needed(monkeypatch, platform, over):
    joined, store = [], HashStore()
    monkeypatch.setattr(attempt, "process_is_ours", lambda: True)
    monkeypatch.setattr(attempt.sys, "platform", platform)
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", over)
    monkeypatch.setattr(attempt, "rendezvous", lambda url, timeout: iter([(store, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: joined.append((args, options)))
    monkeypatch.setattr(attempt, "host_limits_told", lambda: nullcontext(joined.append("told")))
    attempt.join_job("gloo", ROOM)
    [told, (args, options)] = joined
    assert (told, args) == ("told", ("gloo",)) and isinstance(options.pop("store"), PrefixStore)
    assert options == {"rank": 0, "world_size": 1, "timeout": ROOM}
    assert os.environ.pop("TORCH_GLOO_LAZY_INIT", "") == ("1" if (platform, over) == ("linux", "TCP") else "")


def test_who_does_not_come_and_a_store_that_is_gone_are_told(pauses, monkeypatch):
    with pytest.raises(CommError, match=r"waited 3 s for other ranks to start, and ranks \[5, 7\] did not"):
        attempt._met(HashStore(), 0, [4, 5, 7], ROOM, "to start")
    store = Counted()
    store.fails = True
    with pytest.raises(CommError, match=r"store while waiting for other ranks to start \(broken pipe\)"):
        attempt._met(store, 0, [4, 5, 7], ROOM, "to start")
    made = SimpleNamespace(attempt=None)
    monkeypatch.setattr(process_state, "made_here", lambda: made)
    monkeypatch.setattr(attempt, "job_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(CommError, match=r"waiting for other ranks to watch over the job \(broken pipe\)"):
        attempt.this_attempt()
    store.fails = False
    assert attempt.this_attempt() is attempt.this_attempt() and attempt.this_attempt().missing == [1]


def test_a_group_is_made_over_keys_of_its_own_while_no_other_thread_makes_one(monkeypatch):
    keys, seen, group = HashStore(), [], dist.ProcessGroup(0, 1)
    monkeypatch.setattr(attempt, "keys_of", lambda *told: seen.append(told) or keys)
    monkeypatch.setattr(attempt, "default_store_is", lambda store: nullcontext(seen.append(store)))
    monkeypatch.setattr(
        attempt, "new_group_of", lambda *told: seen.extend([told, process_state.swapping.locked()]) or group
    )
    assert attempt.new_group([4, 5], "gloo", ROOM) is group
    assert seen == [([4, 5], ROOM, "to make a process group"), keys, ([4, 5], ROOM, "gloo"), True]


def test_ranks_that_meet_for_keys_of_a_call_are_seen_to_wait(monkeypatch):
    seen = []

    def meets(_, place, *told):
        [wait] = process_state.waits.values()
        seen.append((place, told, wait.launch.number, wait.launch.key, wait.log.ranks))
        return SimpleNamespace(keys=lambda: "theirs")

    monkeypatch.setattr(attempt, "_met", meets)
    monkeypatch.setattr(attempt, "job_store", HashStore)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    assert attempt.keys_of([4, 5], ROOM, "to make a call") == "theirs"
    assert seen == [(1, ([4, 5], ROOM, "to make a call"), 0, "make a call", (4, 5))]


# ---- a meeting to make a transport


def meetings():
    store = HashStore()
    return [Meeting(store, LaunchLog([4, 5, 6]), place, ROOM) for place in range(3)]


@pytest.mark.parametrize(
    ("own", "told"), [((None,) * 3, None), ((None, "no port", None), "no port"), ((None, None, ""), "")]
)
def test_all_that_make_a_transport_hear_why_one_of_them_refuses(own, told):
    three = meetings()
    with ThreadPoolExecutor(3) as pool:
        for each in three:
            each.leave("address", f"at {each.rank}")
        assert [*pool.map(lambda each: each.refusal("ready", own[each.rank]), three)] == [told] * 3
    assert three[0].read("address", [1, 2]) == {1: "at 1", 2: "at 2"}
    three[2].leave("word", "for 1", at=1)
    assert three[1].own("word", of=2) == "for 1"


def test_who_does_not_come_to_make_a_transport_is_named(pauses):
    first, second, _ = meetings()
    with pytest.raises(
        CommError, match=r"waited 3 s for other ranks to make a transport, and ranks \[5, 6\] did"
    ):
        first.refusal("ready", None)
    assert sum(pauses) > 3.0 and max(pauses) == pause_s(0.05, 3) and pauses[0] == max(pauses) / 100
    with pytest.raises(CommError, match=r"ranks \[6\] did not come"):
        second.refusal("ready", None)
    with pytest.raises(CommError, match=r"ranks \[4\] did not come"):
        second.own("word", of=0)


def test_the_watch_sees_who_waits_to_make_a_transport(monkeypatch, pauses):
    seen = []
    own = clock.sleep
    monkeypatch.setattr(clock, "sleep", lambda s: own(s) or seen.extend(process_state.waits.values()))
    with pytest.raises(CommError):
        meetings()[0].refusal("ready", None)
    assert {(wait.launch.number, wait.launch.key) for wait in seen} == {(0, "make a transport (ready)")}
