"""The C library of this process, for calls that Python lacks; None where there is no such thing (Windows)."""

import ctypes

try:
    LIBC: ctypes.CDLL | None = ctypes.CDLL(None, use_errno=True)
except TypeError:
    LIBC = None
