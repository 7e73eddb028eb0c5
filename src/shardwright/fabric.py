"""``shardwright.clients.fabric`` under its documented name."""

from shardwright.clients.fabric import *  # noqa: F403
