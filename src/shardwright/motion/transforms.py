"""Weights are moved outside of the transforms of ``torch.func`` that a model runs in.

Inside of one, every tensor that the transformed function did not make is a constant that may not be written
to. The buffers of unsharded weights are such: they are filled beneath all transforms, and what runs inside
reads them as it reads any captured tensor.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_INSIDE_NONE = nullcontext()


def beneath_transforms() -> AbstractContextManager[None]:
    """A context in which no transform of ``torch.func`` is entered. 0.1 us where none was."""
    return _INSIDE_NONE if functorch.peek_interpreter_stack() is None else _beneath()


@contextmanager
def _beneath() -> Generator[None]:
    with temporarily_clear_interpreter_stack():
        yield
