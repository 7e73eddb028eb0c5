"""Tensor subclasses in the state of an optimizer, as parameters and in ``extra``: saved by what they are made
of, and loaded to the bit or refused by name."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from shardwright import fully_shard
from shardwright.checkpoint import async_save, load, save
from shardwright.errors import CheckpointError
from shardwright.wrapper import FSDP
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.test_extended import WIDTH, Bf16Gathered


class Blocks(torch.Tensor):
    """Whole numbers, and a scale for each block of its elements in row-major order."""

    scales = 4
    context: object = ("blocks", 1)

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.context

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Blocks(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.view.default:  # for DTensor.from_local; torchao's know little more
            raise NotImplementedError(func)
        return cls(args[0].codes.view(args[1]), args[0].scale)


class Other(Blocks):
    context = ("blocks", 2)


class Unnamed(Blocks):
    context = object()


class OptimState8bit(Blocks):
    """Named as torchao's, of which the order is known."""


class Lossy(torch.optim.Optimizer):
    """Momentum in blocks, which ranks with too little, or with odd sizes, keep plain, as torchao's do."""

    def __init__(self, params, kind=Blocks, least=1):
        super().__init__(params, {"lr": 0.1})
        self.kind, self.least = kind, least

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "momentum": self.like(p, grad)}
                state["step"] += 1
                held = getattr(state["momentum"], "_local_tensor", state["momentum"])
                if isinstance(held, Blocks):
                    blocks = held.codes.view(len(held.scale), -1) * held.scale[:, None]
                    blocks = 0.9 * blocks + grad.detach().reshape(blocks.shape) + torch.rand(()) / 8
                    held.scale.copy_(blocks.abs().amax(1) / 100)
                    held.codes.copy_((blocks / held.scale[:, None]).round().view(held.shape))
                else:
                    held.mul_(0.9).add_(grad)
                p.detach().add_(-group["lr"])

    def like(self, p, local):
        made = torch.zeros_like(local)
        if local.numel() >= self.least and local.numel() % self.kind.scales == 0 and local.numel():
            made = self.kind(made.to(torch.int8), torch.zeros(local.numel() // self.kind.scales))
        if not isinstance(p, DTensor):
            return made
        whole = {"run_check": False, "shape": p.shape, "stride": p.stride()}
        return DTensor.from_local(made, p.device_mesh, p.placements, **whole)


def build(shapes, seed, dim=0):
    torch.manual_seed(seed)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    return fully_shard(model, shard_placement_fn=lambda p: Shard(dim))


def trained(model, optimizer, steps=2):
    for step in range(steps):
        for p in model.parameters():
            torch.manual_seed(step)
            p.grad = torch.randn_like(p)
        optimizer.step()


def bits(state):
    """What this rank holds of an optimizer's state, by position and name."""
    found = {}
    for i, values in enumerate(state.values()):
        for key, value in values.items():
            local = getattr(value, "_local_tensor", value)
            inner = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else ()
            found |= {(i, key, each): getattr(local, each).clone() for each in inner} or {(i, key): local}
    return found


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


@pytest.mark.parametrize("saves", [save, async_save])
@pytest.mark.parametrize(
    ("world", "shapes", "kind", "dim"),
    [
        (1, [(3, 4)], Blocks, 0),
        (2, [(4, 4), (2, 6), (6, 2)], Blocks, 0),
        (2, [(2, 4), (6, 4)], Blocks, 1),
        (3, [(5, 8), (1, 8), (6, 2)], OptimState8bit, 0),
    ],
    ids=["one", "rows", "columns", "uneven_and_empty"],
)
@on_ranks()
def test_state_of_a_subclass_comes_back_to_the_bit(rank, tmp_path, shapes, kind, dim, saves):
    path = str(tmp_path)
    model = build(shapes, 1, dim)
    optimizer = Lossy(model.parameters(), kind)
    trained(model, optimizer)
    if saves is async_save:
        saves(path, model=model, optimizer=optimizer, step=1).wait()
    else:
        saves(path, model=model, optimizer=optimizer, step=1)
    expected = bits(optimizer.state)
    assert any(len(key) == 3 for key in expected) or rank
    for steps in (0, 1):  # into state that isn't there yet, and over other state
        other = build(shapes, 2 + rank, dim)
        optimizer = Lossy(other.parameters(), kind)
        trained(other, optimizer, steps)
        held = [*optimizer.state.values()]
        random = torch.get_rng_state()
        load(path, model=other, optimizer=optimizer)
        assert torch.equal(random, torch.get_rng_state())
        assert equal(bits(optimizer.state), expected)
        assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(other, model, strict=True))
        for before, after in zip(held, optimizer.state.values(), strict=False):
            assert before["momentum"] is after["momentum"]
        trained(other, optimizer, 1)


def saved(rank, world, path, shapes, kind, dim=0):
    model = build(shapes, 1, dim)
    optimizer = Lossy(model.parameters(), kind)
    trained(model, optimizer)
    save(path, model=model, optimizer=optimizer, step=1)
    return [bits({0: values}) for values in optimizer.state.values()]


def loaded(rank, world, path, shapes, kind, dim=0, least=1):
    model = build(shapes, 2, dim)
    optimizer = Lossy(model.parameters(), kind, least)
    before = [p.detach().clone() for p in model]
    try:
        load(path, model=model, optimizer=optimizer)
    except CheckpointError as error:
        assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(before, model, strict=True))
        assert not optimizer.state
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(shapes)]
        return str(error)
    return [bits({0: values}) for values in optimizer.state.values()]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_states_of_which_the_order_is_known_are_loaded_by_another_number_of_ranks(tmp_path, before, after):
    # Of (24, 1) the 6 rows of each of 4 ranks are no blocks.
    shapes = [(12, 8), (5, 4), *([(24, 1)] if {before, after} == {2, 3} else [])]
    ranks = run_ranks(before, saved, str(tmp_path), shapes, OptimState8bit)
    others = run_ranks(after, loaded, str(tmp_path), shapes, OptimState8bit)
    for i, shape in enumerate(shapes):
        for key in ((0, "momentum", "codes"), (0, "momentum", "scale")):
            parts = ([rank[i][key].flatten() for rank in side if key in rank[i]] for side in (ranks, others))
            assert torch.equal(*map(torch.cat, parts)), (shape, key)


