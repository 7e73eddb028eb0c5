"""Nights of a folder of checkpoints: jobs that train on integers, save, are killed and start again, on a disk
that loses what wasn't synced. A seed fixes all of it.

    python -c "from tests.storm.checkpoints import night; print(*night(7), sep='\\n')"
"""

import errno
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from shardwright.checkpoint import Keep, background, tools
from shardwright.checkpoint.format import chunk
from shardwright.errors import CheckpointError
from tests.storm.disk import Disk, Killed, Op, error
from tests.storm.savers import Process, loading, saving, simulated, turns

SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass
class Saved:
    """A save: the step, which save it came after, whether the job has loaded nothing, what was saved, and
    which keep it had."""

    step: int
    after: int | None
    is_fresh: bool
    tensors: dict[str, torch.Tensor]
    keep: Keep | None


@dataclass(frozen=True)
class There:
    """A checkpoint as it lies in the folder."""

    name: str
    is_complete: bool
    number: int


class Story:
    """What was saved, by number, and what should be in the folder now. head: the one that should load."""

    def __init__(self) -> None:
        self.saves: dict[int, Saved] = {}
        self.there: dict[int, There] = {}
        self.head: int | None = None

    def line(self, serial: int | None) -> list[int]:
        """It, and those that it comes from, the newest first."""
        found = []
        while serial is not None:
            found.append(serial)
            serial = self.saves[serial].after
        return found

    def whole(self, serials: Sequence[int]) -> list[int]:
        return [s for s in serials if s in self.there and self.there[s].is_complete]

    def newest(self) -> int | None:
        """The newest of the head's line; where nothing is left of it, what was saved last."""
        last = sorted(self.there, key=lambda s: self.there[s].number, reverse=True)
        known = self.head in self.there
        return next(iter([*self.whole(self.line(self.head) if known else []), *self.whole(last)]), None)

    def newest_after(self, serial: int | None) -> int | None:
        """The last saved one that is this, or comes after it."""
        whole = sorted(self.whole([*self.there]), key=self.number)
        return next((s for s in reversed(whole) if serial is None or serial in self.line(s)), None)

    def number(self, serial: int) -> int:
        return self.there[serial].number if serial in self.there else 0

    def goes(self, serial: int, before: dict[int, There]) -> set[int]:
        """What is removed of what was there, once it is saved."""
        save = self.saves[serial]
        if save.keep is None:
            return set()
        line = [s for s in self.line(serial) if s == serial or (s in before and before[s].is_complete)]
        every = save.keep.every
        return {s for s in line[save.keep.last :] if every is None or self.saves[s].step % every}


def tensors_of(process: Process) -> dict[str, torch.Tensor]:
    found = {f"model/{name}": tensor for name, tensor in process.model.state_dict().items()}
    for name, p in process.model.named_parameters():
        momentum = process.optimizer.state[p].get("momentum_buffer")
        found[f"optimizer/{name}/momentum_buffer"] = p.detach() * 0 if momentum is None else momentum
    return {key: tensor.detach().clone() for key, tensor in found.items()}


