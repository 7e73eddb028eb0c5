"""Models that carry adapters of peft's own (``get_peft_model``), and their files."""

from importlib import import_module
from pathlib import Path
from typing import Any

from shardwright.checkpoint.agree import ranks
from shardwright.engine.gather_full import stream_full
from shardwright.engine.unit import units_in


def carries_peft(model: Any) -> bool:
    """Whether it is a ``PeftModel``."""
    return hasattr(model, "peft_config")


def save_peft(model: Any, folder: Path) -> None:
    """Write a sharded ``PeftModel`` as its own ``save_pretrained`` does: one folder for each adapter.

    Every rank calls it, between steps; rank 0 writes. It holds the adapters whole, and of the base what peft
    saves with them (a resized embedding).
    Raises: CheckpointError, on every rank, where writing failed.
    """
    group, what = ranks(), f"saving {folder}"
    group.arrive(what)
    units = units_in(model)
    for unit in units:
        unit.runtime.rest()
    state = model.state_dict(keep_vars=True)
    writes = group.rank == 0
    wanted = group.together(what, lambda: _saved_of(model, state) if writes else [])[0]
    params = {id(p.sharded): p for unit in units for g in unit.groups for p in g.params}
    state |= dict(stream_full({name: state[name] for name in wanted}, params))
    group.together(what, lambda: model.save_pretrained(folder, state_dict=state) if writes else None)


def _saved_of(model: Any, state: dict[str, Any]) -> list[str]:
    """Names in the state dict of what peft saves, which it picks by each method's own rules."""
    pick = import_module("peft").get_peft_model_state_dict
    picked = {
        id(value)
        for adapter in model.peft_config
        for value in pick(model, state_dict=state, adapter_name=adapter).values()
    }
    return [name for name, value in state.items() if id(value) in picked]
