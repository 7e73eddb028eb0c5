"""Plain full tensors on their way into a sharded model: each rank keeps its own rows."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.params.param import Member, ParamSite, ShardedParam
from shardwright.quantized.codec import encode_entries
from shardwright.torch_private import CHECKPOINTED, COMPILED

WRAPPED = "_fsdp_wrapped_module"  # what torch, and so our wrapper, calls the module inside of it


def key_of(name: str) -> str:
    """A name in a tree of wrapped modules as the keys of its state dict have it."""
    for wrapper in (WRAPPED, CHECKPOINTED):
        name = name.replace(f"{wrapper}.", "").removesuffix(f".{wrapper}")
    return name


def original_name(name: str) -> str:
    """A name in the model as it was before any module was wrapped, or compiled."""
    return key_of(name).replace(COMPILED, "")


class PlainLoads:
    """The loads of a unit's modules: what is called before and after each of them.

    at_rest: brings modules to show their shards. shown: the parameters that they show.
    """

    def __init__(self, at_rest: Callable[[], None], shown: Callable[[], Sequence[ShardedParam]]) -> None:
        self._at_rest = at_rest
        self._shown = shown
        self._now: dict[nn.Module, PlainEntries] = {}

    def before(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A hook of ``register_load_state_dict_pre_hook``."""
        self._at_rest()
        # A load that raised has called no hook after it, and its hooks on inner modules are still there.
        if module in self._now:
            self._now[module].drop()
        self._now[module] = PlainEntries(module, prefix)
        self._now[module].shard(state, self._shown(), errors=rest[4])

    def after(self, module: nn.Module, incompatible: Any) -> None:
        """A hook of ``register_load_state_dict_post_hook``."""
        ended = self._now.pop(module, None)
        if ended is not None:  # else the module loads itself, and has called no hook before
            ended.end(incompatible.missing_keys)


class PlainEntries:
    """One load of a sharded module and what is inside of it, from before its own entries are taken on.

    A module may rename its keys while it is loaded, as those do that read files of their former layout. So
    what isn't found by its name beforehand is looked for again where the module that shows it is loaded.
    No communication: every rank has the whole. Only shards of the members of a flat parameter are gathered,
    one at a time.
    """

    def __init__(self, module: nn.Module, prefix: str) -> None:
        """prefix: the module's name in the state dict."""
        self._module = module
        self._prefix = prefix
        self._paths = {id(child): f"{name}." if name else "" for name, child in module.named_modules()}
        self._handles: list[Any] = []
        self._absent: dict[Member, str] = {}
        self._flat: list[ShardedParam] = []

    def shard(self, state: dict[str, Any], params: Sequence[ShardedParam], errors: list[str]) -> None:
        """Replace plain tensors of a parameter's logical shape in ``state`` by this rank's shard of them.

        params: those that the module shows, also where another group holds them (tied weights); flat ones
        are its own. Other entries (shards, other shapes) are left for ``load_state_dict`` to take or to
        complain of. errors: what that will say.
        """
        for child in self._module.modules():
            encode_entries(child, state, self._prefix + self._paths[id(child)])
        # A wrapper's own name isn't part of the names in a state dict, until that wrapper's hook puts it
        # there.
        known = {original_name(key): key for key in state if key.startswith(self._prefix)}
        for param in params:
            if param.members:
                self._take_members(param, state, known, errors)
                continue
            for site in param.sites:
                if id(site.module) not in self._paths:
                    continue
                path = f"{self._prefix}{self._paths[id(site.module)]}{site.name}"
                key = known.get(original_name(path))
                if key is None:
                    self._look_again(site, partial(_to_shard, param))
                else:
                    _to_shard(param, state, key)

    def end(self, missing: list[str]) -> None:
        """All of it has been loaded. missing: gets what wasn't found."""
        self.drop()
        missing += self._absent.values()
        for param in self._flat:
            param.adopt()  # with assign=True it is another one

    def drop(self) -> None:
        """Remove the hooks of this load, which has ended, or which an error has ended."""
        for handle in self._handles:
            handle.remove()

    def _take_members(
        self, param: ShardedParam, state: dict[str, Any], known: Mapping[str, str], errors: list[str]
    ) -> None:
        """Take the members of a flat parameter out of ``state``; put this rank's part of it in their place.

        known: the keys of ``state`` by their original names.
        """
        self._flat.append(param)
        own = f"{self._prefix}{param.sites[0].name}"
        key = known.get(original_name(own))
        if key is not None:
            state[own] = state.pop(key)
            return
        shard = param.local.detach()
        local = torch.zeros_like(shard, device=param.axis.device) if shard.is_meta else shard.clone()
        for member in param.members:
            keys = [known.get(original_name(self._prefix + name), "") for name in member.names]
            values = [state.pop(key) for key in keys if key in state]
            shown = original_name(f"{self._prefix}{member.names[0]}")
            if values:
                _fill(param, member, local, (shown, values[0]), errors)
                continue
            self._absent[member] = shown
            for site in member.sites:
                self._look_again(site, partial(self._fill_late, param, member))
        state[own] = param.dtensor(local)

    def _fill_late(
        self, param: ShardedParam, member: Member, state: dict[str, Any], key: str, errors: list[str]
    ) -> None:
        value, shown = state.pop(key, None), self._absent.get(member)
        if value is not None and shown is not None:
            del self._absent[member]
            param.adopt()  # its own entry has been loaded already
            _fill(param, member, param.local.detach(), (shown, value), errors)

    def _look_again(self, site: ParamSite, take: Callable[[dict[str, Any], str, list[str]], None]) -> None:
        def before_load(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            take(state, prefix + site.name, rest[4])

        if site.module is not self._module:  # whose hooks are being called
            self._handles.append(site.module.register_load_state_dict_pre_hook(before_load))


def _to_shard(param: ShardedParam, state: dict[str, Any], key: str, *_: Any) -> None:
    value = state.get(key)
    if isinstance(value, DTensor) or not isinstance(value, torch.Tensor) or value.shape != param.spec.shape:
        return
    # A copy: with assign=True it becomes the parameter, and the whole tensor must be let go.
    state[key] = param.dtensor(param.shard_of(value.detach()).to(param.home, copy=True).contiguous())


def _fill(
    param: ShardedParam,
    member: Member,
    local: torch.Tensor,
    entry: tuple[str, torch.Tensor],
    errors: list[str],
) -> None:
    """Fill a member's part of ``local`` from ``(name, whole tensor or shards)``."""
    name, value = entry
    if tuple(value.shape) != member.shape:
        errors.append(
            f"size mismatch for {name}: the state dict has shape {list(value.shape)}, the model "
            f"{list(member.shape)}"
        )
        return
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    member.fill(local, param.layout.span(param.axis.rank), whole)