def train(process: Process, seed: int) -> None:
    """One step, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    for p in process.model.parameters():
        p.grad = torch.randint(-9, 9, p.shape, generator=generator).float()
    process.optimizer.step()
    process.model.count.add_(1)


Looked = dict[str, tuple[int | None, bool, int]]


def look(path: Path) -> Looked:
    """Names in the folder, with the serial, whether all files are there, and the number of the save, read
    without the package."""
    found = {}
    for folder in sorted(path.iterdir()) if path.is_dir() else ():
        if not folder.is_dir():
            continue
        serial, is_whole, number = None, False, 0
        with suppress(OSError, ValueError, KeyError):
            manifest = json.loads((folder / "manifest.json").read_text())
            serial, number = manifest["state"]["extra"]["serial"], manifest["state"]["line"]["number"]
            is_whole = all((folder / n).stat().st_size == size for n, size in manifest["files"].items())
        found[folder.name] = serial, is_whole, number
    return found


# ---- a night


class Job:
    """Ranks that train together. ``truth`` trains beside them, and no disk touches it. last: the save that it
    goes on from, and step: its step."""

    numbers = itertools.count()

    def __init__(self, world: int) -> None:
        name = f"job {next(Job.numbers)}"
        self.truth = Process(name, 0, 1)
        self.ranks = [Process(f"{name}.{rank}", rank, world) for rank in range(world)]
        for rank in self.ranks:
            rank.peers = self.ranks
        self.last: int | None = None
        self.step = 0

    @property
    def is_alive(self) -> bool:
        return not any(rank.is_dead for rank in self.ranks)

    def train(self, seed: int) -> None:
        for process in (self.truth, *self.ranks):
            train(process, seed)

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether each rank has its part of these."""
        for rank in self.ranks:
            for key, tensor in tensors_of(rank).items():
                start, size = chunk(len(tensor), rank.world, rank.rank) if tensor.ndim else (0, 0)
                rows = slice(start, start + size) if tensor.ndim else ...
                if not torch.equal(tensor[rows], tensors[key][rows]):
                    return False
        return True


