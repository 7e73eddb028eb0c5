"""``shardwright.quantized.interchange`` under its documented name."""

from shardwright.quantized.interchange import *  # noqa: F403
