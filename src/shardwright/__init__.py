"""Shardwright: fully sharded data parallelism for PyTorch.

from shardwright import fully_shard

for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())

These names are imported, and torch with them, when the first is asked for: `shardwright --help` needs none.
"""

import importlib.util
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.public import *  # noqa: F403
    from shardwright.public import __all__ as __all__

    __version__: str
else:

    def __getattr__(name):
        """A module of the package, a public name, ``__all__`` or ``__version__``."""
        if name == "__version__":
            return version("shardwright")
        if name == "__all__" or not name.startswith("__"):
            if importlib.util.find_spec(f"{__name__}.{name}"):
                return importlib.import_module(f"{__name__}.{name}")
            public = importlib.import_module("shardwright.public")
            globals().update({each: getattr(public, each) for each in public.__all__}, __all__=public.__all__)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({"__version__", *__getattr__("__all__")})
