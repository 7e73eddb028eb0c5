"""Random lives of a folder of checkpoints: whatever happens to it, what loads is the newest complete step of
the line of training that is going on, bit for bit on every rank, and the next save goes on.

The reference is ``Story``, which keeps by hand what was saved, after what, and what became of it.
"""

import os
import random
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import async_save, load, save
from tests.ranks.pool import run_ranks
from tests.ranks.test_checkpoint_faults import kill_at

WORLDS = (1, 2, 3)


@dataclass(frozen=True)
class Save:
    """A save of the weights ``serial`` as ``step``."""

    step: int
    serial: int
    keep: int | None
    in_background: bool


@dataclass
class Saved:
    """What is known of a step: its weights, by the number of the save; the steps that it descends from;
    whether it would load."""

    serial: int
    after: tuple[int, ...]
    complete: bool = True


@dataclass
class Story:
    """What should be in the folder. ``line``: the steps that the last save descends from, and its own."""

    steps: dict[int, Saved] = field(default_factory=dict)
    line: tuple[int, ...] = ()
    stuck: set[int] = field(default_factory=set)
    serial: int = 0

    def latest(self) -> int | None:
        whole = [step for step, saved in self.steps.items() if saved.complete]
        on_line = [step for step in whole if step in self.line]
        return max(on_line or whole, key=lambda step: self.steps[step].serial, default=None)

    def saves(self, at: Save, origin: int | None) -> None:
        after = () if origin is None else (*self.steps[origin].after, origin)
        self.steps[at.step] = Saved(at.serial, tuple(s for s in after if s in self.steps))
        self.line = (*self.steps[at.step].after, at.step)
        if at.keep is not None:
            whole = [step for step in self.line if self.steps[step].complete]
            stays = whole[-at.keep :]
            for step in [s for s in whole if s not in stays and s not in self.stuck]:
                del self.steps[step]
            oldest = self.steps[stays[0]].serial
            broken = [s for s, saved in self.steps.items() if not saved.complete and saved.serial < oldest]
            for step in [s for s in broken if s not in self.stuck]:
                del self.steps[step]


def weights(serial: int, model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(serial)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model


def build(serial: int) -> nn.Module:
    return weights(serial, nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))


def one_life(
    rank: int, world: int, path: str, origin: int | None, todo: Sequence[Save]
) -> list[tuple[int, int]]:
    """Load ``origin``, make all saves, and after each load again: its step, and the weights that it has."""
    model = fully_shard(build(0))
    if origin is not None:
        load(Path(path) / f"step-{origin:06d}", model=model)
    found = []
    for at in todo:
        for p, q in zip(model.parameters(), fully_shard(build(at.serial)).parameters(), strict=True):
            with torch.no_grad():
                p.copy_(q)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if at.in_background:
                async_save(path, model=model, step=at.step, keep=at.keep).wait()
            else:
                save(path, model=model, step=at.step, keep=at.keep)
        found.append(what_loads(path, [at.serial]))
    return found


def what_loads(path: str, serials: Sequence[int]) -> tuple[int, int]:
    """The step that a load takes, and which of the weights it has; -1, if none of them."""
    probe = fully_shard(build(0))
    step = load(path, model=probe).step
    own = [p.to_local() for p in probe.parameters()]
    for serial in serials:
        wanted = [p.to_local() for p in fully_shard(build(serial)).parameters()]
        if all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True)):
            return step, serial
    return step, -1


def loads_on_each(rank: int, world: int, path: str, serials: Sequence[int]) -> tuple[int, int]:
    return what_loads(path, serials)


