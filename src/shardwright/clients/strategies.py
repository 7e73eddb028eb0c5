"""What the strategies of Lightning's Fabric and of its Trainer share."""

import io
import os
import pickle
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.api import fully_shard
from shardwright.checkpoint import save
from shardwright.checkpoint.agree import ranks
from shardwright.checkpoint.folder import complete_steps, step_folder, step_folders
from shardwright.checkpoint.storage import TORN, sync_folder
from shardwright.checkpoint.url import Location
from shardwright.engine.building.grouping import choices
from shardwright.engine.unit import units_in
from shardwright.errors import CheckpointError, InputError, warn
from shardwright.module import FSDPModule
from shardwright.params.param import ShardedParam
from shardwright.policy import DEFAULT_PRECISION, Grouping, MixedPrecisionPolicy
from shardwright.torch_private import tree_map
from shardwright.transport.collect import take_values_of_rank_0

T = TypeVar("T")
StateDictType = Literal["sharded", "full"]


def strategies_of(package: str) -> Any:
    """Its ``strategies``, or None where it isn't installed."""
    try:
        return import_module(f"{package}.strategies")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package.partition(".")[0]:
            raise
        return None


class ShardsModules:
    """How a strategy shards what it is given: before the framework's ``DDPStrategy`` among the bases."""

    def __init__(
        self,
        groups: Any = "auto",
        shard: Callable[[nn.Module], object] | None = None,
        mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
        state_dict_type: StateDictType = "sharded",
        **options: Any,
    ) -> None:
        if state_dict_type not in ("sharded", "full"):
            raise InputError(f"state_dict_type is {state_dict_type!r}, expected 'sharded' or 'full'")
        super().__init__(**options)
        self._is_full = state_dict_type == "full"
        self._groups = groups
        self._shard = shard
        self._mp_policy = mp_policy

    def _shard_whole(self, module: nn.Module) -> None:
        """Shard a module that isn't sharded yet, in place; every rank calls it."""
        if self._shard is not None:
            self._shard(module)
            return
        nested = any(isinstance(part, FSDPModule) for part in module.modules())
        groups = None if nested else _groups_for(self._groups, module)
        fully_shard(module, groups=groups, mp_policy=self._mp_policy)


def _groups_for(groups: Any, module: nn.Module) -> Any:
    """The same, or None, with a warning, where they are "auto" and nothing in the module says how."""
    if groups != "auto" or choices(module, Grouping()):
        return groups
    warn(
        f"nothing in {type(module).__name__} says how to group it, so all of it is gathered at once; "
        "give the strategy groups=, lists of names or a Grouping, or None if that's meant",
    )
    return None


# ---- checkpoints, one at a path: the next one to be saved there replaces it


def on_rank_0(what: str, work: Callable[[], T]) -> T:
    """What ``work`` returns on rank 0, on every rank, which call this. What it raises is raised on all."""
    group = ranks()
    group.arrive(what)
    found: Any = group.together(what, lambda: work() if group.rank == 0 else None)[0]
    return found


def pickled_on_rank_0(what: str, values: Any, device: torch.device) -> torch.Tensor:
    """The bytes of ``torch.save`` of rank 0's ``values``, on every rank, which call this: to be saved, since
    nobody unpickles them. device: of the process group. Raises: as ``pickle_into``, on all ranks."""
    file = io.BytesIO()

    def size() -> int:
        pickle_into(file, values)
        return file.tell()

    data = torch.zeros(on_rank_0(what, size), dtype=torch.uint8)
    if file.tell():
        data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    take_values_of_rank_0([data], device)
    return data


def publish(path: Location, step: int, **state: Any) -> None:
    """``save``, as the one checkpoint in the folder ``path``. It is the newest there from the moment at which
    it is complete, so that there is always one to load; the one before is removed after that."""

    def newest() -> int:
        if isinstance(path, Path) and path.is_file():
            raise CheckpointError(
                f"{path} is a file, and state_dict_type='sharded' saves a folder; nothing was overwritten: "
                "give another name, or state_dict_type='full'"
            )
        found = step_folders(path) if not isinstance(path, Path) or path.exists() else []
        # Two are left where a save was killed. More are a run's own, of ``checkpoint.save``.
        if len(found) > 2:
            raise CheckpointError(
                f"{path} is a folder of {len(found)} checkpoints, which this one would replace; nothing was "
                "overwritten: give another name"
            )
        return found[-1][0] if found else -1

    save(path, step=max(step, on_rank_0(f"saving {path}", newest) + 1), keep=1, **state)


def published_in(path: Location) -> Location:
    """The newest complete checkpoint that was published at ``path``; ``path`` where there is none."""
    steps = complete_steps(path)
    return step_folder(path, steps[0]) if steps else path


def write_file(path: Path, checkpoint: Any) -> None:
    """Save as one file, with whole tensors in the place of shards; every rank calls it. The file that is
    there is replaced when this one is complete."""

    def check() -> None:
        if path.is_dir():
            raise CheckpointError(
                f"{path} is a folder, and state_dict_type='full' saves a file; nothing was overwritten: give "
                "another name, or state_dict_type='sharded'"
            )

    on_rank_0(f"saving {path}", check)
    whole = _whole(checkpoint, ranks().rank == 0)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.with_name(TORN + path.name)
        try:
            with open(torn, "wb") as file:  # torch takes no name that begins with a dot
                pickle_into(file, whole)
            sync_folder(torn)
            os.replace(torn, path)
        finally:
            torn.unlink(missing_ok=True)
        sync_folder(path.parent)

    on_rank_0(f"writing {path}", write)


def pickle_into(file: Any, values: Any) -> None:
    """``torch.save``. Raises: CheckpointError for a value that can't be pickled."""
    try:
        torch.save(values, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"a value can't be pickled ({error}): leave it out, or give it state_dict() and load_state_dict()"
        ) from error


def _whole(checkpoint: Any, keeps: bool) -> Any:
    """``checkpoint`` with whole tensors on the host; without any, where they aren't kept. Tied ones stay
    so."""
    seen: dict[int, Any] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in seen:
            found = value.detach()
            if isinstance(found, DTensor):
                found = found.full_tensor()
            seen[id(value)] = found.cpu() if keeps else None
        return seen[id(value)]

    return tree_map(whole, checkpoint)


def read_file(path: Path, weights_only: bool | None) -> Any:
    """What ``write_file``, or another strategy, has written: mapped, so that a rank reads what it takes."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)


def load_whole(optimizer: Optimizer, state: Mapping[str, Any], module: nn.Module) -> None:
    """``optimizer.load_state_dict``, of whole tensors: this rank keeps its shards of them. No
    communication."""
    params = {id(param.sharded): param for unit in units_in(module) for param in unit.params}
    live = [params.get(id(each)) for group in optimizer.param_groups for each in group["params"]]
    saved = [key for group in state["param_groups"] for key in group["params"]]
    of = dict(zip(saved, live, strict=False))  # the optimizer says what is wrong where the numbers differ
    cut = {
        key: {name: _cut(name, value, of.get(key)) for name, value in entry.items()}
        for key, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": cut})


def _cut(name: str, value: Any, param: ShardedParam | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if param is None or name == "step" or value.shape != param.spec.shape:
        return value.clone()  # which the optimizer counts up in place
    return param.dtensor(param.shard_of(value).to(param.home, copy=True).contiguous())
