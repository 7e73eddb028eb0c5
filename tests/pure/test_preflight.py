"""What a preflight makes of what ranks found out: each thing that is wrong, by name, with a remedy."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from shardwright.observe.preflight.findings import Flow, HostReport, LinkReport, RankCall, Readiness
from shardwright.observe.preflight.host import Interface, nccl_interfaces
from shardwright.observe.preflight.judge import can_measure, judge
from shardwright.observe.preflight.links import MOST_PEERS, Responder, call_all, flow_seconds, rounds, spread
from shardwright.observe.preflight.page import page
from shardwright.transport.cpu.handshake import listen

GOOD_RATE = 1.2e9


def host(number):
    address = f"10.0.0.{number + 1}"
    place = {"host": f"node{number}", "boot": f"boot{number}", "address": address}
    network = {"link": ("eth0", 9000, 10_000), "route": ("eth0", address), "nccl": "eth0"}
    versions = {"Python": "3.11.2", "torch": "2.13.0", "shardwright": "0.1.0"}
    memory = {"device": "8 x NVIDIA H100", "shared_nbytes": 1 << 34, "disk": (5e8, 2e9)}
    return HostReport(**place, **network, **memory, versions=versions)


def job(num_hosts=3, per_host=2):
    """A job in which all is well."""
    hosts = {rank: host(rank // per_host) for rank in range(num_hosts * per_host)}
    links = {}
    for rank in hosts:
        calls = tuple(RankCall(other, 5e-5, 1e-4) for other in hosts if other != rank)
        plan = rounds({r: h.host for r, h in hosts.items()})
        sources = [source for pairs in plan for source, to in pairs.items() if to == rank]
        links[rank] = LinkReport(calls, tuple(Flow(source, GOOD_RATE) for source in sources))
    return Readiness(len(hosts), hosts, links, 1.0, "/shared")


def with_host(found, rank, **changes):
    return replace(found, hosts={**found.hosts, rank: replace(found.hosts[rank], **changes)})


def with_flows(found, rate_of):
    def flows(rank, report):
        return tuple(Flow(each.source, rate_of(each.source, rank)) for each in report.flows)

    links = {rank: replace(report, flows=flows(rank, report)) for rank, report in found.links.items()}
    return replace(found, links=links)


def with_calls(found, call_of):
    links = {
        rank: replace(report, calls=tuple(call_of(rank, call) for call in report.calls))
        for rank, report in found.links.items()
    }
    return replace(found, links=links)


def only(found):
    (trouble,) = judge(found)
    assert trouble.remedy
    return trouble


def test_a_job_in_which_all_is_well_has_no_finding_and_its_page_says_so():
    found = job()
    assert judge(found) == [] and can_measure([])
    text = page(found, [], 3.1)
    assert text.startswith("preflight: 6 rank(s) on 3 host(s), in 3.1 s: all is well")
    assert "between hosts" in text and "eth0 (10 Gbit/s)" in text and "1,200" in text
    assert "all ranks see what the others wrote" in text


def test_a_rank_that_never_came_and_one_that_fell_silent_are_named():
    found = job()
    hosts = {rank: report for rank, report in found.hosts.items() if rank != 4}
    links = {rank: report for rank, report in found.links.items() if rank not in (4, 5)}
    for rank, report in links.items():
        calls = tuple(call for call in report.calls if call.to != 4)
        links[rank] = LinkReport(calls, tuple(flow for flow in report.flows if flow.source != 4))
    absent, silent = judge(replace(found, hosts=hosts, links=links))
    assert (absent.what, absent.ranks, silent.ranks) == ("missing", (4,), (5,))
    assert "did not come within 1.0 s" in absent.text and "MASTER_ADDR" in absent.remedy
    assert not can_measure([absent])
    assert "5 of 6 rank(s)" in page(replace(found, hosts=hosts, links=links), [absent, silent], 9.0)


def test_a_host_whose_own_name_leads_to_itself_is_named_with_the_interface_to_take_instead():
    found = with_host(job(), 2, address="127.0.1.1")
    trouble = only(with_host(found, 3, address="127.0.1.1"))
    assert (trouble.what, trouble.ranks) == ("name", (2, 3))
    assert "127.0.1.1" in trouble.text and trouble.remedy.endswith("export GLOO_SOCKET_IFNAME=eth0")
    same = {"host": "node0", "boot": "boot0", "address": "127.0.1.1"}
    alone = {rank: replace(report, **same) for rank, report in found.hosts.items()}
    assert judge(replace(found, hosts=alone)) == []  # of one host it is as good as any


def test_two_machines_of_one_name_are_told_apart():
    trouble = only(with_host(with_host(job(2, 1), 0, host="localhost"), 1, host="localhost"))
    assert trouble.ranks == (0, 1) and "2 machines are called localhost" in trouble.text


def test_the_rank_whose_version_differs_is_named_with_what_most_have():
    old = {"Python": "3.11.2", "torch": "2.12.0", "shardwright": "0.1.0"}
    trouble = only(with_host(job(), 4, versions=old))
    assert (trouble.what, trouble.ranks) == ("versions", (4,))
    assert "torch 2.12.0 on host node2, and 2.13.0 on most" in trouble.text
    assert trouble.remedy == "install torch 2.13.0 there, too" and not can_measure([trouble])


def test_a_rank_that_nobody_reaches_is_one_finding_and_else_each_pair_is():
    def to_five(rank, call):
        return call._replace(trouble="no answer within 1.5 s") if call.to == 5 else call

    trouble = only(with_calls(job(), to_five))
    assert (trouble.what, trouble.ranks) == ("reach", (5,)) and "10.0.0.3" in trouble.text

    def one_way(rank, call):
        return call._replace(trouble="refused") if (rank, call.to) == (0, 5) else call

    trouble = only(with_calls(job(), one_way))
    assert trouble.ranks == (0,) and "doesn't reach rank 5" in trouble.text


@pytest.mark.parametrize("sides", [("sends",), ("receives",), ("sends", "receives")])
def test_of_three_hosts_the_one_with_the_slow_link_is_named_and_in_which_direction(sides):
    def rate(source, to):
        out, back = source // 2 == 2 != to // 2, to // 2 == 2 != source // 2
        return 1e6 if (out and "sends" in sides) or (back and "receives" in sides) else GOOD_RATE

    trouble = only(with_flows(job(), rate))
    assert (trouble.what, trouble.ranks) == ("slow link", (4, 5))
    assert trouble.text.startswith(f"host node2 {' and '.join(sides)} 1.0 MB/s, and the best")
    assert can_measure([trouble])


def test_of_two_hosts_the_slow_direction_is_named_and_a_link_far_below_its_interface_too():
    trouble = only(with_flows(job(2, 1), lambda source, to: 1e8 if source else GOOD_RATE))
    assert trouble.text.startswith("from host node1 to host node0 100.0 MB/s")
    trouble = only(with_flows(job(2, 1), lambda source, to: 1e7))
    assert "its interface says 1,250" in trouble.text


def test_links_in_a_host_are_shown_and_not_judged():
    assert judge(with_flows(job(), lambda source, to: 1e6 if source // 2 == to // 2 else GOOD_RATE)) == []


def test_mtu_clock_memory_disk_and_folder_are_each_found():
    remedy = only(with_host(job(), 1, link=("eth0", 1500, 10_000))).remedy
    assert remedy.endswith("ip link set dev eth0 mtu 9000")

    def late(rank, call):
        return call._replace(clock_s=(call.to == 4) * 2.0 - (rank == 4) * 2.0)

    assert "node2 is 2.00 s ahead" in only(with_calls(job(), late)).text
    assert "64.0 MiB are free in /dev/shm" in only(with_host(job(), 0, shared_nbytes=64 << 20)).text
    assert "1.0 MB/s are written" in only(with_host(job(), 0, disk=(1e6, 1e9))).text
    found = job()
    apart = {rank: replace(found.links[rank], unseen=(4, 5) if rank < 4 else ()) for rank in found.links}
    trouble = only(replace(found, links=apart))
    assert trouble.ranks == (0, 1, 2, 3) and "what ranks 4, 5 wrote" in trouble.text


@pytest.mark.parametrize("sizes", [(1,), (8,), (1, 1), (2, 2, 2), (3, 1, 2), (8,) * 16, (1,) * 100])
def test_in_no_round_does_a_rank_send_or_receive_twice_and_small_jobs_measure_each_pair_of_hosts(sizes):
    hosts = {}
    for number, size in enumerate(sizes):
        hosts |= {len(hosts) + i: f"node{number}" for i in range(size)}
    plan = rounds(hosts)
    for pairs in plan:
        assert len(set(pairs.values())) == len(pairs) and all(a != b for a, b in pairs.items())
    ways = {(hosts[a], hosts[b]) for pairs in plan for a, b in pairs.items()}
    ways -= {(h, h) for h in hosts.values()}
    if len(sizes) <= 12:
        assert len(ways) == len(sizes) * (len(sizes) - 1)
    assert len(plan) * (flow_seconds(len(plan), 2.0) + 0.03) < 3.0


def test_of_many_ranks_each_calls_some_at_all_distances():
    assert spread(5, MOST_PEERS) == [1, 2, 3, 4, 5]
    far = spread(1023, MOST_PEERS)
    assert len(far) == MOST_PEERS and (far[0], far[-1]) == (1, 1023)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("", ["ib0", "ib1"]),
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("^ib,docker,lo", ["eth0", "eth1"]),
        ("^=eth0,lo,docker0,ib0", ["eth1", "ib1"]),
        ("wlan", []),
    ],
)
def test_nccls_interfaces_are_chosen_by_its_rules(given, taken):
    names = ["lo", "docker0", "eth0", "eth1", "ib0", "ib1"]
    known = [Interface(name, f"10.1.0.{i}", 1500, 0) for i, name in enumerate(names)]
    assert nccl_interfaces([*known, Interface("down", "", 1500, 0)], given) == taken


def test_nccl_takes_dockers_and_then_the_loopback_only_where_there_is_nothing_else():
    lo, docker = Interface("lo", "127.0.0.1", 65536, 0), Interface("docker0", "172.17.0.1", 1500, 0)
    assert nccl_interfaces([lo, docker], "") == ["docker0"]
    assert nccl_interfaces([lo], "") == ["lo"]


def test_strangers_that_call_a_rank_change_nothing():
    sock, place = listen()
    responder, before = Responder(sock, place), threading.active_count()
    strangers = [socket.create_connection((place.host, place.port)) for _ in range(300)]
    (found,) = call_all(1, {0: place, 1: place}, time.monotonic() + 5.0)
    assert (found.to, found.trouble) == (0, "")
    assert threading.active_count() < before + 20, "each stranger has a thread"
    responder.close()
    for stranger in strangers:
        stranger.close()
