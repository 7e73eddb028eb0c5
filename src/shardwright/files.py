"""Files that anybody may have written: only regular ones are opened, JSON is read strictly, and what is wrong
in them is one sentence."""

import errno
import json
import os
import pickle
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shardwright.errors import CheckpointError, ShardwrightError, UnreadError

try:
    import fcntl as fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # neither is there on every system
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file. Raises: OSError, also for what is no regular file: a FIFO would be waited for,
    and to open a device may do something."""
    if os.path.exists(path):
        _check_regular(path, os.stat(path))
    fd = os.open(path, flags | _NO_WAIT, 0o644)
    try:
        _check_regular(path, os.fstat(fd))
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """The bytes of a file. Raises: OSError, as ``open_regular``."""
    with open(open_regular(path), "rb") as file:
        return file.read()


@contextmanager
def reading(where: object, what: str) -> Iterator[None]:
    """Around the reading of a file: what shows that it isn't ``what`` becomes a CheckpointError with the why;
    where it can't be read, an UnreadError.

    Parsers raise many kinds of errors for what they don't expect; each would be taken for a bug of ours.
    """
    try:
        yield
    except ShardwrightError:
        raise
    except OSError as error:
        raise UnreadError(f"{where}: can't be read: {error.strerror or error}") from error
    except Exception as error:
        raise CheckpointError(f"{where}: not {what} ({reason_of(error)})") from error


@contextmanager
def opened(path: Path, what: str) -> Iterator[BinaryIO]:
    """A regular file, and ``reading`` around it. Raises: CheckpointError."""
    with reading(path, what), open(open_regular(path), "rb") as file:
        yield file


def json_file(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file. Raises: CheckpointError."""
    with opened(path, what) as file:
        return json_object(file.read())


def reason_of(error: Exception) -> str:
    """Why something can't be parsed, in words."""
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeError():
            return "it is no text in UTF-8"
        case KeyError():
            return f"{error} is missing"
        case MemoryError():
            return "it asks for more memory than there is"
        case pickle.UnpicklingError():  # torch's have lines of advice around the reason
            found = re.search(r"(Trying to load|Unsupported) .*", str(error))
            return found[0] if found else str(error).partition("\n")[0]
    return " ".join(str(error).split())[:300] or f"a {type(error).__name__} without a word"


def json_object(data: bytes | str) -> dict[str, Any]:
    """A JSON object, read strictly: text in UTF-8, no name twice, no NaN. Raises: ValueError,
    RecursionError."""
    text = data if isinstance(data, str) else data.decode()
    found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refused)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {str(found)[:40]!r}")
    return found


def parsed(parse: Callable[..., Any], *text: Any) -> Any:
    """What ``parse`` (of json or tomllib) makes of a text. Raises: ValueError, also where it is nested too
    deeply."""
    try:
        return parse(*text)
    except RecursionError as error:
        raise ValueError(reason_of(error)) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def is_size(value: object) -> bool:
    """Whether a value of a file is a number of bytes or elements, or an offset."""
    return type(value) is int and 0 <= value < 2**63
