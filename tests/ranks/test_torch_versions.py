"""What torch 2.15 has brought works on all that are supported; what an older one lacks is refused by name."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import shardwright
from shardwright import MixedPrecisionPolicy, fully_shard, torch_fsdp, torch_private
from shardwright.errors import Diverged, InputError, StageError, UnsupportedTorch
from shardwright.policy import adopt
from tests.ranks.models import assert_same_grads, full
from tests.ranks.pool import on_ranks, run_ranks

# ---- policies of torch


@dataclasses.dataclass(frozen=True)
class NewerPolicy:
    """As torch's of a version to come."""

    param_dtype: torch.dtype | None = None
    compress: str | None = None


def test_fields_of_a_newer_torchs_policy_are_taken_at_their_defaults_and_else_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch_fsdp, "TorchMixedPrecisionPolicy", NewerPolicy)
    assert adopt(NewerPolicy(torch.bfloat16)) == MixedPrecisionPolicy(torch.bfloat16)
    with pytest.raises(InputError, match=r"NewerPolicy.compress is 'fp8'.*leave it at its default, None"):
        adopt(NewerPolicy(torch.bfloat16, "fp8"))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)

    def forward(self, x):
        seen.append((self.up.weight.dtype, self.norm.weight.dtype))
        return self.norm(self.up(x).float())


seen = []


def keeps_norms(param):
    return param.dtype if param.ndim == 1 else None


@on_ranks(2)
def test_parameters_that_a_policys_function_names_stay_in_their_dtype(rank, world):
    """The same as one process in which the linear layer's weight alone is cast."""
    kinds = [MixedPrecisionPolicy]
    if torch_fsdp.SUMS_AT_REST:
        kinds.append(fsdp.MixedPrecisionPolicy)
    for kind in kinds:
        seen.clear()
        bf16 = kind(torch.bfloat16, torch.float32, param_dtype_override_fn=keeps_norms)
        model, whole = fully_shard(Normed(), mp_policy=bf16), Normed()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        out = model(x)
        assert seen == [(torch.bfloat16, torch.float32)]
        out.sum().backward()
        weight = whole.up.weight.to(torch.bfloat16)
        whole.norm(nn.functional.linear(x.to(torch.bfloat16), weight).float()).sum().backward()
        for own, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            torch.distributed.all_reduce(theirs.grad)
            assert own.dtype == own.grad.dtype == torch.float32
            assert torch.allclose(full(own.grad), theirs.grad / world, atol=1e-6)


@on_ranks(2)
def test_a_policys_function_that_says_another_thing_on_another_rank_is_told(rank):
    model = fully_shard(
        Normed(),
        mp_policy=MixedPrecisionPolicy(
            torch.bfloat16, param_dtype_override_fn=lambda param: param.dtype if rank else None
        ),
    )
    differ = r"up.weight .*torch.float32\n.*torch.float32, which the policy leaves in it"
    with pytest.raises(Diverged, match=differ):
        model(torch.randn(2, 8))


@on_ranks(1)
def test_a_policys_function_that_names_another_dtype_is_refused_before_anything_is_sharded():
    model = Normed()
    wrong = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda _: torch.float64)
    with pytest.raises(InputError, match=r"returned torch.float64 for parameter 'up\.weight'"):
        fully_shard(model, mp_policy=wrong)
    assert type(model) is Normed
    with pytest.raises(InputError, match="must be a function of a parameter or None, got 'fp32'"):
        MixedPrecisionPolicy(param_dtype_override_fn="fp32")


@on_ranks(2)
def test_gradients_without_a_reduce_dtype_are_summed_in_the_dtype_that_the_installed_torch_takes(rank):
    """Of 1 and 2**-9, which bfloat16 can't add; beside the installed torch's own class."""
    found = []
    for shard, kind in ((fully_shard, MixedPrecisionPolicy), (fsdp.fully_shard, fsdp.MixedPrecisionPolicy)):
        model = shard(nn.Linear(4, 4, bias=False), mp_policy=kind(torch.bfloat16))
        model(torch.full((1, 4), 1.0 if rank else 2**-9)).sum().backward()
        found.append(full(model.weight.grad))
    assert torch.equal(*found), found
    whole = (1 + 2**-9) / 2
    assert (found[0].flatten()[0].item() == whole) == torch_fsdp.SUMS_AT_REST


# ---- finalizing a backward by hand


def model_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


