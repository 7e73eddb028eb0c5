"""Every option, as frozen dataclasses that check themselves.

A policy never changes: a setter replaces the whole object (``dataclasses.replace``), so that a schedule
planned from it can tell by identity whether it is still the one in force.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from shardwright.errors import REMOVED, InputError
from shardwright.options import check, limited

if TYPE_CHECKING:
    import torch

Offload = Literal["none", "optimizer", "all"]
"""What of shards, gradients and the optimizer's state is on the host at rest, in files and commands."""
Base = Literal["plain", "nf4"]
"""What frozen weights are at rest: as they are, or quantised."""


def _check_dtype(owner: str, field: str, dtype: "torch.dtype | None") -> None:
    if dtype is None:
        return
    import torch  # noqa: PLC0415 a recipe, which is made of these policies, is checked without torch

    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(
            f"{owner}.{field} must be a floating-point torch.dtype or None, got {dtype!r}; "
            f"for example {owner}({field}=torch.bfloat16)"
        )


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype is used where. None stands for the dtype that the parameter has at rest.

    At rest, parameters and gradients keep the dtype that the module was built with, and so does the
    optimizer's state.

    Args:
        param_dtype: dtype of the parameters that forward and backward see, and of the all-gather where
            ``gather_dtype`` says no other.
        reduce_dtype: dtype in which gradients are summed over ranks and over microbatches. None means what
            it means in the installed torch: from 2.15 on the dtype that the parameter has at rest, before
            2.15 ``param_dtype``. Gradients whose own dtype converts to it exactly are sent in their own
            dtype and converted on arrival.
        output_dtype: floating-point outputs of the module's forward are cast to it.
        cast_forward_inputs: whether floating-point inputs of the module's forward are cast to
            ``param_dtype``.
        param_dtype_override_fn: called once with each parameter when it is sharded; it must answer the same
            on every rank. Where it returns the parameter's own dtype, the parameter is gathered and used in
            that (norms or routers that stay in float32); None or ``param_dtype`` changes nothing. As in torch
            2.15.
        gather_dtype: dtype in which the all-gather sends weights, if not in the one that computes:
            ``torch.bfloat16`` beside weights that compute in float32 halves what is sent. Weights are rounded
            to it, also in a world of one, and computed with in ``param_dtype``; while a group arrives it
            holds both. It isn't for those that ``param_dtype_override_fn`` leaves in their dtype, for
            scalars (whole on every rank), for quantised ones, and for subclasses that say themselves what is
            gathered. Dtypes of 8 bits are refused: they need a scale, and none is sent.

    Raises:
        InputError: a dtype isn't a floating-point ``torch.dtype``, ``gather_dtype`` has 8 bits, or the
            function can't be called.

    Examples:
        >>> bf16 = shardwright.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        >>> model = shardwright.fully_shard(nn.Linear(8, 4), mp_policy=bf16)
        >>> model.weight.dtype, model(torch.ones(2, 8)).dtype  # at rest, in compute
        (torch.float32, torch.bfloat16)
    """

    param_dtype: "torch.dtype | None" = None
    reduce_dtype: "torch.dtype | None" = None
    output_dtype: "torch.dtype | None" = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: "Callable[[torch.nn.Parameter], torch.dtype | None] | None" = dataclasses.field(
        default=None,
        kw_only=True,
        repr=False,  # ranks compare what it has said of each parameter
    )
    gather_dtype: "torch.dtype | None" = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype", "gather_dtype"):
            _check_dtype("MixedPrecisionPolicy", field, getattr(self, field))
        if self.gather_dtype is not None and self.gather_dtype.itemsize < 2:
            raise InputError(
                f"MixedPrecisionPolicy.gather_dtype is {self.gather_dtype}, whose range weights would leave, "
                "as no scale is sent with them; expected 16 bits or more, for example torch.bfloat16"
            )
        if self.param_dtype_override_fn is not None and not callable(self.param_dtype_override_fn):
            raise InputError(
                "MixedPrecisionPolicy.param_dtype_override_fn must be a function of a parameter or None, got "
                f"{self.param_dtype_override_fn!r}"
            )

    def keeps_dtype(self, fqn: str, param: "torch.nn.Parameter") -> bool:
        """Whether ``param_dtype_override_fn`` leaves a parameter in the dtype that it has at rest. Local.

        Args:
            fqn: its name, for the error.
            param: the parameter before it is sharded, of any shape.

        Returns:
            True where the function returned the parameter's own dtype.

        Raises:
            InputError: the function returned anything but that, ``param_dtype`` and None.
        """
        if self.param_dtype_override_fn is None:
            return False
        dtype = self.param_dtype_override_fn(param)
        if dtype not in (None, self.param_dtype, param.dtype):
            raise InputError(
                f"MixedPrecisionPolicy.param_dtype_override_fn returned {dtype!r} for parameter {fqn!r}; "
                f"expected None, param_dtype ({self.param_dtype}) or the parameter's own ({param.dtype})"
            )
        return dtype is not None and dtype == param.dtype

    def sum_dtype(self, at_rest: "torch.dtype", unsharded: "torch.dtype") -> "torch.dtype":
        """The dtype in which a parameter's gradient is summed over ranks and over microbatches. Local.

        Args:
            at_rest: dtype of its shards.
            unsharded: dtype in which forward and backward see it.

        Returns:
            ``reduce_dtype``; where that is None, one of both, as the installed torch means it.
        """
        from shardwright import torch_fsdp  # noqa: PLC0415 as torch in _check_dtype

        return self.reduce_dtype or (at_rest if torch_fsdp.SUMS_AT_REST else unsharded)


DEFAULT_PRECISION = MixedPrecisionPolicy()


class BackwardPrefetch(StrEnum):
    """When the next group's all-gather is issued in the backward.

    - ``PRE``: before this group's backward, so that its compute and the all-gather run at the same time.
    - ``POST``: after it, at the same time as its reduce-scatter. At the peak one group less is unsharded, but
      less communication is overlapped.
    - ``NONE``: when the next group is needed.
    """

    PRE = "pre"
    POST = "post"
    NONE = "none"


class Wire(StrEnum):
    """What a group's collectives send over a network. Results are bit for bit the same with each.

    - ``PLAIN``: every rank's shards, and gradients without their zeros.
    - ``DIFFERENCE``: what has changed since the last all-gather of the same group, compressed without loss.
      Each rank keeps a copy of the whole model on the host, in the dtype that is sent, as far as all copies
      on a host fit into a quarter of its free memory: ``explain`` shows their bytes, and which groups have
      none. Gradients are compressed without loss, too. This needs ``pip install 'shardwright[wire]'``.
    - ``AUTO``: the faster choice for the link, which is measured before the first step. A slow link gets all
      of ``DIFFERENCE``; on a faster one nothing is compressed, and unchanged values aren't gathered a second
      time. This needs the same extra.
    """

    PLAIN = "plain"
    DIFFERENCE = "difference"
    AUTO = "auto"


class Agreement(StrEnum):
    """Whether ranks agree on the collectives that they launch.

    - ``STRICT``: every rank launches the same collectives in the same order, even if it uses other groups.
      Ranks exchange a few words at the begin and at the end of each forward, evaluation and backward.
    - ``OFF``: a rank launches what its own modules need. All ranks must run the same modules in the same
      order, and no words are exchanged.
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


