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
    """What is sharded, and when. ``NO_SHARD`` keeps parameters whole and all-reduces their gradients."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()

    @property
    def is_hybrid(self) -> bool:
        """Whether shards are copied over a second axis."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def reshard_after_forward(self) -> bool | None:
        """What ``fully_shard`` is told: False keeps parameters unsharded for the backward."""
        resharded = self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        return None if resharded else False


class BackwardPrefetch(Enum):
    """When the next group's all-gather is issued in backward; ``None`` in its place: when it is needed."""

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
    """``offload_params``: shards, their gradients and so the optimizer's step are on the host."""

    offload_params: bool = False


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes, as in torch. Floating-point tensors only; at rest parameters keep the dtype they were made in.

    param_dtype: of unsharded parameters. reduce_dtype: in which gradients are summed; None: ``param_dtype``.
    buffer_dtype: to which buffers are cast when wrapped; state dicts have them in their own dtype.
    cast_forward_inputs, cast_root_forward_inputs: whether a nested, or the outermost, wrapper casts the
        inputs of its forward to ``param_dtype``.
    Raises: InputError for ``keep_low_precision_grads``: torch refuses a ``.grad`` of another dtype than its
        parameter, so the gradients of shards always have the dtype at rest.
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
        """What the runtime is told; inputs are cast by the wrapper."""
        return MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, None, cast_forward_inputs=False)


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


def schedule_policy(prefetch: BackwardPrefetch | None, limit_all_gathers: bool) -> SchedulePolicy:
    """The schedule of a model that is wrapped with these arguments. Raises: InputError."""
    names = {
        None: When.NONE,
        BackwardPrefetch.BACKWARD_PRE: When.PRE,
        BackwardPrefetch.BACKWARD_POST: When.POST,
    }
    if prefetch not in names:
        raise InputError(f"backward_prefetch must be a BackwardPrefetch or None, got {prefetch!r}")
    return SchedulePolicy(backward_prefetch=names[prefetch], max_gathers=2 if limit_all_gathers else None)


@dataclass(frozen=True)
class StateDictConfig:
    """``offload_to_cpu``: tensors of the state dict are on the host."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: other ranks get an empty dict, and hold no whole parameter."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """Of this rank's plain shards."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """Of DTensors."""


@dataclass(frozen=True)
class OptimStateDictConfig:
    """``offload_to_cpu``: tensors of the optimizer's state dict are on the host."""

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """``rank0_only``: other ranks get an empty dict."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Of this rank's plain shards."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Of DTensors."""


_CONFIGS = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(frozen=True)
class StateDictSettings:
    """What ``state_dict`` and ``optim_state_dict`` of a wrapped module return."""

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
        """Settings of a kind, its default configs in place of None. Raises: InputError for another's."""
        kind, config, optim_config = adopt(kind), adopt(config), adopt(optim_config)
        wanted, optim_wanted = _CONFIGS[kind]
        config = wanted() if config is None else config
        optim_config = optim_wanted() if optim_config is None else optim_config
        for got, expected in ((config, wanted), (optim_config, optim_wanted)):
            if not isinstance(got, expected):
                raise InputError(f"{kind} takes a {expected.__name__}, got {type(got).__name__}")
        return cls(kind, config, optim_config)
