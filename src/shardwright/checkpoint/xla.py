"""Our checkpoints of XLA models, under the name that users import; written in ``shardwright.xla.saving``."""

from shardwright.xla.saving import load_xla, save_xla

__all__ = ["load_xla", "save_xla"]
