"""Every option, as frozen dataclasses that check themselves.

A policy never changes: a setter replaces the whole object (``dataclasses.replace``), so that a schedule
planned from it can tell by identity whether it is still the one in force.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any, Self

import torch

from shardwright import torch_fsdp
from shardwright.errors import InputError


def _check_dtype(owner: str, field: str, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(
            f"{owner}.{field} must be a floating-point torch.dtype or None, got {dtype!r}; "
            f"for example {owner}({field}=torch.bfloat16)"
        )


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype is used where (all ``None``: the dtype that the parameter has at rest).

    param_dtype: dtype of the all-gather and of the parameters that the forward and backward see.
    reduce_dtype: dtype in which gradients are summed over ranks (``None``: ``param_dtype``). Gradients
        whose own dtype converts to it exactly travel in their own dtype and are converted on arrival.
    output_dtype: floating-point outputs of the module's forward are cast to it.
    cast_forward_inputs: floating-point inputs of the module's forward are cast to ``param_dtype``.

    At rest, parameters, gradients and so the optimizer keep the dtype that the module was built with.
    Raises: InputError for a dtype that isn't floating point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            _check_dtype("MixedPrecisionPolicy", field, getattr(self, field))


DEFAULT_PRECISION = MixedPrecisionPolicy()


class BackwardPrefetch(StrEnum):
    """When the next group's all-gather is issued in backward.

    PRE: before this group's backward, so that both its compute and the gather run at once.
    POST: after it, beside its reduce-scatter: one unsharded group less at the peak, less overlap.
    NONE: when the next group is needed.
    """

    PRE = "pre"
    POST = "post"
    NONE = "none"


class Wire(StrEnum):
    """What a group's collectives send over a network.

    PLAIN: every rank's shards; gradients, but for zeros.
    DIFFERENCE: what has changed since the last all-gather of the same group, coded without loss; each rank
        keeps a copy of the whole model in the dtype of the wire, on the host. Gradients are coded without
        loss, too. It takes the extra ``wire``.
    AUTO: of these what pays on the link that is measured before the first step: on a slow one all of it, on a
        faster one no code, but no second all-gather of what hasn't changed; within ``wire_nbytes``, or a
        quarter of the host's free memory. It takes the extra, too.
    """

    PLAIN = "plain"
    DIFFERENCE = "difference"
    AUTO = "auto"


class Agreement(StrEnum):
    """Whether ranks agree on what they launch.

    STRICT: every rank launches the same collectives in the same order, whichever groups it uses; they
        exchange a few words at the begin and the end of each forward, evaluation and backward.
    OFF: a rank launches what its own modules need, so all must run the same modules in the same order; no
        words are exchanged.
    """

    STRICT = "strict"
    OFF = "off"


def _agreement() -> Agreement:
    asked = os.environ.get("SHARDWRIGHT_AGREEMENT", Agreement.STRICT)
    if asked not in list(Agreement):
        raise InputError(
            f'the environment variable SHARDWRIGHT_AGREEMENT must be "strict" or "off", got {asked!r}'
        )
    return Agreement(asked)


REMOVED = {  # options of earlier versions, in calls and recipes
    "one_copy_per_host": "one_copy_per_host was removed: it took more memory, and no less time; leave it out"
}


class _WithoutRemoved:
    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Raises: InputError, with what to do, for an option that was removed."""
        for name in REMOVED.keys() & options.keys():
            raise InputError(f"{cls.__name__}: {REMOVED[name]}")
        return super().__new__(cls)


