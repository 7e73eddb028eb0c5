"""``shardwright.quantized.nf4`` under its documented name."""

from shardwright.quantized.nf4 import *  # noqa: F403
