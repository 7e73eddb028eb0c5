"""The systems under comparison, each driven the same way: the same model, AdamW(foreach), the same batches.

A system is built on every rank, inside the default process group, and offers one training step, a flush that
returns when nothing is in flight any more, and what its communication takes alone.
"""

import importlib
import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import shardwright
import shardwright.wrapper
from bench.adapted import adapted
from bench.model import PRECISIONS, Block, Transformer
from shardwright.torch_private import all_gather_of, reduce_scatter_of

ALONE_REPEATS = 3
LEARNING_RATE = 1e-4


class System(ABC):
    """One way of training. ``module`` is what is called, ``optimizer`` holds its (sharded) parameters.

    masters: parameters in fp32, where the module computes with a copy of them in another dtype.
    """

    def __init__(self, module: nn.Module, masters: list[nn.Parameter] | None = None) -> None:
        self.module = module
        self.masters = masters or []
        self.optimizer = torch.optim.AdamW(masters or module.parameters(), lr=LEARNING_RATE, foreach=True)

    def step(self, tokens: Tensor) -> Tensor:
        """One training step on this rank's batch, int64 [batch, sequence + 1]; returns its loss, a scalar."""
        self.optimizer.zero_grad()
        computed = list(self.module.parameters()) if self.masters else []
        with torch.no_grad():
            for master, param in zip(self.masters, computed, strict=True):
                param.copy_(master)
                param.grad = None
        loss = self.module(tokens)
        loss.backward()
        for master, param in zip(self.masters, computed, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        return loss.detach().float()

    def flush(self) -> None:  # noqa: B027 (nothing to do is the rule)
        """Returns when nothing is in flight; the systems of torch wait for everything inside the step."""

    def exposed_s(self) -> float | None:
        """Seconds that the host was held up by collectives since the start; None: it isn't counted."""
        return None

    def unsharded_nbytes(self) -> int | None:
        """Most bytes that unsharded parameters have taken at once; None: it isn't counted."""
        return None

    def at_rest_nbytes(self) -> int | None:
        """Bytes of this rank's shards, their gradients and AdamW's two states; None: it isn't counted."""
        return None

    @abstractmethod
    def communication_s(self) -> float | None:
        """Seconds that one step's collectives take alone, without compute; None: it doesn't communicate."""


class Local(System):
    """No communication: every rank trains a model of its own on its own batches."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(*computed_of(model))

    def communication_s(self) -> None:
        return None


class LocalQLoRA(Local):
    """The same, of adapters on a frozen base of 4 bits."""

    def __init__(self, model: Transformer) -> None:
        System.__init__(self, adapted(model))


class Met(Local):
    """The same, but that ranks wait for each other at the end of a step, as whatever trains one model on them
    must at least once: what is above 1 here is no system's."""

    def step(self, tokens: Tensor) -> Tensor:
        loss = super().step(tokens)
        dist.barrier()
        return loss


class DDP(System):
    """Whole model on every rank; gradients all-reduced in buckets during the backward, in compute's dtype."""

    BUCKET_NUMEL = 25 * 2**20 // 4

    def __init__(self, model: Transformer) -> None:
        computed, masters = computed_of(model)
        super().__init__(DistributedDataParallel(computed), masters)

    def communication_s(self) -> float:
        numel = sum(p.numel() for p in self.module.parameters())
        buckets = torch.zeros(numel).split(self.BUCKET_NUMEL)

        def reduce_all() -> None:
            for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
                work.wait()

        return alone_s(reduce_all)


def computed_of(model: Transformer) -> tuple[nn.Module, list[nn.Parameter] | None]:
    """The model in the dtype of compute, and its masters in fp32 where that is another one."""
    compute, _ = PRECISIONS[model.precision]
    if compute is None:
        return model, None
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    return model.to(compute), masters


class Sharded(System):
    """What FSDP1 and FSDP2 share: blocking collectives per group; the root is gathered once a step."""

    def __init__(self, module: nn.Module, group_numels: list[int]) -> None:
        super().__init__(module)
        self.group_numels = group_numels

    def communication_s(self) -> float:
        world = dist.get_world_size()
        shards = [torch.zeros(-(-numel // world)) for numel in self.group_numels]
        fulls = [torch.zeros(shard.numel() * world) for shard in shards]

        def gather_and_reduce() -> None:
            groups = list(zip(fulls, shards, strict=True))
            for full, shard in groups + groups[1:]:  # [0] is the root: gathered once
                all_gather_of(dist)(full, shard)
            for full, shard in groups:
                reduce_scatter_of(dist)(shard, full)

        return alone_s(gather_and_reduce)


class FSDP1(Sharded):
    """``torch.distributed.fsdp.FullyShardedDataParallel``, a unit per block."""

    def __init__(self, model: Transformer, prefetch: torch_fsdp.BackwardPrefetch | None) -> None:
        group_numels = numels(model)
        wrapped = torch_fsdp.FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            backward_prefetch=prefetch,
            device_id=torch.device("cpu"),
            mixed_precision=torch_fsdp.MixedPrecision(*PRECISIONS[model.precision]),
        )
        super().__init__(wrapped, group_numels)


class FSDP2(Sharded):
    """``torch.distributed.fsdp.fully_shard`` on blocks and root; ``prefetching``: async, one ahead."""

    def __init__(self, model: Transformer, prefetching: bool) -> None:
        group_numels = numels(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        blocks = list(model.blocks)
        policy = torch_fsdp.MixedPrecisionPolicy(*PRECISIONS[model.precision])
        for module in [*blocks, model]:
            torch_fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
        if prefetching:
            for module in [*blocks, model]:
                module._set_unshard_async_op(True)  # on CPU, gathers block without it
            for block, following in pairwise(blocks):
                block.set_modules_to_forward_prefetch([following])
                following.set_modules_to_backward_prefetch([block])
            model.set_modules_to_forward_prefetch(blocks[:1])
            model.set_modules_to_backward_prefetch(blocks[-1:])
        super().__init__(model, group_numels)


class Shardwright(System):
    """``shardwright.fully_shard``, called as FSDP2 is: on each block and the root.

    ``split``: what would be the root's is two groups in the order of execution: the embedding's, which its
    backward doesn't read, and the head's, kept after forward as the root is.
    ``transport``: see ``set_transport``. ``policy``: see ``SchedulePolicy``.
    ``keep``: every group stays unsharded from its forward to its backward, so that it is gathered once.
    ``ends``: the two halves of the first block are groups too. Its all-gather begins a step and its
    reduce-scatter ends one, where nothing hides them; so half of each hides behind the other half's compute.
    """

    def __init__(
        self,
        model: Transformer,
        split: bool,
        transport: str = "auto",
        policy: shardwright.SchedulePolicy | None = None,
        keep: bool = False,
        ends: bool = False,
    ) -> None:
        shardwright.set_transport(transport)
        mixed = {"mp_policy": shardwright.MixedPrecisionPolicy(*PRECISIONS[model.precision])}
        options = {**mixed, **({"reshard_after_forward": False} if keep else {})}
        if split:
            if policy is not None and policy.row_wise:  # only a group that is one lookup can
                shardwright.fully_shard(model.embedding, **mixed)
                shardwright.fully_shard(model.position, **mixed)
            else:
                first_end = [model.embedding, model.position]
                shardwright.fully_shard(first_end, reshard_after_forward=not keep, **mixed)
            shardwright.fully_shard([model.norm, model.head], reshard_after_forward=False, **mixed)
        if ends:
            first = model.blocks[0]
            shardwright.fully_shard([first.attention_norm, first.qkv, first.project], **options)
            shardwright.fully_shard([first.feed_norm, first.expand, first.contract], **options)
        for module in [*model.blocks, model]:
            shardwright.fully_shard(module, **options)
        if policy is not None:
            model.set_schedule_policy(policy)  # type: ignore[operator]
        self.sends_changes = policy is not None and policy.wire != "plain"
        super().__init__(model)

    def exposed_s(self) -> float | None:
        return shardwright.stats(self.module).exposed_s

    def unsharded_nbytes(self) -> int:
        return shardwright.stats(self.module).peak_unsharded_nbytes

    def at_rest_nbytes(self) -> int:
        return 4 * shardwright.stats(self.module).at_rest_nbytes

    def communication_s(self) -> float | None:
        if self.sends_changes:  # between steps nothing changes, so nothing would be sent
            return None
        return shardwright.communication_s(self.module)


class Grouped(Shardwright):
    """``shardwright.fully_shard`` with the groups of one of ``GROUPINGS``, and nothing else asked for."""

    def __init__(self, model: Transformer, calls: "Callable[[Transformer], Groups]") -> None:
        shardwright.set_transport("auto")
        groups = calls(model)
        mixed = {"mp_policy": shardwright.MixedPrecisionPolicy(*PRECISIONS[model.precision])}
        for group in groups if isinstance(groups, list) else []:
            shardwright.fully_shard(group, **mixed)
        chosen = {"groups": "auto"} if groups == "auto" else {}
        shardwright.fully_shard(model, **chosen, **mixed)
        self.sends_changes = False
        System.__init__(self, model)


Groups = list[nn.Module | list[nn.Module]] | str
"""What is sharded before the model itself, inner modules first; or "auto"."""


def blocks_by(number: int) -> Callable[[Transformer], Groups]:
    """Neighbouring blocks, so many of them in a group; the ends of the model are left to the root's call."""

    def groups(model: Transformer) -> Groups:
        blocks = list(model.blocks)
        return [blocks[start : start + number] for start in range(0, len(blocks), number)]

    return groups


GROUPINGS: dict[str, Callable[[Transformer], Groups]] = {
    "one": lambda model: [],
    "blocks": blocks_by(1),
    "blocks-by-2": blocks_by(2),
    "blocks-by-4": blocks_by(4),
    "auto": lambda model: "auto",
    "linears": lambda model: [each for each in model.modules() if isinstance(each, nn.Linear)],
}
"""Name -> the groups of a model; docs/grouping.md says what each is for. As systems: ``grouping-NAME``."""


class ShardwrightWrapper(System):
    """``shardwright.wrapper.FullyShardedDataParallel``, a unit per block."""

    def __init__(self, model: Transformer) -> None:
        shardwright.set_transport("auto")
        policy = shardwright.wrapper.ModuleWrapPolicy({Block})
        mixed = torch_fsdp.MixedPrecision(*PRECISIONS[model.precision])
        super().__init__(
            shardwright.FullyShardedDataParallel(model, auto_wrap_policy=policy, mixed_precision=mixed)
        )

    def communication_s(self) -> float:
        return shardwright.communication_s(self.module.module)


PREFETCH = torch_fsdp.BackwardPrefetch
AT_ONCE = shardwright.SchedulePolicy(
    backward_prefetch="none", forward_prefetch=False, keep_last=0, max_reductions=1
)
"""Nothing is gathered ahead in either direction, and one reduce-scatter at a time: the least memory."""
SYSTEMS = {
    "local": Local,
    "local-met": Met,
    "ddp": DDP,
    "fsdp1-none": lambda model: FSDP1(model, None),
    "fsdp1-pre": lambda model: FSDP1(model, PREFETCH.BACKWARD_PRE),
    "fsdp1-post": lambda model: FSDP1(model, PREFETCH.BACKWARD_POST),
    "fsdp2": lambda model: FSDP2(model, prefetching=False),
    "fsdp2-async": lambda model: FSDP2(model, prefetching=True),
    "shardwright": lambda model: Shardwright(model, split=False),
    "shardwright-sockets": lambda model: Shardwright(model, split=False, transport="sockets"),
    "shardwright-collectives": lambda model: Shardwright(model, split=False, transport="collectives"),
    "shardwright-wrapper": ShardwrightWrapper,
    "shardwright-split": lambda model: Shardwright(model, split=True),
    "shardwright-keep": lambda model: Shardwright(model, split=True, keep=True),
    "shardwright-none": lambda model: Shardwright(model, split=True, policy=AT_ONCE),
    "shardwright-post": lambda model: Shardwright(
        model, split=True, policy=replace(AT_ONCE, backward_prefetch="post", forward_prefetch=True)
    ),
    "shardwright-rows": lambda model: Shardwright(
        model, split=True, policy=shardwright.SchedulePolicy(row_wise=True)
    ),
    "shardwright-difference": lambda model: Shardwright(
        model, split=False, policy=shardwright.SchedulePolicy(wire="difference")
    ),
    "shardwright-auto": lambda model: Shardwright(
        model, split=False, policy=shardwright.SchedulePolicy(wire="auto")
    ),
    "local-qlora": LocalQLoRA,
    "shardwright-qlora": lambda model: Shardwright(adapted(model), split=False),
    "shardwright-qlora-difference": lambda model: Shardwright(
        adapted(model), split=False, policy=shardwright.SchedulePolicy(wire="difference")
    ),
    "shardwright-ends": lambda model: Shardwright(model, split=True, ends=True),
    "shardwright-goal": lambda model: Shardwright(
        model, split=True, policy=shardwright.SchedulePolicy(row_wise=True, keep_last=2), ends=True
    ),
    "shardwright-goal-keep": lambda model: Shardwright(
        model, split=True, policy=shardwright.SchedulePolicy(row_wise=True), ends=True, keep=True
    ),
    "shardwright-pre": lambda model: Shardwright(model, split=True, policy=shardwright.SchedulePolicy()),
    **{f"grouping-{name}": partial(Grouped, calls=calls) for name, calls in GROUPINGS.items()},
}
"""Name -> what makes that system of a model (see ``build_system``)."""

OPTIONAL = {"deepspeed": ("deepspeed", "bench.zero3")}
"""Name -> the package that it needs, no dependency of this project, and the adapter that imports it."""


def build_system(name: str, model: Transformer) -> System:
    """The named system, training ``model``; every rank calls it."""
    if name in OPTIONAL:
        return importlib.import_module(OPTIONAL[name][1]).build(model)
    return SYSTEMS[name](model)


def local_of(name: str) -> str:
    """The system without communication that the named one is compared with."""
    return "local-qlora" if "qlora" in name else "local"


def unavailable(name: str) -> str:
    """Why a system can't run here; empty if it can."""
    if name in OPTIONAL and importlib.util.find_spec(OPTIONAL[name][0]) is None:
        return f"the package {OPTIONAL[name][0]} is not installed"
    return ""


def numels(model: Transformer) -> list[int]:
    """Numbers of parameters per group: the root's own first, then one per block."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return [sum(p.numel() for p in model.parameters()) - sum(blocks), *blocks]


def alone_s(communicate: Callable[[], None]) -> float:
    """Median seconds of one call, after one to warm up, all ranks starting together."""
    taken = []
    for _ in range(ALONE_REPEATS + 1):
        dist.barrier()
        begin = time.perf_counter()
        communicate()
        taken.append(time.perf_counter() - begin)
    return sorted(taken[1:])[ALONE_REPEATS // 2]
