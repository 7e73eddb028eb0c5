"""What this host lets no connection be made by, which torch tells in the words of the part that failed."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import CommError

_NO_FILES = re.compile(r"Too many open files|errno: 24\b")
_NO_INTERFACE = re.compile(r"Unable to find address for: (\S+)")


@contextmanager
def host_limits_told() -> Iterator[None]:
    """Around what opens connections. Raises: CommError in place of an error that ``limit_in`` knows."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if told := limit_in(error):
            raise CommError(told) from error
        raise


def limit_in(error: BaseException | None) -> str:
    """Which limit of this host an error, or its cause, comes from, and what to do; "" for any other."""
    if error is None:
        return ""
    if _NO_FILES.search(str(error)):
        return (
            f"this process has as many files and connections open as it may, {_open_files()}: raise the "
            "limit for every rank (ulimit -n 4096), or of its service or container (LimitNOFILE, --ulimit "
            "nofile)"
        )
    if found := _NO_INTERFACE.search(str(error)):
        names = ", ".join(name for _, name in socket.if_nameindex())
        return (
            f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')}: {socket.gethostname()} has no "
            f"interface {found[1]} with an address, expected one of {names}: set it to that, or unset it"
        )
    return limit_in(error.__cause__)


def _open_files() -> str:
    try:
        import resource  # noqa: PLC0415 Windows has none
    except ImportError:
        return "its limit"
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