class Random:
    """One random life of a folder, and the story that it should be."""

    def __init__(self, seed: int, disk: Path) -> None:
        self.random = random.Random(seed)
        self.disk, self.path, self.story = disk, disk / "runs", Story()
        self.seen = set[int]()

    def new_save(self, origin: int | None) -> Save:
        self.story.serial += 1
        step = (origin or 0) + self.random.choice([1, 2, 10])
        while step in (*self.story.line, *self.seen):
            step += 1
        self.seen.add(step)
        return Save(step, self.story.serial, self.random.choice([None, 1, 2, 3]), self.random.random() < 0.4)

    def trains(self, origin: int | None) -> None:
        """A process, or several, that goes on from ``origin`` and saves once or more."""
        if origin is None and self.story.latest() is not None:
            return
        todo = []
        for _ in range(self.random.choice([1, 1, 2, 3])):
            todo.append(self.new_save(todo[-1].step if todo else origin))
        for saves in run_ranks(self.random.choice(WORLDS), one_life, str(self.path), origin, tuple(todo)):
            assert saves == [(at.step, at.serial) for at in todo]
        for at in todo:
            self.story.saves(at, origin)
            origin = at.step

    def is_restarted(self) -> None:
        self.trains(self.story.latest())

    def goes_back(self) -> None:
        whole = [step for step, saved in self.story.steps.items() if saved.complete]
        self.trains(self.random.choice(whole) if whole else None)

    def is_killed(self) -> None:
        """One process that is killed at some change to the file system while it saves."""
        origin = self.story.latest()
        at, call_number = self.new_save(origin), self.random.randrange(25)
        child = os.fork()
        if child == 0:
            warnings.simplefilter("ignore")
            model = build(0)
            if origin is not None:
                load(self.path / f"step-{origin:06d}", model=model)
            weights(at.serial, model)
            kill_at(call_number)
            save(self.path, model=model, step=at.step)
            os._exit(0)
        os.waitpid(child, 0)
        if (self.path / f"step-{at.step:06d}").is_dir():
            self.story.saves(Save(at.step, at.serial, None, False), origin)

    def is_truncated(self) -> None:
        if self.story.steps:
            step = self.random.choice([*self.story.steps])
            file = self.random.choice([*(self.path / f"step-{step:06d}").iterdir()])
            if file.is_file() and file.stat().st_size:
                os.truncate(file, file.stat().st_size // 2)
                self.story.steps[step].complete = False

    def is_renamed(self) -> None:
        if self.story.steps:
            step = self.random.choice([*self.story.steps.keys() - self.story.stuck] or [0])
            if step:
                (self.path / f"step-{step:06d}").rename(self.path / f"kept-{self.story.serial}-{step}")
                del self.story.steps[step]

    def is_copied(self) -> None:
        """To a name that says nothing, as ``best``."""
        if self.story.steps:
            step = self.random.choice([*self.story.steps])
            shutil.copytree(self.path / f"step-{step:06d}", self.path / "best", dirs_exist_ok=True)

    def gets_stuck(self) -> None:
        """A step can't be removed any more: it is a mount itself, or there is one in it."""
        if self.story.steps:
            step = self.random.choice([*self.story.steps])
            folder = self.path / f"step-{step:06d}"
            if self.random.random() < 0.5 and step not in self.story.stuck:
                subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
                self.story.stuck.add(step)  # it can't be renamed
            elif not (folder / "mounted").exists():
                (folder / "mounted").mkdir()  # it can be renamed, and not be removed then
                subprocess.run(["mount", "-t", "tmpfs", "none", str(folder / "mounted")], check=True)

    def fails_to_save(self) -> None:
        """The folder takes no more: a full disk."""
        origin, at = self.story.latest(), self.new_save(self.story.latest())
        filler = self.disk / "filler"
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        try:
            run_ranks(self.random.choice(WORLDS), one_life, str(self.path), origin, (at,))
            self.story.saves(at, origin)  # what it removed first was enough
        except AssertionError as error:
            assert "No space left on device" in str(error)
        finally:
            filler.unlink()

    def is_read_only(self) -> None:
        """The folder can't be written to for a while."""
        origin, at = self.story.latest(), self.new_save(self.story.latest())
        subprocess.run(["mount", "-o", "remount,ro", str(self.disk)], check=True)
        try:
            with pytest.raises(AssertionError, match=r"can't write to .*: Read-only file system"):
                run_ranks(self.random.choice(WORLDS), one_life, str(self.path), origin, (at,))
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(self.disk)], check=True)

    def loads_the_latest(self) -> None:
        step = self.story.latest()
        world, serials = self.random.choice(WORLDS), [saved.serial for saved in self.story.steps.values()]
        if step is None:
            with pytest.raises(AssertionError, match=r"no complete checkpoint|no such folder"):
                run_ranks(world, loads_on_each, str(self.path), serials)
            return
        for found in run_ranks(world, loads_on_each, str(self.path), serials):
            assert found == (step, self.story.steps[step].serial)


@contextmanager
def disk_of(tmp_path: Path, size: str) -> Iterator[Path]:
    """A small disk, with whatever is mounted in it for its length."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield disk
    finally:
        there = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mounted in reversed([at for at in there if at.startswith(f"{disk}/")]):
            subprocess.run(["umount", mounted], check=True)
        subprocess.run(["umount", str(disk)], check=True)


EVENTS = (
    *["is_restarted"] * 4, *["goes_back"] * 3, *["is_killed"] * 3, *["is_truncated"] * 2, "is_renamed",
    "is_copied", "gets_stuck", "fails_to_save", "is_read_only",
)  # fmt: skip


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_the_newest_complete_step_of_the_line_loads_and_the_next_save_goes_on(
    tmp_path, seed
):
    with disk_of(tmp_path, "4m") as disk:
        life = Random(seed, disk)
        life.trains(None)
        for number in range(9):
            event = life.random.choice(EVENTS)
            try:
                getattr(life, event)()
                life.loads_the_latest()
            except BaseException as error:
                there = sorted(p.name for p in life.path.iterdir()) if life.path.is_dir() else []
                error.add_note(f"event {number}: {event}; {life.story}; {there}")
                raise
        life.is_restarted()