CHECKSUMS = os.environ.get("SHARDWRIGHT_CHECKSUMS", "")
"""What is summed, so that a bit that flips is told: messages over sockets, or memory too; else messages."""
if CHECKSUMS not in ("", "off", "messages", "all"):
    raise InputError(f"SHARDWRIGHT_CHECKSUMS (environment) must be off, messages or all, got {CHECKSUMS!r}")


class _WithoutRemoved:
    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Raises: InputError, with what to do, for an option that was removed."""
        for name in REMOVED.keys() & options.keys():
            raise InputError(f"{cls.__name__}: {REMOVED[name]}")
        return super().__new__(cls)


@dataclass(frozen=True)
class SchedulePolicy(_WithoutRemoved):
    """When collectives are issued, and how many may be outstanding. Counts are numbers of groups.

    The defaults gave the shortest step that takes the memory of two groups (docs/performance.md). Pass it to
    ``FSDPModule.set_schedule_policy``, the same on all ranks.

    Args:
        backward_prefetch: when the next group's all-gather is issued in the backward: before this group's
            backward (pre), after it (post), or when the next group is needed (none). A ``BackwardPrefetch``,
            or its value or name as text.
        forward_prefetch: False issues each forward all-gather only when its group is needed.
        depth: how many groups ahead of the one in use are prefetched.
        budget_nbytes: bytes that prefetched groups may hold while they aren't in use yet; None: ``depth`` is
            the only bound.
        max_reductions: reduce-scatters in flight. Before one more is issued, the oldest one must end. So at
            most this many groups hold an unsharded gradient, besides the group whose gradient is being
            computed.
        keep_last: how many of the groups that the backward needs first stay unsharded from the forward on, if
            their ``reshard_after_forward`` is None. This costs no more memory than their prefetch would.
        bucket_cap_mb: MiB of small groups that share a collective with another group; 0: each has its own.
            Their all-gathers are issued ahead of use, and their gradients are held back until the shared
            reduce-scatter. Groups that share one count as one group in the other fields.
        row_wise: a group that is one ``nn.Embedding`` moves only the rows in use: the all-gather moves those
            that any rank looks up, the reduce-scatter those that any rank has a gradient of. Results are bit
            for bit the same. If other code has hooks on the embedding, all rows are moved. None: True between
            CPU ranks over a network, with ``wire`` plain, for an embedding larger than ``bucket_cap_mb``.
        wire: what all-gathers over a network send: shards (plain), what has changed of them (difference), or
            the faster one for the link (auto). A ``Wire``, or its value or name as text.
        agreement: whether ranks agree on what they launch; off: all must run the same modules in the same
            order. An ``Agreement``, or its value or name as text. The default is the environment variable
            ``SHARDWRIGHT_AGREEMENT``, else strict. If ranks differ in it, an error is raised before their
            first all-gather.

    Raises:
        InputError: a value is not one of these.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> model = shardwright.fully_shard(model, groups=[["0"], ["2"]])
        >>> model.set_schedule_policy(shardwright.SchedulePolicy(depth=2, bucket_cap_mb=0))
    """

    backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE
    forward_prefetch: bool = True
    depth: int = limited(1, ge=0)
    budget_nbytes: int | None = limited(None, ge=0)
    max_reductions: int = limited(2, ge=1)
    keep_last: int = limited(1, ge=0)
    bucket_cap_mb: float = limited(1.0, ge=0)
    row_wise: bool | None = None
    wire: Wire = Wire.PLAIN
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
        check(self)
        if self.bucket_cap_mb == inf:
            raise InputError("SchedulePolicy.bucket_cap_mb must be a number of MiB >= 0, got inf")


@dataclass(frozen=True)
class Grouping:
    """How ``fully_shard(model, groups=Grouping(...))`` chooses groups automatically.

    Args:
        classes: every module of one of these classes, or of a subclass, is a group. Empty: the classes that a
            transformers model names itself (``_fsdp_plan`` and ``_no_split_modules``); for any other model,
            the members of every list of at least two modules of one class.
        least_nbytes: neighbouring groups that hold fewer unsharded bytes than this are merged into one group.

    Raises:
        InputError: ``classes`` holds anything but classes, or ``least_nbytes`` is no int of at least 0.
    """

    classes: tuple[type, ...] = ()
    least_nbytes: int = limited(0, ge=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        if not all(isinstance(cls, type) for cls in self.classes):
            raise InputError(f"Grouping.classes must be classes of modules, got {self.classes!r}")
        check(self)


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

    def __post_init__(self) -> None:
        if self.divide_factor is not None and not self.divide_factor > 0:
            raise InputError(f"the gradient divide factor must be positive, got {self.divide_factor!r}")


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards are stored between uses. This base class: on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Which of parameters, gradients and the optimizer's state are on the host at rest; by default all are.

    If shards or gradients are on the host, the optimizer's step runs there. With ``params=False,
    grads=False`` it runs on the device, which holds the state only during the step. docs/design/streams.md
    lists where the host waits.

    Args:
        pin_memory: page-locked host memory, so that copies in both directions overlap with the host's work
            and the device's compute.
        params: shards are on the host, and are copied to the device when they are unsharded. False: the
            device also keeps a copy of them, in the dtype of the all-gather.
        grads: reduced gradients are copied to the host in the backward. False: they are added up on the
            device until the last backward of a step (``set_is_last_backward``) has ended, and are copied
            once.
        optimizer_state: always True, since the state is on the host in any case.

    Raises:
        InputError: ``optimizer_state=False``, or ``grads=False`` without pinned memory.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4), offload_policy=shardwright.CPUOffloadPolicy())
        >>> model.weight.device
        device(type='cpu')
    """

    pin_memory: bool = True
    params: bool = dataclasses.field(default=True, kw_only=True)
    grads: bool = dataclasses.field(default=True, kw_only=True)
    optimizer_state: bool = dataclasses.field(default=True, kw_only=True)

    @property
    def shards_on_host(self) -> bool:
        """Whether the host has the shards that the optimizer steps, so that the step runs on the host."""
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
    """The optimizer's state and step on the host, the parameters on the device:
    ``CPUOffloadPolicy(params=False)``.

    The device keeps the shards in the dtype of the all-gather, so each shard is copied to it once a step
    instead of at every all-gather; in each forward, where a step has several backwards that reduce gradients.

    Args:
        params: False by default, unlike in ``CPUOffloadPolicy``.

    Raises:
        InputError: as ``CPUOffloadPolicy``.
    """

    params: bool = dataclasses.field(default=False, kw_only=True)


