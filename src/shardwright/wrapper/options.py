"""What the wrapper's arguments are made of: names and meanings as in ``torch.distributed.fsdp``."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from shardwright.errors import InputError
from shardwright.policy import BackwardPrefetch as When
from shardwright.policy import MixedPrecisionPolicy, SchedulePolicy
from shardwright.torch_fsdp import OPTIONS_MODULE
from shardwright.torch_private import BatchNorm


class ShardingStrategy(Enum):
    """What is sharded, and when.

    - ``FULL_SHARD``: parameters, gradients and the optimizer's state; parameters are gathered for the forward
      and again for the backward (ZeRO-3).
    - ``SHARD_GRAD_OP``: the same at rest, but parameters stay unsharded from the forward to the backward
      (ZeRO-2).
    - ``NO_SHARD``: parameters are kept whole and their gradients are all-reduced, as
      ``DistributedDataParallel`` does.
    - ``HYBRID_SHARD``: ``FULL_SHARD`` over a second axis' worth of ranks, such as those of a host, and copies
      over the others.
    - ``_HYBRID_SHARD_ZERO2``: the same with ``SHARD_GRAD_OP``.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()

    @property
    def is_hybrid(self) -> bool:
        """Whether shards are copied over a second axis of the mesh."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def reshard_after_forward(self) -> bool | None:
        """What ``fully_shard`` is told: False keeps parameters unsharded for the backward, None is its
        default.
        """
        resharded = self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        return None if resharded else False


class BackwardPrefetch(Enum):
    """When the next group's all-gather is issued in the backward; ``None`` in its place: when it is needed.

    - ``BACKWARD_PRE``: before this group's backward.
    - ``BACKWARD_POST``: after it, with one unsharded group less at the peak.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class TrainingState(Enum):
    """Where a wrapped module stands."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class StateDictType(Enum):
    """What ``state_dict`` returns: whole tensors, DTensors, or this rank's plain shards."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """What names a parameter in an optimizer's state."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass(frozen=True)
class CPUOffload:
    """Whether shards, their gradients and so the optimizer's step are on the host.

    Args:
        offload_params: True puts them there.
    """

    offload_params: bool = False


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes, as in torch. Only floating-point tensors are cast; at rest parameters keep the dtype they were
    made in.

    Args:
        param_dtype: of unsharded parameters; None: the dtype at rest.
        reduce_dtype: in which gradients are summed; None: ``param_dtype``.
        buffer_dtype: to which buffers are cast when wrapped; state dicts have them in their own dtype.
        keep_low_precision_grads: not supported. Torch refuses a ``.grad`` of another dtype than its
            parameter, so the gradients of shards always have the dtype at rest.
        cast_forward_inputs: whether a nested wrapper casts the inputs of its forward to ``param_dtype``.
        cast_root_forward_inputs: whether the outermost wrapper does.

    Raises:
        InputError: ``keep_low_precision_grads=True``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (BatchNorm,)

    def __post_init__(self) -> None:
        if self.keep_low_precision_grads:
            raise InputError(
                "MixedPrecision.keep_low_precision_grads=True is not supported: the gradient of a shard has "
                "the dtype of the shard; leave it out, or build the model in the dtype that you want"
            )

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """What the runtime is told; inputs are cast by the wrapper.

        Raises:
            InputError: ``param_dtype`` or ``reduce_dtype`` isn't a floating-point dtype.
        """
        sums = self.reduce_dtype or self.param_dtype  # None means something else to fully_shard of torch 2.15
        return MixedPrecisionPolicy(self.param_dtype, sums, None, cast_forward_inputs=False)


def adopt(option: Any) -> Any:
    """Torch's own option as ours of the same name and values; anything else as it is. Programs that change
    one import still have the other names from ``torch.distributed.fsdp``."""
    kind = type(option)
    ours: Any = globals().get(kind.__name__)
    if ours is None or kind.__module__ != OPTIONS_MODULE:
        return option
    if isinstance(option, Enum):
        return ours[option.name]
    return ours(
        **{each.name: getattr(option, each.name) for each in fields(ours) if hasattr(option, each.name)}
    )


def schedule_policy(prefetch: BackwardPrefetch | None) -> SchedulePolicy:
    """The schedule of a model that is wrapped with these arguments. Raises: InputError."""
    names = {
        None: When.NONE,
        BackwardPrefetch.BACKWARD_PRE: When.PRE,
        BackwardPrefetch.BACKWARD_POST: When.POST,
    }
    if prefetch not in names:
        raise InputError(f"backward_prefetch must be a BackwardPrefetch or None, got {prefetch!r}")
    return SchedulePolicy(backward_prefetch=names[prefetch])


@dataclass(frozen=True)
class StateDictConfig:
    """How ``state_dict`` gives tensors.

    Args:
        offload_to_cpu: they are on the host.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """How ``state_dict`` gives whole tensors.

    Args:
        rank0_only: other ranks than the mesh's first get an empty dict, and hold no whole parameter.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """How ``state_dict`` gives this rank's plain shards."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """How ``state_dict`` gives DTensors."""


@dataclass(frozen=True)
class OptimStateDictConfig:
    """How ``optim_state_dict`` gives tensors.

    Args:
        offload_to_cpu: they are on the host.
    """

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """How ``optim_state_dict`` gives whole tensors.

    Args:
        rank0_only: other ranks than the mesh's first get an empty dict.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """How ``optim_state_dict`` gives this rank's plain shards.

    Args:
        offload_to_cpu: they are on the host.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """How ``optim_state_dict`` gives DTensors."""


_CONFIGS = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(frozen=True)
class StateDictSettings:
    """What ``state_dict`` and ``optim_state_dict`` of a wrapped module return.

    Args:
        state_dict_type: whole tensors, DTensors, or this rank's plain shards.
        state_dict_config: the config of that type for ``state_dict``.
        optim_state_dict_config: the config of that type for ``optim_state_dict``.
    """

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)

    @classmethod
    def of(
        cls,
        kind: StateDictType,
        config: StateDictConfig | None = None,
        optim_config: OptimStateDictConfig | None = None,
    ) -> "StateDictSettings":
        """Settings of one type.

        Args:
            kind: the type.
            config: for ``state_dict``; None: the defaults of the type.
            optim_config: for ``optim_state_dict``; None: the defaults of the type.

        Returns:
            The settings.

        Raises:
            InputError: a config is of another type.
        """
        kind, config, optim_config = adopt(kind), adopt(config), adopt(optim_config)
        wanted, optim_wanted = _CONFIGS[kind]
        config = wanted() if config is None else config
        optim_config = optim_wanted() if optim_config is None else optim_config
        for got, expected in ((config, wanted), (optim_config, optim_wanted)):
            if not isinstance(got, expected):
                raise InputError(f"{kind} takes a {expected.__name__}, got {type(got).__name__}")
        return cls(kind, config, optim_config)
