"""One rank of the bench: started by step.py, reads jobs, measures each in a process of its own.

paired   a local step and the system's step, each on a model copy of its own, alternate in one process,
         so that noise of the machine meets both: ratios, times, CPU time, bytes sent
solo     the system alone, in a process of its own: peak memory, losses, communication without compute

A job is a line of JSON on the standard input. It is measured by a fork, which has everything imported (5 s
otherwise) and nothing else: no thread, no process group, no memory of another system. The fork writes
``<stem>.json`` and ``<stem>.log``; then its exit status is a line on the standard output.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch._dynamo  # imported by the first optimizer step otherwise: 2 s and 40 MiB inside a measurement
import torch.distributed as dist
from torch import Tensor

from bench.model import Size, Transformer, build, tokens
from bench.systems import System, build_system, local_of

WARM_UP_STEPS = 2
SOLO_STEPS = 3


@dataclass(frozen=True)
class Job:
    """What one rank is to measure, and where."""

    mode: str
    system: str
    rank: int
    world: int
    interface: str
    num_sharing: int
    blocks: int
    steps: int
    pin: bool
    folder: str
    size: Size = field(default_factory=Size)
    precision: str = "fp32"
    compiles: bool = False

    @property
    def stem(self) -> str:
        """Name, without ending, of every file of this rank."""
        return f"{self.folder}/{self.system}-{self.mode}-{self.rank}"

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Job":
        """From JSON."""
        values = json.loads(text)
        return cls(**{**values, "size": Size(**values["size"])})


def serve() -> None:
    """Measures job after job until the standard input ends."""
    _end_with_parent()
    for line in sys.stdin:
        job = Job.loads(line)
        pid = os.fork()
        if pid == 0:
            _end_with_parent()
            _measure_in_fork(job)
        print(os.waitpid(pid, 0)[1], flush=True)


def _end_with_parent() -> None:
    """Be killed when the parent ends, however it does: ranks of a bench that was killed measured on."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _measure_in_fork(job: Job) -> NoReturn:
    """Runs the job with its output in the log, and ends the process."""
    status = 1
    try:
        log = os.open(f"{job.stem}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        perform(job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def perform(job: Job) -> None:
    """Measures the job and writes ``<stem>.json``."""
    torch.set_num_threads(1)
    if job.pin:
        os.sched_setaffinity(0, {job.rank % (os.cpu_count() or 1)})
    base_nbytes = memory_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here, not during the imports
    os.environ["GLOO_SOCKET_IFNAME"] = job.interface
    store = dist.FileStore(f"{job.folder}/{job.system}-{job.mode}-store", job.world)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=limit)
    found = paired(job) if job.mode == "paired" else solo(job, base_nbytes)
    Path(f"{job.stem}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def model_of(job: Job) -> Transformer:
    """The model that every system trains; with ``compiles`` each block is compiled before it is sharded."""
    model = build(job.size, job.precision)
    for index, block in enumerate(model.blocks) if job.compiles else ():
        model.blocks[index] = torch.compile(block)
    return model


def paired(job: Job) -> dict[str, list[float]]:
    """What ``measure`` gives for each block, for the local step and the system's."""
    local, system = (build_system(name, model_of(job)) for name in (local_of(job.system), job.system))
    count = iter(range(1 << 30))

    def section(one: System, steps: int) -> tuple[float, ...]:
        return measure(job, one, [tokens(job.size, job.rank, next(count)) for _ in range(steps)])

    for one in (local, system):
        section(one, WARM_UP_STEPS)  # first-touch memory, the optimizer's state, connections
    keys = ("step_s", "cpu_s", "sent_nbytes", "exposed_s")
    found: dict[str, list[float]] = {f"{who}{key}": [] for who in ("local_", "") for key in keys}
    for block in range(job.blocks):
        order = [("local_", local), ("", system)]
        for who, one in order if block % 2 == 0 else reversed(order):
            for key, value in zip(keys, section(one, job.steps), strict=True):
                found[who + key].append(value)
    return found


def measure(job: Job, system: System, batches: list[Tensor]) -> tuple[float, ...]:
    """Wall seconds, CPU seconds, bytes sent and exposed seconds (nan: not counted), per step, with everything
    in flight completed."""
    dist.barrier()
    exposed = _exposed_s(system)
    sent, cpu, begin = _sent_nbytes(job), _cpu_s(), time.perf_counter()
    for batch in batches:
        system.step(batch)
    system.flush()
    wall, cpu, exposed = time.perf_counter() - begin, _cpu_s() - cpu, _exposed_s(system) - exposed
    dist.barrier()
    sent = _sent_nbytes(job) - sent
    return tuple(value / len(batches) for value in (wall, cpu, sent, exposed))


def solo(job: Job, base_nbytes: int) -> dict[str, float | list[float] | None]:
    """Peak memory over the import, the mean loss of every step, and communication alone."""
    system = build_system(job.system, model_of(job))
    losses = [system.step(tokens(job.size, job.rank, step)) for step in range(SOLO_STEPS)]
    system.flush()
    peak_nbytes = memory_nbytes("VmHWM") - base_nbytes
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return {
        "peak_nbytes": peak_nbytes,
        "unsharded_nbytes": system.unsharded_nbytes(),
        "at_rest_nbytes": system.at_rest_nbytes(),
        "losses": (mean / job.world).tolist(),
        "communication_s": system.communication_s() if job.world > 1 else None,
    }


def _exposed_s(system: System) -> float:
    exposed = system.exposed_s()
    return math.nan if exposed is None else exposed


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _sent_nbytes(job: Job) -> float:
    """What the interface has sent so far, divided by the ranks that send on it."""
    return int(Path(f"/sys/class/net/{job.interface}/statistics/tx_bytes").read_text()) / job.num_sharing


def memory_nbytes(field_name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field_name}")


if __name__ == "__main__":
    serve()
