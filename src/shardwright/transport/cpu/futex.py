"""Sleeping until a word in shared memory changes, and waking who does: Linux' futexes, which Python lacks.

Only for x86-64, as shared memory is.
"""

import ctypes
import errno
import time
from typing import Any

from shardwright.transport.cpu.libc import LIBC

_SYS_FUTEX = 202
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_EXPECTED = (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR)
_NAP_S = 1e-4  # where the kernel refuses

_syscall: Any = getattr(LIBC, "syscall", None)
if _syscall is not None:
    _syscall.restype = ctypes.c_long
    _syscall.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Return when the 32-bit word at ``address`` isn't ``value``, was woken, or after ``seconds`` (below 1).

    It may return early for no reason. Other threads of this process run meanwhile.
    """
    limit = (ctypes.c_long * 2)(0, int(seconds * 1e9))
    failed = _syscall(_SYS_FUTEX, address, _WAIT, value & 0xFFFFFFFF, ctypes.byref(limit), None, 0)
    if failed and ctypes.get_errno() not in _EXPECTED:
        time.sleep(_NAP_S)


def wake(address: int) -> None:
    """Wake all, of any process, that sleep on the word at ``address``; after it was changed."""
    _syscall(_SYS_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)
