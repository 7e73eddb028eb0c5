"""What is done to a module before it is sharded: materialised, made equal on all ranks, its buffers cast."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.torch_private import buffers_of
from shardwright.transport.channel import check_same_lines
from shardwright.transport.mesh import resolve

InitFn = Callable[[nn.Module], None]


def own_modules(module: nn.Module, skipped: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules of a tree except those that are skipped, with all that is inside of them."""
    found: dict[nn.Module, None] = {}
    out = set(skipped)

    def visit(each: nn.Module) -> None:
        if each not in out and each not in found:
            found[each] = None
            for child in each.children():
                visit(child)

    visit(module)
    return list(found)


def materialise(modules: list[nn.Module], init: InitFn | None, device: torch.device) -> None:
    """Give modules on the meta device memory and values: ``init(module)``, or its ``reset_parameters()``.

    Raises: InputError for one that has neither, or that is still on the meta device afterwards; and where
        ``init`` is no function.
    """
    if init is not None and not callable(init):
        raise InputError(f"param_init_fn must be a function of a module, or None, got {init!r}")
    for module in modules:
        if not _on_meta(module):
            continue
        if init is not None:
            init(module)
        else:
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise InputError(
                    f"{type(module).__name__} has tensors on the meta device and no reset_parameters(); "
                    "pass param_init_fn, which gives them memory and values"
                )
            module.to_empty(device=device, recurse=False)
            reset()
        if _on_meta(module):
            raise InputError(
                f"param_init_fn left tensors of a {type(module).__name__} on the meta device; it is called "
                "with each module and must materialise that module's own parameters and buffers"
            )


def _on_meta(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)


@torch.no_grad()
def broadcast(root: nn.Module, modules: list[nn.Module], mesh: DeviceMesh) -> None:
    """Give every rank of the mesh the parameters and buffers of its first rank, of ``modules`` in ``root``.
    Every rank of it calls.

    Raises: Diverged on every rank where they differ in names, order, shapes or dtypes; nothing was sent then.
    """
    tensors: dict[int, torch.Tensor] = {}
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if not isinstance(tensor, DTensor):
                tensors[id(tensor)] = tensor
    _check_alike(root, tensors, mesh)
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        for tensor in tensors.values():
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, group=group, group_src=0)
            tensor.detach().copy_(whole)


def _check_alike(root: nn.Module, tensors: dict[int, torch.Tensor], mesh: DeviceMesh) -> None:
    found = resolve(mesh)
    names = {id(tensor): name for name, tensor in (*root.named_parameters(), *root.named_buffers())}
    lines = [f"{names.get(key)}: {list(each.shape)}, {each.dtype}" for key, each in tensors.items()]
    what = "sync_module_states=True: ranks have different models"
    for comm in (found.comm, found.replicate):
        if comm is not None:
            check_same_lines(comm, lines, "compare what is sent", what, "Build the same model on every rank")


def cast_buffers(modules: list[nn.Module], dtype: torch.dtype | None) -> dict[int, torch.dtype]:
    """Cast floating-point buffers; the dtypes that they had, by the identity of the new ones."""
    before: dict[int, torch.dtype] = {}
    for module in modules if dtype is not None else ():
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                cast = buffer.to(dtype)
                before[id(cast)] = buffer.dtype
                buffers_of(module)[name] = cast
    return before
