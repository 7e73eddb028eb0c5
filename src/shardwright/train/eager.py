"""The engine of PyTorch's own execution: one process per rank, each with its shards.

step:  [microbatch: forward, backward] x accumulation -> clip -> optimizer -> zero
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright import clock
from shardwright.api import communication_s, full_state_dict, fully_shard, stats
from shardwright.checkpoint import Restored, async_save, load, save
from shardwright.checkpoint.url import Location, RemotePath
from shardwright.data.text import TrainBatches, split_targets, to_device
from shardwright.data.windows import IGNORED
from shardwright.errors import ConfigError
from shardwright.lora import trained_part
from shardwright.module import FSDPModule
from shardwright.observe.memory.report import Category, MemoryReport
from shardwright.ops.owned import other_params, owned_params
from shardwright.optim import Muon, balanced
from shardwright.parallel import Mesh, context_parallel
from shardwright.plan.file import OFFLOADS, Plan
from shardwright.policy import MixedPrecisionPolicy
from shardwright.recipe.config import OptimizerConfig, Recipe
from shardwright.train.engine import Reading, Sizes
from shardwright.train.loop import learning_rate
from shardwright.train.models import VOCABULARY, Transformer, flops_of, loss_of
from shardwright.train.norms import clip
from shardwright.train.ranks import RankPlace
from shardwright.train.stages import Elsewhere, Parts, Pipeline, cut
from shardwright.transport.mesh import set_transport
from shardwright.transport.process import span

_WATCHED_STEP = 2
"""From it on the optimizer has its state, and the schedule is planned. Beside a plan later ones are put."""


def build_model(recipe: Recipe, place: RankPlace) -> Transformer:
    """The sharded model with its initial weights; every rank calls, none ever holds the whole of it.

    A group per block, one for the embedding, one for norm and head; with a tied embedding these three are the
    root's own group, because the root multiplies by the embedding's weight.
    """
    with torch.device("meta"):
        model = Transformer(
            recipe.model,
            activation_checkpointing=recipe.training.activation_checkpointing,
            inputs_on_host=recipe.training.offload_activations,
        )
    cut(model, Parts(["embedding"], "blocks", ["norm", "head"]), place.mesh)
    set_transport(recipe.schedule.transport)
    if recipe.training.plan:
        fully_shard(model, plan=plan_of(recipe))
    else:
        _shard_by_blocks(model, recipe, place)
    context_parallel(model, place.mesh)
    model.to_empty(device=place.device)
    model.reset_parameters(recipe.run.seed)
    return model


def _shard_by_blocks(model: Transformer, recipe: Recipe, place: RankPlace) -> None:
    options = policies_of(recipe)
    if options["layout"] == "owner":
        options["layout"] = balanced(model)  # for all blocks at once
    groups = [[block] for block in model.blocks]
    if model.head is not None:
        groups += [[model.embedding], [model.norm, model.head]]
    for group in groups:
        if not isinstance(group[0], Elsewhere):
            fully_shard(group, mesh=place.mesh.shard, **options)
    fully_shard(model, mesh=place.mesh.shard, **options)
    assert isinstance(model, FSDPModule)
    model.set_schedule_policy(recipe.schedule.policy())


def plan_of(recipe: Recipe) -> Plan:
    """The plan that ``training.plan`` names. Raises: ConfigError where [training] says otherwise."""
    training, plan, own = recipe.training, Plan.load(recipe.training.plan), precision_of(recipe)
    tokens = training.batch_size * training.sequence_length
    pairs = {
        "training.accumulation": (training.accumulation, plan.microbatches),
        "training.batch_size x sequence_length": (tokens, plan.microbatch_tokens),
        "training.dtype": (own.param_dtype or "fp32", plan.mp_policy.param_dtype or "fp32"),
    }
    wrong = [f"{key}: got {got}, expected {has}" for key, (got, has) in pairs.items() if got != has]
    if wrong:
        raise ConfigError(
            f"{training.plan} is a plan for other numbers: {'; '.join(wrong)}. Set these, or make a plan for "
            "this recipe"
        )
    return plan


def precision_of(recipe: Recipe) -> MixedPrecisionPolicy:
    """What ``training.dtype`` says."""
    half = recipe.training.dtype == "bf16"
    return MixedPrecisionPolicy(torch.bfloat16 if half else None, torch.float32 if half else None)


def policies_of(recipe: Recipe) -> dict[str, Any]:
    """Arguments of ``fully_shard``: what ``training.dtype``, ``training.offload`` and the optimizer say."""
    layout = "owner" if recipe.optimizer.kind == "muon" else None
    policies = {"mp_policy": precision_of(recipe), "offload_policy": OFFLOADS[recipe.training.offload]}
    return {**policies, "layout": layout}


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> Any:
    """AdamW (or Muon and AdamW) over the (sharded) parameters that are trained; matrices are decayed, vectors
    are not."""
    is_muon = config.kind == "muon"
    parameters = [p for p in (other_params(model) if is_muon else model.parameters()) if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if is_muon:
        return Muon(
            owned_params(model),
            lr=config.lr,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
            rest=groups,
            rest_lr=config.lr,
            rest_betas=(config.beta1, config.beta2),
        )
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2)}
    if config.kind == "adamw-8bit":
        return import_module("shardwright.train.eight_bit").AdamW8bit(groups, **options)
    return torch.optim.AdamW(groups, **options, fused=config.kind == "adamw-fused")


def opened(optimizer: Any) -> AbstractContextManager[None]:
    """Around what saves or loads the state of an optimizer of ``build_optimizer``; every rank enters."""
    return optimizer.opened() if hasattr(optimizer, "opened") else nullcontext()


def _own_part(inputs: Tensor, targets: Tensor, mesh: Mesh | None) -> tuple[Tensor, Tensor, int]:
    """This rank's part of the sequences, and where that begins in them; all parts are of one length."""
    if mesh is None or mesh.cp is None:
        return inputs, targets, 0
    part = mesh.split({"inputs": inputs, "targets": targets})
    return part["inputs"], part["targets"], mesh.cp.get_local_rank() * part["inputs"].shape[1]


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor, mesh: Mesh | None) -> Tensor:
    """Mean nats per byte of this rank's part of the sequences."""
    inputs, targets, first = _own_part(inputs, targets, mesh)
    return loss_of(model(inputs, first), targets)


