"""What the ranks of a preflight find out, each at home and about the others. Values alone."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Trouble(NamedTuple):
    """One thing that is wrong: its kind, at which ranks, the exact finding, and what to do about it."""

    what: str
    ranks: tuple[int, ...]
    text: str
    remedy: str


class RankCall(NamedTuple):
    """One rank called another: half of the shortest round trip in seconds; the other's clock minus its own,
    known to ``latency_s``. trouble: why the other wasn't reached; "" where it was."""

    to: int
    latency_s: float
    clock_s: float
    trouble: str = ""


class Flow(NamedTuple):
    """What one rank received from another over one TCP connection: bytes/s."""

    source: int
    rate: float


@dataclass(frozen=True)
class HostReport:
    """What one rank found at home, before it spoke with others.

    boot: the same for all that runs on one machine. address: the one that Gloo would tell other ranks.
    link: the interface with that address (where others can't reach it: with one that they can), its MTU in
        bytes, and the Mbit/s that it says of itself (0: it doesn't).
    route: the interface and the own address by which this host reaches ``MASTER_ADDR``.
    nccl: the interfaces that NCCL would take. device: as ``8 x NVIDIA H100``.
    shared_nbytes: of /dev/shm, free. disk: bytes/s written and read in the folder of the job.
    troubles: what is wrong whatever others say.
    """

    host: str
    boot: str
    address: str
    link: tuple[str, int, int]
    route: tuple[str, str]
    nccl: str
    versions: dict[str, str]
    device: str
    shared_nbytes: int
    disk: tuple[float, float]
    troubles: tuple[Trouble, ...] = ()

    @property
    def interface(self) -> str:
        """The one that Gloo, and this package's own connections, take."""
        return self.link[0]


@dataclass(frozen=True)
class LinkReport:
    """What one rank found out about others: whom it reached, what came in, whose file it doesn't see."""

    calls: tuple[RankCall, ...] = ()
    flows: tuple[Flow, ...] = ()
    unseen: tuple[int, ...] = ()


@dataclass(frozen=True)
class Readiness:
    """All that was found out. hosts, links: by rank, of those that came, and of those that reported.

    waited_s: how long was waited for ranks to come. folder: the one that is to be common.
    """

    world: int
    hosts: Mapping[int, HostReport]
    links: Mapping[int, LinkReport]
    waited_s: float
    folder: str

    @property
    def names(self) -> list[str]:
        """The hosts, in the order of their first ranks."""
        return list(dict.fromkeys(self.hosts[rank].host for rank in sorted(self.hosts)))

    def flows(self, *, between: bool) -> dict[tuple[int, int], float]:
        """Bytes/s by source and target; between hosts, or in a host."""
        return {
            (flow.source, rank): flow.rate
            for rank, report in self.links.items()
            for flow in report.flows
            if (self.hosts[flow.source].host != self.hosts[rank].host) == between
        }

    def latencies(self, *, between: bool) -> dict[tuple[int, int], float]:
        """Seconds one way by caller and called; between hosts, or in a host."""
        return {
            (rank, call.to): call.latency_s
            for rank, report in self.links.items()
            for call in report.calls
            if not call.trouble and (self.hosts[call.to].host != self.hosts[rank].host) == between
        }


def clocks(found: Readiness) -> dict[int, float]:
    """Each rank's clock minus that of the first one that came, in seconds, as far as they spoke."""
    first = min(found.hosts)
    ahead = {first: 0.0}
    for rank, report in sorted(found.links.items()):
        call = next((call for call in report.calls if call.to == first and not call.trouble), None)
        if call is not None:
            ahead[rank] = -call.clock_s
    return ahead


def is_loopback(address: str) -> bool:
    """Whether only its own host reaches an address; "" counts as one."""
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback
