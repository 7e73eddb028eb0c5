"""Torch's operations on the simulated device: what is known at once is done at once, the rest is queued.

A tensor of the host program has a shape and a storage, and no numbers: those lie in the device's arena. An
operation is told apart by its schema: views and empty tensors only name memory; what depends on numbers
(``item``, ``nonzero``) makes the host wait; all else becomes a kernel. Tensors of the host are computed with
at once. Between host and device only copies go: asynchronous from and to pinned memory where
``non_blocking`` is said, else the host waits.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.device.sim import Address, Device

_NAMES_MEMORY = ("aten::empty", "aten::new_empty", "aten::set_", "aten::_unsafe_view", "aten::lift_fresh")
_COPIES = ("aten::copy_", "aten::_foreach_copy_", "aten::_to_copy")
_kinds: dict[Any, "_Kind"] = {}
_made: dict[Any, Any] = {}


class _Kind:
    """What a schema says. fresh: which of what is returned is memory of its own."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name
        self.is_view = func.is_view
        self.names_memory = func.is_view or self.name.startswith(_NAMES_MEMORY)
        asks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        self.asks_numbers = bool(asks & set(func.tags))
        self.copies = self.name in _COPIES
        self.returned = [ret.alias_info for ret in schema.returns]
        self.written = {
            frozenset(each.alias_info.before_set): (place, each.name)
            for place, each in enumerate(schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
        }

    def aliased(self, index: int, args: Any, kwargs: Any) -> Any:
        """The argument that is returned at ``index``."""
        place, name = self.written[frozenset(self.returned[index].before_set)]
        return args[place] if place < len(args) else kwargs[name]


class Kernels(TorchDispatchMode):
    """Inside of it operations are the device's."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = _Kind(func)
        if kind.name == "aten::lift_fresh":
            self._hold_numbers(args[0])
        if kind.is_view and not types:
            return func(*args, **kwargs)
        leaves, tree = _flat(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if types and not all(type(t) in (torch.Tensor, torch.nn.Parameter, FakeTensor) for t in tensors):
            return NotImplemented
        places = [str(kwargs.get("device")), *(t.device.type for t in tensors)]
        shapes_alone = "meta" in places or any(type(t) is FakeTensor for t in tensors)
        if shapes_alone or func.namespace == "profiler":
            return func(*args, **kwargs)
        memory = self.device.memory
        if kind.name == "aten::is_pinned":
            return memory.find(tensors[0]).pinned
        if kind.name == "aten::from_file":
            return self._mapped(func(*args, **kwargs))
        if kind.name == "aten::_pin_memory":
            return self._pinned_copy(tensors[0])
        pins = kwargs.pop("pin_memory", False)  # which a build of torch without a device refuses
        on_host = [memory.is_on_host(t) for t in tensors]
        if kind.names_memory:
            out = func(*args, **kwargs)
            if not kind.is_view:
                self._place(out, pins or (bool(on_host) and all(on_host)), pins)
            return out
        by_host = bool(on_host) and all(on_host) and kind.name != "aten::_to_copy"
        asks = kind.asks_numbers and (
            kind.name != "aten::index" or any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])
        )
        if asks and not by_host:
            self.device.wait(kind.name)
        if by_host or asks:
            return self._at_once(func, kind, (args, kwargs), leaves, tree)
        blocks = any(on_host) and not (
            kind.copies
            and (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            and all(memory.find(t).pinned for t, host in zip(tensors, on_host, strict=True) if host)
        )
        out = self._queue(func, kind, (args, kwargs), leaves, tree)
        if blocks:
            self.device.wait(kind.name)
        return out

    def _hold_numbers(self, tensor: torch.Tensor) -> None:
        """``torch.tensor``: they lie on the host."""
        storage = tensor.untyped_storage()
        if not self.device.memory.knows(storage):
            numbers = tensor.clone()
            self.device.memory.take(storage, host=True, pinned=False)
            self.device.memory.address(tensor).tensor().copy_(numbers)

    def _mapped(self, file: torch.Tensor) -> torch.Tensor:
        """Memory of the host that can't be pinned."""
        self._place(file, True)
        return file

    def _pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Made by the host, of a tensor that lies there."""
        source = self.device.memory.address(tensor)
        assert self.device.memory.is_on_host(tensor), "only memory of the host can be pinned"
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self._place(copy, True, True)
        self.device.memory.address(copy).tensor().copy_(source.tensor())
        return copy

    def _place(self, out: Any, on_host: bool, pinned: bool = False) -> None:
        """Memory for the tensors that an operation has made."""
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if not self.device.memory.knows(storage):
                    self.device.memory.take(storage, on_host, pinned)

    def _addresses(self, leaves: list[Any]) -> list[Any]:
        address = self.device.memory.address
        return [address(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def _at_once(self, func: Any, kind: _Kind, call: Any, leaves: list[Any], tree: Any) -> Any:
        host = all(self.device.memory.is_on_host(t) for t in leaves if isinstance(t, torch.Tensor))
        args, kwargs = _whole(_there(self._addresses(leaves)), tree)
        with torch._C._AutoDispatchBelowAutograd():
            result = func(*args, **kwargs)
        if kind.written:
            return self._returned(kind, call, result)
        values, shape = pytree.tree_flatten(result)
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                values[place] = shell = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
                self.device.memory.take(shell.untyped_storage(), host)
                target = self.device.memory.address(shell)
                if host:
                    target.tensor().copy_(value)
                else:
                    self.device.launch(lambda target=target, value=value: target.tensor().copy_(value))
        return pytree.tree_unflatten(values, shape)

    def _returned(self, kind: _Kind, call: Any, result: Any) -> Any:
        """Of an operation that writes where its arguments lie."""
        assert all(info is not None for info in kind.returned), f"{kind.name} returns memory of its own too"
        found = [kind.aliased(index, *call) for index in range(len(kind.returned))]
        return found[0] if len(found) == 1 else (tuple(found) or None)

    def _queue(self, func: Any, kind: _Kind, call: Any, leaves: list[Any], tree: Any) -> Any:
        if kind.written:
            addresses = self._addresses(leaves)

            def write() -> None:
                args, kwargs = _whole(_there(addresses), tree)
                func(*args, **kwargs)

            self.device.launch(write)
            return self._returned(kind, call, None)
        addresses = self._addresses(leaves)
        values, shape = self._shells(func, leaves, tree)
        for value in values:
            if isinstance(value, torch.Tensor):
                self.device.memory.take(value.untyped_storage())
        targets = self._addresses(values)

        def kernel() -> None:
            args, kwargs = _whole(_there(addresses), tree)
            made = pytree.tree_leaves(func(*args, **kwargs))
            for target, value in zip(targets, made, strict=True):
                if isinstance(target, Address):
                    target.tensor().copy_(value)

        self.device.launch(kernel)
        return pytree.tree_unflatten(values, shape)

    @staticmethod
    def _shells(func: Any, leaves: list[Any], tree: Any) -> tuple[list[Any], Any]:
        """What the operation returns, without numbers: as it returns for zeros."""
        key = (func, tree, tuple(_signature(leaf) for leaf in leaves))
        if key not in _made:
            with torch._C._AutoDispatchBelowAutograd():
                args, kwargs = _whole([_zeros(leaf) for leaf in leaves], tree)
                values, shape = pytree.tree_flatten(func(*args, **kwargs))
            _made[key] = [_signature(value) for value in values], shape
        signatures, shape = _made[key]
        return [_shell(each) for each in signatures], shape


def _there(addresses: list[Any]) -> list[Any]:
    return [a.tensor() if isinstance(a, Address) else a for a in addresses]


def _flat(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """What an operation is called with, one after another, and how long each list is. pytree's takes longer
    than all else that is done for an operation."""
    leaves: list[Any] = []
    lengths = []
    for each in (*args, *kwargs.values()):
        if isinstance(each, list | tuple):
            lengths.append(len(each))
            leaves += each
        else:
            lengths.append(-1)
            leaves.append(each)
    return leaves, (len(args), tuple(kwargs), tuple(lengths))


def _whole(leaves: list[Any], tree: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of these leaves."""
    num_args, names, lengths = tree
    rest, values = iter(leaves), []
    for length in lengths:
        values.append(next(rest) if length < 0 else [next(rest) for _ in range(length)])
    return values[:num_args], dict(zip(names, values[num_args:], strict=True))


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor, tuple(leaf.shape), leaf.stride(), leaf.dtype
    return type(leaf), leaf


def _shell(signature: Any) -> Any:
    if signature[0] is torch.Tensor:
        return torch.empty_strided(signature[1], signature[2], dtype=signature[3])
    return signature[1]


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()


def put_on_host(device: Device, tensor: torch.Tensor, pinned: bool) -> None:
    """From now on the storage of ``tensor`` is memory of the host."""
    with _disable_current_modes():
        source = device.memory.address(tensor)
        device.wait("put on host")
        held = source.tensor().clone()
        storage = tensor.untyped_storage()
        device.memory.drop(storage._cdata)
        device.memory.take(storage, host=True, pinned=pinned)
        device.memory.address(tensor).tensor().copy_(held)
