"""The compiled program gathers, reduces and frees as promised, and its arguments are one share."""

import re

import pytest

pytest.importorskip("torchax", reason="the extra shardwright[xla] isn't installed (make setup-xla)")

import torch
from torch import nn
from torch.nn import functional as F

from shardwright import xla

WIDTH = 512
LAYERS = 8


def squared(model, x):
    return model(x).square().mean()


def count(text: str, op: str) -> int:
    return len(re.findall(rf" {op}(?:-start)?\(", text))


class Residual(nn.Module):
    """A stack of equal layers, each one a unit of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compiled(way=F.linear, frozen=slice(0), **options):
    """way: what each layer makes of its input and its weight. frozen: layers."""
    with torch.device("meta"):
        model = Residual()
    for layer in model.layers:
        layer.forward = lambda x, layer=layer: way(x, layer.weight)
    model.layers[frozen].requires_grad_(False)
    xla.fully_shard(model, 4, (nn.Linear,), **options)
    step = xla.make_train_step(model, squared, xla.SGD(0.1))
    return model, step.lower(torch.empty(8, WIDTH, device="meta")).compile()


PROGRAMS = {
    "linear": {},
    "half frozen": {"frozen": slice(1, None, 2)},
    "transposed": {"way": lambda x, weight: x @ weight.t()},
    "cast": {"way": lambda x, weight: x.bfloat16() @ weight.bfloat16()},
    "flipped": {"way": lambda x, weight: x @ weight.flip(0)},
    "joined": {"way": lambda x, weight: x @ torch.cat(weight.chunk(2)[::-1])},
}


@pytest.fixture(scope="module", params=PROGRAMS.values(), ids=PROGRAMS)
def resharded(request):
    return compiled(**request.param)


@pytest.fixture(scope="module")
def kept():
    return compiled(reshard_after_forward=False)


def test_resharding_gathers_each_unit_a_second_time(resharded):
    model, program = resharded
    text = program.as_text()
    # But for the first: its input needs no gradient, and only that would read its weight.
    assert count(text, "all-gather") == 2 * LAYERS - 1
    assert count(text, "reduce-scatter") == sum(p.requires_grad for p in model.parameters())


def test_without_resharding_each_unit_is_gathered_once(kept):
    text = kept[1].as_text()
    assert count(text, "all-gather") == LAYERS
    assert count(text, "reduce-scatter") == LAYERS


def test_resharding_frees_the_unsharded_weights_before_the_backward(resharded, kept):
    """Also that no operator keeps a view, a cast or a transpose of a gathered weight for its backward."""
    freed, held = (program.memory_analysis().temp_size_in_bytes for _, program in (resharded, kept))
    assert held >= LAYERS * WIDTH * WIDTH * 4
    assert freed * 2.5 <= held


def test_checkpointed_activations_are_not_kept():
    """Each layer's own activations are wide; only its narrow input stays."""

    def temp_nbytes(**options):
        with torch.device("meta"):
            layers = [nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 8)) for _ in range(4)]
            model = nn.Sequential(*layers)
        xla.fully_shard(
            model, 4, lambda module, recurse, unwrapped_params: recurse or module in layers, **options
        )
        step = xla.make_train_step(model, squared, xla.SGD(0.1))
        return step.lower(torch.empty(2048, 8, device="meta")).compile().memory_analysis().temp_size_in_bytes

    assert temp_nbytes(checkpoint_activations=True) * 2 < temp_nbytes()


def test_arguments_are_one_share_of_the_model(resharded):
    model, program = resharded
    stats = xla.stats(model)
    assert stats.padding_nbytes == 0
    assert stats.at_rest_nbytes == LAYERS * WIDTH * WIDTH * 4 // 4
    rows, key = 2 * WIDTH * 4, 2 * 4
    assert program.memory_analysis().argument_size_in_bytes == stats.at_rest_nbytes + rows + key


def test_what_a_step_replaces_is_donated(resharded):
    """Trained weights of one share, and the random key, are updated where they are."""
    model, program = resharded
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert program.memory_analysis().alias_size_in_bytes == trained * 4 // 4 + 2 * 4


