"""Where the caller's own code stands, for messages."""

import sys

_OURS = ("shardwright", "torch", "threading", "contextlib", "functools")


def user_line() -> str:
    """``file:line`` of the innermost frame that is neither Shardwright's nor PyTorch's."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread of autograd's"
