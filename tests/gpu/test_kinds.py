"""Every way to gather, on the cards of this machine: what is trained there is what CPU ranks train."""

import pytest
import torch

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


def on_card(device, rank, world, kind):
    return train(kind, NUMBER, rank, Card(device))


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
