"""What ranks tell each other while they save and load: JSON, of which nothing is run where it is read.

    null, numbers and text as they are; else a list of the kind, and what it is made of
    {"a": (1, 2)}   ["dict", ["tuple", "a", ["tuple", 1, 2]]]

A pickle would let who speaks in a rank's place run code on all others.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from shardwright.checkpoint.format import Box, Piece, TensorEntry
from shardwright.checkpoint.storage import Unpublished
from shardwright.storage import location_of


@dataclass(frozen=True)
class Partial:
    """What a rank's part contributes to the checksum of a piece that several ranks hold."""

    key: str
    piece: Piece
    part: Box
    crc32: int


@dataclass(frozen=True)
class Written:
    """What one rank reports after writing: its file, its pieces by key, and the checksums of copies it did
    not write."""

    file: str
    nbytes: int
    pieces: Mapping[str, list[Piece]]
    copies: Mapping[tuple[str, tuple[int, ...]], int]
    rng: Any
    rng_entries: Mapping[str, TensorEntry]


_DESCRIBED = {kind.__name__: kind for kind in (Box, Piece, TensorEntry, Unpublished, Partial, Written)}
_KINDS: dict[str, Callable[[list[Any]], Any]] = {
    **{kind.__name__: kind for kind in (list, tuple, set, dict)},
    "bytes": lambda parts: base64.b64decode(parts[0]),
    "path": lambda parts: location_of(parts[0]),
}


def plain(value: Any) -> Any:
    """``value`` as JSON. Raises: TypeError for one of another kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name, parts = type(value).__name__, value
    if name in _DESCRIBED:
        parts = vars(value).values()
    elif isinstance(value, Mapping):
        name, parts = "dict", value.items()
    elif isinstance(value, PurePath):
        name, parts = "path", [str(value)]
    elif isinstance(value, bytes):
        parts = [base64.b64encode(value).decode()]
    elif isinstance(value, tuple):  # a torch.Size, too
        name = "tuple"
    elif name not in _KINDS:
        raise TypeError(f"ranks don't tell each other of a {name}")
    return [name, *map(plain, parts)]


def made(value: Any) -> Any:
    """What ``plain`` was given on the rank that told it. Raises: KeyError for a kind that isn't known."""
    if not isinstance(value, list):
        return value
    name, parts = value[0], [made(each) for each in value[1:]]
    return _DESCRIBED[name](*parts) if name in _DESCRIBED else _KINDS[name](parts)
