"""One rank of ``bench/waits.py``: trains, and brings about what is asked of it."""

import gc
import json
import mmap
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist

from bench.links import DEVICE
from bench.model import Size, build, tokens
from shardwright import fully_shard, set_transport
from shardwright.checkpoint import save
from shardwright.observe.ledger.causes import CHECKPOINT, DATA, GARBAGE, PAGING, QUOTA
from shardwright.observe.steps.recording import ring
from shardwright.observe.steps.rings import write
from shardwright.transport.process import record_function

SIZE = Size(layers=3, width=96, vocab=512, sequence=32, batch=4)
FILE_NBYTES, OBJECTS = 1 << 26, 50_000
STEPS_SEEN = 16  # of a ring: those of a trial, and as many before as say what a link usually takes


@dataclass(frozen=True)
class Order:
    """Make so many steps, with these causes (milliseconds of a step); then leave a ring in a folder."""

    steps: int
    causes: dict[str, float] = field(default_factory=dict)
    ring: str = ""

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


AS_IS = Order(5)


class Disturbance:
    """What a rank can do to itself. took_s: by cause, without what it was in line for a core meanwhile."""

    def __init__(self, folder: str, rank: int) -> None:
        self.wanted: dict[str, float] = {}
        self.took_s: dict[str, float] = defaultdict(float)
        gc.collect()
        gc.freeze()  # a collection takes as long as these objects ask for
        self._kept = [[number] for number in range(OBJECTS)]
        self._chance = random.Random(rank)
        path = Path(folder, f"pages-{rank}")
        path.write_bytes(os.urandom(1 << 16) * (FILE_NBYTES >> 16))
        self._file = os.open(path, os.O_RDONLY)
        os.fsync(self._file)
        self._map = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        self._map.madvise(mmap.MADV_RANDOM)  # each page by itself
        self._fsync = os.fsync

    @contextmanager
    def timed(self, cause: str) -> Iterator[float]:
        """Around what is done for a cause: gives the seconds that it is to take."""
        start, queued_s = time.perf_counter(), queued()
        yield self.wanted.get(cause, 0.0) / 1e3
        self.took_s[cause] += time.perf_counter() - start - (queued() - queued_s)

    def load(self) -> None:
        """A slow data loader."""
        with self.timed(DATA) as seconds:
            time.sleep(seconds)

    def collect(self) -> None:
        """Collections, until they have taken so long."""
        with self.timed(GARBAGE) as seconds:
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                gc.collect()

    def read(self, *_inputs: object) -> None:
        """Pages of a file, none of which is in memory."""
        if PAGING not in self.wanted:
            return
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        with self.timed(PAGING) as seconds:
            end, queued_s = time.perf_counter() + seconds, queued()
            while time.perf_counter() - (queued() - queued_s) < end:
                for _ in range(32):
                    self._map[self._chance.randrange(FILE_NBYTES)]

    def fsync(self, file: int) -> None:
        """A slow disk: the first time in a save."""
        with self.timed(CHECKPOINT) as seconds:
            time.sleep(seconds)
        self.wanted[CHECKPOINT] = 0.0
        self._fsync(file)


def queued() -> float:
    """Seconds that this thread was in line for a core since it began."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def sent() -> int:
    """Bytes that this rank has sent over its wire."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith(f"{DEVICE}:"))


def main(rank: int, world: int, folder: str, group: str) -> None:
    """Do what the lines of the standard input say, until they end. group: a cgroup to be in, or ""."""
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    torch.set_num_threads(1)
    set_transport("sockets")
    model = build(SIZE)
    for module in [*model.blocks, model]:
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    own = Disturbance(folder, rank)
    model.blocks[1].register_forward_pre_hook(own.read)
    number = 0
    for line in sys.stdin:
        order = Order(**json.loads(line))
        own.took_s.clear()
        cpu_s, nbytes, queued_s = time.process_time(), sent(), queued()
        took_s = []
        for _ in range(order.steps):
            began_s = time.perf_counter()
            own.wanted = dict(order.causes)
            number += 1
            with record_function("data"):
                batch = tokens(SIZE, rank, number)
                own.load()
            model(batch).backward()
            if GARBAGE in order.causes:
                own.collect()
            optimizer.step()
            optimizer.zero_grad()
            if CHECKPOINT in order.causes:
                with mock.patch("os.fsync", own.fsync):
                    save(Path(folder, "checkpoint"), model=model, step=number, keep=1)
            took_s.append(time.perf_counter() - began_s)
        if order.ring:
            own.took_s[QUOTA] = queued() - queued_s
            write(order.ring, ring(STEPS_SEEN))
        took_ms = {cause: 1e3 * seconds / order.steps for cause, seconds in own.took_s.items()}
        spent_ms = 1e3 * (time.process_time() - cpu_s) / order.steps
        said = {"cpu_ms": spent_ms, "sent_nbytes": (sent() - nbytes) / order.steps, "took_ms": took_ms}
        print(json.dumps({**said, "step_ms": 1e3 * median(took_s)}), flush=True)