class Night:
    """One folder, from the first save on. Raises: AssertionError, with what has happened."""

    def __init__(self, seed: int, root: Path) -> None:
        self.seed = seed
        self.worlds: tuple[int, ...] = (1, 1, 2, 3)
        Job.numbers = itertools.count(1)
        self.random = Random(seed)
        self.disk = Disk(root, self.random, turns.process)
        self.disk.before = self._before
        self.path = root / self.random.choice(["runs", "a/b/runs"])
        self.story, self.history = Story(), list[str]()
        self.serials = itertools.count(1)
        self.job: Job | None = None
        self.safe, self.ever, self.torn = set[int](), set[int](), set[str]()
        self.stuck: dict[str, tuple[str, ...]] = {}
        self.was_stuck = False
        self.fault: Callable[[Op], None] | None = None
        self.was_cut, self.has_failed = False, 0

    def _before(self, op: Op) -> None:
        if self.fault is not None:
            self.fault(op)
        for name, kinds in self.stuck.items():
            if op.kind in kinds and name in op.path:
                raise error(errno.EIO, str(self.disk.root / Path(op.path)))
        if self.random.random() < 0.3:
            turns.wait(lambda: True)

    def run(self, num_events: int) -> list[str]:
        with self.telling(), simulated(self.disk, self.random):
            for _ in range(num_events):
                getattr(self, self.random.choice(EVENTS))()
            self.stuck, self.job = {}, None
            self.saves_well()
        return self.history

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error tells what has happened before."""
        try:
            yield
        except BaseException as failed:
            failed.add_note("\n".join([f"night {self.seed}", *self.history, self._folder()]))
            raise

    def prepared(self, what: str, number: int) -> Job:
        """A job that is about to save, in a folder of its own: see ``WHAT``."""
        base = self.path.with_name("base")
        if number == 1:
            self.path = base
            for after in {"first": (), "goes forth": (None, 1, 2, 1)}.get(what, (None, 1, 2)):
                self.job = self.starts({None}) if after is None else self.starts_at(after)
                serial, work = self.plan(self.job, False, None)
                turns.run(work)
                self.check([(self.job, serial)])
            self.base = dict(self.story.there), self.story.head
        with self.disk.off():
            if self.path != base:
                shutil.rmtree(self.path)
            self.path = base.with_name(f"runs{number}")
            if base.is_dir():
                shutil.copytree(base, self.path)
        self.disk.settle()
        self.story.there, self.story.head = dict(self.base[0]), self.base[1]
        self.safe = set(self.base[0])
        if what == "again":
            job = Job(1)
            job.step = 1
            return job
        after = {"goes back": 1, "comes by": 1, "goes forth": 3}.get(what)
        job = self.starts({self.story.head}) if after is None else self.starts_at(after)
        job.step += 10 if what == "goes back" else 0
        return job

    def _folder(self) -> str:
        with self.disk.off():
            text = f"{look(self.path)}, latest: "
            with suppress(OSError):
                text += repr((self.path / "latest").read_text())
        return text

    def note(self, text: str) -> None:
        self.history.append(re.sub(r"pid \d+", "pid", text.replace(self.disk.root, "disk")))

    # ---- what goes wrong

    def draw_fault(self) -> str:
        at = self.disk.count + self.random.choice([self.random.randint(1, 20), self.random.randint(1, 200)])
        kind = self.random.choice(
            ["nothing", "kill", "kill", "cut", "cut", "fails", "fails", "fsync fails", "full"]
        )
        if kind == "nothing":
            return "well"
        if kind == "full":
            self.disk.room, self.has_failed = self.random.randint(0, 3000), 1
            return f"with {self.disk.room} bytes free"
        if kind == "fails":
            return self.fails(at, self.random.choice([1, 1, 1, 2, 5, 10**9]), self.random.choice(ERRORS))
        if kind == "fsync fails":
            return self.fails(at, self.random.choice([1, 10**9]), errno.EIO, ("fsync",))
        return self.kills(at, kind)

    def fails(self, at: int, number: int, code: int, kinds: tuple[str, ...] | None = None) -> str:
        """From this operation on so many, of these kinds."""
        kinds = kinds if kinds or code == errno.EIO else CHANGES + ("fsync",) * (code == errno.ENOSPC)

        def fault(op: Op) -> None:
            if at <= op.number < at + number and (kinds is None or op.kind in kinds):
                self.has_failed += 1
                # What can't be read isn't known to be of the line, and stays.
                self.was_stuck = self.was_stuck or code == errno.EIO
                self.note(f"    {op}: {errno.errorcode[code]}")
                raise error(code, str(self.disk.root / Path(op.path)))

        self.fault = fault
        return f"failing ({errno.errorcode[code]}, {number} times, {kinds})"

    def kills(self, at: int, kind: str) -> str:
        """One rank, or its job; of a power cut all."""
        whole = self.random.random() < 0.5

        def fault(op: Op) -> None:
            if op.number < at or self.was_cut:
                return
            process = turns.process()
            assert process is not None
            self.fault = None
            self.note(f"    {op}: {kind} {process}")
            self.was_cut = kind == "cut"
            dying = turns.processes() if self.was_cut else process.peers if whole else [process]
            for each in dying:
                each.is_dead = True
                self.disk.kill(each)
            raise Killed

        self.fault = fault
        return kind

    def loses_power(self) -> None:
        self.note("    a power cut")
        self.was_cut, self.job = True, None

    def heal(self) -> None:
        """The event is over: what failed works again, and after a power cut the disk is what it has left."""
        self.fault, self.disk.room, self.disk.partial = None, None, 0.0
        if self.was_cut:
            self.disk.crash()

    # ---- what a job does

    def save(self, job: Job, serial: int, step: int, keep: int | Keep | None, in_background: bool) -> Any:
        """A script for each rank."""

        def script(process: Process) -> None:
            state = {"model": process.model, "optimizer": process.optimizer, "step": step, "keep": keep}
            state["extra"] = {"serial": serial, "seen": torch.tensor([serial, step])}
            process.saved[serial] = "killed"
            try:
                if in_background:
                    pending = saving.async_save(self.path, **state)
                    train(process, 0)
                    turns.wait(lambda: True)
                    pending.wait() if serial % 2 else background.finish()
                else:
                    saving.save(self.path, **state)
                process.saved[serial] = ""
            except CheckpointError as failed:
                process.saved[serial] = str(failed)
            if not process.is_dead:
                left = self.disk.opened_by(process)
                assert not left, f"left open: {left}"

        return [(rank, lambda rank=rank: script(rank)) for rank in job.ranks]

    def plan(self, job: Job, in_background: bool | None = None, keep: Any = 0) -> tuple[int, Any]:
        """A save that the job is about to do. Drawn, where nothing is said."""
        serial = next(self.serials)
        step = job.step = job.step + self.random.choice([1, 1, 2, 5] if keep == 0 else [1])
        keep = self.random.choice([None, 1, 1, 2, 3, Keep(1, 2), Keep(2, 3)]) if keep == 0 else keep
        job.train(serial)
        after = job.last
        if after is None and (newest := self.story.newest()) is not None:
            line = self.story.whole(self.story.line(newest))
            after = next((s for s in line if self.story.saves[s].step < step), None)
        kept = Keep(keep) if isinstance(keep, int) else keep
        self.story.saves[serial] = Saved(step, after, job.last is None, tensors_of(job.truth), kept)
        in_background = self.random.random() < 0.4 if in_background is None else in_background
        if in_background:
            train(job.truth, 0)
        job.ranks[0].warned.clear()
        self.disk.partial = self.random.choice([0.0, 0.0, 0.5])
        self.disk.direct = self.random.random() < 0.7
        how = "in the background " if in_background else ""
        self.note(f"{serial}: {job.ranks} save step {step} {how}after {after}, keep={keep}")
        return serial, self.save(job, serial, step, keep, in_background)

    def loads(self, job: Job, path: Path, said: dict[Process, Any]) -> Any:
        def script(process: Process) -> None:
            try:
                said[process] = loading.load(path, model=process.model, optimizer=process.optimizer)
            except CheckpointError as failed:
                said[process] = str(failed)
            if not process.is_dead:
                assert not self.disk.opened_by(process), f"left open: {self.disk.opened_by(process)}"

        return [(rank, lambda rank=rank: script(rank)) for rank in job.ranks]

    def loaded(self, job: Job, said: dict[Process, Any], allowed: set[int | None]) -> None:
        """What came of a load is one of these saves, on all ranks."""
        found: set[Any] = {each if isinstance(each, str) else each.extra["serial"] for each in said.values()}
        [serial] = found
        if isinstance(serial, str):
            assert None in allowed, f"load: {serial}, expected {allowed}"
            assert "no complete checkpoint" in serial or "no such folder" in serial, serial
            return
        assert serial in allowed and serial is not None, f"{serial} was loaded, expected {allowed}"
        save = self.story.saves[serial]
        assert {each.step for each in said.values()} == {save.step}
        assert job.holds(save.tensors), f"other tensors than those of {serial}"
        assert all(torch.equal(e.extra["seen"], torch.tensor([serial, save.step])) for e in said.values())
        job.last, job.step = serial, save.step
        restore(job.truth, save.tensors)

    # ---- what must be so

    def outcome(self, job: Job, serial: int) -> str:
        """Nothing where the save returned, "killed" where a rank was killed, else its error."""
        said = [rank.saved.get(serial, "killed") for rank in job.ranks]
        if not job.is_alive:
            return "killed"
        assert all(said) or not any(said), f"some ranks have saved it: {said}"
        assert all("step" in each for each in said if each), f"no path is named: {said}"
        return said[0]

    def check(self, saved: list[tuple[Job, int]]) -> None:
        """The folder, and what loads, are what they may be after these saves; sometimes the power is lost
        then."""
        before, newest = self.story.there, self.story.newest()
        came = {serial: self.outcome(job, serial) for job, serial in saved}
        is_killed = "killed" in came.values()
        was_full = any("No space" in error for error in came.values())
        was_full &= not (self.stuck or is_killed or self.has_failed > 1)  # what is full lets files be removed
        if saved and not self.was_cut and self.random.random() < 0.2:
            self.loses_power()
        self.heal()
        has_failed = self.was_cut or self.has_failed > 0 or is_killed
        is_well = not has_failed and not self.was_stuck
        with self.disk.off():
            now = look(self.path)
        steps = {name: found for name, found in now.items() if name.startswith("step-")}
        self.story.there = {s: There(n, w, k) for n, (s, w, k) in steps.items() if s is not None}
        if newest is not None and not self.story.whole(
            [newest]
        ):  # it was never safe, or its step is another's
            newest = self.story.newest()
        allowed: set[int | None] = {newest}
        if (
            self.was_stuck and not saved
        ):  # what couldn't be read isn't known as the ancestor of what was saved
            allowed.add(self.story.newest_after(None))
        goes = set[int]()
        for job, serial in sorted(saved, key=lambda each: self.story.number(each[1])):
            error = came[serial]
            self.note(f"    {serial}: {error.splitlines()[-1][-170:] if error else 'saved'}")
            lasts = not any("may not outlast" in text for text in job.ranks[0].warned)
            if error or lasts or not self.was_cut:
                self.returns(serial, error, before, has_failed, REFUSED[: len(saved)])
            if self.story.whole([serial]):
                # One that couldn't be looked at may have the same number, until ``latest`` names this.
                allowed = {serial, newest} if error and self.was_stuck else {serial}
                goes |= self.publishes(job, serial, error, before, lasts)
            elif newest != job.last:  # its line was about to be the one that goes on
                allowed.add(self.story.newest_after(job.last))
        self.stays(before, goes, {step_name(self.story.saves[serial].step) for _, serial in saved}, now)
        self.shows_no_parts(before, came, {name for name, (_, is_whole, _) in steps.items() if not is_whole})
        if is_well:
            assert not [s for s in goes if s in self.story.there], f"of {goes} some should be gone"
        if (is_well and saved and not came[saved[-1][1]]) or (was_full and not self.was_cut):
            assert not [name for name in now if name.startswith(".torn")], "something is left"
        if self.was_cut:
            self.safe |= set(self.story.there)
        self.was_cut, self.has_failed = False, 0
        job = self.starts(allowed)
        self.story.head = job.last
        if self.job is None or not self.job.is_alive:
            self.job = job

    def returns(
        self, serial: int, error: str, before: dict[int, There], has_failed: bool, refused: Sequence[str]
    ) -> None:
        """The save has returned where it is there, and only there; and it fails only where something has."""
        is_there, name = bool(self.story.whole([serial])), step_name(self.story.saves[serial].step)
        assert is_there or error, f"{serial} isn't there"
        # A disk that fails again may not say what has come of it.
        unknown = (self.has_failed > 1 or self.stuck) and "can't publish" in error
        assert error in ("", "killed") or not is_there or unknown, f"{serial} is there, and said {error}"
        if self.story.saves[serial].is_fresh and not has_failed and not self.stuck:
            names = [there.name for there in before.values() if there.is_complete]
            assert ("exists already" in error) == (name in names), error
        is_refused = name in self.stuck or any(text in error for text in refused)
        assert not error or has_failed or is_refused, error

    def publishes(self, job: Job, serial: int, error: str, before: dict[int, There], lasts: bool) -> set[int]:
        """What goes, now that this is there."""
        if job.last in before:
            assert self.story.number(serial) > before[job.last].number
        if error in ("", "killed"):  # else the job doesn't know
            job.last = serial
        if not lasts:
            assert self.has_failed
            return set()
        self.safe |= set() if error else {serial}
        return self.story.goes(serial, before)

    def stays(self, before: dict[int, There], goes: set[int], steps: set[str], now: Looked) -> None:
        """What was there is there, but for what goes, or was never safe. One of ``steps`` may be aside."""
        for s in before:
            if (
                before[s].is_complete
                and not self.story.whole([s])
                and not (self.was_cut and s not in self.safe)
            ):
                aside = before[s].name in steps and any(s == each[0] and each[1] for each in now.values())
                assert s in goes or aside, f"{s} is gone"

    def shows_no_parts(self, before: dict[int, There], came: dict[int, str], torn: set[str]) -> None:
        """Nothing is there in part, or again."""
        if not self.was_cut:
            assert set(self.story.there) <= {*before, *came}, "what was removed is there again"
        else:  # a removal may be half undone
            self.torn |= {step_name(self.story.saves[s].step) for s in self.ever}
        assert torn <= self.torn, f"{torn - self.torn} is there in part"
        self.torn, self.ever = torn, self.ever | set(self.story.there)

    def starts(self, allowed: set[int | None], path: Path | None = None) -> Job:
        """A job of new processes, which has loaded one of these saves."""
        job, said = Job(self.random.choice(self.worlds)), dict[Process, Any]()
        stuck, self.stuck = self.stuck, {}
        turns.run(self.loads(job, path or self.path, said))
        self.stuck = stuck
        self.loaded(job, said, allowed)
        return job

    def saves_well(self, *how: Any) -> None:
        """Nothing that was left keeps a save from what it promises."""
        self.job = self.job or self.starts({self.story.newest()})
        serial, work = self.plan(self.job, *how)
        turns.run(work)
        self.check([(self.job, serial)])
        assert self.story.head == serial
        assert not tools.verify(self.path).faults

    # ---- events

    def saves(self) -> None:
        if self.job is None:
            self.job = self.starts({self.story.newest()})
        serial, work = self.plan(self.job)
        self.note(f"    {self.draw_fault()}")
        turns.run(work)
        self.check([(self.job, serial)])

    def two_save(self) -> None:
        """Two jobs, of which one may find the other saving."""
        if self.job is None or self.job.last is None:
            return
        whole = self.story.whole([*self.story.there])
        if not whole:
            return
        jobs = [self.job, self.starts_at(self.random.choice(whole))]
        plans = [self.plan(job) for job in jobs]
        if self.random.random() < 0.5:
            self.note(f"    {self.draw_fault()}")
        turns.run([each for _, work in plans for each in work])
        self.check([(job, serial) for job, (serial, _) in zip(jobs, plans, strict=True)])

    def starts_at(self, serial: int) -> Job:
        return self.starts({serial}, self.path / self.story.there[serial].name)

    def goes_back(self) -> None:
        whole = self.story.whole([*self.story.there])
        if whole:
            self.job = self.starts_at(self.random.choice(whole))
            self.note(f"{self.job.ranks} have gone back to {self.job.last}")

    def starts_fresh(self) -> None:
        """A job that loads nothing."""
        self.job = Job(self.random.choice([1, 2]))
        self.job.step = self.random.choice([0, self.random.randint(0, 20)])

    def is_restarted(self) -> None:
        self.job = None

    def loads_beside(self) -> None:
        """A load while another job saves, and removes."""
        newest = self.story.newest()
        if self.job is None or newest is None:
            return
        serial, work = self.plan(self.job)
        reader, said = Job(self.random.choice([1, 2])), dict[Process, Any]()
        turns.run([*work, *self.loads(reader, self.path, said)])
        self.loaded(reader, said, self.loadable(newest) | {serial})
        self.check([(self.job, serial)])

    def waits(self, said: dict[Process, Any], at: int, job: Job, keep: int | None) -> tuple[Any, int, Any]:
        """The reader waits at that operation until the job has saved; what keeps it so, and that save."""
        serial, [(process, script)] = self.plan(job, False, keep)
        begun = list[int]()

        def fault(op: Op) -> None:
            if op.number >= at and not begun and turns.process() is not process:
                self.has_failed = 1
                begun.append(op.number)
                turns.wait(lambda: process.saved.get(serial) == "")

        def save() -> None:
            turns.wait(lambda: bool(begun or said))
            script()

        return fault, serial, (process, save)

    def loads_failing(self) -> None:
        """A load on a disk that fails, or of which a process is killed, changes nothing."""
        newest, reader, said = self.story.newest(), Job(self.random.choice([1, 2])), dict[Process, Any]()
        untouched = tensors_of(reader.truth)
        self.note(f"{reader.ranks} load, {self.draw_fault()}")
        turns.run(self.loads(reader, self.path, said))
        if reader.is_alive and not self.was_cut:
            [told] = {str(each) if isinstance(each, str) else "" for each in said.values()}
            if told:
                self.note(f"    {told[-150:]}")
                assert "half loaded" in told or reader.holds(untouched)
                assert newest is None or self.has_failed or self.stuck, told
            elif not self.has_failed:
                self.loaded(reader, said, self.loadable(newest))
        self.check([])

    def loadable(self, newest: int | None) -> set[int | None]:
        """What a load may find now: where one can't be looked at, another."""
        return {newest, None, *self.story.whole([*self.story.there])} if self.stuck else {newest}

    def is_flipped(self) -> None:
        """One bit of a checkpoint: ``verify`` names the file, and the tensor, and no load takes it."""
        for serial in self.story.whole([*self.story.there])[-1:]:
            folder = self.path / self.story.there[serial].name
            with self.disk.off():
                file = self.random.choice(sorted(each.name for each in folder.iterdir()))
                content = bytearray((folder / file).read_bytes())
                manifest = json.loads((folder / "manifest.json").read_text())
                at = self.random.randrange(len(content))
                content[at] ^= 1 << self.random.randrange(8)
                before = (folder / file).read_bytes()
                (folder / file).write_bytes(content)
            self.note(f"byte {at} of {folder.name}/{file} has flipped")
            before_it, self.stuck = (self.stuck, self.was_stuck), {}
            self.finds(serial, folder, file, at, manifest)
            (self.stuck, self.was_stuck), self.has_failed = before_it, 0
            with self.disk.off():
                (folder / file).write_bytes(before)

    def finds(self, serial: int, folder: Path, file: str, at: int, manifest: Any) -> None:
        """``verify`` and ``load`` see that byte."""
        held = [
            key
            for key, entry in manifest["tensors"].items()
            for p in entry["pieces"]
            if p["file"] == file and p["start"] <= at < p["start"] + p["nbytes"]
        ]
        try:
            faults = tools.verify(folder).faults
        except CheckpointError as failed:
            faults = (str(failed),)
        with self.disk.off():
            is_same = file == "manifest.json" and look(self.path)[folder.name][0] == serial
        assert any(file in fault and all(key in fault for key in held) for fault in faults) or is_same, faults
        job, said = Job(self.random.choice([1, 2])), dict[Process, Any]()
        self.fails(self.disk.count + self.random.randint(1, 300), 1, errno.EIO)
        turns.run(self.loads(job, folder, said))
        self.fault = None
        for each in said.values():
            if held and held[0][:4] != "rng/":  # that of a rank is read by ranks of as many
                assert isinstance(each, str) and file in each and held[0] in each, each
                assert job.holds(tensors_of(Job(1).truth)), "loaded all the same"

    def is_damaged(self) -> None:
        """A file is cut, or gone: who asks for that checkpoint is told which."""
        if whole := self.story.whole([*self.story.there]):
            serial = self.random.choice(whole)
            there = self.story.there[serial]
            with self.disk.off():
                file = self.random.choice(sorted((self.path / there.name).glob("shard-*")))
                if self.random.random() < 0.5:
                    file.write_bytes(file.read_bytes()[:-1])
                else:
                    file.unlink()
            self.note(f"{there.name}/{file.name} is damaged")
            self.disk.settle()
            self.story.there[serial] = There(there.name, False, there.number)
            self.torn.add(there.name)
            job, said = Job(2), dict[Process, Any]()
            turns.run(self.loads(job, self.path / there.name, said))
            assert self.stuck or all(file.name in str(each) for each in said.values()), said
            self.check([])

    def is_renamed(self) -> None:
        """Or copied: what has another name is the script's own."""
        if self.story.there:
            serial = self.random.choice([*self.story.there])
            name, kept = self.story.there[serial].name, self.path / f"kept-{next(self.serials)}"
            with self.disk.off():
                if self.random.random() < 0.5:
                    shutil.copytree(self.path / name, kept)
                else:
                    (self.path / name).rename(kept)
                    del self.story.there[serial]
            self.disk.settle()
            self.note(f"{name} is copied or renamed")
            self.check([])

    def gets_stuck(self) -> None:
        """From now on a checkpoint can't be removed, or not even be looked at."""
        if self.story.there:
            name = self.story.there[self.random.choice([*self.story.there])].name
            kinds = self.random.choice([("rename",), ("unlink",), ("rmdir",), ("list", "open", "stat")])
            self.stuck, self.was_stuck = {name: kinds} if not self.stuck else {}, True
            self.note(f"stuck: {self.stuck}")


