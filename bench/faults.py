"""What ranks do when something goes wrong, under torch's FSDP2 with its distributed checkpoint, and ours.

    python bench/faults.py --rounds 3                                     both systems, every scenario
    python bench/faults.py --system torch --scenarios killed,flipped      some of them

Each scenario runs one training script on two ranks over Gloo, with the time limits that torch and we have by
default (30 minutes for a collective). Each rank is started by a torchrun of its own, as on two hosts, so that
what it does is its own doing: with ``--hosts 1`` one torchrun has both, and ends the other rank by itself
where one has ended. Rank 1 makes the fault, in the fourth of six steps; saves follow the third and the fifth.
What still runs ``--limit-s`` after the fault is ended. Printed are medians of the rounds, the last error of
rank 0, and what a second start finds in the folder.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import shardwright
import shardwright.checkpoint
from bench.toy import add_toy

SYSTEMS = ("torch", "shardwright")
SCENARIOS = {
    "none": "nothing",
    "killed": "SIGKILL in a forward",
    "stopped": "SIGSTOP in a forward",
    "raises": "its data loader raises",
    "skips": "it leaves out a layer",
    "order": "it runs two layers in the other order",
    "save-killed": "SIGKILL in the second save",
    "save-full": "the disk is full in the second save",
    "flipped": "a bit of a file of the last save flips",
}
"""What happens on rank 1, by the name of the scenario."""
STEPS, FAULT, SAVES = 6, 3, (2, 4)
WIDTH, ORDER = 256, [0, 1, 2, 3]
DISK = "1700k"
"""Room for one save (1 MiB of weights), not for two."""


# ---- the training script, as each rank runs it


class Net(nn.Module):
    """Layers that a caller may leave out, or run in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in ORDER)

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


class Rows(Dataset[torch.Tensor]):
    """The batches of one rank, by step; the one of step ``bad`` can't be read."""

    def __init__(self, rank: int, bad: int | None) -> None:
        self._rank, self._bad = rank, bad

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> torch.Tensor:
        if step == self._bad:
            mark()
            raise ValueError("bad row")
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + self._rank))


def mark() -> None:
    """Now comes the fault."""
    Path("fault").write_text(str(time.monotonic()))


def die(*_: Any) -> None:
    """In the place of what it was called for."""
    mark()
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_: Any) -> None:
    """Stand still."""
    mark()
    os.kill(os.getpid(), signal.SIGSTOP)


Saving = Callable[[nn.Module, int], Any]
Loading = Callable[[nn.Module], int]


def functions_of(system: str) -> tuple[Callable[[nn.Module], Any], Saving, Loading]:
    """What shards a module, saves a step, and loads the newest one."""
    if system == "torch":
        return torch_fully_shard, torch_save, torch_load
    return (
        shardwright.fully_shard,
        lambda model, step: shardwright.checkpoint.save("saved", model=model, step=step),
        lambda model: shardwright.checkpoint.load("saved", model=model).step,
    )


def torch_save(model: nn.Module, step: int) -> None:
    """A folder for each save."""
    dcp.save({"model": model.state_dict(), "step": step}, checkpoint_id=f"saved/step-{step}")


def torch_load(model: nn.Module) -> int:
    """Of the newest folder."""
    state = {"model": model.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=newest(Path("saved")))
    model.load_state_dict(state["model"])
    return state["step"]


def newest(saved: Path) -> Path:
    """The folder of the last save, whichever library wrote it."""
    return max(saved.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))


def order_of(scenario: str, step: int) -> list[int]:
    """Which layers a rank runs in a step."""
    return {"skips": [0, 2, 3], "order": [0, 2, 1, 3]}.get(scenario, ORDER) if step == FAULT else ORDER