@on_ranks(1, 2, 3)
def test_a_backward_that_is_finalized_by_hand_brings_the_gradients_of_one_process(rank, world):
    ours, whole = model_of(), model_of()
    fully_shard(ours[0])
    fully_shard(ours)
    assert ours.set_manual_backward_finalization(False) is None
    ours.set_manual_backward_finalization(True)
    ours.finalize_backward()  # before the first forward: nothing to do
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (ours, whole)]
    for step in range(3):
        ours.set_requires_gradient_sync(False)
        ours.set_reshard_after_backward(False)
        for microbatch in range(2):
            seed = 10 * step + microbatch
            parts = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(seed))
            ours(parts[rank]).square().mean().backward()
            whole(parts.flatten(0, 1)).square().mean().backward()
        ours.set_requires_gradient_sync(True)
        ours.set_reshard_after_backward(True)
        handle = ours.finalize_backward(async_op=step > 0)
        if step > 0:
            with pytest.raises(StageError, match="called again before wait"):
                ours.finalize_backward()
            handle.wait()
            handle.wait()
        assert all(type(p.data).__name__ == "DTensor" for p in ours.parameters()), "not resharded"
        assert_same_grads(ours, whole)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours.set_manual_backward_finalization(False)
    parts = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(99))
    ours(parts[rank]).square().mean().backward()  # an ordinary step again
    whole(parts.flatten(0, 1)).square().mean().backward()
    assert_same_grads(ours, whole)


@on_ranks(2)
def test_finalizing_at_a_wrong_moment_is_refused():
    model = model_of()
    fully_shard(model[0])
    fully_shard(model)
    x = torch.randn(2, 8)
    with pytest.raises(StageError, match=r"without set_manual_backward_finalization\(True\)"):
        model.finalize_backward()
    for call in (model[0].finalize_backward, lambda: model[0].set_manual_backward_finalization(True)):
        with pytest.raises(StageError, match="must be called on the root FSDP module"):
            call()
    model.set_manual_backward_finalization(True)
    model(x).sum().backward()
    with pytest.raises(StageError, match="in a step whose backward has begun"):
        model.set_manual_backward_finalization(False)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(StageError, match="discarded by reset_iter_state"):
        handle.wait()
    model.zero_grad()
    model(x).sum().backward()
    model.finalize_backward()
    assert model[0].weight.grad is not None


# ---- what only some versions have


def methods(rank, world):
    model = fully_shard(model_of())
    theirs = {name for name, value in vars(fsdp.FSDPModule).items() if callable(value) and name[:2] != "__"}
    classes = [cls for cls in type(model).__mro__ if cls.__module__.startswith("shardwright.")]
    defined = {name for cls in classes if cls is not torch_fsdp.RefusingFSDPModule for name in vars(cls)}
    for name in theirs - defined:
        with pytest.raises(InputError, match=rf"{name} is a method of FSDPModule in torch"):
            getattr(model, name)(True)
    assert theirs - defined <= {"set_keep_unsharded_storage"}, "new in this torch: define it, or say why not"


def test_methods_of_the_installed_torchs_class_that_ours_lacks_raise_and_say_so():
    run_ranks(1, methods)


def test_a_method_of_a_torch_to_come_is_refused_too(monkeypatch):
    methods = {"fly": lambda self: None, "__len__": lambda self: 3}
    refused = torch_fsdp.refusing(type("FSDPModule", (), methods))
    with pytest.raises(InputError, match=r"fly is a method of FSDPModule in torch .* Leave the call out"):
        refused().fly(height=3)
    assert len(refused()) == 3


@on_ranks(1)
def test_install_replaces_every_class_that_torch_has_of_ours():
    shardwright.install()
    for name in torch_fsdp.originals(("FSDPModule", "GradientReductionHandle", "UnshardHandle")):
        assert getattr(fsdp, name) is getattr(shardwright, name)


@on_ranks(4)
def test_what_an_older_torch_lacks_refuses_the_feature_that_needs_it_and_nothing_else():
    """The names that torch 2.11 lacks are taken away: only what needs them is refused."""
    torch_private._register_single_dim_pointwise = None
    torch_private.keeps_order = False
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(UnsupportedTorch, match=r"order \[0, 2, 1, 3\], which shard_over_all=True makes"):
        fully_shard(model_of(), mesh=mesh, shard_over_all=True)
    model = fully_shard(model_of(), mesh=mesh)
    model(torch.randn(2, 8)).sum().backward()
    with pytest.raises(UnsupportedTorch, match=r"SGD\(fused=True\) steps sharded parameters with torch 2.12"):
        torch.optim.SGD(model.parameters(), 0.1, fused=True).step()
    torch.optim.AdamW(model.parameters(), fused=True).step()
