"""``search``: the fastest way to train a model within a budget of memory, of those that can be asked for.

A candidate is a value for each lever. Greedy: from a start, the best change of one lever is taken, until none
is better; the starts are the plain choice and the one that holds least. Only another size of the microbatch
is traced again; everything else is the same workload, changed (``levers``) and simulated.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.plan.answer import in_words
from shardwright.plan.axes import AxisSizes
from shardwright.plan.cluster import GIB, Cluster
from shardwright.plan.constants import MEMORY_ERROR
from shardwright.plan.file import BASES, OFFLOADS, Plan, PlannedGroup, offload_name
from shardwright.plan.levers import first_blocks, kept_groups, merged, neighbours, recomputes
from shardwright.plan.predict import Choice, Estimate, a_cluster, price
from shardwright.plan.presets import preset
from shardwright.plan.subject import Subject, of_architecture, of_model
from shardwright.plan.transformer import Architecture, Microbatch, part_of
from shardwright.plan.workload import Workload
from shardwright.policy import Base, Offload
from shardwright.torch_private import tree_leaves

_SPLITS = (1, 2, 4, 8)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_AHEAD = (1, 2)
_GROUPS_AHEAD = 2.25
"""Bytes that two groups ahead may take, in largest groups: a runtime pads them to the ranks."""
_NEAR = 0.01
_SEARCHED = 3
_MOST = 8
"""Ranks of tp, of cp and of pp that a search of meshes tries."""


class Candidate(NamedTuple):
    """A value for each lever.

    groups: parts that the model is in. recomputed: share of them that is computed again in the backward.
    shards: ranks that a parameter is sharded over. reshards: after a forward; an int keeps shards over so
    many ranks until the backward. kept: share of the groups that stay unsharded until then, in any case.
    ahead: 1, the next group is gathered ahead; 2, what takes the bytes of the two largest. split:
    microbatches in the place of each one of the sample's. offload: what is on the host at rest, by its name
    in ``planned.OFFLOADS``. base: frozen weights are as they are ("plain"), or in 4 bits ("nf4"), which
    changes results.
    """

    groups: int
    recomputed: float
    shards: int
    reshards: bool | int
    kept: float
    ahead: int
    split: int
    offload: Offload
    base: Base


class Tried(NamedTuple):
    """A candidate, what it takes and holds, and by how many bytes that is more than there is."""

    candidate: Candidate
    step_s: float
    nbytes: int
    over_nbytes: float = 0.0

    def beats(self, other: "Tried") -> bool:
        """It takes no longer and holds no more, and one of both is less."""
        return (
            self.step_s <= other.step_s
            and self.nbytes <= other.nbytes
            and (self.step_s, self.nbytes) != (other.step_s, other.nbytes)
        )


@dataclass(frozen=True)
class FoundPlan(Plan):
    """A ``Plan``, and how it was found.

    ``print`` shows the answer, and the candidates that hold less than the plan. ``fully_shard(model,
    plan=...)`` applies it, and ``save`` writes the file for that.

    Attributes:
        estimate: of the fastest candidate that fits (if none fits, of the one that holds least), or of one
            that takes at most a hundredth longer and holds less.
        candidate: the value of each setting that the search varies.
        tried: every candidate that was simulated, with its seconds and bytes.
        num_meshes: how many meshes were priced, if that was asked for; else 1.

    Raises:
        InputError: as ``Plan``.
    """

    estimate: Estimate = field(kw_only=True)
    candidate: Candidate = field(kw_only=True)
    tried: tuple[Tried, ...] = field(kw_only=True)
    num_meshes: int = field(default=1, kw_only=True)

    @property
    def budget_nbytes(self) -> float:
        """The limit of the search, in bytes of a device."""
        return self.estimate.cluster.room_nbytes

    @property
    def choice(self) -> Choice:
        """How the model is trained by this plan, as ``estimate`` takes it."""
        return self.estimate.choice

    @property
    def front(self) -> tuple[Tried, ...]:
        """The candidates that no other one beats, the fastest first."""
        found = [one for one in self.tried if not any(other.beats(one) for other in self.tried)]
        return tuple(sorted(found, key=lambda one: one.step_s))

    def lost(self) -> dict[Candidate, str]:
        """Why each of the other candidates isn't the plan.

        Returns:
            Candidate -> reason.
        """
        best = next(one for one in self.tried if one.candidate == self.candidate)
        return {one.candidate: self._why(one, best) for one in self.tried if one is not best}

    def _why(self, one: Tried, best: Tried) -> str:
        if one.over_nbytes:
            return f"holds {one.over_nbytes / GIB:.1f} GiB more than there is"
        less = (best.nbytes - one.nbytes) / GIB
        if one.step_s < best.step_s:
            return f"takes {1 - one.step_s / best.step_s:.1%} less, but holds {-less:.1f} GiB more"
        gain = f", and holds {less:.1f} GiB less" if less > 0 else ""
        return f"takes {one.step_s / best.step_s - 1:.1%} longer{gain}"

    def answer(self, tokens: float = 1e9, price_per_hour: float | None = None) -> dict[str, Any]:
        """As ``Estimate.answer``, with ``ways``: the plan, and the slower candidates of the front, of which
        each holds so much less than the one before it that the prediction's error doesn't hide it.

        Args:
            tokens: to be trained on.
            price_per_hour: of one device.

        Returns:
            The answer as data, which ``json.dumps`` takes.
        """
        ways, of_step = list[dict[str, Any]](), self.estimate.tokens_per_s * self.step_s
        most = self.peak_nbytes if self.estimate.fits else 0.0
        for one in self.front:
            if one.nbytes <= most and not one.over_nbytes:
                most = one.nbytes * (1 - MEMORY_ERROR)
                held = {"peak_nbytes": one.nbytes, "step_s": one.step_s, "tokens_per_s": of_step / one.step_s}
                ways.append(one.candidate._asdict() | held)
        over = [one.over_nbytes for one in self.tried if one.over_nbytes]
        tried = {"tried": len(self.tried), "too_large": len(over)}
        tried["num_meshes"] = self.num_meshes
        found = {"ways": ways, **tried, "nearest_over_nbytes": min(over, default=None)}
        return self.estimate.answer(tokens, price_per_hour) | found

    def __str__(self) -> str:
        return in_words(self.answer())


@dataclass
class Space:
    """The values of each lever for a model and a cluster, and what was simulated so far.

    workloads: of a microbatch split so many times.
    """

    cluster: Cluster
    choice: Choice
    workloads: Mapping[int, Workload]
    seen: dict[Candidate, tuple[Tried, Estimate]] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, tuple[Any, ...]]:
        """Of each lever, by its name in ``Candidate``."""
        choice = self.choice
        ranks, host = choice.data_ranks(self.cluster.ranks), max(1, self.cluster.ranks_on_host // choice.tp)
        groups = self.workloads[1].groups
        count = sum(group.part_of is None for group in groups)
        may_be_coded = choice.base == "plain" and any(group.frozen[0] for group in groups)
        return {
            "groups": tuple(dict.fromkeys(max(1, count // size) for size in (1, 2, 4, 8, 16, 32))),
            "recomputed": _SHARES[:1] if recomputes(self.workloads[1]) else _SHARES,
            "shards": tuple(
                dict.fromkeys(s for s in (ranks, 8 * host, host) if ranks % s == 0 and s <= ranks)
            ),
            "reshards": (True, *([host] if 1 < host < ranks and choice.pp == 1 else [])),
            "kept": _SHARES,
            "ahead": _AHEAD,
            "split": tuple(self.workloads),
            "offload": tuple(OFFLOADS)[: 1 if self.cluster.device.is_host else None],
            "base": BASES if may_be_coded else (choice.base,),
        }

    @property
    def plain(self) -> Candidate:
        """The first value of each lever."""
        return Candidate(*(each[0] for each in self.values.values()))

    def changes(self, candidate: Candidate) -> list[Candidate]:
        """Those that differ from it in one lever."""
        return [
            candidate._replace(**{lever: value})
            for lever, values in self.values.items()
            for value in values
            if value != getattr(candidate, lever)
        ]

    def all(self) -> Iterable[Candidate]:
        """Every candidate: only for small spaces."""
        return (Candidate(*values) for values in product(*self.values.values()))

    def prepare(self, candidate: Candidate) -> tuple[Workload, list[list[int]]]:
        """Its workload before anything is computed again, and which traced groups each group is made of."""
        traced = self.workloads[candidate.split]
        parts = neighbours(traced, candidate.groups)
        return merged(traced, parts), parts

    def price(self, candidate: Candidate) -> Tried:
        """Simulate it, once."""
        if candidate not in self.seen:
            work, _ = self.prepare(candidate)
            policy = replace(self.choice.policy or preset(self.choice.runtime).policy, depth=1)
            if candidate.ahead > 1:
                sizes = [group.numel for index, group in enumerate(work.groups) if index not in work.of_root]
                largest = max(sizes, default=0) * work.itemsize
                policy = replace(policy, depth=len(work.groups), budget_nbytes=int(_GROUPS_AHEAD * largest))
            is_smaller = candidate.reshards not in (True, False) and candidate.reshards < candidate.shards
            choice = replace(
                self.choice,
                shards=candidate.shards,
                reshard_after_forward=candidate.reshards if is_smaller else bool(candidate.reshards),
                recompute=candidate.recomputed,
                keep=candidate.kept,
                microbatches=self.choice.microbatches * candidate.split,
                policy=policy,
                offload=OFFLOADS[candidate.offload],
                base=candidate.base,
            )
            found = price(work, self.cluster, choice)
            self.seen[candidate] = Tried(candidate, found.step_s, found.peak.total, found.over_nbytes), found
        return self.seen[candidate][0]


def search(
    model: nn.Module | Architecture,
    sample: Any,
    cluster: Cluster,
    choice: Choice | None = None,
    *,
    budget: float | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    meshes: bool = False,
) -> FoundPlan:
    """Find the fastest way to train a model on a cluster within the memory of its devices.

    The search varies the number of groups, which of them are under activation checkpointing, over how many
    ranks a parameter is sharded, which groups stay unsharded from their forward to their backward, over how
    many ranks the others are resharded, how much is prefetched, the size of microbatches, what is on the host
    at rest, and, only if nothing else fits, frozen weights in 4 bits. A step has the same samples in all of
    them. No process group is needed, and nothing is computed.

    Args:
        model: as ``estimate``. Of numbers the plan names modules as a Llama of transformers does.
        sample: as ``estimate``.
        cluster: as ``estimate``.
        choice: everything that the search doesn't vary; None: the defaults of ``Choice``.
        budget: bytes of each device that may be used; None: all but a reserve (``Cluster.room_nbytes``).
        loss: as ``estimate``.
        meshes: sizes of tp, cp, ep and pp are tried too, of a model in numbers, each a power of two. The
            sample is of one rank without them; with them a step still has as many tokens.

    Returns:
        The plan; if nothing fits, the one that holds least. Its ``choice`` has the sizes of the mesh.

    Raises:
        InputError: as ``estimate``, or the budget isn't positive.
        ConfigError: the runtime isn't known.

    Examples:
        >>> from shardwright.plan import Choice, search
        >>> from shardwright.plan.cluster import Cluster, device
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])
        ...     sample = torch.empty(1024, 4096)
        >>> cluster = Cluster(device("H100"), ranks=8)
        >>> choice = Choice(groups=[[str(n)] for n in range(8)])
        >>> found = search(model, sample, cluster, choice, budget=2e9, loss=torch.sum)
        >>> found.save("plan.toml")  # for shardwright.fully_shard(model, plan="plan.toml")
        >>> found.estimate.fits
        True
    """
    choice = choice or Choice()
    cluster = a_cluster(cluster)
    subject = of_model(model, sample, choice, loss)
    return (fastest_mesh if meshes else fastest)(subject, cluster, choice, budget)


def fastest_mesh(given: Subject, cluster: Cluster, choice: Choice, budget: float | None = None) -> FoundPlan:
    """``search`` with ``meshes``. Each mesh is priced as it is and where it holds least, and searched if it
    is one of the best ``_SEARCHED`` then, or has no other axis than sharding's. Raises: InputError."""
    if given.numbers is None:
        raise InputError(
            f"meshes of {given.workload.name} can't be searched, since how ranks share the layers of a "
            "module isn't known: pass its numbers (shardwright.plan.Architecture, or a folder's config.json)"
        )
    arch, batch = given.numbers
    found = list[tuple[tuple[float, float], Subject, Choice]]()
    for axes in _meshes_of(arch, batch, cluster.ranks):
        rows = replace(batch, sequences=batch.sequences * axes.tp * axes.cp)
        one = replace(choice, microbatches=choice.microbatches * axes.pp, **asdict(axes))
        subject = of_architecture(arch, rows, axes, given.workload.name)
        space = space_of(subject, cluster.within(budget), one)
        found.append((min(_rank(space.price(start)) for start in _starts(space)), subject, one))
    plain, *others = found
    best_first = [plain, *sorted(others, key=lambda each: each[0])[:_SEARCHED]]
    plans = [fastest(subject, cluster, one, budget) for _, subject, one in best_first]
    best = min(plans, key=lambda plan: (plan.estimate.over_nbytes, plan.step_s))
    return replace(best, num_meshes=len(found))


