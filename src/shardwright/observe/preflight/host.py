"""What a rank finds out about its own host: names, interfaces, versions, memory, disk and devices."""

import os
import platform
import secrets
import socket
import struct
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
from torch.cuda import nccl

from shardwright import clock
from shardwright.files import fcntl
from shardwright.observe.preflight.findings import HostReport, Trouble, is_loopback
from shardwright.transport.liveness import boot_id

_T = TypeVar("_T")

_ADDRESS, _MTU, _FLAGS = 0x8915, 0x8921, 0x8913  # SIOCGIFADDR, SIOCGIFMTU, SIOCGIFFLAGS
_UP = 1
_PART_NBYTES = 4 << 20
_DISK_NBYTES = 64 << 20
_DISK_S = 0.6
_NAME_S = 2.0


class Interface(NamedTuple):
    """A network interface that is up. mbits: what it says of its speed, 0 where it says nothing."""

    name: str
    address: str
    mtu: int
    mbits: int


class OwnFile(NamedTuple):
    """The file that this rank wrote for others to see, and what stands in it; bytes/s written and read."""

    path: Path
    text: str
    rates: tuple[float, float]
    trouble: str


def within(seconds: float, call: Any, *arguments: Any) -> Any:
    """What ``call`` returns, or raises, in a thread that is left behind when it takes longer.

    Raises: TimeoutError then.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return future.result(max(seconds, 0.0))
    except TooLate:
        raise TimeoutError(f"no answer within {seconds:.1f} s") from None


def addresses(name: str) -> list[str]:
    """Return the addresses of a name, in order; none where it is unknown, or nobody answers in time."""
    try:
        found = within(_NAME_S, socket.getaddrinfo, name, None, 0, socket.SOCK_STREAM)
    except OSError:  # TimeoutError is one
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def interfaces() -> list[Interface]:
    """Those that are up, in the order of the system. IPv4; another address has no name here."""
    found = []
    for _, name in socket.if_nameindex():
        flags = _asked(name, _FLAGS)
        if flags is None or not struct.unpack("H", flags[:2])[0] & _UP:
            continue
        address, mtu = _asked(name, _ADDRESS), _asked(name, _MTU)
        found.append(
            Interface(
                name,
                socket.inet_ntoa(address[4:8]) if address else "",
                struct.unpack("i", mtu[:4])[0] if mtu else 0,
                _speed(name),
            )
        )
    return found


def _asked(name: str, what: int) -> bytes | None:
    """The 16 bytes after the name in what the kernel answers."""
    if fcntl is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, what, struct.pack("256s", name.encode()[:15]))[16:32]
        except OSError:
            return None


def _speed(name: str) -> int:
    try:
        return max(0, int(Path("/sys/class/net", name, "speed").read_text()))
    except (OSError, ValueError):
        return 0


def route_to(address: str, known: Iterable[Interface]) -> tuple[str, str]:
    """The interface and the own address by which packets to an address leave; "" for what isn't known."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return "", ""
    return next((each.name for each in known if each.address == own), ""), own


def gloo_address(known: Iterable[Interface]) -> tuple[str, Trouble | None]:
    """The address that Gloo gives to other ranks, and what is wrong with its choice.

    Gloo takes the first interface of ``GLOO_SOCKET_IFNAME``; without one an address of the host's name that
    is its own, and else 127.0.0.1.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if names:
        first = names.split(",")[0]
        there = {each.name: each.address for each in known}
        if there.get(first):
            return there[first], None
        text = (
            f"GLOO_SOCKET_IFNAME={names}, and {socket.gethostname()} has no interface {first} that is up, "
            "with an IPv4 address"
        )
        others = ", ".join(name for name, address in there.items() if address) or "none"
        return "", Trouble("interface", (), text, f"set it to one that it has: {others}; or leave it out")
    for address in addresses(socket.gethostname()):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            socket.create_server((address, 0), family=family).close()
        except OSError:
            continue
        return address, None
    return "127.0.0.1", None


def nccl_interfaces(known: Iterable[Interface], given: str | None = None) -> list[str]:
    """The interfaces that NCCL takes for sockets, by the rules of its ``NCCL_SOCKET_IFNAME``.

    Beginnings of names, exact names after ``=``, all but those after ``^``; not given, those of InfiniBand,
    else all but ``lo`` and Docker's, else Docker's, else ``lo``.
    """
    there = [each.name for each in known if each.address]
    given = os.environ.get("NCCL_SOCKET_IFNAME", "") if given is None else given
    if given:
        names = given.lstrip("^=").split(",")
        exact = given.startswith(("=", "^="))
        fits = [name for name in there if any(name == n if exact else name.startswith(n) for n in names)]
        return [name for name in there if name not in fits] if given.startswith("^") else fits
    plain = [name for name in there if name != "lo" and not name.startswith("docker")]
    of_infiniband = [name for name in plain if name.startswith("ib")]
    return of_infiniband or plain or [name for name in there if name != "lo"] or there


def versions() -> dict[str, str]:
    """Of what must be the same on all ranks."""
    try:
        own = version("shardwright")
    except PackageNotFoundError:
        own = "not installed"
    found = {"Python": platform.python_version(), "torch": torch.__version__, "shardwright": own}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        found["NCCL"] = ".".join(map(str, nccl.version()))
    if torch.version.hip:
        found["HIP"] = torch.version.hip
    return found


def device(local_rank: int, local_ranks: int) -> tuple[str, list[Trouble]]:
    """This host's accelerators as ``8 x NVIDIA H100``, and what is wrong with them; or ``CPU, 4 cores``."""
    count = torch.accelerator.device_count()
    accelerator = torch.accelerator.current_accelerator()
    if not count or accelerator is None:
        return f"CPU, {os.cpu_count()} cores", []
    name = torch.get_device_module(accelerator).get_device_name(min(local_rank, count - 1))
    troubles, host = [], socket.gethostname()
    if local_ranks > count:
        text = f"{local_ranks} ranks on host {host}, and {count} {accelerator.type} devices"
        troubles.append(Trouble("device", (), text, f"start {count} ranks there"))
    elif accelerator.type == "cuda":
        others = [other for other in range(count) if other != local_rank]
        apart = [o for o in others if not torch.cuda.can_device_access_peer(local_rank, o)]
        if apart and len(apart) < len(others):  # where none can, that is how these devices are
            text = f"device {local_rank} of host {host} can't access the memory of {apart}, as others can"
            troubles.append(
                Trouble("device", (), text, "nvidia-smi topo -p2p r says why; switch off PCIe ACS")
            )
    return f"{count} x {name}", troubles


