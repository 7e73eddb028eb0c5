"""Every error that Shardwright raises on purpose.

    ShardwrightError
    |-- InputError (ValueError)        an argument, a module or a mesh that can't be sharded as asked
    |   `-- MisuseError (also AssertionError)  where torch's ``fully_shard`` raises an AssertionError
    |-- ConfigError (ValueError)       a configuration file or command line; lists everything wrong at once
    |-- MissingExtra (ModuleNotFoundError)  a package that comes with an extra of ours and isn't installed
    |-- UnsupportedTorch (ImportError) a torch that lacks a name that is needed
    |-- DataError (ValueError)         a corpus that is missing, empty or too small
    |-- ScheduleError (AssertionError) a schedule that isn't sound
    |-- StageError (RuntimeError)      a call that is illegal in the stage that a group is in
    |-- NonFinite (ArithmeticError)    a training step whose gradients are infinite or NaN
    |-- DamagedMemory (RuntimeError)   memory has other bits than were written to it
    |-- OutOfMemory (MemoryError)      a rank that holds more host memory than its budget
    |-- CommError (RuntimeError)       ranks in different collectives, or a rank that ended or never came
    |   |-- Diverged                   ranks wait for each other in different places: proven, not timed
    |   |-- RankFailed                 a rank raised an exception, or left, while others needed it
    |   |-- RankLost                   a rank's process ended without a word, or its host is gone
    |   `-- Stalled                    a rank has done nothing for as long as ``stall_s``
    |-- CheckpointError (RuntimeError) a checkpoint that is missing, damaged or doesn't fit
    |   `-- DamagedError               what was read isn't what was saved
    |-- StorageError (OSError)         an object store that can't be reached, or that refuses
    `-- LaunchError (RuntimeError)     ranks that could not be started, or that ended early

Each message says which thing, what was got, what was expected and what to do. Violations of our own
invariants are ``assert`` statements and not in this tree: they are bugs of ours, never of the user's.
"""

import difflib
import json
import sys
import warnings
from collections import abc
from typing import Any

REMOVED = {
    "one_copy_per_host": "one_copy_per_host was removed: it took more memory, and no less time; leave it out",
    "max_gathers": "max_gathers was removed: set depth, which limits all-gathers in flight to one more",
    "keep_nbytes": "keep_nbytes was removed: set keep_last, a number of groups",
    "ahead": "ahead was removed: call set_modules_to_forward_prefetch or set_modules_to_backward_prefetch",
    "forget_after": "forget_after was removed: what no rank has used for 100 backwards leaves the schedule",
    "wire_nbytes": "wire_nbytes was removed: all copies on a host take at most a quarter of its free memory",
}
"""Options of earlier versions, in calls and recipes, and what is said of them."""

_BETWEEN = {"shardwright", "torch", "contextlib", "lightning", "lightning_fabric", "pytorch_lightning"}
"""Packages whose frames may stand between what warns and the user's line that is meant."""


def printable(text: str) -> str:
    """``text`` for a screen: what moves its cursor, hides or reorders as escapes; lines and tabs stay.

    Messages have names, paths and what other ranks say, and a terminal obeys what is in them.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def said(data: bytes | str) -> Any:
    """What another process has said as JSON, its texts as ``printable`` gives them. Raises: ValueError."""
    return _printable(json.loads(data))


def _printable(found: Any) -> Any:
    if isinstance(found, list):
        return [_printable(each) for each in found]
    if isinstance(found, dict):
        return {printable(name): _printable(each) for name, each in found.items()}
    return printable(found) if isinstance(found, str) else found


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, at the innermost line that isn't of these packages; a thread of ours has none, and warns here."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    is_in_a_thread = frame is None or frame.f_globals.get("__name__") == "threading"
    warnings.warn(printable(message), category, stacklevel=2 if is_in_a_thread else level)


def nearest(name: str, known: abc.Iterable[str], prefix: str = "") -> str:
    """What is said of a misspelt name beside the error, after a semicolon; "" where nothing comes near."""
    leaf, names = name.split(".")[-1], [*known]
    if leaf in REMOVED:
        return f"; {REMOVED[leaf]}"
    same_leaf = [each for each in names if each.split(".")[-1] == leaf]
    close = same_leaf or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


class ShardwrightError(Exception):
    """Base of every error raised on purpose by this package."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InputError(ShardwrightError, ValueError):
    """An argument, a module or a mesh that can't be sharded as asked."""


class MisuseError(InputError, AssertionError):
    """An input for which torch's ``fully_shard`` raises an AssertionError, so that code written for it
    catches this."""


class ConfigError(ShardwrightError, ValueError):
    """A configuration file or a command line that can't be used; the message lists all mistakes at once."""


class MissingExtra(ShardwrightError, ModuleNotFoundError):
    """A package of one of our extras that isn't installed; the message has the command that installs it."""


class UnsupportedTorch(ShardwrightError, ImportError):
    """An installed torch that lacks a name that is needed, by everything or by the feature that is used; the
    message says which torch has it."""


class DataError(ShardwrightError, ValueError):
    """A corpus that is missing, empty or too small for the batch that was asked for."""


class ScheduleError(ShardwrightError, AssertionError):
    """An invalid schedule: it uses, gathers, reduces or frees something at a wrong place."""


class StageError(ShardwrightError, RuntimeError):
    """A call that isn't allowed in the current stage of a step or of a group."""


class NonFinite(ShardwrightError, ArithmeticError):
    """A step of a recipe whose gradients are infinite or NaN; the message names the step and a parameter."""


class DamagedMemory(ShardwrightError, RuntimeError):
    """Memory of this rank has other bits than were written to it; only with ``SHARDWRIGHT_CHECKSUMS=all``."""


class OutOfMemory(ShardwrightError, MemoryError):
    """A rank holds, or is about to hold, more host memory than ``SHARDWRIGHT_MEMORY_BUDGET`` allows."""


class CommError(ShardwrightError, RuntimeError):
    """Ranks are in different collectives, or a rank ended or never arrived."""


class Diverged(CommError):
    """Ranks wait for each other in different places, or launched different collectives."""


class RankFailed(CommError):
    """A rank raised an exception, or left, while others needed it; its own error comes first."""


class RankLost(CommError):
    """A rank's process ended without an error message, or its host can't be reached."""


class Stalled(CommError):
    """A rank has done nothing for ``WatchPolicy.stall_s`` while others waited; or all ranks have launched a
    collective that hasn't ended for ``WatchPolicy.collective_s``."""


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint that is missing, damaged, incomplete, or doesn't fit the model."""


class DamagedError(CheckpointError):
    """A checkpoint is complete, but its bytes are not those that were saved. Nothing was loaded."""


class UnreadError(CheckpointError):
    """A file of a checkpoint can't be opened or read now: it was removed meanwhile, or its disk fails. That
    says nothing about its bytes. Nothing was loaded."""


class StorageError(ShardwrightError, OSError):
    """An object store (``s3://``, ``gs://``, ...) can't be reached, or refuses a request."""


class LaunchError(ShardwrightError, RuntimeError):
    """Local ranks could not be started, or ended before the job was done."""