def _meshes_of(arch: Architecture, batch: Microbatch, ranks: int) -> list[AxisSizes]:
    """Sizes of tp, cp, ep and pp, powers of two up to ``_MOST``, by which ranks can share the model; the
    first is all 1."""
    sizes = [2**power for power in range(_MOST.bit_length())]
    found = []
    for pp, ep, cp, tp in product(sizes, sizes if arch.experts else [1], sizes, sizes):
        axes = AxisSizes(tp=tp, cp=cp, ep=ep, pp=pp)
        try:
            axes.data_ranks(ranks)
            part_of(arch, axes)
        except InputError:
            continue
        if batch.sequence % cp == 0:
            found.append(axes)
    return found


def _starts(space: Space) -> tuple[Candidate, Candidate]:
    """The plain candidate, and the one that holds least without offload."""
    most = {lever: space.values[lever][-1] for lever in ("recomputed", "split")}
    return space.plain, space.plain._replace(**most)


def fastest(subject: Subject, cluster: Cluster, choice: Choice, budget: float | None = None) -> FoundPlan:
    """``search`` of what was traced, or of a row of numbers. Raises: InputError."""
    space = space_of(subject, cluster.within(budget), choice)
    best = thriftiest(space, greedy(space))
    _, parts = space.prepare(best.candidate)
    listed = [tuple(name for group in part for name in subject.modules[group]) for part in parts]
    found = space.seen[best.candidate][1]
    named = [list(names) for names in listed if names not in ((), ("",))]
    found = replace(found, choice=replace(found.choice, groups=named))
    plan = planned(found, listed)
    return FoundPlan(
        **{each.name: getattr(plan, each.name) for each in fields(Plan)},
        estimate=found,
        candidate=best.candidate,
        tried=tuple(tried for tried, _ in space.seen.values()),
    )


