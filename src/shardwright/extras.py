"""Packages that come with an extra of ours, and the one line that is said where one is missing."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import MissingExtra


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Around the imports of packages that the extra of this name brings, at the top of a file.

    Raises: MissingExtra for a package that isn't installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingExtra):
            raise
        raise _missing((error.name or str(error)).partition(".")[0], extra) from error


def require(extra: str, *packages: str) -> None:
    """Raise MissingExtra unless ``packages``, which the extra brings, are installed. Imports none of them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise _missing(package, extra)


def _missing(package: str, extra: str) -> MissingExtra:
    text = f"this needs {package}, which is not installed: pip install 'shardwright[{extra}]'"
    return MissingExtra(text, name=package)
