"""The accelerator that is proven, or CPU ranks in its place: all that sections ask of a device.

``sim`` runs every section's own code where no accelerator is: ranks are processes whose tensors are in host
memory, sharded over the transport of accelerators (``ProcessGroupComm``) on Gloo. Its figures mean nothing.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwright

SIM = "sim"
SHARED = "SHARDWRIGHT_SHARE_CARD"
"""How many ranks share the first card, where they do (``--share-card``)."""
OVER_LOOPBACK = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "TORCH_DIST_USE_NCCL2": "0",
}
"""NCCL between ranks of one card. It refuses two of one bus id on one host, and tells hosts apart by a hash.
With a ``NCCL_HOSTID`` each, ranks count as hosts and talk over its sockets, here on the loopback. From NCCL
2.30 on a variable allows it, too; torch 2.15's own engine doesn't. Read in NCCL's source; not run yet."""
_COMMUNICATES = ("nccl", "rccl", "ccl_", "gloo:", "c10d::")
_MEASURED = "measured step"
_BEGIN = (_MEASURED, "user_annotation")
_RUNS_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Trace:
    """What ran on the device, as ``(begin, end)`` in microseconds."""

    kernels: list[tuple[float, float]]
    copies: list[tuple[float, float]]
    collectives: list[tuple[float, float]]

    @classmethod
    def of(cls, events: list[dict[str, Any]], categories: tuple[str, ...]) -> "Trace":
        """events: of a Chrome trace of torch's profiler; those of ``categories`` count, once it was begun."""
        found = cls([], [], [])
        [begin] = [each["ts"] for each in events if (each.get("name"), each.get("cat")) == _BEGIN]
        for event in events:
            category, name = event.get("cat", ""), event.get("name", "").lower()
            if category not in categories or event["ts"] < begin:
                continue
            if any(word in name for word in _COMMUNICATES):
                spans = found.collectives
            else:
                spans = found.copies if "mem" in category else found.kernels
            spans.append((event["ts"], event["ts"] + event["dur"]))
        return found

    @property
    def exposed_ms(self) -> float:
        """Milliseconds in which collectives ran and nothing else did."""
        others = merged(self.kernels + self.copies)
        covered = sum(
            max(0.0, min(end, stop) - max(begin, start))
            for begin, end in merged(self.collectives)
            for start, stop in others
        )
        return (sum(end - begin for begin, end in merged(self.collectives)) - covered) / 1e3


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


@dataclass(frozen=True)
class Device:
    """kind: of device, as torch names it. simulated: CPU ranks are in its place. count: how many. shared:
    they are ranks of one card."""

    kind: str
    simulated: bool
    count: int
    shared: bool = False

    @classmethod
    def of(cls, name: str) -> "Device":
        """name: "sim", or "accelerator" for the one that torch finds. Ends the process if it finds none."""
        if name == SIM:
            return cls("cpu", True, 2)
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            sys.exit(
                f"prove-gpu: torch {torch.__version__} finds no accelerator. Where there is one, this torch "
                "was built without it: give a Python that has another (make prove-gpu PROVE_PYTHON=python3). "
                "DEVICE=sim runs the sections on the CPU, to see whether they work."
            )
        shared = int(os.environ.get(SHARED, "0"))
        return cls(found.type, False, shared or torch.accelerator.device_count(), shared > 0)

    @property
    def worlds(self) -> list[int]:
        """Numbers of ranks: all, one, then what lies between, so that a lack of time costs the least."""
        most = min(self.count, 8)
        return [most, *(number for number in (1, 2, 4) if number < most)]

    def size(self, real: Any, toy: Any) -> Any:
        """A size that is ``toy`` where the device is simulated."""
        return toy if self.simulated else real

    # ---- in a rank

    def join(self) -> torch.device:
        """Called by a process that torchrun started: its device, once it is in the default process group."""
        if self.simulated:
            torch.set_num_threads(1)
            shardwright.set_transport("collectives")
            dist.init_process_group("gloo")
            return torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
        index = 0 if self.shared else int(os.environ["LOCAL_RANK"])
        if self.shared:
            os.environ |= {**OVER_LOOPBACK, "NCCL_HOSTID": f"rank{os.environ['RANK']}"}
        torch.accelerator.set_device_index(index)
        backend = dist.get_default_backend_for_device(self.kind)
        dist.init_process_group(f"cpu:gloo,{self.kind}:{backend}")
        return torch.device(self.kind, index)

    def synchronize(self) -> None:
        """Return when all that was launched has run."""
        if not self.simulated:
            torch.accelerator.synchronize()

    def together(self) -> None:
        """Let all ranks go on from here at the same time, with nothing in flight."""
        self.synchronize()
        dist.barrier()
        self.synchronize()

    def mark(self) -> Any:
        """A point in time of the current stream."""
        if self.simulated:
            return time.perf_counter()
        event = torch.Event(self.kind, enable_timing=True)
        event.record()
        return event

    def between_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks that have been passed."""
        return 1e3 * (end - begin) if self.simulated else begin.elapsed_time(end)

    def now_nbytes(self) -> int:
        """Bytes of tensors on the device; in simulation, what this process has in memory."""
        return _resident("VmRSS") if self.simulated else torch.accelerator.memory_allocated()

    def peak_nbytes(self, step: Callable[[], Any]) -> tuple[int, int]:
        """Most bytes of tensors while ``step`` ran, and most that the allocator held for them."""
        self.synchronize()
        if self.simulated:
            Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
            step()
            return _resident("VmHWM"), _resident("VmHWM")
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        step()
        self.synchronize()
        return torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()

    def empty_cache(self) -> None:
        """Give back what the allocator holds for nobody."""
        if not self.simulated:
            torch.accelerator.empty_cache()

    def traced(self, step: Callable[[], Any]) -> Trace:
        """Run ``step`` twice under torch's profiler; what ran in the second, begun by all ranks together."""
        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
            step()
            self.together()
            with torch.profiler.record_function(_MEASURED):
                step()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        return Trace.of(events, ("cpu_op",) if self.simulated else _RUNS_ON_DEVICE)

    # ---- on the page

    def described(self) -> dict[str, str]:
        """What the figures were taken with."""
        ranks = f"simulated: {self.count} CPU ranks over Gloo"
        found = {
            "device": ranks if self.simulated else _or_unknown(self._cards),
            "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}",
            "python": f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores",
            "commit": _said_by("git", "describe", "--always", "--dirty"),
        }
        if self.kind == "cuda" and not self.simulated:
            found["NCCL"] = _or_unknown(lambda: ".".join(map(str, torch.cuda.nccl.version())))
            found["driver"] = _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            found["links"] = f"\n```\n{_said_by('nvidia-smi', 'topo', '-m')}\n```"
        return found

    def _cards(self) -> str:
        card = torch.get_device_module(self.kind).get_device_properties(0)
        cards = f"{card.name} ({self.kind}), {card.total_memory / 2**30:.0f} GiB"
        return f"{self.count} ranks on one {cards}" if self.shared else f"{self.count} x {cards} each"


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _said_by(*command: str) -> str:
    ran = partial(subprocess.run, command, capture_output=True, text=True, timeout=20, check=True)
    return _or_unknown(lambda: ran().stdout.strip())


def _or_unknown(ask: Callable[[], str]) -> str:
    """A page without a version is better than none."""
    try:
        return ask()
    except Exception as error:
        return f"unknown ({error})"
