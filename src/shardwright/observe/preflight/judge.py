"""What is wrong with what the ranks of a preflight have found out, and what to do about it. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import median

from shardwright.columns import in_words
from shardwright.observe.preflight.findings import Readiness, Trouble, clocks, is_loopback
from shardwright.observe.watch.diagnosis import spans

SLOW_SHARE = 1 / 3  # of the best flow between hosts
_STATED_SHARE = 0.03  # of what the interface says of itself; one TCP connection doesn't fill a fast one
_FAR_S = 0.02
_CLOCK_S = 0.1
_SHARED_NBYTES = 256 << 20
_DISK_RATE = 5e6


def judge(found: Readiness) -> list[Trouble]:
    """Everything that is wrong, what keeps ranks from meeting first. Equal findings of ranks are one."""
    troubles = _missing(found)
    troubles += [trouble for rank in sorted(found.hosts) for trouble in found.hosts[rank].troubles]
    for check in (_names, _versions, _calls, _slow, _packets, _clocks, _memory_and_disk, _files):
        troubles += check(found)
    ranks: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for trouble in troubles:
        ranks[trouble.what, trouble.text, trouble.remedy] |= set(trouble.ranks)
    return [Trouble(what, tuple(sorted(who)), text, remedy) for (what, text, remedy), who in ranks.items()]


def can_measure(troubles: Iterable[Trouble]) -> bool:
    """Whether ranks can join a process group all the same: all are there, reach each other and run the
    same."""
    return not {trouble.what for trouble in troubles} & {"missing", "name", "interface", "reach", "versions"}


def _missing(found: Readiness) -> list[Trouble]:
    absent = sorted(set(range(found.world)) - found.hosts.keys())
    silent = sorted(found.hosts.keys() - found.links.keys())
    troubles = []
    if absent:
        remedy = (
            "its own output says why, where it could start; else see that its host runs, and that from there "
            "MASTER_ADDR is a known name, and MASTER_PORT open. More time: --seconds"
        )
        text = f"did not come within {found.waited_s:.1f} s"
        troubles.append(Trouble("missing", tuple(absent), text, remedy))
    if silent:
        text = "came, and then reported nothing"
        troubles.append(Trouble("missing", tuple(silent), text, "look at its own output"))
    return troubles


def _names(found: Readiness) -> list[Trouble]:
    troubles, boots = [], defaultdict(set)
    for rank, report in sorted(found.hosts.items()):
        boots[report.host].add(report.boot)
        if len(found.names) > 1 and is_loopback(report.address):
            name = report.route[0] or "the interface that leads to the others"
            text = (
                f"Gloo on host {report.host} would tell the others {report.address or 'no address'}, where "
                "no other host reaches it: the host's own name leads there (or GLOO_SOCKET_IFNAME does)"
            )
            troubles.append(Trouble("name", (rank,), text, f"on that host: export GLOO_SOCKET_IFNAME={name}"))
    for host, those in boots.items():
        if len(those) > 1:
            ranks = tuple(rank for rank, report in found.hosts.items() if report.host == host)
            text = f"{len(those)} machines are called {host}, and would be taken for one host"
            troubles.append(Trouble("name", ranks, text, "give each a name of its own: hostnamectl hostname"))
    return troubles


def _versions(found: Readiness) -> list[Trouble]:
    troubles = []
    for package in dict.fromkeys(name for report in found.hosts.values() for name in report.versions):
        counts = Counter(report.versions.get(package, "none") for report in found.hosts.values())
        usual = counts.most_common(1)[0][0]
        for rank, report in sorted(found.hosts.items()):
            version = report.versions.get(package, "none")
            if version != usual:
                text = f"{package} {version} on host {report.host}, and {usual} on most ranks"
                troubles.append(Trouble("versions", (rank,), text, f"install {package} {usual} there, too"))
    return troubles


def _calls(found: Readiness) -> list[Trouble]:
    """A rank that nobody reaches, or that reaches nobody, is one finding; else each pair is."""
    failed = {
        (rank, call.to): call.trouble
        for rank, report in found.links.items()
        for call in report.calls
        if call.trouble
    }
    tried = Counter(call.to for report in found.links.values() for call in report.calls)
    remedy = (
        "open all TCP ports between the hosts of the job to each other (a firewall, a security group), and "
        "see that GLOO_SOCKET_IFNAME names, on each host, the interface that leads to the others"
    )
    troubles = []
    for rank in sorted({to for _, to in failed}):
        callers = [caller for caller, to in failed if to == rank]
        if len(callers) == tried[rank] > 1:
            text = f"no rank reaches it at {found.hosts[rank].address} ({failed[callers[0], rank]})"
            troubles.append(Trouble("reach", (rank,), text, remedy))
        else:
            for caller in callers:
                text = f"doesn't reach rank {rank} at {found.hosts[rank].address} ({failed[caller, rank]})"
                troubles.append(Trouble("reach", (caller,), text, remedy))
    return troubles


def _slow(found: Readiness) -> list[Trouble]:
    flows = found.flows(between=True)
    remedy = "each collective takes at least as long: use hosts of one data centre"
    troubles = [
        Trouble("latency", (a,), f"{1e3 * s:.0f} ms to rank {b}, one way", remedy)
        for (a, b), s in found.latencies(between=True).items()
        if s > _FAR_S
    ]
    if not flows:
        return troubles
    best = max(flows.values())
    by_hosts: dict[tuple[str, str], float] = {}
    for (source, to), rate in flows.items():
        way = found.hosts[source].host, found.hosts[to].host
        by_hosts[way] = min(rate, by_hosts.get(way, rate))
    slow = {way for way, rate in by_hosts.items() if rate < SLOW_SHARE * best}
    remedy = (
        "look at that host's cable, port and errors (ethtool -S, ip -s link), and at what else sends there; "
        "or leave the host out"
    )
    named: set[tuple[str, str]] = set()
    for host in found.names if len(found.names) > 2 else ():
        sides = {
            side: {way for way in by_hosts if way[index] == host}
            for index, side in enumerate(("sends", "receives"))
        }
        sides = {side: ways for side, ways in sides.items() if ways and ways <= slow}
        if sides:
            named |= set().union(*sides.values())
            rate = min(by_hosts[way] for ways in sides.values() for way in ways)
            text = (
                f"host {host} {' and '.join(sides)} {rate / 1e6:,.1f} MB/s, and the best link between hosts "
                f"carries {best / 1e6:,.1f}"
            )
            ranks = tuple(rank for rank, report in found.hosts.items() if report.host == host)
            troubles.append(Trouble("slow link", ranks, text, remedy))
    for source, to in sorted(slow - named):
        ranks = tuple(rank for rank, report in found.hosts.items() if report.host in (source, to))
        text = (
            f"from host {source} to host {to} {by_hosts[source, to] / 1e6:,.1f} MB/s, and the best link "
            f"between hosts carries {best / 1e6:,.1f}"
        )
        troubles.append(Trouble("slow link", ranks, text, remedy))
    stated = min(report.link[2] for report in found.hosts.values()) * 1e6 / 8
    if best < _STATED_SHARE * stated:
        text = (
            f"the best link between hosts carries {best / 1e6:,.1f} MB/s, its interface says "
            f"{stated / 1e6:,.0f}"
        )
        troubles.append(Trouble("slow link", tuple(found.hosts), text, remedy))
    return troubles


def _packets(found: Readiness) -> list[Trouble]:
    if len(found.names) < 2:
        return []
    usual = Counter(report.link[1] for report in found.hosts.values()).most_common(1)[0][0]
    return [
        Trouble(
            "mtu",
            (rank,),
            f"packets of {report.link[1]} bytes on {report.interface} of host {report.host}, and of {usual} "
            "on most ranks: large ones are cut, or lost",
            f"on that host: ip link set dev {report.interface} mtu {usual}",
        )
        for rank, report in sorted(found.hosts.items())
        if report.link[1] != usual and not is_loopback(report.address)
    ]


def _clocks(found: Readiness) -> list[Trouble]:
    ahead = clocks(found) if found.hosts else {}
    middle = median(ahead.values()) if ahead else 0.0
    troubles = []
    remedy = "times in logs and of files on a common disk don't fit: on that host, start chronyd or ntpd"
    for rank, s in sorted(ahead.items()):
        if abs(s - middle) > _CLOCK_S:
            off = f"{abs(s - middle):.2f} s {'ahead' if s > middle else 'behind'}"
            text = f"the clock of host {found.hosts[rank].host} is {off}"
            troubles.append(Trouble("clock", (rank,), text, remedy))
    return troubles


def _memory_and_disk(found: Readiness) -> list[Trouble]:
    troubles = []
    for rank, report in sorted(found.hosts.items()):
        if 0 <= report.shared_nbytes < _SHARED_NBYTES:
            text = f"{in_words(report.shared_nbytes)} are free in /dev/shm of host {report.host}"
            remedy = "NCCL and workers of data loaders need more: docker run --shm-size=8g, or --ipc=host"
            troubles.append(Trouble("shared memory", (rank,), text, remedy))
        if 0 < report.disk[0] < _DISK_RATE:
            text = f"{report.disk[0] / 1e6:.1f} MB/s are written to {found.folder} by host {report.host}"
            remedy = f"10 GB of a checkpoint take {1e10 / report.disk[0] / 60:,.0f} minutes: --folder another"
            troubles.append(Trouble("disk", (rank,), text, remedy))
    return troubles


def _files(found: Readiness) -> list[Trouble]:
    """A host whose files nobody elsewhere sees is named; a rank that sees none of the others', too."""
    troubles = []
    remedy = (
        "checkpoints and runs need a folder that all hosts share (NFS, Lustre, ...), mounted at the same "
        "path: --folder names it"
    )
    for rank, report in sorted(found.links.items()):
        if report.unseen:
            text = f"doesn't see in {found.folder} what {spans(report.unseen)} wrote there"
            troubles.append(Trouble("common folder", (rank,), text, remedy))
    return troubles
