"""Every way to gather, on the cards of this machine: what is trained there is what CPU ranks train."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwright.params.binding import Buffer
from shardwright.transport.streams import Streams
from tests.device.cases import KINDS, Place, on_cpu, train
from tests.gpu.cards import NEEDS_CARDS, WORLDS, result, run_on_cards
from tests.ranks.pool import run_ranks

pytestmark = NEEDS_CARDS
NUMBER = 3
ROUNDED = ("half", "subclass")
"""Kinds that round to bfloat16 or to 8 bits: what differs in the last bit of a sum may round otherwise."""


def kinds_in(world):
    """Those that a world of so many ranks can train."""
    return [
        kind
        for kind, (ranks, _, _) in KINDS.items()
        if (ranks == world if ranks == 1 else world % 4 == 0 if ranks == 4 else True)
    ]


class Card(Place):
    """Of this process."""

    def __init__(self, card):
        self.card, self.device = card, card.kind

    def stream(self):
        return torch.get_device_module(self.device).Stream()  # the kind that users make

    def read(self, tensors):
        self.card.synchronize()
        return [each.detach().to("cpu", copy=True) for each in tensors]


def on_card(device, rank, world, kind, poisons=False):
    with poison(device) if poisons else nullcontext():
        return train(kind, NUMBER, rank, Card(device))


@contextmanager
def poison(device):
    """What is given back is overwritten on gather's stream, as soon as rule 2 of streams.py lets that write.
    Modules compute late, behind a sleeping kernel: what reads without being ordered reads something else."""
    free = Buffer.free

    def overwritten(buffer):
        nbytes = buffer._storage.nbytes()
        streams = Streams.of(buffer._storage.device) if nbytes else None
        if streams is not None:
            streams.release()
        if nbytes:
            with nullcontext() if streams is None else streams.filling(changed=False):
                buffer.tensor(torch.uint8, 0, (nbytes,), (1,)).fill_(0xFF)
        free(buffer)

    def sleeps(*_):
        if device.kind == "cuda":
            torch.cuda._sleep(1_000_000)  # cycles: about half a millisecond

    slow = register_module_forward_pre_hook(sleeps)
    Buffer.free = overwritten
    try:
        yield
    finally:
        Buffer.free = free
        slow.remove()


@pytest.fixture(scope="module", params=WORLDS, ids="{} cards".format)
def trained(request):
    """By kind, what cards and CPU ranks give."""
    kinds = kinds_in(request.param)
    found = run_on_cards(request.param, {kind: (on_card, (kind,)) for kind in kinds})
    on_cpus = run_ranks(request.param, on_cpu, [(kind, NUMBER) for kind in kinds], limit_s=120.0)
    return found, dict(zip(kinds, zip(*on_cpus, strict=True), strict=True))


def apart(ours, theirs):
    """How long the difference is, over how long the tensor of the CPU is."""
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-3)).item()


def whole(tensors):
    """All numbers of a rank: what is a small sum of large ones is far off in bfloat16, taken by itself."""
    return torch.cat([tensor.flatten().double() for tensor in tensors if tensor.is_floating_point()])


@pytest.fixture(scope="module", params=WORLDS, ids="{} cards".format)
def beside_poison(request):
    """By kind, and by kind with poison, what cards give."""
    kinds = kinds_in(request.param)
    jobs = {(kind, poisons): (on_card, (kind, poisons)) for kind in kinds for poisons in (False, True)}
    return run_on_cards(request.param, {f"{kind} {poisons}": job for (kind, poisons), job in jobs.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_same_where_memory_that_is_given_back_is_overwritten(kind, beside_poison):
    if f"{kind} True" not in beside_poison:
        pytest.skip(f"{kind}: its mesh needs another number of cards")
    pairs = zip(result(beside_poison, f"{kind} False"), result(beside_poison, f"{kind} True"), strict=True)
    for plain, poisoned in pairs:
        assert all(map(torch.equal, plain, poisoned))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_gradients_and_weights_are_those_of_cpu_ranks(kind, trained):
    found, on_cpus = trained
    if kind not in on_cpus:
        pytest.skip(f"{kind}: its mesh needs another number of cards")
    for ours, theirs in zip(result(found, kind), on_cpus[kind], strict=True):
        assert [(t.dtype, t.shape) for t in ours] == [(t.dtype, t.shape) for t in theirs]
        if any(word in kind for word in ROUNDED):
            assert apart(whole(ours), whole(theirs)) <= 2e-2
        else:
            pairs = zip(ours, theirs, strict=True)
            assert max(apart(a, b) for a, b in pairs if a.is_floating_point()) <= 1e-4
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True) if not a.is_floating_point())
