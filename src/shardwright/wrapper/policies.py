"""Which modules of a tree are wrapped: the auto-wrap policies of ``torch.distributed.fsdp.wrap``.

A policy is a callable ``(module, recurse, nonwrapped_numel) -> bool``, asked on the way down whether to go
into a module and on the way up whether to wrap it, or an object that names all modules at once with their
own options (``ModuleWrapPolicy``, ``CustomPolicy``).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardwright.errors import InputError
from shardwright.torch_private import children_of

Wrap = Callable[..., nn.Module]
Chosen = dict[nn.Module, dict[str, Any]]


class ModuleWrapPolicy:
    """Wrap every module of some classes.

    Args:
        module_classes: the classes; their subclasses count, too.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = tuple(module_classes)

    def chosen(self, root: nn.Module, ignored: set[nn.Module]) -> Chosen:
        """The modules to wrap, and in which options each differs from the root.

        Args:
            root: the model.
            ignored: modules that are left as they are.

        Returns:
            Module -> options; here always none.
        """
        return {m: {} for m in root.modules() if m not in ignored and isinstance(m, self.module_classes)}

    def __call__(self, module: nn.Module, recurse: bool, *_: Any, **__: Any) -> bool:
        return recurse or isinstance(module, self.module_classes)


class CustomPolicy:
    """Wrap the modules that a function picks, each with options of its own if it likes.

    Args:
        lambda_fn: called with each module; returns whether to wrap it, or a dict of options other than the
            root's.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self.lambda_fn = lambda_fn

    def chosen(self, root: nn.Module, ignored: set[nn.Module]) -> Chosen:
        """The modules to wrap, and in which options each differs from the root.

        Args:
            root: the model.
            ignored: modules that are left as they are.

        Returns:
            Module -> options.

        Raises:
            InputError: ``lambda_fn`` returned something else than a bool or a dict.
        """
        found: Chosen = {}
        for module in root.modules():
            answer = False if module in ignored else self.lambda_fn(module)
            if not isinstance(answer, bool | dict):
                raise InputError(
                    f"CustomPolicy's lambda_fn must return a bool or a dict of options, got {answer!r} for a "
                    f"{type(module).__name__}"
                )
            if answer:
                found[module] = dict(answer) if isinstance(answer, dict) else {}
        return found


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module.

    Args:
        *args: without effect.
        **kwargs: without effect.

    Returns:
        True.
    """
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules that a function picks; give it with ``functools.partial``.

    Args:
        module: the module that is asked about.
        recurse: whether the question is to look into it, or to wrap it.
        nonwrapped_numel: elements in it that aren't wrapped yet.
        lambda_fn: called with the module; True wraps it.

    Returns:
        The answer; modules are always looked into.
    """
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Wrap the layers of a transformer, by class; give it with ``functools.partial``.

    Args:
        module: the module that is asked about.
        recurse: whether the question is to look into it, or to wrap it.
        nonwrapped_numel: elements in it that aren't wrapped yet.
        transformer_layer_cls: the classes of layers.

    Returns:
        The answer; modules are always looked into.
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wrap a module once so many elements inside of it aren't wrapped yet.

    The defaults of its last two arguments stand on this function, as ``FORCE_LEAF_MODULES`` and
    ``EXCLUDE_WRAP_MODULES``.

    Args:
        module: the module that is asked about.
        recurse: whether the question is to look into it, or to wrap it.
        nonwrapped_numel: elements in it that aren't wrapped yet.
        min_num_params: how many elements are enough.
        force_leaf_modules: classes whose children are never wrapped; None: the default.
        exclude_wrap_modules: classes that are never wrapped; None: the default.

    Returns:
        The answer.
    """
    defaults: Any = size_based_auto_wrap_policy
    leaves = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(
        module, tuple(leaves if recurse else excluded)
    )


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def wrap_tree(root: nn.Module, policy: Any, ignored: set[nn.Module], wrap_one: Wrap) -> None:
    """Replace the modules in ``root`` that the policy chooses by ``wrap_one(module, **options)``, children
    first; a module that is shared is wrapped once."""
    chosen = policy.chosen(root, ignored) if hasattr(policy, "chosen") else _asked(root, policy, ignored)
    wrapped: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for name, child in list(children_of(module).items()):
            if child is None or child in ignored:
                continue
            if child not in wrapped:
                wrapped[child] = child
                visit(child)
                if child in chosen and child is not root:
                    wrapped[child] = wrap_one(child, **chosen[child])
            children_of(module)[name] = wrapped[child]

    visit(root)


def _asked(root: nn.Module, policy: Callable[..., bool], ignored: set[nn.Module]) -> Chosen:
    found: Chosen = {}
    skipped = {id(param) for module in ignored for param in module.parameters()}
    seen: set[nn.Module] = set()

    def ask(module: nn.Module) -> int:
        """Elements of the tree under ``module`` that are wrapped."""
        numel = sum(p.numel() for p in module.parameters() if id(p) not in skipped)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        inside = 0
        for child in module.children():
            if child not in ignored and child not in seen:
                seen.add(child)
                inside += ask(child)
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=numel - inside):
            found[module] = {}
            return numel
        return inside

    ask(root)
    return found


# Of a thread, as a context that ``wrap`` looks up is.
_enabled: ContextVar[tuple[Wrap, dict[str, Any]] | None] = ContextVar("enabled", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Wrap, **wrapper_kwargs: Any) -> Iterator[None]:
    """A context in which ``wrap`` wraps with one class and these options. In this thread only.

    Args:
        wrapper_cls: the class, such as ``FullyShardedDataParallel``.
        **wrapper_kwargs: its options.
    """
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module, inside of ``enable_wrap``; outside of it nothing happens.

    Args:
        module: the module.
        **wrap_overrides: options other than those of ``enable_wrap``.

    Returns:
        The wrapped module; outside of ``enable_wrap`` the module itself.
    """
    enabled = _enabled.get()
    if enabled is None:
        return module
    wrapper, options = enabled
    return wrapper(module, **{**options, **wrap_overrides})
