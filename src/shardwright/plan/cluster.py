"""What a plan is made for: devices and the links between them. Data sheets, or what was measured. Pure."""

import json
import re
import tomllib
from collections.abc import Collection
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardwright.errors import ConfigError, InputError
from shardwright.files import parsed
from shardwright.options import check, limited, read, words_of
from shardwright.plan.constants import Constants

GIB = 2**30


@dataclass(frozen=True)
class DeviceSpec:
    """One device, by its data sheet where nothing else is said.

    Args:
        name: what it is called.
        peak_flops: dense FLOP/s in ``dtype``.
        memory_nbytes: bytes of its memory; of a CPU those of its host, which ranks of it share.
        memory_bandwidth: bytes/s of that memory.
        link_bandwidth: bytes/s, in one direction, of all its links to the other devices of its host; 0: not
            known.
        matmul: share of ``peak_flops`` that the best matmul was measured to reach, of any shape.
        attention: share of it that the usual fused attention reaches (see docs/plan.md).
        ring: share of ``link_bandwidth`` that the rings of a collective use.
        float8: FLOP/s of matmuls in 8 bits over those in bfloat16; 1 where it has none.
        float32: FLOP/s of matmuls in float32, without TF32, over those in bfloat16; 0: not known.
        tf32: FLOP/s of those in TF32 over those in bfloat16; 0: not known.
        reserved: bytes that torch's caching allocator was seen to take for each byte in use, where there was
            enough.
        host_link: bytes/s, in one direction, between it and its host's memory.
        host_memory: bytes/s of that memory which one of the host's ranks has.
        dtype: of ``peak_flops``: "float32" where it was measured in that, without any other.
        source: where these numbers are from: "measured" (by ``shardwright bench compute``), "fitted" (the
            constants were fitted to runs on it) or "data sheet". Error bars depend on it.

    Raises:
        ConfigError: one of these isn't a number above 0, or ``dtype`` or ``source`` isn't known.
    """

    name: str
    peak_flops: float = field(metadata={"gt": 0})
    memory_nbytes: float = field(metadata={"gt": 0})
    memory_bandwidth: float = field(metadata={"gt": 0})
    link_bandwidth: float = field(metadata={"ge": 0})
    matmul: float = limited(0.8, gt=0)
    attention: float = limited(0.5, gt=0)
    ring: float = limited(0.8, gt=0)
    float8: float = limited(1.0, gt=0)
    float32: float = limited(0.0, ge=0)
    tf32: float = limited(0.0, ge=0)
    reserved: float = limited(1.36, gt=0)
    host_link: float = limited(25e9, gt=0)
    host_memory: float = limited(25e9, gt=0)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    source: Literal["measured", "fitted", "data sheet"] = "data sheet"

    def __post_init__(self) -> None:
        try:
            check(self, ConfigError)
        except ConfigError as error:
            raise ConfigError(f"of the device {self.name!r} {error}") from None

    def flops_in(self, dtype: str) -> float:
        """FLOP/s of matmuls in one dtype, dense, as ``peak_flops`` is.

        Args:
            dtype: torch's name of it; "float8" for each kind of 8 bits, or "tf32".

        Returns:
            The number.

        Raises:
            ConfigError: it isn't known.
        """
        known = {"bfloat16": 1.0, "float16": 1.0, "float8": self.float8, "float32": self.float32}
        known["tf32"] = self.tf32
        if self.dtype == "float32":  # and in TF32 if torch was set to take it where this was measured
            known = {"float32": 1.0, "tf32": 1.0}
        if not known.get(dtype):
            names = ", ".join(name for name, share in known.items() if share)
            raise ConfigError(
                f"the model has matmuls in {dtype}, and of {self.name!r} only the rates in {names} are "
                "known; compute in one of these (MixedPrecisionPolicy.param_dtype, --param-dtype), measure "
                "the device (shardwright bench compute --dtype ...), or describe it in a file (docs/plan.md)"
            )
        return self.peak_flops * known[dtype]

    @property
    def host_network(self) -> float:
        """Bytes/s, in one direction, that are usual between a host of it and the others: network cards of 400
        Gbit/s for each of eight devices, of 200 Gbit/s for A100. 0 of a device that isn't in the library, or
        was measured: nothing is usual there."""
        if self.source == "measured" or _known(self.name) is None:
            return 0.0
        return 200e9 if "A100" in self.name.upper() else 400e9

    @property
    def is_host(self) -> bool:
        """Whether it is a CPU, so that its memory is that of its host."""
        return self.name.upper().startswith("CPU")


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal devices.

    Args:
        device: one of them; ``device("H100")`` has those of the library.
        ranks: devices in all: of one host, or of whole hosts.
        ranks_per_host: of them in one host.
        host_bandwidth: bytes/s, in one direction, between one host and the others; 0, the default, takes the
            device's ``host_network``.
        constants: what no data sheet says; others than the fitted ones where the cluster was measured.
        host_memory_nbytes: bytes of a host's memory, which its ranks share; 0: not known.
        budget_nbytes: bytes of each device that a step may hold; 0, the default: all but a reserve.
        measured_hosts: how many hosts ``shardwright bench links`` measured together; 0: it didn't.

    Raises:
        ConfigError: ``device`` isn't one, a number isn't above 0, or ``ranks`` aren't whole hosts.
    """

    device: DeviceSpec
    ranks: int = field(metadata={"gt": 0})
    ranks_per_host: int = limited(8, gt=0)
    host_bandwidth: float = limited(0.0, ge=0)
    constants: Constants = field(default=Constants())
    host_memory_nbytes: float = limited(0.0, ge=0)
    budget_nbytes: float = limited(0.0, ge=0)
    measured_hosts: int = limited(0, ge=0)

    def __post_init__(self) -> None:
        if not isinstance(self.device, DeviceSpec):
            raise ConfigError(
                f"Cluster.device is {self.device!r}, expected a DeviceSpec: shardwright.plan.cluster.device("
                '"H100") is one, by its name in the library'
            )
        try:
            check(self, ConfigError)
        except ConfigError as error:
            raise ConfigError(f"{error}; ranks are devices in all, as Cluster(device, ranks=8)") from None
        if self.ranks > self.ranks_per_host and self.ranks % self.ranks_per_host:
            whole = self.ranks - self.ranks % self.ranks_per_host
            raise ConfigError(
                f"{self.ranks} ranks aren't whole hosts of {self.ranks_per_host}: take {whole} or "
                f"{whole + self.ranks_per_host}, or describe hosts of another size (ranks_per_host of a "
                "Cluster, or of its file: --cluster)"
            )

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return -(-self.ranks // self.ranks_per_host)

    @property
    def ranks_on_host(self) -> int:
        """Ranks that share a host."""
        return min(self.ranks, self.ranks_per_host)

    @property
    def memory_nbytes(self) -> float:
        """Bytes of memory that one rank has: its device's, or, on CPUs, its part of the host's."""
        return self.device.memory_nbytes / (self.ranks_on_host if self.device.is_host else 1)

    @property
    def room_nbytes(self) -> float:
        """Bytes of it that a step may hold: the budget, or all but a reserve (docs/plan.md)."""
        return self.budget_nbytes or FULL * self.memory_nbytes

    @property
    def network(self) -> float:
        """Bytes/s of a host to the others: as given, or what is usual for its devices; 0: not known."""
        return self.host_bandwidth or self.device.host_network

    def of(self, ranks: int) -> "Cluster":
        """The same hosts with another number of ranks.

        Args:
            ranks: devices in all.

        Returns:
            The cluster.

        Raises:
            ConfigError: these aren't whole hosts.
        """
        return replace(self, ranks=ranks, ranks_per_host=min(ranks, self.ranks_per_host))

    def within(self, budget_nbytes: float | None) -> "Cluster":
        """The same with a budget.

        Args:
            budget_nbytes: bytes of each device that a step may hold; None leaves the cluster as it is.

        Returns:
            The cluster.

        Raises:
            InputError: the budget isn't positive.
        """
        if budget_nbytes is None:
            return self
        if not budget_nbytes > 0:
            raise InputError(f"budget must be a positive number of bytes, got {budget_nbytes!r}")
        return replace(self, budget_nbytes=budget_nbytes)

    def save(self, path: str | Path) -> None:
        """Write it as TOML: a device of the library by its name, any other by all of its fields.

        Args:
            path: of the file; what is there is replaced.
        """
        lines = [f"# {self.hosts} host(s) of equal devices, for shardwright plan --cluster."]
        if known := DEVICES.get(self.device.name) == self.device:
            lines.append(f"device = {json.dumps(self.device.name)}")
        lines += _lines(self)
        if not known:
            measured = self.device.source == "measured"  # by a command that doesn't measure these
            lines += ["", "[device]", *_lines(self.device, ("host_link", "host_memory") if measured else ())]
        if self.constants != Constants():
            lines += ["", "[constants] # what each is: docs/plan.md"]
            lines += [f"{name} = {value!r}" for name, value in asdict(self.constants).items()]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> "Cluster":
        """Read a cluster from a file of TOML, as ``save`` writes it.

        Its ``device`` is a name of the library, or a table: with the fields of ``DeviceSpec``, or with the
        ``name`` of a device of the library and what differs from it, as it was measured.

        Args:
            path: of the file.

        Returns:
            The cluster.

        Raises:
            ConfigError: the file can't be read as one.
        """
        try:
            table: dict[str, Any] = parsed(tomllib.loads, Path(path).read_text(encoding="utf-8"))
            table["device"] = _device_of(table.get("device"))
            found = read(Cluster, table)
            check(found.constants, ConfigError)
            return found
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a cluster: {error}; expected ranks, and the name of a device or all of its "
                "fields under [device] (docs/plan.md)"
            ) from error


def _device_of(given: Any) -> DeviceSpec:
    """What a file has as its device. Raises: ValueError."""
    if isinstance(given, str):
        return device(given)
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise ValueError(f"device is {given!r}, expected a name, or a table with a name")
    known = _known(given["name"])
    if known is None or given.get("source") == "measured":
        given = {"link_bandwidth": 0.0, **given}
    if known is not None:
        return read(DeviceSpec, asdict(known) | given, "[device] ")
    try:
        return read(DeviceSpec, given, "[device] ")
    except ValueError as error:
        raise ValueError(f"{error} ({given['name']!r} isn't in the library: {', '.join(DEVICES)})") from error


def _lines(of: Any, left_out: Collection[str] = ()) -> list[str]:
    """Return a file's lines with their words, without what isn't known: 0 or, by default, ``left_out``."""
    words, lines = words_of(type(of)), []
    for each in fields(of):
        value = getattr(of, each.name)
        is_default = value == each.default or (each.default is MISSING and value == 0)
        if not (is_default and (not value or each.name in left_out)) and not is_dataclass(value):
            lines.append(f"{each.name} = {json.dumps(value)}  # {words[each.name].partition(';')[0]}")
    return lines


FULL = 0.867
"""Share of a device's memory that a plan fills: what torch's caching allocator was seen to hold where more
than that was cached, 82.4 of 95.04 GiB of one published run (TTH001). The rest is a reserve: for the driver
and kernels' workspaces, for blocks that don't fit again, and for the error of the prediction."""


def _library() -> tuple[dict[str, DeviceSpec], dict[str, str]]:
    """Devices by name, and the words that a name of each may have besides."""
    devices, words = dict[str, DeviceSpec](), dict[str, str]()
    tables = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
    for name, table in tables.items():
        words[name], like = table.pop("words"), table.pop("like", None)
        base = {} if like is None else asdict(devices[like]) | {"source": "data sheet"}
        devices[name] = read(DeviceSpec, base | table | {"name": name}, f"{name} ")
    return devices, words


DEVICES, _WORDS = _library()


def _known(name: str) -> DeviceSpec | None:
    """The device of which each word of ``name`` is one. "A100" alone is the one of 80 GB."""
    words = set(re.split(r"[\s_-]+", name.upper().strip())) - {"NVIDIA", "AMD", "INSTINCT"}
    for known, more in _WORDS.items():
        own = {word for word in known.upper().split("-") if known != "A100-80GB" or word != "80GB"}
        if own <= words <= own | set(more.split()):
            return DEVICES[known]
    return None


def device(name: str) -> DeviceSpec:
    """A device of the library.

    Args:
        name: its name, or the one that ``torch.cuda.get_device_name()`` prints: "NVIDIA A100-SXM4-40GB" is
            "A100-40GB". Another variant of a device (PCIe, NVL, more memory) is another device.

    Returns:
        The device, by its data sheet and what was measured.

    Raises:
        ConfigError: no device of the library has that name.
    """
    found = _known(name)
    if found is None:
        raise ConfigError(
            f"no device {name!r} is in the library, which has {', '.join(DEVICES)}; name one of these "
            "if it is the same, or describe yours in a file: a Cluster with all fields of its device "
            "(docs/plan.md)"
        )
    return found