@dataclass(frozen=True)
class SchedulePolicy(_WithoutRemoved):
    """When collectives are issued, and how many may be outstanding. Counts are groups.

    backward_prefetch: see ``BackwardPrefetch``; its value or its name.
    forward_prefetch: False issues each forward all-gather when its group is needed.
    depth: how many groups ahead of the one in use are gathered.
    budget_nbytes: bytes that gathered groups not yet in use may hold; None: no bound but ``depth``.
    max_gathers: all-gathers in flight, the needed one included; None: no bound but ``depth``.
    max_reductions: reduce-scatters in flight; the oldest is waited for before one more is issued, so that
        at most this many groups hold an unsharded gradient besides the one being computed.
    keep_last: of the groups that the backward needs first, how many stay unsharded from the forward, where
        the caller left ``reshard_after_forward`` open. Costs no more than the prefetch would hold there.
    keep_nbytes: more of them stay, while all that stay take no more than these bytes of unsharded parameters.
    bucket_cap_mb: MiB of small groups that share a collective with another one: all-gathers ahead of their
        use, and gradients, which are held back until then. What shares one counts as one group above. 0: each
        group has collectives of its own.
    ahead: phase ("forward", "backward") -> group -> the groups to gather when it begins there, in order,
        instead of the next ``depth`` ones; by the paths of their modules ("blocks.0", "norm+head"). What
        ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch`` list goes before it.
    row_wise: a group that is one ``nn.Embedding`` moves only rows in use: the all-gather those that any rank
        looks up, the reduce-scatter those that any has a gradient of. Same bits; hooks of others make it move
        whole. None: between CPU ranks over a network, with ``wire`` plain, if larger than ``bucket_cap_mb``.
    forget_after: where ranks agree: backwards after which a group that no rank has used since leaves the
        schedule of forwards and backwards, so that its bytes no longer move. Its next use is agreed on as a
        first one is.
    wire: see ``Wire``; its value or its name. Same bits.
    wire_nbytes: bytes of host memory that the copies of ``wire`` may take on a rank: the first groups that
        fit have one. None: no bound, or that of "auto". ``explain`` says how many they are.
    agreement: see ``Agreement``; its value or its name. Left out: that of the environment variable
        ``SHARDWRIGHT_AGREEMENT``, else strict. Ranks that differ in it are told so before their first
        all-gather.

    The defaults are those that gave the shortest step for the memory of two groups (docs/performance.md).
    Raises: InputError for a value outside of these.
    """

    backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE
    forward_prefetch: bool = True
    depth: int = 1
    budget_nbytes: int | None = None
    max_gathers: int | None = None
    max_reductions: int = 2
    keep_last: int = 1
    keep_nbytes: int = 0
    bucket_cap_mb: float = 1.0
    ahead: Mapping[str, Mapping[str, Sequence[str]]] = dataclasses.field(default_factory=dict)
    row_wise: bool | None = None
    forget_after: int = 100
    wire: Wire = Wire.PLAIN
    wire_nbytes: int | None = None
    agreement: Agreement = dataclasses.field(default_factory=_agreement)

    @property
    def bucket_cap_nbytes(self) -> int:
        """``bucket_cap_mb`` in bytes."""
        return int(self.bucket_cap_mb * 2**20)

    def __post_init__(self) -> None:
        for name, kind in (("backward_prefetch", BackwardPrefetch), ("wire", Wire), ("agreement", Agreement)):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(str(value).lower()))
            except ValueError:
                choices = ", ".join(f'"{choice}"' for choice in kind)
                raise InputError(f"SchedulePolicy.{name} must be one of {choices}, got {value!r}") from None
        least = {"depth": 0, "budget_nbytes": 0, "max_gathers": 1, "max_reductions": 1, "keep_last": 0}
        least |= {"keep_nbytes": 0, "forget_after": 1, "wire_nbytes": 0}
        for field, bound in least.items():
            value = getattr(self, field)
            if value is None and field in ("budget_nbytes", "max_gathers", "wire_nbytes"):
                continue
            if not isinstance(value, int) or value < bound:
                raise InputError(f"SchedulePolicy.{field} must be an int >= {bound}, got {value!r}")
        if not isinstance(self.bucket_cap_mb, int | float) or not 0 <= self.bucket_cap_mb < inf:
            raise InputError(
                f"SchedulePolicy.bucket_cap_mb must be a number of MiB >= 0, got {self.bucket_cap_mb!r}"
            )
        object.__setattr__(self, "ahead", _lists(self.ahead))


def _lists(ahead: Any) -> dict[str, dict[str, tuple[str, ...]]]:
    """Phase -> name -> names. Raises: InputError for anything else."""

    def are_names(names: Any) -> bool:
        return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)

    def are_lists(lists: Any) -> bool:
        return isinstance(lists, Mapping) and are_names([*lists]) and all(map(are_names, lists.values()))

    is_phases = isinstance(ahead, Mapping) and {*ahead} <= {"forward", "backward"}
    if not is_phases or not all(map(are_lists, ahead.values())):
        raise InputError(
            "SchedulePolicy.ahead must map a phase, and in it a group's name, to a list of names, got "
            f'{ahead!r}; for instance {{"forward": {{"blocks.0": ["blocks.1", "blocks.2"]}}}}'
        )
    return {phase: {key: (*names,) for key, names in lists.items()} for phase, lists in ahead.items()}


