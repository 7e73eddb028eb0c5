"""What a run of fine-tuning has left, read back by one process: the whole model, or a base with its adapter.

    tensor of the base's files -> dtype of the run -> encoded and decoded, where the run did so -> adapter
    added

One tensor at a time, so that a model can be merged which no memory holds twice.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.folder import complete_steps, step_folder, step_folders
from shardwright.checkpoint.format import TensorEntry
from shardwright.checkpoint.shardfile import Reader
from shardwright.checkpoint.sources import open_source
from shardwright.checkpoint.tools import read_tensor
from shardwright.errors import CheckpointError, InputError
from shardwright.finetune.engine import meta_model
from shardwright.finetune.job import fingerprint
from shardwright.hf import library
from shardwright.hf.load import encoded_names
from shardwright.hf.weights import under_model_names
from shardwright.lora import (
    ADAPTER_CONFIG,
    adapter_parts,
    base_of_adapter,
    is_transposed,
    merged_weight,
    read_lora,
)
from shardwright.quantized.codecs import codec_of
from shardwright.recipe.config import Recipe
from shardwright.recipe.resolve import resolve
from shardwright.train.folder import RunFolder

_DEFAULTS = Recipe()


@dataclass(frozen=True)
class Tuned:
    """What is left of a run in one folder.

    folder: of a model, or of an adapter in peft's form. base: the folder of the model that the adapter is
    for; of a whole model the same folder. quantise: how the base was encoded in training. recipe: of the
    run, or the defaults where an adapter comes from elsewhere. trusted: the function ``module:function`` that
    may make the model, if the recipe names it; the folder may be a stranger's.
    """

    folder: Path
    base: Path
    is_adapter: bool
    quantise: str = "none"
    recipe: Recipe = _DEFAULTS
    trusted: str = ""


def find_tuned(path: Path, base: Path | None = None, trusted: str = "") -> Tuned:
    """What ``path`` holds: a run's folder (then the last that it exported), one of its exported folders, or
    an adapter of peft's own. base: where its base is now, if it isn't where it was. trusted: see ``Tuned``.

    Raises: InputError where there is nothing exported, no base, or another one than the run has trained on.
    """
    if (path / "exported").is_dir():
        exported = dict(step_folders(path / "exported"))
        if exported:
            return find_tuned(exported.get(_exported_step(path), exported[max(exported)]), base, trusted)
    is_adapter = (path / ADAPTER_CONFIG).is_file()
    if not is_adapter and not (path / library.CONFIG).is_file():
        raise InputError(
            f"{path} holds no fine-tuned model (no exported/step-N/, {ADAPTER_CONFIG} or {library.CONFIG}): "
            f"give the folder of a run that has exported one{RunFolder(path).before()}, which it does after "
            "each epoch and at its end"
        )
    run = RunFolder(path.parent.parent)
    recipe = (
        resolve(run.config).recipe if path.parent.name == "exported" and run.config.is_file() else _DEFAULTS
    )
    if not is_adapter:
        return Tuned(path, path, False, recipe=recipe, trusted=trusted)
    given = recipe.base.folder or base_of_adapter(path)
    base = base or Path(given or "")
    if not given or not (base / library.CONFIG).is_file():
        raise InputError(
            f"{path}: its base is {given or 'not named'}, and {base} has no {library.CONFIG}: give the "
            "folder of the base with --base"
        )
    if recipe.base.folder:
        _check_base(run, base)
    return Tuned(path, base, True, recipe.base.quantise, recipe, trusted)


def _exported_step(run: Path) -> int:
    """The step of the model that a finished run has left, which with ``heldout.keep_best`` may not be the
    newest; or 0."""
    try:
        return json.loads(RunFolder(run).summary.read_text())["exported_step"]
    except (OSError, ValueError, KeyError):
        return 0


def _check_base(run: RunFolder, base: Path) -> None:
    """Check that ``base`` has the files that were trained on, as the run's newest checkpoint says."""
    steps = complete_steps(run.checkpoint)
    if not steps:
        return
    state = open_source(step_folder(run.checkpoint, max(steps))).manifest.state
    was = state["extra"]["identity"]["the base (its files)"]
    if was != fingerprint(base):
        raise InputError(
            f"{base} is not the base that {run.root} was trained on (its files have changed): give that "
            "one with --base"
        )


