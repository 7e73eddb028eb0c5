"""``shardwright.clients.lightning`` under its documented name."""

from shardwright.clients.lightning import *  # noqa: F403