@dataclass(frozen=True)
class Grouping:
    """How ``fully_shard(model, groups=...)`` chooses groups by itself.

    classes: every module of one of these classes is a group, subclasses included. Empty: what the model says
        of itself (``_fsdp_plan`` and ``_no_split_modules`` of transformers); where it says nothing, the
        members of every list of at least two modules of one class.
    least_nbytes: neighbours that hold less than this, unsharded, share a group.
    Raises: InputError for anything else.
    """

    classes: tuple[type, ...] = ()
    least_nbytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        if not all(isinstance(cls, type) for cls in self.classes):
            raise InputError(f"Grouping.classes must be classes of modules, got {self.classes!r}")
        if not isinstance(self.least_nbytes, int) or self.least_nbytes < 0:
            raise InputError(f"Grouping.least_nbytes must be an int >= 0, got {self.least_nbytes!r}")


@dataclass(frozen=True)
class ReductionPolicy:
    """How unsharded gradients become the gradients of the shards; ``FSDPModule``'s setters replace it.

    reduce: False keeps gradients unsharded and adds them up (gradient accumulation without communication).
    all_reduce: on a mesh that replicates, False keeps the reduced gradients and adds them up before they
        are all-reduced over the replicas.
    divide_factor: the sum over ranks is divided by it; None: by the number of ranks (the average).
    unused_params: parameters that got no gradient on this rank take part with zeros, because other ranks
        may have used them.
    weighted: each loss carries its share of the step (``loss_weights``), so sums are left as they are.
    """

    reduce: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None
    unused_params: bool = False
    weighted: bool = False

    def divisor(self, ranks: int) -> float:
        """What the sum over so many ranks is divided by."""
        return 1.0 if self.weighted else self.divide_factor or ranks

    def __post_init__(self) -> None:
        if self.divide_factor is not None and not self.divide_factor > 0:
            raise InputError(f"the gradient divide factor must be positive, got {self.divide_factor!r}")


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards lie between uses. This base class: on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Which of parameters, gradients and the optimizer's state are on the host at rest; by default all.

    params: shards; they are copied to the device as they are unsharded. False: the device keeps them, too, in
        the dtype that they are gathered in.
    grads: reduced gradients are copied to the host in the backward. False: they stay and add up on the device
        until the last backward of a step (``set_is_last_backward``) has ended, and are copied once.
    optimizer_state: always on the host. Where the shards or gradients are too, the step runs there; with
        ``params=False, grads=False`` it runs on the device, which has the state for the length of it.
    pin_memory: page-locked host memory, so that copies both ways run beside the host and compute.

    docs/design/streams.md says where the host waits. Raises: InputError for a combination that can't be.
    """

    pin_memory: bool = True
    params: bool = dataclasses.field(default=True, kw_only=True)
    grads: bool = dataclasses.field(default=True, kw_only=True)
    optimizer_state: bool = dataclasses.field(default=True, kw_only=True)

    @property
    def shards_on_host(self) -> bool:
        """Whether the host has the shards that an optimizer steps, and steps them."""
        return self.params or self.grads

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not self.optimizer_state:
            raise InputError(
                f"{name}: with optimizer_state=False the step runs on the device, and needs the parameters "
                "and gradients there that are to be on the host; leave optimizer_state=True (to have the "
                "state alone on the host: params=False, grads=False), or take OffloadPolicy()"
            )
        if not self.pin_memory and not self.grads:
            raise InputError(
                f"{name}: grads=False copies gradients, or the optimizer's state, in pinned memory; leave "
                "pin_memory=True, or grads=True"
            )


@dataclass(frozen=True)
class OptimizerOffloadPolicy(CPUOffloadPolicy):
    """``CPUOffloadPolicy(params=False)``: the optimizer's part on the host. The device keeps the shards in
    the dtype that they are gathered in: one is copied to it once a step and not at every all-gather."""

    params: bool = dataclasses.field(default=False, kw_only=True)


@dataclass(frozen=True)
class DiskOffloadPolicy(CPUOffloadPolicy):
    """As ``CPUOffloadPolicy``, with this rank's shards in files that the host maps and may drop from memory.

    folder: an existing folder on a local disk. The files have no names there and end with the process.
    Gradients and the optimizer's state are in the host's memory. Raises: InputError without such a folder.
    """

    folder: str | Path = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shards_on_host:
            raise InputError("DiskOffloadPolicy: with params=False and grads=False nothing would be in files")
        if not self.folder or not Path(self.folder).is_dir():
            raise InputError(f"DiskOffloadPolicy.folder must be an existing folder, got {str(self.folder)!r}")


DEFAULT_OFFLOAD = OffloadPolicy()


def adopt(policy: Any) -> Any:
    """Torch's own policy as ours of the same fields; anything else as it is."""
    for theirs, ours in _ADOPTED.items():
        if isinstance(policy, theirs):
            return ours(**{field.name: getattr(policy, field.name) for field in dataclasses.fields(theirs)})
    return policy


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a larger mesh are data parallel, by name; a tuple of names is flattened into one axis.

    shard: axes that parameters are sharded over. replicate: axes that hold copies of the shards.
    Raises: InputError where both are None.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise InputError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes of ``shard`` as a tuple."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes of ``replicate`` as a tuple."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


