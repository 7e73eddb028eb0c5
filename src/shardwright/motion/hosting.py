"""Which groups have one copy of their unsharded parameters per host, and not one per rank."""

import logging
from collections.abc import Sequence
from weakref import WeakSet

from shardwright.comm.shm import ShmComm
from shardwright.policy import SchedulePolicy
from shardwright.state.group import ParamGroup

logger = logging.getLogger(__name__)


def choose_hosted(groups: Sequence[ParamGroup], policy: SchedulePolicy) -> list[int]:
    """Have the ranks of a host share unsharded parameters, where the policy says so, and nowhere else.

    Every rank decides alike, from what the groups are. Says once why a group can't. Returns the groups, by
    their places, for which it is another than before.
    """
    before = [group.is_hosted for group in groups]
    for group in groups:
        group.is_hosted = False
        if not policy.one_copy_per_host or group.axis.world == 1:
            continue
        why = _why_not(group, policy)
        group.is_hosted = not why
        if why and group not in _said:
            _said.add(group)
            logger.info("group %s has an unsharded copy on each rank: %s (said once)", group.name, why)
    return [place for place, group in enumerate(groups) if group.is_hosted != before[place]]


_said: WeakSet[ParamGroup] = WeakSet()


def _why_not(group: ParamGroup, policy: SchedulePolicy) -> str:
    """Why the ranks of ``group`` can't read one copy."""
    if not isinstance(group.axis.comm, ShmComm):
        return "its ranks don't share memory"
    if group.comm is not group.axis.comm:
        return "its collectives were replaced"
    if group.near is not None:
        return "it is resharded to a smaller world"
    if group.rows is not None:
        return "it moves rows in use only"
    if group.decoding.frozen or group.decoding.extended:
        return "weights in it are made on arrival, from what is gathered"
    nbytes = sum(param.layout.numel * param.local.element_size() for param in group.params)
    if nbytes <= policy.bucket_cap_nbytes:
        return f"it is small, and shares collectives instead (bucket_cap_mb={policy.bucket_cap_mb:g})"
    return ""
