"""CRC-32 at the speed of memory where Intel's ISA-L is installed (``isal``, 27 GB/s on a core whose ``zlib``
does 4), by ``zlib`` where it is not. Both give the same number; neither holds the interpreter's lock."""

import os
import zlib

from shardwright.errors import InputError

try:
    from isal import isal_zlib  # pyright: ignore[reportMissingImports]
except ImportError:  # no wheel for this processor: slower, not other
    isal_zlib = None

crc32 = zlib.crc32 if isal_zlib is None else isal_zlib.crc32

_asked = os.environ.get("SHARDWRIGHT_CHECKSUMS", "off" if isal_zlib is None else "messages")
if _asked not in ("off", "messages", "all"):
    raise InputError(f"SHARDWRIGHT_CHECKSUMS in the environment must be off, messages or all, got {_asked!r}")
SUMS_MEMORY = _asked == "all"
"""Whether shards, optimizer state and unsharded parameters are summed, too (``engine/groups/summed.py``)."""
SUMS_MESSAGES = _asked != "off"
"""Whether messages over sockets carry their CRC-32; by ``zlib`` that takes 6% of a core at 1 Gbit/s."""