def grouped(model: nn.Module, sample: Any, cluster: Cluster, choice: Choice) -> list[list[str]]:
    """The groups for ``groups=``: so many neighbours in each as make the shortest step of those that fit (the
    least bytes, where none does), with everything else as ``choice`` has it.

    ``sample`` as ``estimate`` takes it; what the model returns needn't be a loss. Raises: InputError.
    """
    subject = of_model(model, sample, choice, any_loss)
    space = Space(cluster, choice, {1: subject.workload})
    given = {"shards": choice.shards_on(cluster.ranks), "reshards": choice.reshard_after_forward}
    plain = space.plain._replace(**given, kept=choice.keep)
    tried = [space.price(plain._replace(groups=count)) for count in space.values["groups"]]
    best = thriftiest(space, min(tried, key=_rank))
    _, parts = space.prepare(best.candidate)
    names = [[name for group in part for name in subject.modules[group]] for part in parts]
    return [listed for listed in names if listed not in ([], [""])]


def any_loss(out: Any) -> Tensor:
    """Of what a model returns, something that a backward can begin at."""
    leaves = [leaf for leaf in tree_leaves(getattr(out, "loss", None)) if isinstance(leaf, Tensor)]
    leaves = leaves or [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.float().mean() for leaf in leaves]).sum()


