"""A folder of Hugging Face as a sharded model: no rank ever holds, or reads, the whole of it.

config.json -> model on the meta device -> groups from its hints -> shards -> each rank's slices of the files
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.api import fully_shard
from shardwright.checkpoint.agree import ranks
from shardwright.checkpoint.load import fill, install
from shardwright.checkpoint.shardfile import Reader
from shardwright.checkpoint.sources import open_source
from shardwright.checkpoint.target import LoadTargets, allocated, matched
from shardwright.checkpoint.url import Location
from shardwright.engine.building.grouping import hints_of, suggested
from shardwright.engine.unit import unit_of
from shardwright.errors import InputError
from shardwright.hf import library
from shardwright.hf.weights import under_model_names
from shardwright.lora import Lora, adapter_names, add_lora, reset_adapters
from shardwright.optim import balanced
from shardwright.params.ragged import Layout
from shardwright.policy import DEFAULT_OFFLOAD, DEFAULT_PRECISION, MixedPrecisionPolicy, OffloadPolicy
from shardwright.quantize import quantisable, quantize_
from shardwright.transport.cpu.pages import give_back_freed_pages


@dataclass(frozen=True)
class WeightsRead:
    """What one rank read.

    Attributes:
        nbytes: bytes of the files that this rank read.
        num_tensors: how many tensors were filled.
        cast: names of tensors whose dtype was converted.
    """

    nbytes: int
    num_tensors: int
    cast: tuple[str, ...]


def load(
    folder: str | Path,
    *,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
    offload_policy: OffloadPolicy = DEFAULT_OFFLOAD,
    quantise: str | None = None,
    dequantise: str = "group",
    lora: Lora | None = None,
) -> Any:
    """The model of a local folder of Hugging Face, sharded. Every rank of the job must call it.

    It is built on the meta device from ``config.json``, sharded by ``shard`` and filled by ``read_weights``;
    buffers that files don't have are computed anew. It is in evaluation mode, as from ``from_pretrained``.
    Host memory: this rank's shards and a buffer of 2 MiB (seen: 167 MiB for shards of 154, two ranks); with
    ``quantise`` one matrix's shard besides.

    Args:
        folder: as ``save_pretrained`` writes it, or ``hf download`` fetches it; nothing is downloaded here.
        mesh: as for ``fully_shard``; None: all ranks.
        dtype: of the parameters at rest; None: what the configuration says.
        mp_policy: as for ``fully_shard``.
        offload_policy: what is on the host at rest, as for ``fully_shard``.
        quantise: codec of its matrices, as for ``quantize_``: each is encoded as soon as it is read. The head
            and what isn't a matrix stay as they are; what is encoded is frozen.
        dequantise: when it is decoded, as for ``quantize_``.
        lora: adapters; the base is then frozen. Their A is drawn from the layer's name, B is zeros; with
            ``dora`` their lengths are the weights'.

    Returns:
        The sharded model.

    Raises:
        InputError: the folder has no model, or targets or ``quantise`` match nothing.
        CheckpointError: weights are missing, damaged or of another shape; raised on every rank.
    """
    path = Path(folder)
    if not (path / library.CONFIG).is_file():
        raise InputError(
            f"{folder}: no folder with a {library.CONFIG}; nothing is downloaded here: fetch the model first "
            "(hf download NAME --local-dir FOLDER) and give that folder"
        )
    model: Any = library.build(path, dtype)
    if lora is not None:
        add_lora(model, lora)
    shard(model, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
    read_weights(model, path, quantise=quantise, dequantise=dequantise)
    return model.eval()


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
    offload_policy: OffloadPolicy = DEFAULT_OFFLOAD,
    layout: Layout = None,
) -> nn.Module:
    """Shard a model of transformers in groups from its own hints, in place. Every rank of the mesh calls it.

    There is a group for each block (``_no_split_modules`` or, where these mean no module, the members of its
    lists) and for each module that ``_fsdp_plan`` would free, one for the embedding, one for the last norm
    and the head, and one for the rest. The memory of the plain parameters is freed.

    Args:
        model: a model of transformers, on the meta device or any.
        mesh: as for ``fully_shard``; None: all ranks.
        mp_policy: as for ``fully_shard``.
        offload_policy: as for ``fully_shard``.
        layout: as for ``fully_shard``; owners are chosen for the whole model at once.

    Returns:
        The argument ``model``.

    Raises:
        InputError: it is sharded already, or the mesh has the wrong shape or lacks this rank.
    """
    groups = suggested(model)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mp_policy, "offload_policy": offload_policy}
    options["layout"] = balanced(model) if layout == "owner" else layout
    for names in (*([name] for name in groups.apart), groups.last):
        modules = [model.get_submodule(name) for name in names]
        if any(True for module in modules for _ in module.parameters()):  # a pipeline's stage lacks some
            fully_shard(modules, **options)
    return fully_shard(model, **options)


def read_weights(
    model: nn.Module, folder: str | Path, *, quantise: str | None = None, dequantise: str = "group"
) -> WeightsRead:
    """Fill a sharded model from the safetensors files of a folder. Every rank of the job must call it.

    Each rank reads the byte ranges of its own slices, once. Names and layouts of files that the model's class
    converts (experts stored one by one) are followed where they are stacked or concatenated. Parameters on
    the meta device are allocated, and so are buffers that no file has; these are computed from the
    configuration. Adapters (``add_lora``) are in no file, and are initialised.

    Args:
        model: a model that ``shard`` was called on.
        folder: with safetensors files, as for ``load``.
        quantise: as for ``load``.
        dequantise: as for ``load``.

    Returns:
        What this rank read.

    Raises:
        CheckpointError: something is missing, unexpected, misshapen or unreadable; all of it is listed, on
            every rank. Nothing was written then, unless a file can't be read to its end.
        InputError: the model isn't sharded, or ``quantise`` is no codec.
    """
    path, group = Path(folder), ranks()
    what = f"reading {path}"
    group.arrive(what)
    prepared: list[tuple[Location, LoadTargets]] = []

    def prepare() -> None:
        source = open_source(path)
        names = [key.removeprefix("model/") for key in source.manifest.tensors]
        manifest = under_model_names(source.manifest, library.places(model, names))
        library.rebuild_buffers(model, unit_of(model).runtime.groups[0].axis.device)
        prepared.append(
            (source.folder, matched(manifest, model, None, None, group.rank, adapter_names(model)))
        )

    group.together(what, prepare)
    source_folder, todo = prepared[0]
    chosen = encoded_names(model) if quantise else frozenset()
    with Reader(source_folder) as reader:
        how = {} if quantise is None else {"codec": quantise, "dequantise": dequantise}
        group.together(what, lambda: _fill_and_encode(todo, reader, chosen, how))
        nbytes = reader.nbytes
    give_back_freed_pages()
    reset_adapters(model)
    for param in model.parameters():
        param._is_hf_initialized = True  # type: ignore[attr-defined]
    return WeightsRead(nbytes, len(todo.targets), tuple(t.key for t in todo.targets.values() if t.casts))


def encoded_names(model: nn.Module) -> frozenset[str]:
    """Names of the weights that ``quantise`` encodes: all matrices except the head's. Local."""
    return frozenset(quantisable(model)) - {f"{hints_of(model).head}.weight"}


def _fill_and_encode(todo: LoadTargets, reader: Reader, chosen: frozenset[str], how: dict[str, str]) -> None:
    """Fill and install: what isn't to be encoded at once, then one tensor after another."""
    named = {target.key.removeprefix("model/"): target for target in todo.targets.values()}
    others = [target for name, target in named.items() if name not in chosen]
    for targets in (others, *([target] for name, target in named.items() if name in chosen)):
        filled = allocated(targets)
        fill(reader, filled.values())
        install(todo, filled, {})
        names = {target.key.removeprefix("model/") for target in targets} & chosen
        if names:
            quantize_(todo.model, where=lambda name, _: name in names, **how)  # noqa: B023 (called at once)
