"""Checkpoints that can't be silently wrong: sharded, published atomically, verified on read and after the
load."""

from shardwright.checkpoint.load import Restored, latest, load
from shardwright.checkpoint.save import async_save, save
from shardwright.checkpoint.stop import StopRequest
from shardwright.checkpoint.writer import Keep

__all__ = ["Keep", "Restored", "StopRequest", "async_save", "latest", "load", "save"]