@dataclass(frozen=True)
class DiskOffloadPolicy(CPUOffloadPolicy):
    """As ``CPUOffloadPolicy``, but this rank's shards are in memory-mapped files, whose pages the host can
    drop from memory.

    Gradients and the optimizer's state are in the host's memory.

    Args:
        folder: an existing folder on a local disk. The files are unnamed and disappear when the process ends.

    Raises:
        InputError: there is no such folder, ``params=False`` and ``grads=False`` leave nothing for the files,
            or as ``CPUOffloadPolicy``.
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
    """Torch's own policy as ours of the same fields; anything else as it is.

    Raises: InputError for a field of a newer torch that ours doesn't have and that isn't at its default.
    """
    import torch  # noqa: PLC0415 as in _check_dtype

    from shardwright import torch_fsdp  # noqa: PLC0415 the same

    adopted = {
        torch_fsdp.TorchMixedPrecisionPolicy: MixedPrecisionPolicy,
        torch_fsdp.TorchCPUOffloadPolicy: CPUOffloadPolicy,
        torch_fsdp.TorchOffloadPolicy: OffloadPolicy,
        torch_fsdp.TorchDataParallelMeshDims: DataParallelMeshDims,
    }
    for theirs, ours in adopted.items():
        if theirs is not None and isinstance(policy, theirs):  # None: this torch hasn't the class
            known = {field.name for field in dataclasses.fields(ours)}
            values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(theirs)}
            untouched = theirs() if values.keys() - known else policy
            for name in values.keys() - known:
                if values[name] != getattr(untouched, name):
                    raise InputError(
                        f"{theirs.__name__}.{name} is {values[name]!r}: Shardwright doesn't have this field "
                        f"of torch {torch.__version__}; leave it at its default, {getattr(untouched, name)!r}"
                    )
            return ours(**{name: value for name, value in values.items() if name in known})
    return policy


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a larger mesh are data parallel, by name. A tuple of names is flattened into one axis.

    Args:
        shard: axes that parameters are sharded over.
        replicate: axes that the shards are replicated over.

    Raises:
        InputError: both are None.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise InputError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes of ``shard`` as a tuple; empty for None."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes of ``replicate`` as a tuple; empty for None."""
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


