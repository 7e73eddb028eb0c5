"""What a plan is made for: devices and the links between them. Data sheets, or what was measured. Pure."""

import json
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class DeviceSpec:
    """One device, by its data sheet unless it says otherwise.

    peak_flops: dense FLOP/s in bfloat16. matmul: share of it that the best matmul was measured to reach, of
        any shape. attention: share of it that the usual fused attention reaches (see docs/plan.md).
    memory_nbytes: of the device. memory_bandwidth: bytes/s of that memory.
    link_bandwidth: bytes/s, in one direction, of all its links to the other devices of its host.
    ring: share of those that the rings of a collective use. float8: FLOP/s of matmuls in 8 bits over those
    in bfloat16; 1: it has none. reserved: bytes that torch's caching allocator was seen to take for each byte
    in use, where there was enough.
    """

    name: str
    peak_flops: float
    memory_nbytes: float
    memory_bandwidth: float
    link_bandwidth: float
    matmul: float = 0.8
    attention: float = 0.5
    ring: float = 0.8
    float8: float = 1.0
    reserved: float = 1.36


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal devices.

    ranks: devices in all. ranks_per_host: of them in one host. host_bandwidth: bytes/s, in one direction,
    between one host and the others; the default is a network card of 400 Gbit/s for each device.
    """

    device: DeviceSpec
    ranks: int
    ranks_per_host: int = 8
    host_bandwidth: float = 400e9

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return -(-self.ranks // self.ranks_per_host)


_A100 = DeviceSpec("A100-80GB", 312e12, 80 * GIB, 2.039e12, 300e9, matmul=0.869, attention=0.70, ring=0.78)
_H100 = DeviceSpec("H100", 989e12, 80 * GIB, 3.35e12, 450e9, matmul=0.803, attention=0.35, float8=1.77)

DEVICES = {
    spec.name: spec
    for spec in (
        _A100,
        replace(_A100, name="A100"),
        replace(_A100, name="A100-40GB", memory_nbytes=40 * GIB, memory_bandwidth=1.555e12),
        _H100,
        replace(
            _H100,
            name="H100-96GB-500W",
            memory_nbytes=96 * GIB,
            memory_bandwidth=2.4e12,
            matmul=0.803 * 0.894,
        ),
        replace(_H100, name="H200", memory_nbytes=141e9, memory_bandwidth=4.8e12),
        DeviceSpec("B200", 2250e12, 180e9, 8.0e12, 900e9, matmul=0.776, attention=0.35, float8=1.97),
        DeviceSpec("MI300X", 1300e12, 192 * GIB, 5.3e12, 448e9, matmul=0.514, attention=0.25, reserved=1.1),
    )
}
"""Devices by name. ``H100-96GB-500W`` is limited in power, and so in the clock that it can keep up."""


def device(name: str) -> DeviceSpec:
    """The device of the library whose name is ``name``, or the longest beginning of it.

    Raises: ConfigError for a device that isn't in the library.
    """
    known = [known for known in DEVICES if name.upper().startswith(known.upper())]
    if not known:
        raise ConfigError(
            f"no device {name!r} is in the library, which has {', '.join(DEVICES)}; describe it in a file: "
            "a Cluster with all fields of its device (docs/plan.md)"
        )
    return DEVICES[max(known, key=len)]


def load(path: str | Path) -> Cluster:
    """The cluster in a file of TOML or JSON, as ``save`` writes it.

    Its ``device`` is a table with all fields of ``DeviceSpec``, or a name of the library.
    Raises: ConfigError for a file that can't be read as one.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        fields: dict[str, Any] = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        named = fields.pop("device")
        return Cluster(device(named) if isinstance(named, str) else DeviceSpec(**named), **fields)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is not a cluster: {error}; expected the fields of Cluster, with the name of a device "
            f"({', '.join(DEVICES)}) or all of its fields under [device]"
        ) from error


def save(cluster: Cluster, path: str | Path) -> None:
    """Write it as JSON."""
    Path(path).write_text(json.dumps(asdict(cluster), indent=2) + "\n", encoding="utf-8")
