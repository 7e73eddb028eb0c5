"""Weights are moved outside of ``torch.func``'s transforms, and of the inference mode, that a model runs in.

Inside of one, every tensor that the transformed function did not make is a constant that may not be written
to. The buffers of unsharded weights are such: they are filled beneath all transforms, and what runs inside
reads them as it reads any captured tensor. What an inference mode makes may not be trained with after it.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from shardwright.torch_private import beneath_all_transforms, peek_transforms

_INSIDE_NONE = nullcontext()


def beneath_transforms() -> AbstractContextManager[None]:
    """A context in which no transform of ``torch.func`` and no inference mode is entered. 0.1 us where none
    was."""
    if torch.is_inference_mode_enabled():
        return _beneath(torch.inference_mode(False), torch.no_grad())
    return _INSIDE_NONE if peek_transforms() is None else _beneath()


@contextmanager
def _beneath(*modes: AbstractContextManager[None]) -> Generator[None]:
    with ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        with beneath_all_transforms():
            yield
