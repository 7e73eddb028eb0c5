"""Weights into another format, by the name that users import; written in ``checkpoint.tools``."""

from shardwright.checkpoint.tools import Format, convert

__all__ = ["Format", "convert"]