def write_own_file(folder: Path, rank: int) -> OwnFile:
    """Write a file for other ranks to see, and measure how fast the disk is, in about a second.

    What is measured is on the disk (fsync), and comes from it (the kernel is asked to drop its pages).
    """
    path, text = folder / f".shardwright-preflight-{rank}-{secrets.token_hex(4)}", secrets.token_hex(16)
    bulk = path.with_suffix(".bulk")
    part, written = os.urandom(_PART_NBYTES), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        with open(bulk, "wb", buffering=0) as file:
            start = clock.perf_counter()
            while written < _DISK_NBYTES and clock.perf_counter() < start + _DISK_S:
                written += file.write(part)
            os.fsync(file.fileno())
            wrote_s = clock.perf_counter() - start
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with open(bulk, "rb", buffering=0) as file:
            start = clock.perf_counter()
            read = 0
            while (got := len(file.read(_PART_NBYTES))) and clock.perf_counter() < start + _DISK_S:
                read += got
            read_s = clock.perf_counter() - start
        return OwnFile(path, text, (written / wrote_s, read / read_s), "")
    except OSError as error:
        return OwnFile(path, text, (0.0, 0.0), str(error))
    finally:
        bulk.unlink(missing_ok=True)


def shared_nbytes() -> int:
    """Bytes that are free in /dev/shm; -1 where there is no such thing."""
    try:
        found = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return -1
    return found.f_bavail * found.f_frsize


def host_report(rank: int, master: str, file: OwnFile | None, folder: Path) -> HostReport:
    """What this rank says of its host. master: the address of rank 0's host; "" for a rank that is alone.

    file: None where the disk didn't answer.
    """
    known = interfaces()
    address, trouble = gloo_address(known)
    troubles = [] if trouble is None else [trouble]
    route = route_to(master, known) if master else ("", "")
    usable = address if address and not (is_loopback(address) and route[1]) else route[1] or address
    link = next((each for each in known if each.address == usable), Interface("", usable, 0, 0))
    accelerator, found = device(
        int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    troubles += found
    nccl = nccl_interfaces(known)
    if not nccl and os.environ.get("NCCL_SOCKET_IFNAME"):
        given = os.environ["NCCL_SOCKET_IFNAME"]
        text = f"NCCL_SOCKET_IFNAME={given} fits no interface of {socket.gethostname()}"
        there = ", ".join(each.name for each in known if each.address)
        troubles.append(
            Trouble("interface", (), text, f"set it to the beginning of one that it has: {there}")
        )
    if file is None or file.trouble:
        text = f"{folder} on host {socket.gethostname()}: {file.trouble if file else 'no answer'}"
        remedy = "give a folder that can be written, --folder; a mount that doesn't answer wants its server"
        troubles.append(Trouble("disk", (), text, remedy))
    return HostReport(
        host=socket.gethostname(),
        boot=boot_id() or platform.node(),
        address=address,
        link=(link.name, link.mtu, link.mbits),
        route=route,
        nccl=",".join(nccl),
        versions=versions(),
        device=accelerator,
        shared_nbytes=shared_nbytes(),
        disk=file.rates if file else (0.0, 0.0),
        troubles=tuple(trouble._replace(ranks=(rank,)) for trouble in troubles),
    )