_ADOPTED: dict[Any, Any] = {
    torch_fsdp.TorchMixedPrecisionPolicy: MixedPrecisionPolicy,
    torch_fsdp.TorchCPUOffloadPolicy: CPUOffloadPolicy,
    torch_fsdp.TorchOffloadPolicy: OffloadPolicy,
    torch_fsdp.TorchDataParallelMeshDims: DataParallelMeshDims,
}
_ON_OFF = {"on": True, "off": False}
_WATCH_SECONDS = ("suspect_s", "answer_s", "lost_s", "stall_s", "collective_s")


@dataclass(frozen=True)
class WatchPolicy:
    """When a rank that waits becomes suspicious, and what is an error then. Alike on all ranks; seconds.

    on: False starts no thread and sends nothing; a rank that never comes is then found by the time limit.
    suspect_s: a rank that has waited so long asks all others what they do.
    answer_s: how long it waits for their answers.
    lost_s: a rank that hasn't answered for so long, though its process or connection seems alive, is lost.
    stall_s: a rank that others wait for, and that has neither computed nor waited for so long, is an error;
        None: it is reported and waited for, since a program may sleep. 600 suits most jobs.
    collective_s: a collective that all its ranks have launched, and that hasn't ended for so long, is an
        error; None: the network is called slow, and waited for.
    signal: SIGUSR1 prints the table of all ranks, SIGTERM who is lost before it ends; False: both are left.

    Raises: InputError for a value that isn't positive.
    """

    on: bool = True
    suspect_s: float = 1.0
    answer_s: float = 0.7
    lost_s: float = 30.0
    stall_s: float | None = None
    collective_s: float | None = None
    signal: bool = True

    def __post_init__(self) -> None:
        for field in ("on", "signal"):
            if not isinstance(getattr(self, field), bool):
                raise InputError(f"WatchPolicy.{field} must be True or False, got {getattr(self, field)!r}")
        for field in _WATCH_SECONDS:
            value = getattr(self, field)
            if field in ("stall_s", "collective_s") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InputError(f"WatchPolicy.{field} must be a positive number of seconds, got {value!r}")

    @classmethod
    def from_text(cls, text: str) -> "WatchPolicy":
        """``"off"``, or fields as ``"suspect_s=2,stall_s=600,signal=off"``; "" is the default.

        Raises: InputError for anything else.
        """
        if text.strip() in ("", "on"):
            return cls()
        if text.strip() == "off":
            return cls(on=False)
        values: dict[str, float | bool] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            try:
                if name == "signal" and value in _ON_OFF:
                    values[name] = _ON_OFF[value]
                    continue
                if name not in _WATCH_SECONDS:
                    raise ValueError
                values[name] = float(value)
            except ValueError:
                raise InputError(
                    f'can\'t read the watch policy {text!r} at {part!r}: expected "off", or some of '
                    f'{", ".join(_WATCH_SECONDS)}, signal, as "suspect_s=2,stall_s=600,signal=off"'
                ) from None
        return cls(**values)  # type: ignore[arg-type]
