"""What a file is that isn't text: told from its bytes, whatever its name."""

import io
import json
import pickletools
from dataclasses import dataclass

_EXPORT = (
    "write it as text, or its records as .jsonl "
    '(pandas: frame.to_json("data.jsonl", orient="records", lines=True))'
)
_UNPACK = "unpack it first"
_FORMATS = (
    (b"\x1f\x8b", "gzip", _UNPACK),
    (b"PK\x03\x04", "zip", _UNPACK),
    (b"PK\x05\x06", "zip", _UNPACK),
    (b"BZh91AY&SY", "bzip2", _UNPACK),
    (b"\xfd7zXZ\0", "xz", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "Zstandard", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "7z", _UNPACK),
    (b"\xff\xff\xff\xff", "an Arrow stream", _EXPORT),
    (b"\x93NUMPY", "a NumPy array", _EXPORT),
    (b"\x89HDF\r\n", "HDF5", _EXPORT),
    (b"%PDF-", "PDF", "write it as text"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the data", "fetch the data with: git lfs pull"),
)
_FORMATS_WITH_NUL = (
    (b"PAR1", "Parquet", _EXPORT),
    (b"PARE", "Parquet, encrypted", _EXPORT),
    (b"ARROW1", "Arrow", _EXPORT),
    (b"FEA1", "Feather", _EXPORT),
    (b"ORC", "ORC", _EXPORT),
    (b"Obj\x01", "Avro", _EXPORT),
    (b"SQLite format 3\0", "an SQLite database", _EXPORT),
    (b"\xff\xfe", "UTF-16", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16", "save it as UTF-8"),
)
"""What they begin with could begin a text, too, and each holds a NUL."""


@dataclass(frozen=True)
class Kind:
    """``name`` of a format, and what to do with it; ``holds_data``: someone's data, not a picture or so."""

    name: str
    remedy: str
    holds_data: bool = True


def kind_of(content: bytes) -> Kind | None:
    """What ``content`` is; None: text, as far as one can tell."""
    formats = _FORMATS + (_FORMATS_WITH_NUL if b"\0" in content else ())
    for begin, name, remedy in formats:
        if content.startswith(begin):
            return Kind(name, remedy)
    if content.endswith(b".") and _is_pickle(content):
        return Kind("a pickle", _EXPORT)
    if content.lstrip()[:1] == b"[" and content.rstrip()[-1:] == b"]" and _is_json(content):
        return Kind("a JSON array", "write one record per line, as .jsonl (jq -c '.[]')")
    if b"\0" in content:
        return Kind(f"binary (a NUL at byte {content.index(0):,})", "write it as text", holds_data=False)
    return None


class _Nowhere:
    def write(self, text: str) -> None:
        """What pickletools prints is not looked at."""


def _is_pickle(content: bytes) -> bool:
    """Whether it is one or more of them from its first byte to its last; nothing of it is executed."""
    if content[:1] == b"\x80" and content[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return True
    stream = io.BytesIO(content)  # protocols 0 and 1 have no mark of their own, the former is ASCII
    try:
        while stream.tell() < len(content):
            pickletools.dis(stream, out=_Nowhere())  # type: ignore[arg-type]
    except Exception:  # at the first byte that no pickle has there, and by many classes
        return False
    return len(content) > 4  # "N." is None, and an initial


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True