def test_padding_is_computed():
    model = nn.Linear(10, 3)  # 30 + 3 numbers, each parameter padded to 4 * 8
    xla.fully_shard(model, 4, pad_multiple=8)
    stats = xla.stats(model)
    assert stats.at_rest_nbytes == (8 + 8) * 4
    assert stats.padding_nbytes == (64 - 33)  # in all, over 4 devices, in 4-byte numbers


@pytest.mark.parametrize(("rows", "on_each"), [(3, 1), (4, 1), (5, 2)])
def test_rows_are_padded_to_the_devices_only(rows, on_each):
    model = nn.Linear(10, rows, bias=False)
    weight = model.weight.detach().clone()
    xla.fully_shard(model, 4, shard_param_on_dim_0=True)
    assert xla.stats(model).at_rest_nbytes == on_each * 10 * 4
    assert torch.equal(xla.full_state_dict(model)["weight"], weight)
    x = torch.randn(4, 10)
    assert torch.allclose(model(x), x @ weight.T, atol=1e-6)


def test_rows_travel_as_rows_in_both_directions():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6, 8))
    xla.fully_shard(model, 4, shard_param_on_dim_0=True)
    text = xla.make_train_step(model, squared, xla.SGD(0.1)).lower(torch.empty(8, 3, 3, 3)).as_text()
    gathers, sums = (
        re.findall(rf"{op}.*?\(tensor<(\S+?)xf32>\) -> tensor<(\S+?)xf32>", text, re.DOTALL)
        for op in ("all_gather", "reduce_scatter")
    )
    rows = [("2x3x3x3", "8x3x3x3"), ("2", "8"), ("2x6", "8x6"), ("2", "8")]
    assert sorted(gathers) == sorted(rows)
    assert sorted(sums) == sorted((whole, part) for part, whole in rows)


def branches(depth: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *([branches(depth - 1)] if depth else []), nn.Linear(8, 8))


def test_nested_units_are_each_gathered_twice():
    model = branches(2)
    xla.fully_shard(model, 4, (nn.Sequential,))
    text = xla.make_train_step(model, squared, xla.SGD(0.1)).lower(torch.empty(8, 8)).compile().as_text()
    assert count(text, "reduce-scatter") == 3
    assert count(text, "all-gather") == 3 + 2  # the root's parameters stay


def test_parameters_of_a_unit_share_one_all_gather():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    xla.fully_shard(model, 4)
    text = xla.make_train_step(model, squared, xla.SGD(0.1)).lower(torch.empty(8, 8)).compile().as_text()
    assert count(text, "all-gather") == 1
    assert count(text, "reduce-scatter") == 1


@pytest.mark.parametrize("flat", [False, True])
def test_frozen_parameters_are_gathered_apart_from_the_trained_and_never_reduced(flat):
    block = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False))
    block[0].requires_grad_(False)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), block)
    xla.fully_shard(model, 4, (nn.Sequential,), pad_multiple=1, flatten_parameters=flat)
    text = xla.make_train_step(model, squared, xla.SGD(0.1)).lower(torch.empty(8, 8)).compile().as_text()
    # Those of the block are gathered again in the backward.
    for op, shapes in {"all-gather": "4,12 4,12 4,16 4,6 4,6", "reduce-scatter": "1,16 1,6"}.items():
        assert " ".join(sorted(re.findall(rf" = f32\[(\S+)\]\S+ {op}\(", text))) == shapes


def test_the_all_gather_travels_in_the_compute_dtype_and_the_sum_in_fp32():
    model = nn.Linear(8, 8)
    xla.fully_shard(model, 4, compute_dtype=torch.bfloat16, fp32_reduce_scatter=True)
    text = xla.make_train_step(model, squared, xla.SGD(0.1)).lower(torch.empty(8, 8)).as_text()
    assert re.search(r"all_gather.*?tensor<\d+xbf16>", text, re.DOTALL)
    assert re.search(r"reduce_scatter.*?\(tensor<4x\d+xf32>\)", text, re.DOTALL)