IN_TWO = r"in 2 parts by \(Shard\(dim=0\),\)"
REFUSED = {
    "ranks": (3, {}, r"wrong kind optimizer/0/momentum: Blocks .* in 2 parts by \(Shard\(dim=0\),\) in the"),
    "dim": (2, {"dim": 1}, rf"{IN_TWO} in the checkpoint, the optimizer has Blocks .*dim=1"),
    "context": (2, {"kind": Other}, r"Blocks \('blocks', 1\).*the optimizer has Other \('blocks', 2\)"),
    "plain": (2, {"least": 99}, "the optimizer has a plain tensor for this rank's part"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_state_that_would_not_be_exact_is_refused_by_name_and_nothing_is_changed(tmp_path, case):
    world, options, text = REFUSED[case]
    run_ranks(2, saved, str(tmp_path), [(12, 8)], Blocks)
    values = {"kind": Blocks, "dim": 0, "least": 1, **options}.values()
    for message in run_ranks(world, loaded, str(tmp_path), [(12, 8)], *values):
        assert re.search(text, message), message


@on_ranks(3)
def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    path = str(tmp_path)

    def message(model, optimizer=None, **options):
        with pytest.raises(CheckpointError) as caught:
            save(path, model=model, optimizer=optimizer, step=1, **options)
        return str(caught.value)

    model = build([(4, 4)], 1)
    blocks = Blocks(torch.zeros(4, 4), torch.zeros(4))
    said = message(model, extra={"mean": blocks})
    assert "extra/mean: a Blocks can't be made again by a load; give its tensors (codes, scale)" in said
    optimizer = Lossy(model.parameters(), Unnamed)
    trained(model, optimizer)
    assert "optimizer/0/momentum: a Unnamed with the context <object" in message(model, optimizer)
    for kind, shape in ((Blocks, (5, 4)), (OptimState8bit, (10, 2))):  # 2 + 2 + 1 rows; 4 + 4 + 2 in twos
        uneven = build([shape], 1)
        optimizer = Lossy(uneven.parameters(), kind)
        trained(uneven, optimizer)
        assert f"optimizer/0/momentum: 'scale' of a {kind.__name__} has shape" in message(uneven, optimizer)
    mixed = build([(5, 4)], 1)
    # Less on the third rank, which keeps it plain.
    optimizer = Lossy(mixed.parameters(), OptimState8bit, least=8)
    trained(mixed, optimizer)
    text = message(mixed, optimizer)
    assert "optimizer/0/momentum: a OptimState8bit on rank 0, torch.float32 [5, 4] on rank 2" in text
    assert "a number of ranks that divides the rows" in text
    flat = FSDP(nn.Linear(7, 3), use_orig_params=False)
    optimizer = Lossy(flat.parameters())
    trained(flat, optimizer)
    assert "use_orig_params=True" in message(flat, optimizer)
    assert not [*Path(path).glob("step-*")]


def of_elements(kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, WIDTH))
    for layer in model[::2]:
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return fully_shard(model)


def inner_of(value):
    return pytree.tree_map_only(Bf16Gathered, lambda each: each.data_, value.to_local()).clone()


def elements_saved(rank, world, path):
    model = of_elements(Bf16Gathered, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    save(path, model=model, optimizer=optimizer, step=1)
    return [inner_of(v) for p in model.parameters() for v in (p, optimizer.state[p]["exp_avg"])]


def elements_loaded(rank, world, path):
    model = of_elements(Bf16Gathered, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    load(path, model=model, optimizer=optimizer)
    assert type(optimizer.state[model[0].weight]["exp_avg"].to_local()) is Bf16Gathered
    return [inner_of(v) for p in model.parameters() for v in (p, optimizer.state[p]["exp_avg"])]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
def test_parameters_of_a_subclass_and_their_states_come_back_on_any_number_of_ranks(tmp_path, before, after):
    ranks = run_ranks(before, elements_saved, str(tmp_path))
    others = run_ranks(after, elements_loaded, str(tmp_path))
    for one, other in zip(zip(*ranks, strict=True), zip(*others, strict=True), strict=True):
        assert torch.equal(torch.cat(one), torch.cat(other))
