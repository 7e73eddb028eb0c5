"""Tensor subclasses that say themselves what is gathered, as torch's fully_shard takes them, beside it."""

import copy

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

from shardwright import MixedPrecisionPolicy, explain, fully_shard, set_transport, stats
from shardwright.errors import InputError
from tests.ranks.models import train_on_parts
from tests.ranks.pool import on_ranks, run_ranks

WIDTH = 12


class Bf16Gathered(torch.Tensor):
    """float32 at rest, bfloat16 on the wire, float32 again in compute."""

    pads = False

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self.data_ = data

    def __tensor_flatten__(self):
        return ["data_"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = pytree.tree_map_only(cls, lambda t: t.data_, (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, out)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.ndim == 1
        assert isinstance(module, nn.Linear)
        sent = self.data_.to(torch.bfloat16)
        chunk = -(-outer_size[0] // mesh.size())
        if self.pads:
            sent = nn.functional.pad(sent, (0, 0, 0, chunk - len(sent)))
        return (sent,), outer_size[0]

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        assert gathered.dtype == torch.bfloat16
        assert metadata <= len(gathered)
        if out is None:
            whole = gathered.to(param_dtype)
            return whole, (gathered, whole)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered[: len(out)])
        return None


class TakesTwo(Bf16Gathered):
    """Put together again by a method that doesn't take sizes and strides, which torch's fully_shard never
    calls."""

    @staticmethod
    def __tensor_unflatten__(inner, metadata):
        return TakesTwo(inner["data_"])


class EncodesAnew(Bf16Gathered):
    """Put together again by nobody, and a copy of it is another weight."""

    @staticmethod
    def __tensor_unflatten__(*_):
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            out.data_.copy_(args[-1].data_.bfloat16())
        return out


class ReleasedGathered(Bf16Gathered):
    """What was gathered isn't read once the unsharded parameter is made of it."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self):
        return True


class PaddedGathered(Bf16Gathered):
    pads = True


class ScaledInt8(Bf16Gathered):
    """int8 and a scale of each rank on the wire: two inputs, one of them without dims, and the older call."""

    def fsdp_pre_all_gather(self, mesh):
        scale = self.data_.abs().amax() / 127
        return ((self.data_ / scale).round().to(torch.int8), scale), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        codes, scales = outputs
        whole = (codes.unflatten(0, (len(scales), -1)) * scales.view(-1, 1, 1)).flatten(0, 1).to(param_dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


def build(kind, rows=WIDTH):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, rows), nn.Tanh(), nn.Linear(rows, WIDTH))
    for layer in model[::2] if kind else ():
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def shard(model, shards, **options):
    shards(model[0], **options)
    return shards(model, **options)


@pytest.mark.parametrize(
    ("world", "kind", "rows"),
    [
        (1, Bf16Gathered, 12),
        (2, Bf16Gathered, 12),
        (2, ScaledInt8, 12),
        (3, PaddedGathered, 13),
        (2, TakesTwo, 12),
    ],
)
@on_ranks()
def test_extensions_train_as_under_torchs_fully_shard(rank, world, kind, rows):
    ours = shard(build(kind, rows), fully_shard)
    theirs = shard(build(kind, rows), torch_fsdp.fully_shard)
    plain = shard(build(None, rows), fully_shard)
    twin = copy.deepcopy(ours)
    assert type(ours[0].weight.to_local()) is kind
    expected = train_on_parts(theirs, rank, world, WIDTH, lr=0.1)
    assert train_on_parts(ours, rank, world, WIDTH, lr=0.1) == pytest.approx(expected, abs=1e-6)
    assert train_on_parts(twin, rank, world, WIDTH, lr=0.1) == pytest.approx(expected, abs=1e-6)
    assert train_on_parts(plain, rank, world, WIDTH, lr=0.1) != pytest.approx(expected, abs=1e-6)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        one, other = (getattr(p.to_local(), "data_", p.to_local()) for p in (a, b))
        assert torch.allclose(one, other, atol=1e-6), name
    assert stats(ours).unsharded_nbytes == 0
    with ours.unsharded(), torch.no_grad():
        ours[0].weight.zero_()
    assert not ours[0].weight.to_local().data_.any()


def held(rank, world):
    found = []
    for kind in (Bf16Gathered, ReleasedGathered):
        model = shard(build(kind, 12), fully_shard)
        with model.unsharded():
            found.append(stats(model).unsharded_nbytes)
        train_on_parts(model, rank, world, WIDTH, lr=0.1)
    return found


def test_what_a_class_says_it_no_longer_reads_is_freed_once_the_unsharded_parameter_is_made():
    kept, released = run_ranks(2, held)[0]
    assert kept - released == 2 * 2 * WIDTH * WIDTH  # the bfloat16 of two weights


@on_ranks(3)
def test_rows_that_need_no_padding_are_gathered_in_half_the_bytes():
    set_transport("sockets")  # ranks of one host share memory otherwise, and send nothing
    sent = {}
    for kind in (None, Bf16Gathered):
        model = shard(build(kind, rows=61), fully_shard, mp_policy=MixedPrecisionPolicy(torch.float32))
        rounded = build(None, rows=61)
        for layer in rounded[::2] if kind else ():
            layer.weight.data = layer.weight.data.bfloat16().float()
        x, before = torch.randn(2, WIDTH), stats(model).sent_nbytes
        assert torch.equal(model(x), rounded(x))
        sent[kind] = stats(model).sent_nbytes - before
    assert 0 < sent[Bf16Gathered] < 0.6 * sent[None]


@on_ranks(2)
def test_weights_that_a_load_is_to_fill_are_sharded_without_a_method_that_takes_four_arguments(rank):
    model = build(TakesTwo)
    with torch.no_grad():
        model[0].weight.data_[0, 0] = torch.nan  # as memory that a load is to fill may be
    assert fully_shard(model)[0].weight.to_local().data_.isnan().sum() == (rank == 0)
    with torch.device("meta"):
        assert fully_shard(build(TakesTwo))[0].weight.is_meta


@on_ranks(1)
def test_extensions_that_are_not_as_torch_takes_them_are_refused():
    class Half(Bf16Gathered):
        fsdp_post_all_gather = property()

    class Three(Bf16Gathered):
        def fsdp_pre_all_gather(self, mesh, size, stride):
            raise AssertionError

    with pytest.raises(
        InputError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined"
    ):
        fully_shard(build(Half))
    with pytest.raises(InputError, match="Invalid fsdp_pre_all_gather"):
        fully_shard(build(Three))(torch.randn(2, WIDTH))
    with pytest.raises(InputError, match="dim 0"):
        fully_shard(build(Bf16Gathered), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with pytest.raises(InputError, match=r"'weight' is a EncodesAnew, .*4 arguments") as caught:
        fully_shard(build(EncodesAnew)[0])
    assert isinstance(caught.value.__cause__, NotImplementedError)


def sends_bf16(self, mesh):
    return (self.bfloat16(),), None


def takes_bf16(self, outputs, metadata, param_dtype, *, out=None):
    (gathered,) = outputs
    assert gathered.dtype == torch.bfloat16
    if out is None:
        return gathered.to(param_dtype), (gathered,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(gathered)
    return None


def patch(model):
    """Extensions for every weight, on the local tensors that are there now."""
    for name, param in model.named_parameters():
        if name.endswith("weight"):
            local = param._local_tensor
            local.fsdp_pre_all_gather = sends_bf16.__get__(local)
            local.fsdp_post_all_gather = takes_bf16.__get__(local)


def at_rest(model):
    """What was kept for the backward is given back."""
    for module in (model[0], model):
        module.reshard()


@on_ranks(1, 2)
def test_extensions_set_on_local_tensors_are_seen_at_the_next_gather(rank, world):
    """After sharding; again after ``to_empty``, whose tensors have none; in the middle of training."""
    x = torch.randn(2, WIDTH)
    rounded = build(None)
    for layer in rounded[::2]:
        layer.weight.data = layer.weight.data.bfloat16().float()
    ours, theirs = (shard(build(None), shards) for shards in (fully_shard, torch_fsdp.fully_shard))
    whole = build(None).state_dict()
    assert torch.equal(ours(x), build(None)(x))
    losses = []
    for model in (ours, theirs):
        at_rest(model)
        patch(model)
        assert torch.equal(model(x), rounded(x))
        at_rest(model)
        losses.append(train_on_parts(model, rank, world, WIDTH, lr=0.1))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    ours.to_empty(device="cpu")
    ours.load_state_dict(dict(whole))
    assert torch.equal(ours(x), build(None)(x))
    at_rest(ours)
    patch(ours)
    assert torch.equal(ours(x), rounded(x))
    torch.manual_seed(0)
    across = fully_shard(nn.Linear(WIDTH, WIDTH), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    patch(across)
    with pytest.raises(InputError, match="dim 0"):
        across(x)


class SeesStorages(ScaledInt8):
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert [output.storage_offset() for output in outputs] == [0] * len(outputs)
        assert len({output.untyped_storage().data_ptr() for output in outputs}) == len(outputs)
        for output in outputs:
            assert output.untyped_storage().nbytes() == output.nbytes
        return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)


@on_ranks(4)
def test_what_is_gathered_by_its_class_alone_says_why_it_is_not_resharded_to_a_smaller_world(rank, world):
    model = shard(build(ScaledInt8), fully_shard, reshard_after_forward=2)
    said = str(explain(model))
    train_on_parts(model, rank, world, WIDTH, lr=0.1)
    assert "resharded to all 4 ranks after forward, not to 2: the class of 'weight' says itself" in said


@on_ranks(2)
def test_each_output_of_a_gather_has_a_storage_of_its_own():
    model = shard(build(SeesStorages), fully_shard)
    for _ in range(2):
        model(torch.randn(2, WIDTH)).sum().backward()


class Packed(torch.Tensor):
    """int8 and scales of as many rows as divide its own, without methods of the all-gather."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight, blocks):
        scale = weight.view(blocks, -1).abs().amax(1, keepdim=True) / 127
        codes = (weight.view(blocks, -1) / scale).round().to(torch.int8).view(weight.shape)
        return cls(codes, scale)

    def decoded(self):
        return (self.codes.view(len(self.scale), -1) * self.scale).view(self.codes.shape)

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        args, kwargs = pytree.tree_map_only(cls, cls.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)


class InColumns(Packed):
    @classmethod
    def of(cls, weight, blocks):
        packed = Packed.of(weight, blocks)
        return cls(packed.codes.T.contiguous(), packed.scale)

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape[::-1], dtype=torch.float32)


def with_packed(kind, rows, blocks):
    model = build(None, rows)
    model[0].weight = nn.Parameter(kind.of(model[0].weight.detach(), blocks), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("world", "rows", "blocks"), [(2, 12, 12), (2, 12, 4), (2, 12, 1), (3, 13, 13), (3, 13, 1)]
)
@on_ranks()
def test_a_weight_packed_by_a_class_without_methods_is_gathered_as_the_bytes_it_is_made_of(
    rank, world, rows, blocks
):
    set_transport("sockets")
    alone, model = (with_packed(Packed, rows, blocks) for _ in range(2))
    shard(model, fully_shard)
    own = model[0].weight._local_tensor
    assert len(own.codes) == len(own) <= -(-rows // world)
    with torch.no_grad():
        before = stats(model).sent_nbytes
        model[0](torch.zeros(1, WIDTH))
    scales = 0 if blocks % world and blocks != rows else own.scale.nbytes
    bias = model[0].bias.to_local().nbytes
    assert stats(model).sent_nbytes - before == (world - 1) * (own.codes.nbytes + scales + bias)
    model[0].unshard()
    assert torch.equal(model[0].weight.codes, alone[0].weight.codes)
    assert torch.equal(model[0].weight.scale, alone[0].weight.scale)
    model[0].reshard()
    expected = train_on_parts(alone, 0, 1, WIDTH, lr=0.1)
    assert train_on_parts(model, rank, world, WIDTH, lr=0.1) == pytest.approx(expected, abs=1e-6)


@on_ranks(2)
def test_packed_weights_without_rows_or_with_gradients_or_packed_too_late_are_refused(rank):
    model = with_packed(InColumns, 10, 10)
    with pytest.raises(InputError, match=r"'weight' is a InColumns of shape \[10, 12\], packed as"):
        fully_shard(model[0])
    assert type(model[0]) is nn.Linear
    trained, late = with_packed(Packed, 12, 12), build(None)
    trained[0].weight.requires_grad_(True)
    with pytest.raises(InputError, match="'weight' is a Packed, which packs a weight and can't be trained"):
        shard(trained, fully_shard)(torch.zeros(1, WIDTH))
    shard(late, fully_shard)
    late[0].weight._local_tensor = Packed.of(late[0].weight.to_local().detach(), 1)
    with pytest.raises(InputError, match=r"'weight' was replaced by a Packed, .* after fully_shard"):
        late(torch.zeros(1, WIDTH))