def space_of(subject: Subject, cluster: Cluster, choice: Choice) -> Space:
    """The space of a model that is split into as many microbatches as its rows can be."""
    # A microbatch is spread over the ranks of tp and cp, so that there are more rows in it.
    more = tuple(_SPLITS[-1] * 2**power for power in range(1, (choice.tp * choice.cp).bit_length()))
    splits = [split for split in _SPLITS + more if subject.rows % split == 0]
    workloads = {split: subject.at(subject.rows // split, subject.sequence) for split in splits}
    return Space(cluster, choice, workloads)


def planned(found: Estimate, listed: Sequence[tuple[str, ...]]) -> Plan:
    """What ``fully_shard`` needs of an estimate. listed: names of the modules of each group of the workload.
    A root that has names is a group that stays unsharded."""
    choice, root = found.choice, found.workload.root
    kept = kept_groups(found.workload, choice.keep)
    again = first_blocks(found.workload, choice.recompute)
    return Plan(
        ranks=choice.data_ranks(found.cluster.ranks),
        shards=choice.shards_on(found.cluster.ranks),
        groups=tuple(
            PlannedGroup(
                names, index not in (root, *kept) and choice.pp == 1 and choice.reshard_after_forward
            )
            for index, names in enumerate(listed)
            if names not in ((), ("",))
        ),
        microbatches=choice.microbatches,
        microbatch_tokens=found.tokens,
        modules_to_recompute=tuple(name for group in again for name in listed[group]),
        base=choice.base,
        offload=offload_name(choice.offload),
        policy=choice.policy or preset(choice.runtime).policy,
        mp_policy=choice.mp_policy,
        step_s=found.step_s,
        exposed_s=float(found.timeline.exposed_s),
        peak_nbytes=found.peak.total,
        devices=found.cluster.device.name,
    )


def greedy(space: Space) -> Tried:
    """The best that changes of one lever at a time lead to, from two starts."""
    values = space.values
    starts = list(_starts(space))
    least = starts[-1]
    if space.price(least).over_nbytes:
        starts.append(least._replace(offload=values["offload"][-1]))
    if space.price(starts[-1]).over_nbytes:
        starts.append(starts[-1]._replace(base=values["base"][-1]))
    return min((_climb(space, start) for start in starts), key=_rank)


def thriftiest(space: Space, best: Tried) -> Tried:
    """Of what was tried and takes hardly longer than the best, that which holds least: a hundredth is far
    less than the error of a prediction. What is offloaded or quantised stays as the best has it."""
    near = [
        one
        for one, _ in space.seen.values()
        if one.over_nbytes <= best.over_nbytes
        and one.step_s <= best.step_s * (1 + _NEAR)
        and one.candidate[-2:] == best.candidate[-2:]
    ]
    return min(near, key=lambda one: (one.nbytes, one.step_s))


def _climb(space: Space, start: Candidate) -> Tried:
    best = space.price(start)
    while True:
        bases = best.candidate.base, space.plain.base  # another one changes results
        changes = [each for each in space.changes(best.candidate) if each.base in bases]
        found = min(map(space.price, changes), key=_rank)
        if _rank(found) >= _rank(best):
            return best
        best = found


def _rank(one: Tried) -> tuple[float, float]:
    """What fits first, then by seconds; what doesn't fit by how much it is over."""
    return (one.over_nbytes, one.step_s)
