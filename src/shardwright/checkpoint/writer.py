"""The one writer of a folder of checkpoints: the lock, publication, and what is kept.

Nothing that can't be removed, listed or read keeps the next save from being published, and nothing after the
publication is an error: it is a warning, and the next save tries again.
"""

import itertools
import operator
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shardwright.checkpoint.folder import (
    by_line,
    check_files,
    is_complete,
    latest_name,
    step_folder,
    step_folders,
    storage_of,
    survey,
)
from shardwright.checkpoint.format import MANIFEST, Manifest, loads
from shardwright.checkpoint.storage import Held
from shardwright.checkpoint.url import Location
from shardwright.errors import CheckpointError, InputError, warn
from shardwright.torch_private import COMPILED


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept after a save: complete ones, of the line of training that is saved. What is
    older and incomplete is removed with the others; those of other lines stay.

    Args:
        last: how many of the newest ones, at least 1.
        every: also every checkpoint whose step is a multiple of this number; None: no others.

    Raises:
        InputError: a number is below 1.
    """

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        whole_number(self.last, "Keep.last", "at least 1 (None keeps all)", 1)
        if self.every is not None:
            whole_number(self.every, "Keep.every", "at least 1, or None", 1)


def keep_of(keep: int | Keep | None) -> Keep | None:
    """What ``save`` takes for ``keep``. Raises: InputError."""
    if keep is None or isinstance(keep, Keep):
        return keep
    return Keep(whole_number(keep, "keep", "at least 1, a Keep, or None", 1))


def whole_number(value: Any, name: str, expected: str, least: int) -> int:
    """An argument as an integer, NumPy's too. Raises: InputError for anything else, or one out of range."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # torch's, of a tensor of several elements
        number = least - 1
    if not least <= number < 2**63:
        raise InputError(f"{name} is {repr(value)[:40]}, expected {expected}")
    return number


@dataclass(frozen=True)
class Lineage:
    """The line of training that a model is on in the folder ``path``: its last checkpoint was the save
    ``number`` of the folder, and ``names`` are that one and those it descends from, the oldest first.
    ``seen``: what was in the folder after it; nothing where it was loaded."""

    path: Location
    number: int
    names: tuple[str, ...]
    seen: frozenset[str] = frozenset()

    def state(self) -> dict[str, Any]:
        """What the manifest of its last checkpoint says of it."""
        return {"number": self.number, "after": list(self.names[:-1])}


_line_of: "WeakKeyDictionary[nn.Module, Lineage]" = WeakKeyDictionary()
"""The line of each model that was saved or loaded. Of one that was neither, the step says where it is."""


def line_of(model: nn.Module, path: Location) -> Lineage | None:
    """The line that ``model`` was saved or loaded on last, if that was in ``path``."""
    line = _line_of.get(_original(model))
    return line if line is not None and line.path == _whole(path) else None


def loaded(model: nn.Module, folder: Location, manifest: Manifest) -> None:
    """What ``model`` saves next comes after the checkpoint in ``folder``."""
    _line_of.pop(_original(model), None)
    if (line := manifest.state.get("line")) is not None:
        last = step_folder(folder, manifest.step).name
        saved(model, Lineage(_whole(folder.parent), line["number"], (*line["after"], last)))


def saved(model: nn.Module, line: Lineage) -> None:
    """What ``model`` saves next comes after ``line``."""
    _line_of[_original(model)] = line


def _original(model: nn.Module) -> nn.Module:
    """The one inside of a compiled one."""
    return getattr(model, COMPILED[:-1], model)


def _whole(path: Location) -> Location:
    return path.resolve() if isinstance(path, Path) else path


