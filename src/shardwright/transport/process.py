"""The one switch for all that the package does to the process it runs in; docs/process.md lists it."""

import os

from shardwright.errors import InputError

VARIABLE = "SHARDWRIGHT_PROCESS"
"""``off`` leaves the process alone, in programs that don't call ``set_process``; ``on`` and "" do not."""

_chosen: bool | None = None


def set_process(on: bool) -> None:
    """Choose whether the package may change this process beyond its models; the same on all ranks.

    Call it before the first ``fully_shard``. Local. Without a call the environment variable
    ``SHARDWRIGHT_PROCESS`` decides. docs/process.md lists what is changed.

    Args:
        on: False means no watchdog thread, no signal handlers, no ``excepthook``, nothing at exit, and
            unchanged malloc settings. Then no rank is ended by another one's failure, and a missing rank is
            only detected by the time limit of the process groups.

    Raises:
        InputError: ``on`` isn't a bool.
    """
    global _chosen
    if not isinstance(on, bool):
        raise InputError(f"set_process expects True or False, got {on!r}")
    _chosen = on


def process_is_ours() -> bool:
    """Whether the package may change anything of this process. Raises: InputError for another variable."""
    if _chosen is not None:
        return _chosen
    value = os.environ.get(VARIABLE, "").strip()
    if value not in ("", "on", "off"):
        raise InputError(f'{VARIABLE} must be "on" or "off", got {value!r}')
    return value != "off"
