"""Real links between ranks of one machine: network namespaces joined by shaped veth pairs.

    loopback      one namespace for all ranks, its own lo (so that its counters see nothing else)
    two ranks     namespace 0 [wire] ======== [wire] namespace 1          tbf on both ends
    more ranks    namespace r [wire] ======== [port r] bridge namespace   tbf on both ends

All names carry this run's process id and are removed at exit, also after an error or Ctrl-C; what a killed
run left behind is removed by the next one. No address outside these namespaces is used.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "shardwright-bench"
DEVICE = "wire"


@dataclass(frozen=True)
class Shape:
    """What ``tc`` makes of each end: a rate, and a delay where the kernel can (``netem``)."""

    rate: str
    delay: str = ""


LINKS: dict[str, Shape | None] = {
    "loopback": None,
    "10gbit": Shape("10gbit"),
    "1gbit": Shape("1gbit"),
    "1gbit+0.5ms": Shape("1gbit", "0.5ms"),
    "100mbit": Shape("100mbit"),
}
BITS_PER_S = {"10gbit": 10e9, "1gbit": 1e9, "1gbit+0.5ms": 1e9, "100mbit": 100e6}


@dataclass(frozen=True)
class Place:
    """Where one rank runs: the words before its command line, its interface, and how many ranks use that."""

    prefix: tuple[str, ...]
    interface: str
    num_sharing: int


class LinkError(RuntimeError):
    """A link that can't be made on this machine."""


@contextmanager
def places(link: str, world: int) -> Iterator[list[Place]]:
    """One place per rank, joined by ``link``; everything made is removed on the way out.

    Raises:
        LinkError: not root, ``ip`` or ``tc`` is missing, or the kernel can't shape as asked. ``loopback``
            needs none of these: without them it uses the machine's own lo.
    """
    shape = LINKS[link]
    lacking = _lacking()
    if shape is None and (lacking or not _can_make_namespaces()):
        yield [Place((), "lo", world)] * world
        return
    if lacking:
        raise LinkError(f"link {link!r} needs {lacking}; run as root with iproute2, or use --link loopback")
    _remove_leftovers()
    with ExitStack() as stack:
        if shape is None:
            home = _namespace(stack, "lo")
            yield [Place(("ip", "netns", "exec", home), "lo", world)] * world
            return
        homes = [_namespace(stack, str(rank)) for rank in range(world)]
        if world == 2:
            _join(homes[0], DEVICE, homes[1], DEVICE)
            ends = [(home, DEVICE) for home in homes]
        else:
            ends = _bridge(_namespace(stack, "bridge"), homes)
        for rank, home in enumerate(homes):
            _ip("-n", home, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", DEVICE)
        for home, device in ends:
            _ip("-n", home, "link", "set", device, "up")
            _shape(home, device, shape)
        yield [Place(("ip", "netns", "exec", home), DEVICE, 1) for home in homes]


def reshape(place: Place, shape: Shape, burst: str = "256k") -> None:
    """Give what ``place`` sends another rate. Raises: LinkError."""
    tbf = ("tbf", "rate", shape.rate, "burst", burst, "latency", "30ms")
    _tc(place.prefix[-1], place.interface, "root", *tbf)


def _lacking() -> str:
    missing = [f"the command {name!r}" for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0:
        missing.insert(0, "root")
    return " and ".join(missing)


def _can_make_namespaces() -> bool:
    """Containers often lack the right to: then loopback falls back to the machine's own lo."""
    name = f"{PREFIX}-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    _ip("netns", "del", name)
    return True


def _remove_leftovers() -> None:
    """Removes the namespaces of runs whose process is gone."""
    for name in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split():
        pid = name.removeprefix(f"{PREFIX}-").split("-")[0]
        if name.startswith(f"{PREFIX}-") and pid.isdigit() and not Path("/proc", pid).exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _namespace(stack: ExitStack, suffix: str) -> str:
    name = f"{PREFIX}-{os.getpid()}-{suffix}"
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "del", name)
    _ip("-n", name, "link", "set", "lo", "up")
    return name


def _join(home: str, device: str, other_home: str, other_device: str) -> None:
    _ip(*f"-n {home} link add name {device} type veth peer name {other_device} netns {other_home}".split())


def _bridge(middle: str, homes: list[str]) -> list[tuple[str, str]]:
    """Joins all ranks' namespaces by a bridge in ``middle``; returns every device to bring up and shape."""
    _ip("-n", middle, "link", "add", "bridge", "type", "bridge")
    _ip("-n", middle, "link", "set", "bridge", "up")
    ends = []
    for rank, home in enumerate(homes):
        port = f"port{rank}"
        _join(home, DEVICE, middle, port)
        _ip("-n", middle, "link", "set", port, "master", "bridge")
        ends += [(home, DEVICE), (middle, port)]
    return ends


def _shape(home: str, device: str, shape: Shape) -> None:
    root = ["root"]
    if shape.delay:
        try:
            _tc(home, device, "root", "handle", "1:", "netem", "delay", shape.delay)
        except LinkError as error:
            raise LinkError(
                f"a delay of {shape.delay} needs the kernel's netem queue, which this kernel lacks; "
                f"use a link without a delay ({error})"
            ) from error
        root = ["parent", "1:1"]
    _tc(home, device, *root, "tbf", "rate", shape.rate, "burst", "256k", "latency", "30ms")


def _tc(home: str, device: str, *words: str) -> None:
    _command("tc", "-n", home, "qdisc", "replace", "dev", device, *words)


def _ip(*words: str) -> None:
    _command("ip", *words)


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
