"""What a wrapped model's state dicts look like, and its optimizer's, and how they are loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.params.load_plain import WRAPPED, key_of
from shardwright.torch_private import CHECKPOINTED, children_of
from shardwright.wrapper import optim_states, states
from shardwright.wrapper.from_first import from_first
from shardwright.wrapper.options import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)


class StatefulWrapper(nn.Module):
    """A wrapper around ``module``, whose name is left out of the names of state.

    ``_settings``: what its state dicts are. ``_buffer_dtypes``: what its cast buffers are saved as, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._settings = StateDictSettings()
        self._buffer_dtypes: dict[str, torch.dtype] = {}
        self.register_load_state_dict_post_hook(_name_plainly)

    @property
    def module(self) -> nn.Module:
        """The module that was wrapped, without a wrapper for activation checkpointing around it: as in torch,
        so that ``apply_activation_checkpointing`` may come before or after."""
        inner = self._inside
        return children_of(inner).get(CHECKPOINTED, inner)  # type: ignore[return-value]

    @property
    def _inside(self) -> nn.Module:
        return children_of(self)[WRAPPED]  # type: ignore[return-value]

    # ---- state dicts

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose what state dicts of every wrapper in a tree are from now on. Local; the same on all ranks.

        Args:
            module: the top of the tree.
            state_dict_type: whole tensors, DTensors, or this rank's plain shards.
            state_dict_config: of that type; None: its defaults.
            optim_state_dict_config: of that type; None: its defaults.

        Returns:
            What they were before.

        Raises:
            InputError: a config is of another type, or the wrappers differed before.
        """
        settings = StateDictSettings.of(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StatefulWrapper.get_state_dict_type(module)
        for wrapper in wrappers_in(module):
            wrapper._settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What state dicts of the wrappers in a tree are.

        Local; the same on all ranks.

        Args:
            module: the top of the tree.

        Returns:
            The type and its configs.

        Raises:
            InputError: the wrappers differ.
        """
        found = [wrapper._settings for wrapper in wrappers_in(module)]
        if any(settings != found[0] for settings in found):
            raise InputError(
                "the wrappers in this module have different state dict types; set one on the root"
            )
        return found[0] if found else StateDictSettings()

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """A context with ``set_state_dict_type`` in it; at its end each wrapper has its former settings.

        Local; the same on all ranks.

        Args:
            module: the top of the tree.
            state_dict_type: as there.
            state_dict_config: as there.
            optim_state_dict_config: as there.

        Raises:
            InputError: as there.
        """
        before = {wrapper: wrapper._settings for wrapper in wrappers_in(module)}
        StatefulWrapper.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper, settings in before.items():
                wrapper._settings = settings

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The model's state under its own names, as ``state_dict_type`` says: whole tensors by default.

        Every rank calls it, between steps.

        Args:
            *args: as of ``nn.Module``.
            destination: a mapping to fill; None: a new one.
            prefix: what the names begin with.
            keep_vars: give the live tensors, sharded.

        Returns:
            Names and tensors; with ``rank0_only`` none on other ranks than the mesh's first.
        """
        if keep_vars:
            return self._inside.state_dict(*args, destination=destination, prefix=prefix, keep_vars=True)
        settings = self._settings
        config, before = settings.state_dict_config, set(destination or ())
        live = self._inside.state_dict(*args, destination=destination, prefix=prefix, keep_vars=True)
        keys = [key for key in live if key not in before]
        dtypes = {
            f"{prefix}{key_of(f'{path}.{name}' if path else name)}": dtype
            for path, each in self.named_modules()
            if isinstance(each, StatefulWrapper)
            for name, dtype in each._buffer_dtypes.items()
        }
        params = states.params_by_id(self)
        first = not getattr(config, "rank0_only", False) or all(p.is_first for p in params.values())
        values = [(key, live.pop(key)) for key in keys]
        converted: dict[int, dict[str, Any]] = {}
        for key, value in values:
            found = converted.get(id(value))
            if found is None:
                found = converted[id(value)] = states.entries(key, value, params, settings)
            elif found:  # a tied tensor, converted under its first name
                names = states.names_for(key, params.get(id(value)), settings)
                found = dict(zip(names, found.values(), strict=True))
            for name, entry in found.items() if first else ():
                live[name] = entry.to(dtypes[key]) if key in dtypes else entry
        return live

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take whole tensors, DTensors, or (``LOCAL_STATE_DICT``) this rank's shards, by the names of the
        model before it was wrapped; also where a module around this one is loaded. Communicates only
        for DTensors into flat parameters: those are gathered one at a time."""
        if self._settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            self._shard_local_entries(state_dict, prefix)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if not key.startswith(f"{prefix}{WRAPPED}."):
                state_dict[f"{prefix}{WRAPPED}.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.__dict__[_ERRORS] = args[-1]

    def _shard_local_entries(self, state_dict: Any, prefix: str) -> None:
        params = states.params_by_id(self)
        for name, live in self.state_dict(keep_vars=True).items():
            value = state_dict.get(f"{prefix}{name}")
            if id(live) in params and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                state_dict[f"{prefix}{name}"] = states.sharded_like(value, params[id(live)])

    # ---- optimizer state

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: Any = None, group: Any = None
    ) -> dict[str, Any]:
        """An optimizer's state by the names of parameters, as ``state_dict_type`` says.

        Every rank calls it for a full one, between steps, and for one of flat parameters.

        Args:
            model: the wrapped model.
            optim: an optimizer of its parameters.
            optim_state_dict: what ``optim.state_dict()`` gave; None: it is called.
            group: accepted; the parameters know their mesh.

        Returns:
            A dict of ``state`` and ``param_groups``; with ``rank0_only`` empty on other ranks than the mesh's
                first.

        Raises:
            InputError: the optimizer has parameters that aren't the model's, or the wrappers differ in their
                type.
            Diverged: ranks have states of different parameters; raised on all of them.
        """
        settings = StatefulWrapper.get_state_dict_type(model)
        given = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return optim_states.optim_state(model, given, optim_states.groups_of(model, optim), settings)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Any,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes, from what ``optim_state_dict`` gave on any number of ranks.

        Every rank calls it, between steps, with the whole state or its shards. Where some ranks have an empty
        one, and always with ``rank0_only``, all ranks receive that of the mesh's first.

        Args:
            model: the wrapped model.
            optim: an optimizer of its parameters.
            optim_state_dict: by the names of parameters; without ``param_groups`` it gives none.
            is_named_optimizer: accepted, without effect.
            load_directly: load it into ``optim``, too.
            group: accepted; the parameters know their mesh.

        Returns:
            A state dict by the numbers of parameters, sharded as they are.

        Raises:
            InputError: the optimizer has parameters that aren't the model's, or that the state lacks; no rank
                has a state.
            Diverged: ranks have different states.
        """
        config = StatefulWrapper.get_state_dict_type(model).optim_state_dict_config
        only_first = getattr(config, "rank0_only", False)
        optim_state_dict = from_first(optim_state_dict, states.mesh_of(model), only_first)
        ready = optim_states.optim_state_to_load(
            model, optim_state_dict, optim_states.groups_of(model, optim), compares=True
        )
        if load_directly:
            optim.load_state_dict(ready)
        return ready

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """``optim_state_dict`` with whole tensors on the host. Every rank calls it, between steps.

        Args:
            model: the wrapped model.
            optim: an optimizer of its parameters.
            optim_input: what the optimizer was built from; None: ``optim`` knows it.
            rank0_only: other ranks than the mesh's first get ``{}``.
            group: accepted; the parameters know their mesh.

        Returns:
            A dict of ``state`` and ``param_groups``, by the names of parameters.

        Raises:
            InputError: the optimizer has parameters that aren't the model's.
            Diverged: ranks have states of different parameters; raised on all of them.
        """
        groups = optim_states.groups_of(model, optim, optim_input)
        settings = StateDictSettings(optim_state_dict_config=FullOptimStateDictConfig(rank0_only=rank0_only))
        return optim_states.optim_state(model, optim.state_dict(), groups, settings)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: Any, model: nn.Module, optim_input: Any = None, optim: Any = None
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes, from a full state dict that every rank has. No communication.

        Args:
            full_optim_state_dict: by the names of parameters.
            model: the wrapped model.
            optim_input: what the optimizer was built from: parameters, or groups of them.
            optim: an optimizer of the model's parameters, instead; None, without ``optim_input`` too: one
                that was built from ``model.parameters()``.

        Returns:
            A state dict by the numbers of parameters, sharded as they are.

        Raises:
            InputError: the optimizer has parameters that aren't the model's, or that the state lacks.
            Diverged: never, since it compares nothing with other ranks.
        """
        groups = optim_states.groups_of(model, optim, optim_input)
        return optim_states.optim_state_to_load(model, full_optim_state_dict, groups, compares=False)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: Any,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """The same state with names in place of numbers, or back: between a wrapped run and a plain one.
        Local.

        Args:
            optim_state_dict: by names or numbers of parameters.
            optim_state_key_type: what it is to be by.
            model: the model whose names they are, not wrapped.
            optim_input: what the optimizer with the numbers was built from: parameters, or groups of them.
            optim: that optimizer, instead; None, without ``optim_input`` too: one that was built from
                ``model.parameters()``.

        Returns:
            A new state dict with the same tensors.

        Raises:
            InputError: the model has flat parameters, or the optimizer has parameters that aren't the
                model's.
        """
        groups = optim_states.groups_of(model, optim, optim_input)
        return optim_states.rekey(optim_state_dict, optim_state_key_type, model, groups)


_ERRORS = "_errors_of_load"


def _name_plainly(module: nn.Module, incompatible: Any) -> None:
    """Have what ``load_state_dict`` gives and says name the model's own names."""
    for told in (incompatible.missing_keys, incompatible.unexpected_keys, vars(module).pop(_ERRORS, [])):
        told[:] = map(key_of, told)


def wrappers_in(module: nn.Module) -> list[StatefulWrapper]:
    """The wrappers in a tree, the module itself included."""
    return [each for each in module.modules() if isinstance(each, StatefulWrapper)]
