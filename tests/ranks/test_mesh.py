"""`shardwright.mesh`: axes, mistakes, and what a loader and a loss are to know."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import shardwright
from shardwright import expert_parallel, full_state_dict, fully_shard
from shardwright.errors import InputError
from tests.ranks.models import Run
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.test_experts import build, train_beside


def arranged(rank, world, sizes):
    """The axes, and of each mesh the ranks that this one is with."""
    mesh = shardwright.mesh(**sizes)

    def with_me(part):
        return part and [dist.get_process_group_ranks(part.get_group(axis)) for axis in range(part.ndim)]

    parts = {name: with_me(getattr(mesh, name)) for name in ("shard", "experts", "ep", "tp", "cp", "pp")}
    parts["loss"] = dist.get_process_group_ranks(mesh.loss_group)
    root = mesh.device_mesh
    axes = dict(zip(root.mesh_dim_names, root.shape, strict=True))
    return axes, parts, (mesh.sample_rank, mesh.num_samples), mesh.seed(100)


NONE = {"ep": None, "tp": None, "cp": None, "pp": None}


@pytest.mark.parametrize(
    ("world", "sizes", "axes", "parts", "samples", "seeds"),
    [
        (2, {}, {"dp": 2}, NONE | {"shard": [[0, 1]], "experts": [[0, 1]], "loss": [0, 1]}, [0, 1], [0, 1]),
        (
            4,
            {"replicate": 2, "cp": 2},
            {"replicate": 2, "dp": 1, "cp": 2},
            NONE
            | {"shard": [[0, 2], [0, 1]], "experts": [[0, 2], [0, 1]], "cp": [[0, 1]], "loss": [0, 1, 2, 3]},
            [0, 0, 1, 1],
            [0, 1, 2, 3],
        ),
        (
            8,
            {"tp": 2, "cp": 2},
            {"dp": 2, "cp": 2, "tp": 2},
            NONE | {"shard": [[0, 2, 4, 6]], "cp": [[0, 2]], "tp": [[0, 1]], "loss": [0, 2, 4, 6]},
            [0, 0, 0, 0, 1, 1, 1, 1],
            [0, 0, 1, 1, 2, 2, 3, 3],
        ),
        (
            8,
            {"pp": 2, "ep": 2},
            {"pp": 2, "dp_outer": 2, "dp_inner": 2},
            NONE
            | {"shard": [[0, 1, 2, 3]], "experts": [[0, 2]], "ep": [[0, 1]], "pp": [[0, 4]]}
            | {"loss": [0, 1, 2, 3]},
            [0, 1, 2, 3, 0, 1, 2, 3],
            [0, 1, 2, 3, 0, 1, 2, 3],
        ),
        (
            8,
            {"cp": 2, "ep": 4},
            {"dp_outer": 2, "dp_inner": 2, "cp": 2},
            NONE | {"shard": [[*range(8)]], "experts": [[0, 4]], "ep": [[0, 1, 2, 3]], "cp": [[0, 1]]},
            [0, 0, 1, 1, 2, 2, 3, 3],
            [*range(8)],
        ),
        (
            4,
            {"cp": 4, "ep": 2},
            {"dp": 1, "cp_outer": 2, "cp_inner": 2},
            {"shard": [[0, 1, 2, 3]], "experts": [[0, 2]], "ep": [[0, 1]], "cp": [[0, 1, 2, 3]]},
            [0, 0, 0, 0],
            [0, 1, 2, 3],
        ),
        (
            8,
            {"replicate": 2, "dp": 4, "ep": 4},
            {"replicate": 2, "dp_outer": 1, "dp_inner": 4},
            {"shard": [[0, 4], [0, 1, 2, 3]], "experts": [[0, 4], [0]], "ep": [[0, 1, 2, 3]]},
            [*range(8)],
            [*range(8)],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) and "shard" not in value else "",
)
def test_axes_ranks_samples_and_seeds_of_a_mesh_are_these(world, sizes, axes, parts, samples, seeds):
    found = run_ranks(world, arranged, sizes)
    assert [each[0] for each in found] == [axes] * world
    assert {name: found[0][1][name] for name in parts} == parts
    assert [each[2] for each in found] == [(sample, max(samples) + 1) for sample in samples]
    assert [each[3] for each in found] == [100 + seed for seed in seeds]


MODEL = {"num_attention_heads": 16, "num_key_value_heads": 6, "num_hidden_layers": 4, "num_local_experts": 6}
MISTAKES = [
    ({"cp": 0}, {}, "cp is 0, expected a number of ranks, 1 or more"),
    ({"ep": -1}, {}, "ep is -1, expected"),
    ({"tp": 2.0}, {}, "tp is 2.0, expected"),
    ({"replicate": -1}, {}, "replicate and dp are -1, but only one can be what is left"),
    (
        {"cp": 3},
        {},
        "cp=3 needs a multiple of 3 ranks, but the world has 4: a product of 1, 2 or 4 would fit",
    ),
    ({"dp": 2, "cp": 4}, {}, "dp=2 x cp=4 is 8 ranks, but the world has 4: start 8 ranks, or leave dp out"),
    ({"ep": 3}, {}, "ep=3 doesn't divide the 4 ranks of dp=4 x cp=1, .*: 1, 2 or 4 would fit"),
    ({"cp": 4}, {"num_attention_heads": 6}, "cp=4 doesn't divide 6 heads: 1, 2, 3 or 6 would"),
    (
        {"tp": 2, "cp": 2},
        {"num_attention_heads": 10},
        "cp=2 doesn't divide 5 heads of each of tp=2 ranks: 1 or",
    ),
    ({"tp": 4}, MODEL, "tp=4 doesn't divide 6 key/value heads: 1, 2, 3 or 6 would"),
    ({"ep": 4}, MODEL, "ep=4 doesn't divide 6 experts: 1, 2, 3 or 6 would"),
    (
        {"ep": 4},
        {"text_config": SimpleNamespace(n_routed_experts=2)},
        "ep=4 doesn't divide 2 experts: 1 or 2",
    ),
    ({"pp": 4}, {"num_hidden_layers": 3}, "pp=4 is more than 3 layers: 1 to 3 would fit"),
]


@on_ranks(4)
def test_a_mistake_says_what_would_fit_and_makes_no_group(rank, world):
    shardwright.mesh()
    groups = len(shardwright.torch_private.process_groups())
    for sizes, config, expected in MISTAKES:
        model = nn.Linear(1, 1)
        model.config = SimpleNamespace(**config)
        with pytest.raises(InputError, match=f"^mesh: {expected}"):
            shardwright.mesh(**sizes, model=model)
    assert len(shardwright.torch_private.process_groups()) == groups
    shardwright.mesh(cp=4, model=SimpleNamespace(**MODEL))  # 6 key/value heads are repeated


def trains_experts(rank, world, sizes):
    mesh = shardwright.mesh(**sizes)
    model, reference = build(), build()
    placed = {"shard_placement_fn": lambda param: Shard(1) if param.ndim == 3 else None}
    fully_shard(expert_parallel(model, mesh), mesh=mesh.shard, groups="auto", **placed)
    assert model.blocks[0].routed.experts.up.placements[-2:] == (Shard(1), Shard(0))
    train_beside(Run.of(model), Run.of(reference), rank, world)
    return [*full_state_dict(model)]


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"replicate": 2, "ep": 2}], ids=str)
def test_experts_beside_dense_parameters_on_one_mesh_train_as_in_one_process(sizes):
    assert run_ranks(4, trains_experts, sizes)[0] == [*build().state_dict()]