def loss_of(model: nn.Module, batch: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Of a batch of one rank."""
    return (model(batch, order) - 1).square().mean()


def rank_main(system: str, scenario: str, resume: bool) -> None:
    """Train as one rank, in the current folder; ``resume``: only load."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Path(f"pid{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, (shard, save, load) = Net(), functions_of(system)
    for module in (*model.layers, model):
        shard(module)
    if resume:
        step = load(model)
        print(f"rank {rank}: resumed at step {step}, weights {digest(model)}", flush=True)
    else:
        train(model, scenario if rank == 1 else "none", save)
    dist.destroy_process_group()


def train(model: Net, scenario: str, save: Saving) -> None:
    """As one rank, on which ``scenario`` happens."""
    rank, acts = dist.get_rank(), {"killed": die, "stopped": stop}
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    rows = Rows(rank, FAULT if scenario == "raises" else None)
    for step, batch in enumerate(DataLoader(rows, batch_size=None)):
        order = order_of(scenario, step)
        if order != ORDER:
            mark()
        if step == FAULT and scenario in acts:
            model.layers[2].register_forward_pre_hook(acts[scenario])
        loss_of(model, batch, order).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in SAVES:
            if step == SAVES[-1] and scenario == "save-killed":
                os.fsync = die  # which both libraries call at the end of a file
            if step == SAVES[-1] and scenario == "save-full":
                mark()
            save(model, step)
            print(f"rank {rank}: saved step {step}, weights {digest(model)}", flush=True)
    wholes = weights_of(model)
    if rank == 0:
        torch.save(wholes, "weights.pt")


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """All of them, whole; every rank calls it."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


def digest(model: nn.Module) -> str:
    """A checksum of the whole weights; every rank calls it."""
    return f"{zlib.crc32(b''.join(each.numpy().tobytes() for each in weights_of(model))):08x}"


def alone(scenario: str) -> list[torch.Tensor]:
    """The weights that one process trains by the gradients of both ranks."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for step in range(STEPS):
        for rank, here in enumerate(("none", scenario)):
            (loss_of(model, Rows(rank, None)[step], order_of(here, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


# ---- starting it, and what comes of it


@dataclass(frozen=True)
class Outcome:
    """How rank 0 ended: when, as seconds after the fault or "still waiting"; its last error; and what the
    ranks printed."""

    when: float | str
    error: str
    printed: str


ERROR = re.compile(r"^\[rank0\]:? ?((?:\w+\.)*[A-Z]\w*: .*)$", re.MULTILINE)


class Ranks:
    """Both ranks of a script, in a folder."""

    def __init__(self, folder: Path, words: Sequence[str], hosts: int) -> None:
        for file in (*folder.glob("pid*"), *folder.glob("fault")):
            file.unlink()
        self.folder, self.begin = folder, time.monotonic()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torchrun = [str(Path(sys.executable).parent / "torchrun"), f"--nproc-per-node={2 // hosts}"]
        torchrun += [f"--nnodes={hosts}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.launchers = []
        for host in range(hosts):
            with open(folder / f"log{host}", "w") as log:
                command = [
                    *torchrun,
                    f"--node-rank={host}",
                    str(Path(__file__).resolve()),
                    "--as-rank",
                    *words,
                ]
                self.launchers.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log))

    def outcome(self, limit_s: float) -> Outcome:
        """Wait for rank 0, and end what still runs ``limit_s`` after the fault."""
        try:
            while (ended := self._ended()) is None and time.monotonic() < self._fault() + limit_s:
                time.sleep(0.02)
            if ended is not None:  # the other one may be about to say why it ended
                time.sleep(2.0)
        finally:
            for file in self.folder.glob("pid*"):
                if self._runs(int(file.read_text())):
                    os.kill(int(file.read_text()), signal.SIGKILL)
            for launcher in self.launchers:
                launcher.kill()
                launcher.wait()
        wrote = "\n".join(file.read_text() for file in sorted(self.folder.glob("log*")))
        errors = [*re.findall("ended by SIGTERM: .*", wrote), *ERROR.findall(wrote)]
        errors += re.findall("terminate called .*", wrote)
        printed = "\n".join(sorted(re.findall(r"^rank \d: .*$", wrote, re.MULTILINE)))
        when = "still waiting" if ended is None else ""
        if ended is not None and (self.folder / "fault").exists():
            when = max(0.0, ended - self._fault())
        return Outcome(when, errors[-1] if errors else "", printed)

    def _ended(self) -> float | None:
        """When rank 0 was seen to have ended."""
        own = self.folder / "pid0"
        text = own.read_text() if own.exists() else ""
        gone = not self._runs(int(text)) if text else all(each.poll() is not None for each in self.launchers)
        return time.monotonic() if gone else None

    def _fault(self) -> float:
        """When the fault came; where none came, when the ranks may have been done."""
        file = self.folder / "fault"
        text = file.read_text() if file.exists() else ""
        return float(text) if text else self.begin + 30

    @staticmethod
    def _runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False


def once(system: str, scenario: str, options: argparse.Namespace) -> tuple[float | str, str]:
    """One round of a scenario: when rank 0 ended, and the rest in words."""
    with tempfile.TemporaryDirectory() as place, disk(Path(place, "saved"), scenario):
        folder = Path(place)
        found = Ranks(folder, [system, scenario], options.hosts).outcome(options.limit_s)
        said = [found.error]
        if (folder / "weights.pt").exists():
            pairs = zip(torch.load(folder / "weights.pt"), alone(scenario), strict=True)
            off = max((a - b).abs().max().item() for a, b in pairs)
            said.append(f"largest difference from one process {off:.1e}")
        if scenario in ("save-killed", "save-full", "flipped"):
            if scenario == "flipped":
                flip(newest(folder / "saved"))
            again = Ranks(folder, [system, "none", "resume"], options.hosts).outcome(options.limit_s)
            said.append(resumed(found.printed, again))
        return found.when, "; ".join(filter(None, said))


def resumed(before: str, again: Outcome) -> str:
    """What a second start found."""
    loaded = re.search(r"resumed at step (\d+), weights (\w+)", again.printed)
    if loaded is None:
        return f"resume: {again.error or 'nothing was loaded'}"
    saved = dict(re.findall(r"saved step (\d+), weights (\w+)", before))
    same = "as saved" if saved.get(loaded[1]) == loaded[2] else "NOT as saved"
    return f"resume: step {loaded[1]}, weights {same}"


def flip(save: Path) -> None:
    """One bit in the third of four layers, which one file has by rows as another does."""
    file = max(save.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) * 5 // 8] ^= 64
    file.write_bytes(data)


@contextmanager
def disk(folder: Path, scenario: str) -> Iterator[None]:
    """What is saved in: of the scenario of the full disk a small one, which needs root."""
    folder.mkdir()
    if scenario != "save-full":
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def main() -> None:
    """Parse, then train as a rank or start the ranks."""
    if sys.argv[1:2] == ["--as-rank"]:
        return rank_main(sys.argv[2], sys.argv[3], "resume" in sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--system", choices=SYSTEMS, help="default: both")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="of them, with commas between")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=2, help="torchruns that have the ranks")
    parser.add_argument("--limit-s", type=float, default=60.0, help="after the fault")
    add_toy(parser, system="shardwright", scenarios="raises", rounds=1)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.rounds} rounds, a torchrun for each of {options.hosts} hosts")
    print("| rank 1 | system | rank 0 ends after, s | it says, and leaves |\n| --- | --- | ---: | --- |")
    for scenario in options.scenarios.split(","):
        for system in [options.system] if options.system else SYSTEMS:
            rounds = [once(system, scenario, options) for _ in range(options.rounds)]
            numbers = [when for when, _ in rounds if isinstance(when, float)]
            whens = {when for when, _ in rounds if isinstance(when, str) and when}
            ends = ", ".join([*([f"{median(numbers):.1f}"] if numbers else []), *whens])
            said = " / ".join(dict.fromkeys(words for _, words in rounds))
            print(f"| {SCENARIOS[scenario]} | {system} | {ends} | {said} |", flush=True)
    return None


if __name__ == "__main__":
    main()
