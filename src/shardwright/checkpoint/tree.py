"""Small state as JSON, tensors apart: what a pickle would hold, without code that runs when it is read.

    {"lr": 0.1, "betas": (0.9, 0.95), "ema": tensor}
      -> {"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}, "ema": {"$tensor": "extra/ema"}}
         and {"extra/ema": tensor}

A tensor of a subclass has an object of what it is made of: {"$subclass": path, "kind": ..., "of": {...}}.
Plain JSON stays as it is; the few Python values that JSON lacks become an object with one ``$`` key.
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shardwright.checkpoint.apart import Apart, taken_apart
from shardwright.checkpoint.flat import Saved
from shardwright.checkpoint.format import Manifest
from shardwright.errors import CheckpointError
from shardwright.files import reading, reason_of

Tensors = dict[str, Saved]
_MAX_DEPTH = 100  # far below where Python's own limit would end a save or a load
_MAX_BITS = 10_000  # of an integer; Python writes none of more than 4,300 digits


def encode(
    value: Any, path: str, tensors: Tensors, apart: dict[str, Apart] | None = None, depth: int = 0
) -> Any:
    """``value`` as JSON; every tensor or array in it is put into ``tensors`` under ``path`` and its place
    in the tree.

    apart: gets the tensors of subclasses by their paths, and ``tensors`` what they are made of.
    depth: of what it is part of.
    Raises:
        CheckpointError: a value of another type, one that contains itself, or two tensors whose places read
            the same (keys ``1`` and ``"1"``, or ``"a/b"`` and ``"b"`` in ``"a"``); names its path. A tensor
            of a subclass without ``apart``.
    """
    if isinstance(value, Saved):
        found = taken_apart(path, value) if isinstance(value, torch.Tensor) else None
        if found is None:
            return {"$tensor": put(value, path, tensors)}
        if apart is None:
            raise CheckpointError(
                f"{path}: a {found.kind.partition(' ')[0]} can't be made again by a load; give its tensors "
                f"({', '.join(found.inner)}), or pass its optimizer as optimizer="
            )
        apart[path] = found
        inner = {key: {"$tensor": put(part, f"{path}.{key}", tensors)} for key, part in found.inner.items()}
        return {"$subclass": path, "kind": found.kind, "of": inner}
    if isinstance(value, np.ndarray):
        try:
            tensor = torch.from_numpy(np.array(value))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: an array of {value.dtype} can't be saved ({error})") from error
        return {"$ndarray": put(tensor, path, tensors)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise CheckpointError(
            f"{path}: an integer of {value.bit_length()} bits can't be saved; give its text"
        )
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if not isinstance(value, Mapping | list | tuple):
        raise CheckpointError(
            f"{path}: a {type(value).__qualname__} can't be saved (nothing is pickled); "
            "give numbers, strings, lists, tuples, dicts, tensors, or an object with state_dict()"
        )
    if depth == _MAX_DEPTH:
        raise CheckpointError(f"{path[:80]}...: contains itself, or is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, Mapping):
        items = [(k, encode(v, f"{path}/{k}", tensors, apart, depth + 1)) for k, v in value.items()]
        if all(isinstance(k, str) and not k.startswith("$") for k, _ in items):
            return dict(items)
        return {"$dict": [[encode(k, f"{path}/<key>", tensors, None, depth + 1), v] for k, v in items]}
    encoded = [encode(v, f"{path}/{i}", tensors, apart, depth + 1) for i, v in enumerate(value)]
    return encoded if isinstance(value, list) else {"$tuple": encoded}


def put(tensor: Saved, key: str, tensors: Tensors) -> str:
    """Put a tensor under its key. Raises: CheckpointError if another has it, or it is no text."""
    if key in tensors:
        raise CheckpointError(
            f"{key}: two tensors would have this name: a key has a '/' in it, or 1 stands beside '1'; rename "
            "one of the keys"
        )
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{key!a}: no file can have this name ({reason_of(error)})") from error
    tensors[key] = tensor
    return key


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
    has_one = len(value) == 1 or tag == "$subclass"
    if not has_one or (tag in ("$tuple", "$dict") and not isinstance(value[tag], list)):
        raise CheckpointError(f"small state has {str(value)[:80]}, expected one value tagged {tag!r}")
    body = value[tag]
    match tag:
        case "$tensor" | "$subclass":
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


def _tagged(value: Any) -> Iterator[dict[str, Any]]:
    """What an encoded tree has in the place of tensors."""
    tag = next(iter(value), "") if isinstance(value, dict) else ""
    if tag in ("$tensor", "$ndarray", "$subclass"):
        yield value
    elif isinstance(value, list | dict):
        for each in value if isinstance(value, list) else value.values():
            yield from _tagged(each)


def keys_in(value: Any) -> list[str]:
    """The keys of all tensors that an encoded tree refers to."""
    found = []
    for each in _tagged(value):
        found += keys_in(each["of"]) if "$subclass" in each else each.values()
    return found


def kinds_in(value: Any) -> dict[str, Any]:
    """The encoded tensors of subclasses that an encoded tree refers to, by path."""
    return {each["$subclass"]: each for each in _tagged(value) if "$subclass" in each}


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
    elif tag == "$subclass":
        yield path, f"a {value['kind']}"
    elif tag and not tag.startswith("$"):
        items = value.items()
    else:
        yield path, _text(value)
    for key, each in items:
        yield from leaves(each, f"{path}/{key}")


def _text(value: Any) -> str:
    """A value that is no container, as in Python."""
    return repr(decode(value, torch.tensor))


def check_trees(manifest: Manifest, where: str) -> None:
    """Raise CheckpointError unless the small state of a manifest has the form that ``save`` gives it."""
    placeholders = dict.fromkeys(manifest.tensors, torch.empty(0))
    state, optimizer = manifest.state, manifest.state.get("optimizer")
    with reading(where, "the small state of a checkpoint"):
        for kind, expected in {"model": dict, "optimizer": dict, "extra": dict, "rng": list}.items():
            if type(state.get(kind, expected())) is not expected:
                raise ValueError(f"{kind} is {str(state[kind])[:40]!r}, expected a {expected.__name__}")
        trees = [*state.get("model", {}).values(), state.get("extra", {}), *state.get("rng", [])]
        if optimizer is not None:
            names = [name for group in optimizer["groups"] for name in group["params"]]
            if not all(type(name) is str for name in (optimizer["kind"], *names)):
                raise ValueError("a name in the optimizer's state is no text")
            trees += [{k: v for k, v in group.items() if k != "params"} for group in optimizer["groups"]]
            trees += optimizer["state"].values()
        for tree in trees:
            subclasses = kinds_in(tree)
            decode([kind["of"] for kind in subclasses.values()], placeholders.__getitem__)
            decode(tree, (placeholders | dict.fromkeys(subclasses, torch.empty(0))).__getitem__)
