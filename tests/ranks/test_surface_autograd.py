"""What autograd and torch.func do with a sharded model: gradients of gradients, retries, transforms."""

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vjp, vmap

from shardwright import fully_shard, stats
from shardwright.errors import StageError
from tests.ranks.models import assert_same_grads, full, sharded
from tests.ranks.pool import on_ranks

WIDTH = 7


def network() -> nn.Sequential:
    torch.manual_seed(7)
    block = [nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, WIDTH)) for _ in range(3)]
    return nn.Sequential(*block)


def rows(step: int, world: int) -> torch.Tensor:
    """Inputs of all ranks: [world, 4, WIDTH]."""
    return torch.randn(world, 4, WIDTH, generator=torch.Generator().manual_seed(step))


ASKS = {
    "grad": lambda loss, params: torch.autograd.grad(loss, params),
    "the used of them": lambda loss, params: torch.autograd.grad(loss, params, allow_unused=True),
    "inputs": lambda loss, params: loss.backward(inputs=params),
    "through edges": lambda loss, params: torch.autograd.backward(
        torch.autograd.graph.get_gradient_edge(loss), inputs=params
    ),
    "with inputs": lambda loss, params: loss.backward(inputs=[params[0]]),
}


@pytest.mark.parametrize("after", [None, True, False])
@pytest.mark.parametrize("ask", ASKS)
@on_ranks(2)
def test_gradients_of_shards_that_the_graph_lacks_are_refused(rank, world, ask, after):
    model, reference = network(), network()
    fully_shard(model[0], reshard_after_forward=after)
    fully_shard(model, reshard_after_forward=after)
    params, inputs = list(model.parameters()), rows(0, world)
    own = inputs[rank].clone().requires_grad_()
    decay = sum(param.square().sum() for param in params)
    for loss in (model(own).square().mean(), model(own).square().mean() + full(decay)):
        with pytest.raises(StageError, match=r"asked for the gradient of '.*' .* got its shard"):
            ASKS[ask](loss, params)
    # Shards that are in the graph, and no unsharded parameter of theirs, and other tensors, may be asked for.
    for param, slope in zip(params, torch.autograd.grad(decay, params), strict=True):
        assert full(slope).equal(2 * full(param))
    loss = model(own).square().mean()
    loss.backward(inputs=[own], retain_graph=True)
    loss.backward()
    reference(inputs.flatten(0, 1)).square().mean().backward()
    assert_same_grads(model, reference)


@on_ranks(2)
def test_a_hessian_with_respect_to_the_inputs_equals_one_process():
    model, reference = sharded(network()), network()
    inputs = rows(0, 1)[0, 0]
    ours, theirs = (
        torch.autograd.functional.hessian(lambda x, m=m: m(x).pow(2).sum(), inputs)
        for m in (model, reference)
    )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(model, inputs),
        torch.autograd.functional.jacobian(reference, inputs),
    )


@on_ranks(1, 2, 3)
def test_a_backward_that_failed_may_be_tried_again_on_its_graph(rank, world):
    model, reference = sharded(network()), network()
    fails = [True]

    def fail(gradient):
        if fails[0]:
            raise KeyError("a failure of the caller's")

    inputs = rows(0, world)
    middle = model[0](inputs[rank])
    middle.register_hook(fail)
    loss = model[2](model[1](middle)).sum()
    for _ in range(2):
        with pytest.raises(KeyError):
            loss.backward(retain_graph=True)
        assert all(param.grad is None for param in model[0].parameters())
    fails[0] = False
    model.zero_grad()  # the last groups had their gradients already
    loss.backward()  # at once: no forward has told the failed backward's end
    torch.stack([reference(each).sum() for each in inputs]).mean().backward()
    assert_same_grads(model, reference)
    assert stats(model).unsharded_nbytes == 0


@on_ranks(2)
def test_transforms_of_torch_func_over_the_inputs_equal_one_process():
    model, reference = sharded(network()), network()
    inputs, tangents = rows(0, 1)[0], rows(1, 1)[0]

    def each(call):
        ours, theirs = call(model), call(reference)
        torch.testing.assert_close(ours, theirs)

    for _ in range(2):  # the second time by the plan
        each(lambda m: grad(lambda x: m(x).pow(2).sum())(inputs))
        each(lambda m: vjp(m, inputs)[1](tangents)[0])
        each(lambda m: jvp(m, (inputs,), (tangents,)))
        each(lambda m: vmap(m)(rows(2, 3)))
    model(inputs).sum().backward()
    reference(inputs).sum().backward()
    assert_same_grads(model, reference)
