"""``shardwright.ops.bucketer`` under its documented name."""

from shardwright.ops.bucketer import *  # noqa: F403
