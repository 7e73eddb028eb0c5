"""Small state as JSON, tensors apart: what a pickle would hold, without code that runs when it is read.

    {"lr": 0.1, "betas": (0.9, 0.95), "ema": tensor}
      -> {"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}, "ema": {"$tensor": "extra/ema"}}
         and {"extra/ema": tensor}

Plain JSON stays as it is; the few Python values that JSON lacks become an object with one ``$`` key.
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shardwright.checkpoint.flat import Saved
from shardwright.errors import CheckpointError

Tensors = dict[str, Saved]


def encode(value: Any, path: str, tensors: Tensors) -> Any:
    """``value`` as JSON; every tensor or array in it is put into ``tensors`` under ``path`` and its place
    in the tree.

    Raises:
        CheckpointError: a value of another type, naming its path.
    """
    if isinstance(value, Saved):
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(np.array(value))
        return {"$ndarray": path}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        items = [(k, encode(v, f"{path}/{k}", tensors)) for k, v in value.items()]
        if all(isinstance(k, str) and not k.startswith("$") for k, _ in items):
            return dict(items)
        return {"$dict": [[encode(k, f"{path}/<key>", tensors), v] for k, v in items]}
    if isinstance(value, list | tuple):
        encoded = [encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        return encoded if isinstance(value, list) else {"$tuple": encoded}
    raise CheckpointError(
        f"{path}: a {type(value).__qualname__} can't be saved (nothing is pickled); "
        "give numbers, strings, lists, tuples, dicts, tensors, or an object with state_dict()"
    )


def decode(value: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of ``encode``; ``tensor_of`` gives the tensor for a key. Unknown ``$`` keys raise
    CheckpointError."""
    if isinstance(value, list):
        return [decode(v, tensor_of) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {k: decode(v, tensor_of) for k, v in value.items()}
    body = value[tag]
    match tag:
        case "$tensor":
            return tensor_of(body)
        case "$ndarray":
            return tensor_of(body).numpy()
        case "$float":
            return float(body)
        case "$bytes":
            return base64.b64decode(body)
        case "$tuple":
            return tuple(decode(v, tensor_of) for v in body)
        case "$dict":
            return {decode(k, tensor_of): decode(v, tensor_of) for k, v in body}
    raise CheckpointError(
        f"small state has a value tagged {tag!r}, which this release does not know; upgrade shardwright"
    )


def keys_in(value: Any) -> list[str]:
    """The keys of all tensors that an encoded tree refers to."""
    if isinstance(value, list):
        return [key for v in value for key in keys_in(v)]
    if not isinstance(value, dict):
        return []
    tag = next(iter(value), "")
    if tag in ("$tensor", "$ndarray"):
        return [value[tag]]
    return [key for v in value.values() for key in keys_in(v)]


def leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """What an encoded tree holds beside its tensors, as text under its path: each value, the length of each
    list, and what is empty."""
    tag, body = next(iter(value.items()), ("", value)) if isinstance(value, dict) else ("", value)
    items: Any = []
    if tag in ("$tensor", "$ndarray"):
        return
    if isinstance(value, list) or tag == "$tuple":
        yield path, f"a {'tuple' if tag else 'list'} of {len(body)}"
        items = enumerate(body)
    elif tag == "$dict":
        items = ((key if isinstance(key, str) else _text(key), each) for key, each in body)
    elif tag and not tag.startswith("$"):
        items = value.items()
    else:
        yield path, _text(value)
    for key, each in items:
        yield from leaves(each, f"{path}/{key}")


def _text(value: Any) -> str:
    """A value that is no container, as in Python."""
    return repr(decode(value, torch.tensor))