@torch.no_grad()
def heldout_loss(model: nn.Module, windows: Tensor, batch_size: int, place: RankPlace | None = None) -> float:
    """Mean nats per byte over ``windows`` (n, sequence_length + 1), dealt out in batches to the ranks.

    Every rank calls and makes the same number of forwards (a sharded forward needs all ranks); one that has
    no window left repeats an old one with weight 0. Without ``place``: one process does them all.
    """
    rank, world = (place.mesh.sample_rank, place.num_samples) if place else (0, 1)
    mesh = place.mesh if place else None
    device = place.device if place else torch.device("cpu")
    was_training = model.training
    model.eval()
    loss_sum, count = 0.0, 0
    for first in range(0, len(windows), batch_size * world):
        start = first + rank * batch_size
        batch = windows[start : start + batch_size]
        own = len(batch)
        inputs, targets = split_targets(to_device(batch if own else windows[:1], device))
        loss = _loss(model, inputs, targets, mesh).item()
        loss_sum, count = loss_sum + loss * own, count + own
    model.train(was_training)
    if place:
        loss_sum, count = place.total(loss_sum, count)
    return loss_sum / count


class RankEngine(ABC):
    """What every engine of one process per rank has: the step around the gradients, and the sizes."""

    def __init__(self, recipe: Recipe, place: RankPlace, model: nn.Module) -> None:
        self.recipe = recipe
        self.place = place
        self.model: Any = model
        self.optimizer = build_optimizer(recipe.optimizer, model)
        self.data_s = 0.0
        self._steps = 0
        self._held: MemoryReport | None = None

    @contextmanager
    def getting_data(self) -> Iterator[None]:
        """Around what gets a batch ready: its seconds count in ``data_s``."""
        began = clock.perf_counter()
        with span("data"):
            yield
        self.data_s += clock.perf_counter() - began

    @property
    @abstractmethod
    def flops_per_token(self) -> float:
        """See ``Engine``."""

    @property
    def exposed_s(self) -> float | None:
        """See ``Engine``."""
        return stats(self.model).exposed_s

    def tokens(self, first: int, end: int) -> int:
        """See ``Engine``."""
        return (end - first) * self.recipe.training.sequence_length

    def step(self, number: int, position: int) -> Reading:
        """See ``Engine``."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe.optimizer, number, recipe.training.steps)
        # As a function of the step, random numbers need no state in the checkpoint, and none per rank.
        own = self.place.mesh.seed((recipe.run.seed * 1_000_003 + number) * 65_537)
        torch.manual_seed(own % 2**64)  # torch takes no more bits
        self._steps += 1
        with self._watched():
            loss = self.gradients(position)
        norms = clip(self.model, recipe.optimizer.clip_norm, self.place.mesh.pp)
        if recipe.training.on_nonfinite != "skip" or math.isfinite(norms.total()):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return Reading(
            lambda: (self.place.total(loss.item())[0] / self.place.world, norms.total(), self.figures()),
            norms.total,
            norms.first_nonfinite,
        )

    def figures(self) -> dict[str, float]:
        """Of the last step besides its loss, over all ranks, by their keys in ``metrics.jsonl``. Every rank
        calls."""
        return {}

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around forward and backward: malloc knows no peak, so on a CPU one step is watched."""
        if self._steps != _WATCHED_STEP or self.place.device_type != "cpu":
            yield
            return
        with self.model.record_memory() as log:
            yield
        self._held = log.peak

    @property
    def peak_nbytes(self) -> int | None:
        """See ``Engine``."""
        if self.place.device_type != "cpu":
            return torch.accelerator.max_memory_allocated()
        if self._held is None or not self._held.is_complete:
            return None
        return self._held.total_nbytes - self._held.by_category[Category.OTHER]

    def save(self, path: Location, extra: dict[str, Any], step: int) -> None:
        """See ``Engine``. Of a model with adapters these alone are saved."""
        write = async_save if isinstance(path, RemotePath) else save  # an upload would stop the training
        model, keep = trained_part(self.model), self.recipe.checkpoint.keep
        with opened(self.optimizer):  # what goes on in the background has its own copy
            pp = self.place.mesh.pp
            write(path, model=model, optimizer=self.optimizer, extra=extra, step=step, keep=keep, pp=pp)

    def restore(self, path: Location) -> Restored:
        """See ``Engine``."""
        with opened(self.optimizer):
            model, pp = trained_part(self.model), self.place.mesh.pp
            return load(path, model=model, optimizer=self.optimizer, pp=pp)

    @abstractmethod
    def gradients(self, position: int) -> Tensor:
        """Forward and backward of each microbatch; the last reduces the gradients. Returns a loss, whose mean
        over ranks is the step's."""

    def sizes(self) -> Sizes:
        """See ``Engine``."""
        alone_s, measured = communication_s(self.model), stats(self.model)
        at_rest, peak, alone_s = self.place.largest(
            measured.at_rest_nbytes, measured.peak_unsharded_nbytes, alone_s
        )
        known = measured.exposed_s is not None
        numel, full_nbytes = self.whole()
        return Sizes(numel, int(at_rest), full_nbytes, int(peak), alone_s, known)

    def whole(self) -> tuple[int, int]:
        """Elements and bytes of all parameters, of which ``stats`` counts this rank's layers and experts.
        Every rank calls."""
        measured, mesh = stats(self.model), self.place.mesh
        numel, nbytes = measured.param_numel, measured.full_nbytes
        if mesh.tp is not None or mesh.ep is not None:
            params = list(self.model.parameters())
            numel, nbytes = sum(p.numel() for p in params), sum(p.numel() * p.itemsize for p in params)
        if mesh.pp is not None:
            of_stage = self.place.world // mesh.pp.size()
            numel, nbytes = (int(total) // of_stage for total in self.place.total(numel, nbytes))
        return numel, nbytes


class EagerEngine(RankEngine):
    """See ``Engine``. ``batches`` are this rank's, ``windows`` (n, sequence_length + 1) are held out."""

    def __init__(
        self, recipe: Recipe, place: RankPlace, batches: Sequence[TrainBatches], windows: Tensor
    ) -> None:
        super().__init__(recipe, place, build_model(recipe, place))
        (self._batches,) = batches
        self._windows = windows
        self._pipeline = _pipeline_of(recipe, place, self.model) if place.mesh.pp else None

    @property
    def flops_per_token(self) -> float:
        """See ``Engine``."""
        return flops_of(self.recipe.model, self.recipe.training.sequence_length)

    def gradients(self, position: int) -> Tensor:
        """See ``RankEngine``."""
        training, device = self.recipe.training, self.place.device
        total = torch.zeros((), device=device)
        firsts = [position + i * self._batches.share.num_windows for i in range(training.accumulation)]
        if self._pipeline is not None:
            with self.getting_data():
                inputs, targets = map(torch.cat, zip(*map(self._batches.at, firsts), strict=True))
            return self._loss_sum(self._pipeline, inputs, targets, len(targets)) * self._pipeline.stages
        for microbatch, first in enumerate(firsts):
            self.model.set_requires_gradient_sync(microbatch == training.accumulation - 1)
            with self.getting_data():
                inputs, targets = (to_device(part, device) for part in self._batches.at(first))
            loss = _loss(self.model, inputs, targets, self.place.mesh) / training.accumulation
            loss.backward()
            total += loss.detach()
        return total

    def _loss_sum(self, pipeline: Pipeline, inputs: Tensor, targets: Tensor, num_rows: int) -> Tensor:
        """Of all rows the mean nats per byte, summed and divided by ``num_rows``, on the last stage."""
        inputs, targets, first = _own_part(inputs, targets, self.place.mesh)
        scale = 1 / (num_rows * targets.shape[1])
        inputs, targets = (to_device(part, self.place.device) for part in (inputs, targets))
        return pipeline.losses(inputs, targets, scale, **({"first": first} if first else {}))

    def heldout_loss(self) -> float:
        """See ``Engine``."""
        if self._pipeline is not None:
            return self._heldout_loss_of_stages(self._pipeline)
        return heldout_loss(self.model, self._windows, self.recipe.training.batch_size, self.place)

    @torch.no_grad()
    def _heldout_loss_of_stages(self, pipeline: Pipeline) -> float:
        """Windows go through the stages as many at once as in training; what fills them up isn't learned."""
        training, place, windows = self.recipe.training, self.place, self._windows
        self.model.eval()
        loss_sum, count, rows = 0.0, 0, training.batch_size * training.accumulation
        for first in range(0, len(windows), rows * place.num_samples):
            start = first + place.mesh.sample_rank * rows
            own = windows[start : start + rows]
            inputs, targets = split_targets(torch.cat([own, windows[:1].expand(rows - len(own), -1)]))
            targets = targets.clone()
            targets[len(own) :] = IGNORED
            loss_sum += self._loss_sum(pipeline, inputs, targets, 1).item()
            count += len(own) * pipeline.is_last
        self.model.train()
        loss_sum, count = place.total(loss_sum, count)
        return loss_sum / count

    def full_state_dict(self) -> dict[str, Tensor]:
        """See ``Engine``."""
        tensors, pp = full_state_dict(self.model), self.place.mesh.pp
        if pp is None:
            return tensors
        with torch.device("meta"):
            whole = Transformer(self.recipe.model).state_dict()
        for name, like in whole.items():  # a sum with zeros of the stages that haven't it
            whole[name] = tensors.get(name, torch.zeros_like(like, device="cpu"))
            dist.all_reduce(whole[name], group=pp.get_group())
        return whole


def _pipeline_of(recipe: Recipe, place: RankPlace, model: Transformer) -> Pipeline:
    training, mesh = recipe.training, place.mesh
    length = training.sequence_length // (1 if mesh.cp is None else mesh.cp.size())
    shape, dtype = (training.batch_size, length), precision_of(recipe).param_dtype or torch.float32
    tokens = torch.zeros(shape, dtype=torch.int64, device="meta")
    hidden, logits = (
        torch.zeros(*shape, width, dtype=dtype, device="meta") for width in (recipe.model.dim, VOCABULARY)
    )

    def sum_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

    how = recipe.mesh.pp_schedule, training.accumulation
    return Pipeline(model, mesh, how, (tokens, hidden, logits), sum_of, place.device)
