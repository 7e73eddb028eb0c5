"""``estimate``: a model on the meta device, a sample batch and a cluster in; seconds and bytes out."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.engine.building.grouping import Groups
from shardwright.errors import ConfigError, InputError
from shardwright.observe.steps.drawing import Drawing
from shardwright.options import limited
from shardwright.plan import pipeline
from shardwright.plan.answer import in_words
from shardwright.plan.axes import ALONE, AxisSizes, exchanged
from shardwright.plan.cluster import FULL, Cluster
from shardwright.plan.constants import ACCURACY, MEMORY_ERROR, PUBLISHED_NETWORK, PUBLISHED_RANKS, Accuracy
from shardwright.plan.events import TracedGroup
from shardwright.plan.file import offload_name
from shardwright.plan.groups import traced_groups
from shardwright.plan.levers import coded, first_blocks, kept_groups, recomputed, recomputes
from shardwright.plan.memory import AtRest, HeldBytes, Sharding, peak, reserved
from shardwright.plan.phases import PhaseBytes, in_table, phases_of
from shardwright.plan.picture import drawing_of, named
from shardwright.plan.presets import preset, schedule
from shardwright.plan.prices import Prices
from shardwright.plan.simulate import Timeline
from shardwright.plan.trace import trace
from shardwright.plan.traced import cut_layers
from shardwright.plan.transformer import Architecture, Microbatch, Recompute
from shardwright.plan.transformer import workload as workload_of_numbers
from shardwright.plan.workload import Workload
from shardwright.policy import DEFAULT_OFFLOAD, Base, MixedPrecisionPolicy, OffloadPolicy, SchedulePolicy
from shardwright.quantized import encodings
from shardwright.schedule.schedule import Phase, Schedule
from shardwright.torch_private import tree_map

_SAID = ("runtime", "microbatches", "reshard_after_forward", "keep", "recompute", "base")
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Choice(AxisSizes):
    """How a model is trained: the input of ``estimate``.

    Sizes of a mesh are given by their names: ``tp``, ``cp``, ``ep`` and ``pp`` as ``shardwright.mesh`` has
    them, and ``chunks``, the stages of a pipeline on each rank (1 is 1F1B, more are interleaved). A
    microbatch is then of the tp x cp x pp ranks that share it, and ``shards`` counts ranks of dp and cp.

    Args:
        runtime: "shardwright", "fsdp1" or "fsdp2".
        groups: as ``fully_shard(groups=...)`` takes them.
        mp_policy: dtypes; by default parameters in bfloat16 and gradients summed in float32.
        reshard_after_forward: False keeps every group unsharded until its backward. With an int, groups are
            sharded over that many ranks until then.
        shards: ranks that a parameter is sharded over; it is replicated over the others. None: all of them.
        microbatches: samples that gradients are accumulated over in a step.
        policy: when collectives are issued, instead of the runtime's own policy.
        offload: as ``fully_shard(offload_policy=...)`` takes it.
        base: "nf4" if frozen weights are quantised for training (in the model passed to ``estimate`` they
            aren't yet), else "plain".
        recompute: share of the blocks under activation checkpointing, 0 to 1: the first ones in the order in
            which they run, and never the group that runs last.
        keep: share of the groups that stay unsharded from their forward to their backward, 0 to 1: the ones
            that the backward needs first. The others are resharded as ``reshard_after_forward`` says.

    Raises:
        InputError: ``base`` is neither, ``shards``, ``microbatches`` or a size of the mesh is below 1, or
            ``recompute`` or ``keep`` is no share.
    """

    runtime: str = "shardwright"
    groups: Groups = "auto"
    mp_policy: MixedPrecisionPolicy = field(default=_BF16)
    reshard_after_forward: bool | int = True
    shards: int | None = limited(None, ge=1)
    microbatches: int = limited(1, ge=1)
    policy: SchedulePolicy | None = None
    offload: OffloadPolicy = DEFAULT_OFFLOAD
    base: Base = "plain"
    recompute: float = limited(0.0, ge=0, le=1)
    keep: float = limited(0.0, ge=0, le=1)

    __str__ = object.__str__  # all of it, and not of the axes alone

    def shards_on(self, ranks: int) -> int:
        """Of how many of a cluster's ranks each has a part of a parameter.

        Args:
            ranks: of the cluster.

        Returns:
            ``shards``, or all that the axes leave.

        Raises:
            InputError: the ranks can't be divided so.
        """
        of_data = self.data_ranks(ranks)
        shards = self.shards or of_data
        if of_data % shards:
            raise InputError(f"Choice.shards must divide the cluster's {of_data} ranks, got {shards}")
        return shards


@dataclass(frozen=True)
class Estimate:
    """Predicted time and memory of a step on one rank. ``print`` shows it as a table.

    Attributes:
        cluster: the cluster that it was estimated for.
        choice: how the model is trained.
        workload: the traced model and one microbatch of it.
        schedule: when collectives are issued; it prints as ``model.schedule()`` does.
        timeline: what the simulation did, and when.
        held: the bytes that are held after each action, and the peak inside each stretch of compute.
        kept: the bytes at rest.
    """

    cluster: Cluster
    choice: Choice
    workload: Workload
    schedule: Schedule
    timeline: Timeline
    held: tuple[HeldBytes, ...]
    kept: AtRest

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank, or on those that share it: elements of the sample's first
        tensor if those are integers, else its first dim.
        """
        return self.workload.tokens

    @property
    def step_s(self) -> float:
        """Seconds of a step, the optimizer's included."""
        return float(self.timeline.step_s)

    @property
    def peak(self) -> HeldBytes:
        """The moment at which most bytes are held, with the bytes by category."""
        return peak(self.held)

    @property
    def over_nbytes(self) -> float:
        """Bytes by which a rank holds more than it may, on its device and, where that memory is known, as its
        part of the host; 0: it fits."""
        cluster, need = self.cluster, self.peak.total + self.host_nbytes * self.cluster.device.is_host
        over = max(need - cluster.room_nbytes, 0.0)
        if cluster.host_memory_nbytes and not cluster.device.is_host:
            over += max(self.host_nbytes - FULL * cluster.host_memory_nbytes / cluster.ranks_on_host, 0.0)
        return over

    @property
    def fits(self) -> bool:
        """Whether each rank holds no more than it may (``Cluster.room_nbytes``), and each host."""
        return not self.over_nbytes

    @property
    def phases(self) -> dict[str, PhaseBytes]:
        """Bytes by phase, of a device by category, of a rank's host and of files: while a model is loaded, in
        the first step (whose optimizer has no state until its end), in a steady step, in an evaluation of a
        microbatch, in a save of model and optimizer, and while both are loaded from that.
        """
        shards = self.choice.shards_on(self.cluster.ranks)
        return phases_of(self.schedule, self.workload, self.kept, self.peak, shards)

    @property
    def exchanged(self) -> dict[str, int]:
        """Bytes of a rank's tensors that a microbatch exchanges over "tp", "cp", "ep" and "pp": of an
        all-to-all what goes in, of an all-gather what comes out, of a reduce-scatter what goes in; of the
        last stage."""
        return exchanged(self.workload)

    def by_phase(self) -> str:
        """``phases`` as a table; of the host with all of its ranks.

        Returns:
            Lines of text, in GiB.
        """
        return in_table(self.phases, self.cluster.ranks_on_host)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes that torch's caching allocator takes for the peak at most, as was seen in few runs."""
        return int(reserved(self.peak.total, self.cluster.device))

    @property
    def host_nbytes(self) -> int:
        """Bytes of a rank's host that shards, gradients and the optimizer's state take; 0 without offload."""
        return self.kept.on_host

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, of all ranks together."""
        of_all = self.tokens * self.choice.microbatches * self.cluster.ranks
        return of_all / self.choice.sharing / self.step_s

    @property
    def model_flops(self) -> float:
        """FLOPs of a step on one rank: three times the matmuls and the attention of the forward, so
        recomputation doesn't count.
        """
        return sum(self._flops_by_dtype.values())

    @property
    def _flops_by_dtype(self) -> Mapping[str, float]:
        """``model_flops``, by the dtype that they are computed in, the most first; of a pipeline's ranks the
        mean."""
        found: defaultdict[str, float] = defaultdict(float)
        stages, earlier = self.choice.pp, self.workload.earlier or self.workload
        for work, times in ((self.workload, 1), (earlier, stages - 1)):
            for _, stretch in work.phases[Phase.FORWARD]:
                for op in stretch.ops:
                    if op.flops:
                        found[op.dtype] += 3.0 * self.choice.microbatches * op.flops * times / stages
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def mfu(self) -> float:
        """``model_flops`` divided by the FLOPs that the device can do in that time, each at the peak of the
        dtype that it is computed in, by the data sheet (or as measured).
        """
        device, flops = self.cluster.device, self._flops_by_dtype
        at_peak_s = sum(each / device.flops_in(dtype) for dtype, each in flops.items())
        return at_peak_s / self.step_s

    @property
    def accuracy(self) -> Accuracy:
        """How far seconds were off where a device's numbers were obtained as this one's were. In another
        dtype than that in which they were measured or fitted, they are those of a data sheet. NaN for what no
        measured run shows, as offload.
        """
        device = self.cluster.device
        dtype = next(iter(self._flops_by_dtype), device.dtype)
        known = dtype == device.dtype or {dtype, device.dtype} <= {"bfloat16", "float16"}
        found = ACCURACY[device.source if known else "data sheet"]
        unseen = self._unseen(found is ACCURACY["measured"])
        return found if unseen is None else Accuracy(math.nan, math.nan, unseen)

    def _unseen(self, measured: bool) -> str | None:
        """What no run shows that a prediction was compared with."""
        cluster = self.cluster
        if self.choice.offload != DEFAULT_OFFLOAD:
            return "no run with states or parameters on the host was compared with its prediction"
        if any(group.coded[0] for group in self.workload.groups):
            return "no run with quantised weights was compared with its prediction"
        if self.choice.axes != ALONE:
            return f"no run with {self.choice.axes} was compared with its prediction"
        if cluster.hosts > 1 and measured and cluster.measured_hosts < 2:
            return "what is between hosts is as the cluster's file says, and was not measured"
        if not measured and cluster.ranks > PUBLISHED_RANKS:
            return f"no published run has more than {PUBLISHED_RANKS} devices"
        if not measured and cluster.hosts > 1 and cluster.network < PUBLISHED_NETWORK:
            return f"published runs have {PUBLISHED_NETWORK / 1e9:g} GB/s or more between hosts"
        return None

    def cost_per_billion_tokens(self, price_per_hour: float) -> float:
        """The cost of a billion tokens.

        Args:
            price_per_hour: of one device, in any currency.

        Returns:
            The cost in that currency.
        """
        return 1e9 / self.tokens_per_s * self.cluster.ranks * price_per_hour / 3600

    def drawing(self) -> Drawing:
        """A drawing of the timeline above the memory, for at most two microbatches.

        Returns:
            A drawing; ``drawing().save("step.html")`` writes it.
        """
        title = (
            f"A step of {self.workload.name} on {self.cluster.ranks} x {self.cluster.device.name}: "
            f"{self.step_s:.3f} s, as planned"
        )
        names = [group.name for group in self.workload.groups]
        capacity = int(self.cluster.memory_nbytes)
        return drawing_of(title, self.timeline.intervals, self.held, names, capacity)

    def __str__(self) -> str:
        return self.table()

    def table(self, price_per_hour: float | None = None, tokens: float = 1e9) -> str:
        """What ``print`` shows: ``answer`` in words.

        Args:
            price_per_hour: of one device; adds what ``tokens`` cost.
            tokens: to be trained on.

        Returns:
            Lines of text.
        """
        return in_words(self.answer(tokens, price_per_hour))

    def answer(self, tokens: float = 1e9, price_per_hour: float | None = None) -> dict[str, Any]:
        """Whether it fits, how it is trained, how fast, and for how long and how much.

        Args:
            tokens: to be trained on.
            price_per_hour: of one device.

        Returns:
            The answer as data, which ``json.dumps`` takes. Bytes are of one device, ``host_nbytes`` of a host
            with all of its ranks, ``checkpoint_nbytes`` of all ranks. ``error`` is None where no measured run
            stands behind the seconds.
        """
        cluster, choice, held, accuracy = self.cluster, self.choice, self.peak, self.accuracy
        known, hours = accuracy.most == accuracy.most, tokens / self.tokens_per_s / 3600
        device_hours = hours * cluster.ranks
        return {name: getattr(choice, name) for name in _SAID} | {
            "model": self.workload.name,
            "parameters": self.workload.parameters or self.workload.numel,
            "device": cluster.device.name,
            "ranks": cluster.ranks,
            "hosts": cluster.hosts,
            "network_bytes_per_s": cluster.network if cluster.hosts > 1 else None,
            "network_assumed": cluster.hosts > 1 and not cluster.host_bandwidth,
            "groups": len(self.workload.groups),
            "mesh": str(choice.axes) if choice.axes != ALONE else None,
            "shards": choice.shards_on(cluster.ranks),
            "microbatch_tokens": self.tokens,
            "offload": offload_name(choice.offload) or "some",
            "fits": self.fits,
            "peak_nbytes": held.total,
            "memory_error": MEMORY_ERROR,
            "peak_at": named(held.at, self.schedule.names),
            "peak_by_category": {str(category): nbytes for category, nbytes in held.nbytes.items()},
            "room_nbytes": cluster.room_nbytes,
            "memory_nbytes": cluster.memory_nbytes,
            "has_budget": bool(cluster.budget_nbytes),
            "over_nbytes": self.over_nbytes,
            "reserved_nbytes": self.reserved_nbytes,
            "host_nbytes": self.host_nbytes * cluster.ranks_on_host,
            "host_room_nbytes": FULL * cluster.host_memory_nbytes or None,
            "checkpoint_nbytes": self.phases["save"].disk,
            "phases": {name: each.total for name, each in self.phases.items()},
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "error": accuracy.most if known else None,
            "error_mean": accuracy.mean if known else None,
            "error_why": accuracy.why,
            "mfu": self.mfu,
            "dtypes": ", ".join(self._flops_by_dtype),
            "exposed": float(self.timeline.exposed_s) / self.step_s,
            "tokens": tokens,
            "days": hours / 24,
            "device_hours": device_hours,
            "price_per_hour": price_per_hour,
            "cost": None if price_per_hour is None else device_hours * price_per_hour,
        }


def estimate(
    model: nn.Module | Architecture,
    sample: Any,
    cluster: Cluster,
    choice: Choice | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
) -> Estimate:
    """Predict one training step: its seconds, and its bytes by category at every event.

    No process group is needed, nothing is computed, and the model isn't changed. Adam with two states in
    float32 is counted. At rest trained parameters are in float32, frozen ones in their own dtype.

    Args:
        model: not sharded yet; on any device. On the meta device it takes no memory. Or the numbers of a
            decoder, of which each block is a group, whatever ``choice.groups`` says.
        sample: one microbatch of one rank: a tensor, a sequence of arguments or a mapping of named ones. Only
            shapes and dtypes matter, so they may be on the meta device too. Of numbers a ``Microbatch``.
        cluster: the devices and the links between them.
        choice: how it is trained; None: the defaults of ``Choice``.
        loss: makes a tensor of one element from the model's output; None if the output is one, or has
            ``.loss``.

    Returns:
        The estimate; print it.

    Raises:
        InputError: the model can't be traced without data, has no loss or can't be grouped, or the ranks
            can't be divided as asked; or numbers come without a ``Microbatch``, or in more than 16 bits.
        ConfigError: the runtime isn't known, ``cluster`` isn't one, or the rate of its device in a dtype of
            the model isn't known.

    Examples:
        >>> from shardwright.plan import Choice, estimate
        >>> from shardwright.plan.cluster import Cluster, device
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])
        ...     sample = torch.empty(1024, 4096)
        >>> cluster = Cluster(device("H100"), ranks=8)
        >>> choice = Choice(groups=[[str(n)] for n in range(8)])
        >>> step = estimate(model, sample, cluster, choice, loss=torch.sum)
        >>> step.fits, step.step_s < 1
        (True, True)
    """
    choice = choice or Choice()
    return price(workload_of(model, sample, choice, loss), cluster, choice)


def workload_of(
    model: nn.Module | Architecture, sample: Any, choice: Choice, loss: Callable[[Any], Tensor] | None = None
) -> Workload:
    """The model and one microbatch, in the groups of ``choice``. Raises: InputError as ``estimate``."""
    if isinstance(model, Architecture):
        return workload_of_numbers(model, a_microbatch(sample, choice), choice.axes)
    args, named = arguments(_part_of(sample, choice.cp))
    quantised = next((name for name, module in model.named_modules() if encodings(module)), None)
    if quantised is not None:
        raise InputError(
            f"{type(model).__name__} has quantised weights ({quantised!r}), which can't be traced without "
            'data; pass the model as it was before quantize_, and Choice(base="nf4")'
        )
    shared = choice.axes != ALONE
    numel = sum(param.numel() for param in model.parameters()) if shared else 0
    groups = chosen_groups(model, choice)
    with cut_layers(model, choice):
        found = trace(model, args, named, groups, choice.mp_policy.param_dtype, loss, choice)
    tokens = _tokens([*args, *named.values()]) * choice.cp
    return replace(found, tokens=tokens, name=type(model).__name__, parameters=numel)


def price(workload: Workload, cluster: Cluster, choice: Choice) -> Estimate:
    """Simulate a step. ``choice.groups`` has no part in it: ``workload`` is in its groups already.

    Raises: InputError where the ranks can't be divided as asked.
    """
    cluster = a_cluster(cluster)
    if choice.axes != ALONE and not workload.parameters:
        raise InputError(
            f"Choice asks for {choice.axes} of {workload.name}, which was traced without: pass it to of_model"
        )
    runs = preset(choice.runtime)
    workload = _changed(workload, choice)
    if choice.policy is not None:
        runs = replace(runs, policy=choice.policy)
    kept = kept_groups(workload, choice.keep)
    reshards = choice.reshard_after_forward if choice.pp == 1 else False
    planned = schedule(workload, runs, reshards, kept)
    shards = choice.shards_on(cluster.ranks)
    smaller = _smaller_world(reshards, shards)
    sizes = _itemsizes(choice.mp_policy)
    prices = Prices(
        cluster, cluster.constants, runs, shards, *sizes, 1.0, choice.offload, smaller, choice.axes
    )
    timeline = pipeline.timeline(planned, workload, prices, choice.microbatches, keeps=True)
    sharding = Sharding(shards, sizes[1], choice.microbatches > 1, choice.offload, smaller)
    held = pipeline.held(planned, workload, runs, sharding, choice.axes, choice.microbatches)
    planned = replace(planned, names=tuple(group.name for group in workload.groups))
    return Estimate(cluster, choice, workload, planned, timeline, tuple(held), sharding.keeps(workload))


def a_cluster(given: object) -> Cluster:
    """What was passed, if it is a cluster. Raises: ConfigError."""
    if isinstance(given, Cluster):
        return given
    raise ConfigError(
        f"the cluster is {given!r}, expected a shardwright.plan.cluster.Cluster: "
        'Cluster(device("H100"), ranks=8), or Cluster.load("cluster.toml")'
    )


def a_microbatch(given: object, choice: Choice) -> Microbatch:
    """What was passed with the numbers of a model, if they can be priced. Raises: InputError."""
    if not isinstance(given, Microbatch) or given.recompute is not Recompute.NONE:
        raise InputError(
            f"the sample is {given!r}, expected with an Architecture a shardwright.plan.Microbatch, as "
            "Microbatch(sequence=2048, sequences=4); of recomputation Choice.recompute is the share"
        )
    dtype = choice.mp_policy.param_dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise InputError(
            f"numbers alone are priced in 16 bits, and Choice.mp_policy.param_dtype is {dtype}: set it to "
            "torch.bfloat16, or pass the module instead"
        )
    return given


def _changed(workload: Workload, choice: Choice) -> Workload:
    """Return it with frozen weights as codes and blocks computed again, as asked. Raises: InputError."""
    if workload.earlier is not None:
        workload = replace(workload, earlier=_changed(workload.earlier, choice))
    if choice.recompute:
        if recomputes(workload):
            raise InputError(
                f"Choice.recompute is {choice.recompute:g}, and the model recomputes by itself: leave it "
                "out, or pass the model without activation checkpointing"
            )
        workload = recomputed(workload, first_blocks(workload, choice.recompute))
    return coded(workload) if choice.base != "plain" else workload


def chosen_groups(model: nn.Module, choice: Choice) -> list[TracedGroup]:
    """The groups that a choice asks for. Raises: InputError."""
    ours = choice.runtime.startswith("shardwright")
    with cut_layers(model, choice):
        return traced_groups(model, choice.groups, choice.mp_policy, cuts=ours)


def _smaller_world(reshard: bool | int, shards: int) -> int | None:
    """Raises: InputError."""
    if isinstance(reshard, bool):
        return None
    if not 1 <= reshard <= shards or shards % reshard:
        raise InputError(
            f"Choice.reshard_after_forward must be True, False or a factor of the {shards} ranks that a "
            f"parameter is sharded over, got {reshard}"
        )
    return reshard


def _itemsizes(policy: MixedPrecisionPolicy) -> tuple[int, int]:
    """Bytes of an element of parameters, and of gradients, on the wire."""
    params = policy.param_dtype or torch.float32
    return (policy.gather_dtype or params).itemsize, policy.sum_dtype(torch.float32, params).itemsize


def arguments(sample: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What a model is called with for a sample: by position, and by name. Raises: InputError for nothing."""
    if isinstance(sample, Tensor):
        return (sample,), {}
    if isinstance(sample, Mapping) and sample:
        return (), sample
    if isinstance(sample, list | tuple) and sample:
        return sample, {}
    raise InputError(
        f"a plan needs a sample batch: a tensor, a sequence of arguments or a mapping of named ones, got "
        f'{sample!r}; for instance torch.empty(4, 2048, dtype=torch.int64, device="meta")'
    )