EVENTS = (
    *["saves"] * 9, *["two_save"] * 2, *["goes_back"] * 2, "starts_fresh", *["is_restarted"] * 2,
    "loads_beside", *["loads_failing"] * 2, "is_flipped", "is_damaged", "is_renamed", "gets_stuck",
)  # fmt: skip
ERRORS = (errno.EIO, errno.EIO, errno.EACCES, errno.EROFS, errno.ENOSPC)
REFUSED = ("exists already", "another process is saving here")
CHANGES = ("open to write", "write", "mkdir", "rename", "unlink", "rmdir")


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def restore(process: Process, tensors: dict[str, torch.Tensor]) -> None:
    """The process has these."""
    for name, tensor in process.model.state_dict().items():
        tensor.copy_(tensors[f"model/{name}"])
    for name, p in process.model.named_parameters():
        process.optimizer.state[p]["momentum_buffer"] = tensors[f"optimizer/{name}/momentum_buffer"].clone()


WHAT = {
    "first": "the first save of a folder",
    "one more": "after three others",
    "async": "the same in the background",
    "goes back": "after the first of three, a step that is new",
    "comes by": "after the first of three, the step of the second",
    "again": "of a job that has loaded nothing, a step that is there",
    "goes forth": "after the third, the step of whose second another run has saved again",
}