class Writer:
    """Takes the lock, offers a place to write, publishes it; on rank 0.

    Raises (from ``__init__``):
        CheckpointError: the folder can't be written, the step exists, or another process is writing.
    """

    def __init__(self, path: Location, step: int, line: Lineage | None = None) -> None:
        self.path = path
        self.storage = storage_of(path)
        self.final = step_folder(path, step)
        self._outlasts = True
        try:
            self._lock = self.storage.lock(path)
            with ExitStack() as undo:
                undo.callback(self._lock.close)
                is_ours = line is None or self.final.name in line.names
                if is_ours and self._is_there() and is_complete(self.final):
                    raise CheckpointError(
                        f"{self.final} exists already; nothing was overwritten: remove it, or use another "
                        "folder"
                    )
                self.line, self._left = self._continued(step, line)
                for left in self.storage.leftovers(path):  # we hold the lock: no living writer owns them
                    what = f"{left}, left by an earlier save, couldn't be removed"
                    self._try(what, self.storage.remove, left)
                self.attempt = self.storage.begin(self.final)
                undo.pop_all()
        except Held as error:
            raise CheckpointError(
                f"{path}: another process is saving here ({error}); nothing was written"
            ) from None
        except OSError as error:
            raise CheckpointError(f"can't write to {path}: {error.strerror or error}") from error

    def _continued(self, step: int, line: Lineage | None) -> tuple[Lineage, tuple[str, ...]]:
        """The line that this save goes on with, and what it leaves behind: of the line that is going on in
        the folder, the checkpoints that this one doesn't descend from."""
        there = frozenset(self.storage.names(self.path))
        # Mostly nobody else has saved since: then no manifest is read, however many there are.
        if line is not None and line.seen == there and line.names[-1] == latest_name(self.path):
            number, names, left = line.number, line.names, ()
        else:
            going_on, others = by_line(self.path)
            found = (*going_on, *others)
            names = tuple(f.name for f in reversed(going_on) if f.step < step)
            number = max((f.number for f in found), default=0)
            if line is not None:
                number = max(number, line.number)  # its last one may be unreadable
                # Another run may have saved a step of this line again, under its name. Of what can't be read
                # now nobody can tell.
                own = {f.name for f in found if f.number <= line.number and (f.is_damaged or not f.fault)}
                names = tuple(name for name in line.names if name in own)
            left = tuple(f.name for f in reversed(going_on) if f.name not in names)
        names = (*(name for name in names if name in there), self.final.name)
        return Lineage(_whole(self.path), number + 1, names), left

    def continued(self) -> Lineage:
        """The line after this save."""
        with suppress(OSError):  # not known, it is looked up by the next save
            return replace(self.line, seen=frozenset(self.storage.names(self.path)))
        return self.line

    def _is_there(self) -> bool:
        return self.final.name in self.storage.names(self.path)

    def publish(self, manifest_text: str) -> None:
        """Publish what all ranks have sent, then move ``latest``. Every file is synced already.

        Raises: CheckpointError; then it is not published.
        """
        try:
            check_files(loads(manifest_text, str(self.final)), self.attempt.at)
            self._lock.check()
            if latest_name(self.path) not in ("", *self.line.names):
                # A kill before the file names the new one: of what descends from the common ancestor, the
                # one that was saved last is the latest.
                self.storage.name_latest(self.path, self.line.names[-2] if len(self.line.names) > 1 else "")
            if self._left:
                warn(
                    f"{self.path}: this run doesn't go on from {', '.join(self._left)}: they stay, they "
                    "aren't counted by keep, and load takes what this run saves",
                )
            if self._is_there():  # a damaged one, or another line's: this one comes by here again
                why = "left" if is_complete(self.final) else "damaged"
                self.storage.move(self.final, _unused(self.path, f"{why}-{self.final.name}"))
            self.storage.publish(self.attempt, manifest_text)
        except OSError as error:
            if not self._is_published(manifest_text):
                raise CheckpointError(f"can't publish {self.final}: {error.strerror or error}") from error
            _warn(f"{self.final} is complete, but may not outlast a power cut", error)
            self._outlasts = False
        self._try(
            f"{self.final} is saved, but {self.path / 'latest'} couldn't be written",
            self.storage.name_latest,
            self.path,
            self.final.name,
        )

    def _is_published(self, manifest_text: str) -> bool:
        """Whether this save is in its place; another's may be, which was taken for dead."""
        with suppress(OSError, UnicodeDecodeError):
            return self.storage.read_text(self.final / MANIFEST) == manifest_text
        return False

    def prune(self, keep: Keep) -> None:
        """Remove the checkpoints that ``keep`` does not keep; none where only these outlast a power cut."""
        if not self._outlasts:
            return
        try:
            found = survey(self.path)
        except OSError as error:
            _warn(f"{self.path} couldn't be listed, so nothing was removed from it", error)
            return
        line = [f for f in found if not f.fault and f.name in self.line.names]
        if not line:  # what was just saved can't be read now
            return
        oldest = line[: keep.last][-1].order
        broken = [f for f in found if f.is_damaged and (f.number or oldest[0], f.step) < oldest]
        for old in (*line[keep.last :], *broken):
            if keep.every is None or old.step % keep.every or old.fault:
                self._try(f"{old.folder} couldn't be removed, and stays", self.storage.remove, old.folder)

    def _try(self, what: str, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except FileNotFoundError:
            pass  # somebody else has removed it
        except OSError as error:
            _warn(what, error)

    def close(self) -> None:
        """Give the lock back and remove what was not published."""
        with suppress(OSError):  # the next writer removes it
            self.storage.abandon(self.attempt)
        self._lock.close()


def _warn(what: str, error: OSError) -> None:
    warn(f"{what}: {error.strerror or error}")


def set_aside_after(path: Location, step: int, damaged: Collection[int] = ()) -> list[Location]:
    """Rename what was saved in ``path`` after ``step`` to ``left-step-...``, because a run goes back to
    ``step`` and will come by there again; to ``damaged-step-...`` what is incomplete, or was found to be
    ``damaged``. Returns the new names."""
    moved, storage = [], storage_of(path)
    for newer, folder in step_folders(path):
        if newer > step:
            why = "damaged" if newer in damaged or not is_complete(folder) else "left"
            moved.append(_unused(path, f"{why}-{folder.name}"))
            storage.move(folder, moved[-1])
    if moved:
        storage.name_latest(path, step_folder(path, step).name)
    return moved


def _unused(path: Location, name: str) -> Location:
    """``path / name``, or with the first number behind it that no folder has."""
    names = set(storage_of(path).names(path))
    numbered = (f"{name}.{number}" for number in itertools.count(1))
    return path / next(n for n in itertools.chain([name], numbered) if n not in names)
