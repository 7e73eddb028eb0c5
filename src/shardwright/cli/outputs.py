"""Where a verb writes: looked at before its work, so that a mistake costs nothing and leaves nothing."""

import os
import stat
import tempfile
from pathlib import Path

from shardwright.errors import ConfigError


def check_file(path: str | Path, *, may_exist: bool = False) -> None:
    """Raise ConfigError unless a file can be written there. ``may_exist``: one that is there is changed."""
    path, found = _found(path, may_exist)
    if found is not None and not stat.S_ISREG(os.stat(path).st_mode):
        raise _refused(path, "it is no regular file")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} can't be written: there is no folder {path.parent}; make it first")
    _try(path, path.parent)
    if found is not None and not os.access(path, os.W_OK):
        raise _refused(path, "it is read-only")


def check_folder(path: str | Path, *, may_exist: bool = False) -> None:
    """Raise ConfigError unless a folder, and those above it, can be made there. ``may_exist``: or used."""
    path, _ = _found(path, may_exist)
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise _refused(path, f"{place} is no folder")
    _try(path, place)


def _found(path: str | Path, may_exist: bool) -> tuple[Path, os.stat_result | None]:
    """The path, and what is there. Raises: ConfigError for what may not."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return Path(path), None
    except (OSError, ValueError) as error:  # a part of it is a file, it is too long, or it holds a NUL
        raise _refused(path, getattr(error, "strerror", None) or str(error)) from None
    if not may_exist:
        raise ConfigError(f"{path} exists already: give another name, or remove it first")
    return Path(path), found


def _try(path: Path, folder: Path) -> None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from None


def _refused(path: str | Path, why: str) -> ConfigError:
    return ConfigError(f"{path} can't be written: {why}; give another path")
