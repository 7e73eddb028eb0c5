"""The one switch for all that the package does to the process it runs in; docs/process.md lists it."""

import os

from shardwright.errors import InputError

VARIABLE = "SHARDWRIGHT_PROCESS"
"""``off`` leaves the process alone, in programs that don't call ``set_process``; ``on`` and "" do not."""

_chosen: bool | None = None


def set_process(on: bool) -> None:
    """Choose whether the package may change anything of this process beside its models; alike on all ranks.

    False: no watch thread, no handlers of signals, no ``excepthook``, nothing at exit, malloc as it is; no
    rank is then ended, and a rank that never comes is found by the time limit of the process groups. Called
    before the first ``fully_shard``. Local; without a call the variable ``SHARDWRIGHT_PROCESS`` decides.
    Raises: InputError for anything but a bool.
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