def check_trusted(tuned: Tuned) -> None:
    """Raises: InputError where the run's recipe names a function to make its model, and that isn't the
    trusted one; or where it names none, and one is trusted."""
    names, trusted = tuned.recipe.base.build, tuned.trusted
    if names and names != trusted:
        got = f"--build names {trusted!r}" if trusted else "no --build was given"
        raise InputError(
            f"{tuned.folder}: its run makes the model by the function {names!r} (base.build), which is "
            f"called with the base's folder, and {got}: if you trust that code, add --build {names}"
        )
    if trusted and not names:
        raise InputError(
            f"{tuned.folder}: its run names no function to make its model, got {trusted!r}: leave --build out"
        )


def build(tuned: Tuned) -> Any:
    """The model on the meta device, in the dtype in which its base was read. Raises: as ``check_trusted``."""
    check_trusted(tuned)
    return meta_model(tuned.recipe.base.model_copy(update={"folder": str(tuned.base)}))


@contextmanager
def reading(tuned: Tuned, model: nn.Module) -> Iterator[Callable[[str], torch.Tensor]]:
    """What reads a tensor of ``model`` (of ``build``) by its name, with its adapter added: on the CPU, in the
    dtype that the model has there. Float32 until it is rounded once.

    A base that was encoded in training is encoded and decoded again, since that is what the adapters were
    trained beside. Raises: CheckpointError, before anything is read, for tensors that are missing or
    misshapen; InputError for an adapter of a tied weight.
    """
    source = open_source(tuned.base)
    names = [key.removeprefix("model/") for key in source.manifest.tensors]
    manifest = under_model_names(source.manifest, library.places(model, names))
    entries = {key.removeprefix("model/"): entry for key, entry in manifest.tensors.items()}
    adapters = adapter_parts(tuned.folder, model) if tuned.is_adapter else {}
    lora = read_lora(tuned.folder) if tuned.is_adapter else None
    _check(tuned, model, entries, adapters, lora)
    encoded = encoded_names(model) if tuned.quantise != "none" else frozenset()
    state = model.state_dict(keep_vars=True)
    with Reader(source.folder) as reader:

        def read(name: str) -> torch.Tensor:
            whole = read_tensor(reader, f"model/{name}", entries[name]).to(state[name].dtype)
            if name in encoded:
                codec = codec_of(tuned.quantise)
                whole = codec.decode(*codec.encode(whole), tuple(whole.shape), whole.dtype)
            parts = adapters.get(name)
            if parts is None or lora is None:
                return whole
            return merged_weight(whole, lora, parts, is_transposed(model, name)).to(whole.dtype)

        yield read


def _check(
    tuned: Tuned,
    model: nn.Module,
    entries: dict[str, TensorEntry],
    adapters: dict[str, dict[str, torch.Tensor]],
    lora: Any,
) -> None:
    params = dict(model.named_parameters(remove_duplicate=False))
    for name in adapters:
        others = [n for n, p in params.items() if p is params.get(name) and n != name]
        if others:
            raise InputError(
                f"{name.removesuffix('.weight')} has an adapter, and its weight is {others[0]} too, which "
                "would change with it: leave it out of the adapter's targets, or untie them in the base "
                "(tie_word_embeddings)"
            )
    tied = library.tied_names(model)
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}
    wrong = [
        f"{name}: {list(entries[name].shape) if name in entries else 'missing'}, expected "
        f"{list(tensor.shape)}"
        for name, tensor in state.items()
        if name not in entries or entries[name].shape != tuple(tensor.shape)
    ]
    for name, parts in adapters.items():
        weight, (a, b) = state.get(name), (parts[f"lora_{x}.weight"] for x in "AB")
        shape = (b.shape[0], a.shape[1])[:: -1 if weight is not None and is_transposed(model, name) else 1]
        if weight is not None and weight.ndim == 3:
            shape = (len(a) // lora.rank, *shape)
        if weight is None or tuple(weight.shape) != shape:
            has = "no such layer" if weight is None else f"its weight is {list(weight.shape)}"
            layer = name.removesuffix(".weight")
            wrong.append(f"the adapter of {layer} is for a weight of {list(shape)}: {has}")
    if wrong:
        listed = "\n  ".join(wrong[:10])
        raise CheckpointError(
            f"{tuned.folder} and {tuned.base} don't fit in {len(wrong)} tensor(s):\n  {listed}"
        )


@torch.no_grad()
def load_whole(tuned: Tuned, device: torch.device) -> Any:
    """The model of transformers with its adapter merged, whole, on ``device``, for evaluation; what ``merge``
    would write. Raises: as ``reading``."""
    model = build(tuned)
    tied = library.tied_names(model)
    with reading(tuned, model) as read:
        for name in [name for name in model.state_dict() if name not in tied]:
            model.load_state_dict({name: read(name).to(device)}, strict=False, assign=True)
    model.tie_weights()
    library.rebuild_buffers(model, device)
    return model.eval()