def _tokens(values: Sequence[Any]) -> int:
    first = next((value for value in values if isinstance(value, Tensor)), None)
    if first is None:
        return 1
    return first.numel() if not first.is_floating_point() else first.shape[0]


def first_tensor(sample: Any) -> Tensor | None:
    """The first one that has dims: its first dim is the sample's rows, its second their tokens."""
    args, named = arguments(sample)
    values = [*args, *named.values()]
    return next((value for value in values if isinstance(value, Tensor) and value.dim()), None)


def _part_of(sample: Any, cp: int) -> Any:
    """What a rank of cp has of it: a part of each row."""
    first = first_tensor(sample)
    if cp == 1 or first is None:
        return sample
    if first.dim() < 2:
        raise InputError(f"cp={cp} shares the tokens of rows, and the sample is {list(first.shape)}")
    return resized(sample, first.shape[0], -(-first.shape[1] // cp))


def resized(sample: Any, rows: int, sequence: int | None) -> Any:
    """The sample with so many rows and tokens in every tensor that has as many as the first one."""
    first = first_tensor(sample)
    if first is None or (rows, sequence) == (first.shape[0], first.shape[1] if first.dim() > 1 else None):
        return sample

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != first.shape[0]:
            return leaf
        shape = [rows, *leaf.shape[1:]]
        if sequence is not None and leaf.dim() > 1 and leaf.shape[1] == first.shape[1]:
            shape[1] = sequence
        return leaf.new_empty(shape).requires_grad_(leaf.requires_grad)

    return tree_map(resize, sample)
