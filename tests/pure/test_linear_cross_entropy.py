"""The loss over head and vocabulary in chunks, beside the plain one."""

import json

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from shardwright import linear_cross_entropy
from shardwright.errors import InputError, StageError


def made(rows=300, width=24, words=500, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    hidden = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = (0.2 * torch.randn(words, width)).to(dtype).requires_grad_()
    own = (0.1 * torch.randn(words)).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(words, (rows,))
    targets[::5] = -100
    return hidden, weight, own, targets


def plain(hidden, weight, bias, targets):
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def grads(loss, *tensors):
    (0.01 * loss).backward()
    found = [None if each is None else each.grad for each in tensors]
    for each in tensors:
        if each is not None:
            each.grad = None
    return found


def off(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "rel"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)]
)
def test_loss_and_gradients_are_those_of_all_logits_at_once(dtype, rel, bias):
    hidden, weight, own, targets = made(dtype=dtype, bias=bias)
    theirs, ours = plain(hidden, weight, own, targets), linear_cross_entropy(hidden, weight, targets, own)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)  # in bf16, too
    expected = grads(theirs, hidden, weight, own)
    for got, want in zip(grads(ours, hidden, weight, own), expected, strict=True):
        if want is not None:
            assert got.dtype == want.dtype
            assert off(got, want) < rel


def test_a_frozen_head_gets_no_gradient_and_an_evaluation_makes_none():
    hidden, weight, own, targets = made()
    weight.requires_grad_(False)
    (of_hidden, of_weight, _) = grads(linear_cross_entropy(hidden, weight, targets, own), hidden, weight, own)
    assert of_hidden is not None and of_weight is None
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets).grad_fn is None


def test_there_are_never_more_logits_than_a_32nd_of_all(monkeypatch):
    hidden, weight, _, targets = made(rows=640)
    seen = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *a: seen.append(linear(*a)) or seen[-1])
    linear_cross_entropy(hidden, weight, targets)
    assert sum(each.numel() for each in seen) == 640 * 500
    assert max(each.numel() for each in seen) * 32 <= 640 * 500


def peak_nbytes(run, path):
    """Most bytes that torch's allocator had given out at once, of those asked for in ``run``: what is
    temporary within an operation is seen, too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    seen.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_the_gradient_of_the_weight_its_peak_is_at_most_a_15th_of_the_plain_ones(
    dtype, trained, tmp_path
):
    llama_3_by_32 = {"rows": 256, "width": 128, "words": 4008}
    hidden, weight, _, targets = made(**llama_3_by_32, dtype=dtype, bias=False)
    weight.requires_grad_(trained)
    theirs = peak_nbytes(lambda: plain(hidden, weight, None, targets).backward(), tmp_path / "theirs.json")
    hidden.grad = weight.grad = None
    ours = peak_nbytes(
        lambda: linear_cross_entropy(hidden, weight, targets).backward(), tmp_path / "ours.json"
    )
    # On machines with a matrix unit (AMX) oneDNN packs a copy of a bfloat16 weight for the product.
    grads = torch.ones(256 // 32, 4008, dtype=dtype)
    product = peak_nbytes(lambda: grads @ weight.detach(), tmp_path / "product.json")
    own = weight.nbytes if trained else 0
    assert theirs >= 3 * 4 * 256 * 4008  # the logits' softmax and two gradients, so the count sees them
    assert 15 * (ours - own - product) <= theirs
    assert ours - own >= hidden.nbytes
    if not trained or dtype == torch.bfloat16:
        assert 8 * ours <= theirs


def test_rows_without_a_target_learn_nothing():
    hidden, weight, own, targets = made()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100), own)
    assert loss.item() == 0
    assert not any(grad.any() for grad in grads(loss, hidden, weight, own))


def test_other_shapes_and_a_second_backward_are_refused_by_name():
    hidden, weight, own, targets = made()
    with pytest.raises(InputError, match=r"got hidden \[1, 300, 24\]"):
        linear_cross_entropy(hidden[None], weight, targets)
    loss = linear_cross_entropy(hidden, weight, targets, own)
    loss.backward(retain_graph=True)
    with pytest.raises(StageError, match="second time"):
        loss.backward()