def every_operation(what: str, kind: str, stride: int = 1) -> int:
    """A save that is one of ``WHAT``, again and again, of which first the first operation fails, then the
    second, and so on; after each one that is well. Returns how many operations it has."""
    with tempfile.TemporaryDirectory(dir=SHM) as root:
        own = Night(0, Path(root))
        own.worlds = (1,)
        with own.telling(), simulated(own.disk, own.random):
            for number in itertools.count(1, stride):
                own.job = job = own.prepared(what, number)
                serial, work = own.plan(job, what == "async", 2)
                begin = own.disk.count
                if kind in ("kill", "cut"):
                    own.kills(begin + number, kind)
                else:
                    own.fails(begin + number, 1, getattr(errno, kind), None if kind == "EIO" else CHANGES)
                turns.run(work)
                end = own.disk.count
                own.check([(job, serial)])
                own.job = None if what == "again" else own.job
                own.saves_well()
                own.history.clear()
                if end < begin + number:
                    return number - 1
    raise AssertionError


def every_operation_of_a_load(world: int, what: str) -> int:
    """Loads of which one operation fails, each in turn, once; or before which a save removes what is loaded,
    or another run saves its step again. Returns how many it has."""
    with tempfile.TemporaryDirectory(dir=SHM) as root:
        own = Night(0, Path(root))
        own.worlds = (1,)
        with own.telling(), simulated(own.disk, own.random):
            for _ in range(2):
                own.saves_well(False, None)
            for number in itertools.count(1):
                own.has_failed, said, job = 0, dict[Process, Any](), Job(world)
                works, at, before = own.loads(job, own.path, said), own.disk.count + number, own.story.head
                if what != "fails":
                    own.job = saver = own.starts_at(before if before and what == "is removed" else 1)
                    at = own.disk.count + number
                    own.fault, serial, save = own.waits(said, at, saver, 1 if what == "is removed" else None)
                    turns.run([*works, save])
                    is_over = not own.has_failed
                    own.check([(saver, serial)])
                else:
                    own.fails(at, 1, errno.EIO)
                    turns.run(works)
                    is_over, own.fault = not own.has_failed, None
                own.loaded(job, said, {before, own.story.head})
                if is_over:
                    return number - 1
    raise AssertionError


def night(seed: int, num_events: int = 12) -> list[str]:
    """What has happened. Raises: AssertionError, where a promise was broken."""
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        return Night(seed, Path(folder)).run(num_events)