_ON_OFF = {"on": True, "off": False}


@dataclass(frozen=True)
class WatchPolicy:
    """When a waiting rank's watchdog asks the other ranks for their state, and what it treats as an error.

    Pass the same policy on all ranks, to ``set_watch``. Times are in seconds.

    Args:
        on: False starts no watchdog thread and sends nothing. A missing rank is then only detected by the
            time limit of the process group.
        suspect_s: seconds after which a waiting rank asks all others what they are doing.
        answer_s: seconds for which it waits for their answers.
        lost_s: a rank that hasn't answered for so many seconds counts as lost, even if its process or
            connection seems alive.
        stall_s: an error is raised if others wait for a rank that has neither computed nor waited for so
            many seconds. None: the rank is reported and waited for, since a program may sleep. 600 suits most
            jobs.
        collective_s: an error is raised if all ranks have launched a collective and it hasn't ended after so
            many seconds. None: the network is reported as slow, and waited for.
        signal: the signal SIGUSR1 prints the table of all ranks, and SIGTERM prints which ranks are lost
            before the process ends; False: neither is handled.

    Raises:
        InputError: a time isn't positive, or ``on`` or ``signal`` isn't a bool.
    """

    on: bool = True
    suspect_s: float = limited(1.0, gt=0)
    answer_s: float = limited(0.7, gt=0)
    lost_s: float = limited(30.0, gt=0)
    stall_s: float | None = limited(None, gt=0)
    collective_s: float | None = limited(None, gt=0)
    signal: bool = True

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def from_text(cls, text: str) -> "WatchPolicy":
        """A policy from text, in the format of the environment variable ``SHARDWRIGHT_WATCH``.

        Args:
            text: ``"off"``, or fields as in ``"suspect_s=2,stall_s=600,signal=off"``; ``""`` and ``"on"`` are
                the default.

        Returns:
            The policy.

        Raises:
            InputError: the text is neither.
        """
        if text.strip() in ("", "on"):
            return cls()
        if text.strip() == "off":
            return cls(on=False)
        seconds = [field.name for field in dataclasses.fields(cls) if field.name.endswith("_s")]
        values: dict[str, float | bool] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            try:
                if name == "signal" and value in _ON_OFF:
                    values[name] = _ON_OFF[value]
                    continue
                if name not in seconds:
                    raise ValueError
                values[name] = float(value)
            except ValueError:
                raise InputError(
                    f'can\'t read the watch policy {text!r} at {part!r}: expected "off", or some of '
                    f'{", ".join(seconds)}, signal, as "suspect_s=2,stall_s=600,signal=off"'
                ) from None
        return cls(**values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Lora:
    """What adapters are like.

    Args:
        targets: which layers and 3-D parameters (stacked experts, ``"experts.down_proj"``) get one: their
            name, its last parts (``"q_proj"``), or a pattern (``"*.mlp.*"``); "auto": every ``nn.Linear``,
            except the head (``get_output_embeddings``) and routers.
        rank: rows of A and columns of B, at least 1.
        alpha: the product is scaled by ``alpha / rank``, if not as ``rslora`` says; above 0.
        dropout: probability, of the adapter's input; at least 0 and below 1.
        rslora: scale by ``alpha / sqrt(rank)`` (Kalajdzievski, arXiv:2312.03732).
        dora: train the lengths of the rows too (Liu et al., arXiv:2402.09353).

    Raises:
        InputError: a value is out of range, or there are no targets.
    """

    targets: Sequence[str] = "auto"
    rank: int = limited(8, ge=1)
    alpha: float = limited(16.0, gt=0)
    dropout: float = limited(0.0, ge=0, lt=1)
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        targets = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        object.__setattr__(self, "targets", targets)
        if not targets:
            raise InputError("Lora.targets is empty; name layers, for example ('q_proj', 'v_proj')")
        check(self)

    @property
    def scaling(self) -> float:
        """The factor of the product."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)
