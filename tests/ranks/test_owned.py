"""Whole matrices on the rank that owns them, and rows that blocks keep together: as one process trains."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright
from shardwright import (
    Blocks,
    CPUOffloadPolicy,
    OptimizerOffloadPolicy,
    Owned,
    SchedulePolicy,
    checkpoint,
    fully_shard,
)
from shardwright.errors import Diverged, InputError
from shardwright.recipe.config import ModelConfig, OptimizerConfig
from shardwright.schedule.balance import newton_schulz_flops
from shardwright.train.eager import build_optimizer
from shardwright.train.models import Transformer
from tests.ranks.pool import run_ranks

LAYOUTS = ["owner", Owned(1), Blocks(3), Blocks(elements=16), Blocks(shares=(2, 1, 1))]


class Net(nn.Module):
    """An embedding, two blocks with a stack of experts each, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.experts = nn.Parameter(torch.randn(5, 6, 6) / 6)

    def forward(self, x):
        x = self.down(torch.relu(self.up(self.norm(x))))
        return torch.einsum("bsi,eij->bsj", x, self.experts)


def sharded(layout, mesh=None, dtype=torch.float64):
    model = Net().to(dtype)
    for block in model.blocks:
        fully_shard(block, layout=layout, mesh=mesh)
    return fully_shard(model, layout=layout, mesh=mesh)


def loss_of(model, step, rows):
    tokens = torch.randint(0, 11, (12, 4), generator=torch.Generator().manual_seed(step))[rows]
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def worst(ours, theirs):
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items())


def whole_of(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def adamw_in_layout(rank, world, layout, transport, copies):
    shardwright.set_transport(transport)
    mesh = None
    if copies:
        mesh = dist.init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("replicate", "dp"))
    one, model = Net().double(), sharded(layout, mesh)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.1, foreach=bool(rank % 2)) for each in (one, model)
    ]
    share = 12 // world
    for step in range(3):
        for each, rows in ((one, slice(None)), (model, slice(rank * share, (rank + 1) * share))):
            for part in range(2):  # two microbatches: the second one's sums are added
                loss_of(each, step * 2 + part, rows).backward()
        norms = [shardwright.clip_grad_norm_(each.parameters(), 0.1) for each in (one, model)]
        assert abs(float(norms[0] - norms[1])) < 1e-12
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = one.state_dict()
    assert worst(whole_of(model), expected) < 1e-12
    found = shardwright.full_state_dict(model)
    assert rank or worst(found, expected) < 1e-12


@pytest.mark.parametrize("transport", ["auto", "sockets", "collectives"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_three_clipped_steps_of_adamw_are_those_of_one_process_in_any_layout(layout, transport):
    run_ranks(3, adamw_in_layout, layout, transport, 0)


@pytest.mark.parametrize("layout", [*LAYOUTS[:-1], Blocks(shares=(2, 1))], ids=str)
def test_three_clipped_steps_on_a_hybrid_mesh_are_those_of_one_process(layout):
    run_ranks(4, adamw_in_layout, layout, "auto", 2)


def muon_of(model, kind):
    if isinstance(model.head.weight, DTensor):
        owned, others = shardwright.owned_params(model), shardwright.other_params(model)
    else:
        owned = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim > 1]
        others = [p for p in model.parameters() if not any(p is each for each in owned)]
    return [kind([{"params": owned}]), torch.optim.AdamW(others, lr=0.01)]


class Orthogonal(torch.optim.Optimizer):
    """Momentum, and Newton-Schulz steps of it: what needs whole matrices."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})
        self.shapes = []

    @torch.no_grad()
    def step(self):
        for p in (p for p in params_of(self) if p.grad is not None):
            assert type(p.grad) is torch.Tensor
            momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            self.shapes += [tuple(p.shape[-2:])] * (len(p) if p.ndim == 3 else 1)
            x = momentum / momentum.norm(dim=(-2, -1), keepdim=True)
            for _ in range(5):
                gram = x @ x.mT
                x = 3.4445 * x - 4.775 * gram @ x + 2.0315 * gram @ gram @ x
            p.sub_(x, alpha=self.param_groups[0]["lr"])


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(model, optimizers, steps, rank, world):
    share = 12 // world
    for step in steps:
        loss_of(model, step, slice(rank * share, (rank + 1) * share)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not any(p.grad is not None and p.grad.numel() for o in optimizers for p in params_of(o))


def alone(num_steps):
    model = Net().double()
    optimizers = muon_of(model, Orthogonal)
    train(model, optimizers, range(num_steps), 0, 1)
    return model.state_dict(), len(optimizers[0].shapes)


def owners_train(rank, world, first, steps, folder, layout):
    model = sharded(layout)
    optimizers = muon_of(model, Orthogonal)
    if first is not None:
        for number, optimizer in enumerate(optimizers):
            checkpoint.load(f"{folder}/{number}", model=model, optimizer=optimizer)
    sent = []
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda *_: sent.append(shardwright.communication_s(model)))
    train(model, optimizers, steps, rank, world)
    for number, optimizer in enumerate(optimizers):
        checkpoint.save(f"{folder}/{number}", model=model, optimizer=optimizer, step=steps[-1] + 1)
    return whole_of(model), len(optimizers[0].shapes)


def test_an_optimizer_of_whole_matrices_trains_as_in_one_process_at_worlds_changed_at_checkpoints(tmp_path):
    expected, num_done = alone(8)
    first, total = None, 0
    for world, steps in ((2, [0, 1]), (3, [2, 3]), (1, [4, 5]), (4, [6, 7])):
        found = run_ranks(world, owners_train, first, steps, str(tmp_path), "owner")
        first, total = 0, total + sum(done for _, done in found)
    assert worst(found[0][0], expected) < 1e-10
    assert total == num_done, "a matrix was orthogonalised by two ranks"


def owners_clear_between(rank, world):
    model, one = sharded("owner"), Net().double()
    owned, others = shardwright.owned_params(model), shardwright.other_params(model)
    optimizers = [torch.optim.SGD([{"params": params}], lr=0.1) for params in (owned, others)]
    rows = slice(rank * 6, rank * 6 + 6)
    model.set_requires_gradient_sync(False)
    loss_of(model, 0, rows).backward()  # a microbatch that is given up
    for optimizer in optimizers:
        optimizer.zero_grad()
    model.set_requires_gradient_sync(True)
    loss_of(model, 1, rows).backward()
    for optimizer in optimizers:
        optimizer.step()
    loss_of(one, 1, slice(None)).backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert worst(whole_of(model), one.state_dict()) < 1e-12


def test_what_owners_clear_between_microbatches_is_cleared_on_the_ranks_that_own_nothing_of_it():
    run_ranks(2, owners_clear_between)


def steps_beside_one_process(model, rank, world, num_steps=3, optimizer=Orthogonal, first=0, dtype=None):
    """The largest difference to one process after some steps of an optimizer of whole matrices."""
    one = Net().to(dtype or torch.float64)
    ours, theirs = muon_of(model, optimizer), muon_of(one, optimizer)
    train(model, ours, range(first, first + num_steps), rank, world)
    train(one, theirs, range(first, first + num_steps), 0, 1)
    return worst(whole_of(model), one.state_dict())


def owned_on_the_host(rank, world, policy):
    model = Net().double()
    for module in (*model.blocks, model):
        fully_shard(module, layout="owner", offload_policy=policy)
    assert steps_beside_one_process(model, rank, world) < 1e-12


@pytest.mark.parametrize(
    "policy",
    [CPUOffloadPolicy(), CPUOffloadPolicy(params=False, grads=False), OptimizerOffloadPolicy()],
    ids=["all", "state", "optimizer"],
)
def test_owned_matrices_are_trained_with_what_a_policy_puts_on_the_host(policy):
    run_ranks(2, owned_on_the_host, policy)


def owned_and_moved(rank, world, folder):
    model = sharded("owner")
    optimizers = muon_of(model, Orthogonal)
    train(model, optimizers, [0], rank, world)
    shardwright.offload_states(model)
    shardwright.reload_states(model)
    train(model, optimizers, [1], rank, world)
    for number, optimizer in enumerate(optimizers):
        checkpoint.async_save(f"{folder}/{number}", model=model, optimizer=optimizer, step=2).wait()
    with torch.device("meta"):
        other = Net().double()
    for module in (*other.blocks, other):
        fully_shard(module, layout="owner")
    with pytest.raises(InputError, match="on the meta device; load its weights"):
        shardwright.owned_params(other)
    checkpoint.load(f"{folder}/0", model=other)
    optimizers = muon_of(other, Orthogonal)
    for number, optimizer in enumerate(optimizers):
        checkpoint.load(f"{folder}/{number}", model=other, optimizer=optimizer)
    train(other, optimizers, [2], rank, world)
    one = Net().double()
    train(one, muon_of(one, Orthogonal), range(3), 0, 1)
    assert worst(whole_of(other), one.state_dict()) < 1e-12


def test_owned_matrices_are_trained_on_after_states_were_away_and_from_a_checkpoint_onto_the_meta_device(
    tmp_path,
):
    run_ranks(3, owned_and_moved, str(tmp_path))


def owned_beside_tensor_parallelism(rank, world, layout):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one, model = Net().double(), Net().double()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (*model.blocks, model):
        fully_shard(module, layout=layout, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (one, model)]
    rows = slice(rank // 2 * 6, rank // 2 * 6 + 6)
    for step in range(3):
        loss_of(one, step, slice(None)).backward()
        loss_of(model, step, rows).backward()
        norms = [shardwright.clip_grad_norm_(each.parameters(), 0.1) for each in (one, model)]
        assert abs(float(norms[0] - norms[1])) < 1e-12
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert worst(whole_of(model), one.state_dict()) < 1e-12
    if layout == "owner":  # a rank owns what tensor parallelism has left it of a matrix
        parts = [tuple(p.shape) for p in shardwright.owned_params(model) if "experts" not in p.fqn]
        assert set(parts) <= {(5, 6), (6, 5)}
    full = shardwright.full_state_dict(model)
    assert rank or worst(full, one.state_dict()) < 1e-12


@pytest.mark.parametrize("layout", ["owner", Blocks(2), Blocks(shares=(3, 1))], ids=str)
def test_steps_beside_tensor_parallelism_are_those_of_one_process_in_any_layout(layout):
    run_ranks(4, owned_beside_tensor_parallelism, layout)


def quantised_beside_owned(rank, world, placement_fn):
    one, model = Net().float(), Net().float()
    for each in (one, model):
        for name, param in each.named_parameters():
            param.requires_grad_("up.w" not in name and "down.w" not in name)
    for module in (*model.blocks, model):
        fully_shard(module, layout="owner", shard_placement_fn=placement_fn)
    for each in (one, model):
        shardwright.quantize_(each, "nf4", where=["*.up.weight", "*.down.weight"])
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (one, model)
    ]
    for step in range(3):
        loss_of(one, step, slice(None)).backward()
        loss_of(model, step, slice(rank * 4, rank * 4 + 4)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = shardwright.full_state_dict(model)
    assert rank or worst(full, {k: v for k, v in one.state_dict().items() if v.is_floating_point()}) < 1e-5


def all_on_the_second(param):
    return Owned(1)


@pytest.mark.parametrize("placement_fn", [None, all_on_the_second], ids=["matrices", "all"])
def test_a_quantised_base_beside_owned_matrices_or_owned_itself_computes_as_in_one_process(placement_fn):
    run_ranks(3, quantised_beside_owned, placement_fn)


def owned_with_differences_sent(rank, world):
    shardwright.set_transport("sockets")
    model = sharded("owner")
    model.set_schedule_policy(SchedulePolicy(wire="auto"))
    assert steps_beside_one_process(model, rank, world, 4) < 1e-10


def test_all_gathers_of_differences_bring_owned_matrices_too():
    run_ranks(3, owned_with_differences_sent)


def published(rank, world, folder):
    model = sharded("owner", dtype=torch.float32)
    publisher = shardwright.publish(model, to=folder)
    publisher.send()
    publisher.close()
    whole = shardwright.full_state_dict(model)
    if rank == 0:
        files = [load_file(file) for file in Path(folder).rglob("*.safetensors")]
        found = {name: value for file in files for name, value in file.items()}
        assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_a_model_of_owned_matrices_is_published_bit_for_bit(tmp_path):
    run_ranks(2, published, str(tmp_path / "weights"))


def owned_saved_by_torch(rank, world, folder, layout, load):
    model = sharded(layout)
    state = model.state_dict()
    if load:
        for value in state.values():
            value.zero_()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
    else:
        dcp.save(state, checkpoint_id=folder)
    return whole_of(model)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("owner", None), (None, "owner"), ("owner", Blocks(2))], ids=str
)
def test_torchs_checkpoints_hold_owned_matrices_and_fill_them(saved, loaded, tmp_path):
    (first, *_) = run_ranks(3, owned_saved_by_torch, str(tmp_path), saved, False)
    (second, *_) = run_ranks(2, owned_saved_by_torch, str(tmp_path), loaded, True)
    assert worst(second, first) == 0


def operations_on_owned(rank, world):
    model = sharded("owner")
    p = model.blocks[0].up.weight
    whole = p.full_tensor()
    assert torch.equal(p.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    assert torch.equal((p @ p.T).full_tensor(), whole @ whole.T)
    assert torch.equal(p.detach().mul(2).full_tensor(), whole * 2)
    assert torch.equal(shardwright.scattered(p, whole).to_local(), p.to_local())
    assert torch.equal(copy.deepcopy(p).full_tensor(), whole)
    leaf = p.detach().requires_grad_()
    leaf.full_tensor().square().sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), 2 * whole)
    with pytest.raises(InputError, match=r"shardwright\.owned_params\(model\)"):
        p.detach().add_(p.detach() @ p.detach().T @ p.detach())
    with pytest.raises(InputError, match="of which this rank holds"):
        pickle.dumps(p)
    with shardwright.pickle_shards():
        assert pickle.loads(pickle.dumps(p)).placements == p.placements


def test_operations_of_torch_on_owned_matrices_are_right_or_say_what_to_do():
    run_ranks(3, operations_on_owned)


def layouts_that_cannot_be(rank, world):
    for layout, says in (
        (Owned(7), r"'weight' was given to rank 7 of an axis of 1 ranks"),
        ("own", r"layout must be 'rows', 'owner', an Owned or a Blocks, got 'own'"),
        (Blocks(shares=(1, 2)), r"'weight' was given 2 shares, expected 1: one for each rank"),
    ):
        model = nn.Linear(3, 3)
        with pytest.raises(InputError, match=says):
            fully_shard(model, layout=layout)
        assert not isinstance(model.weight, DTensor)
    with pytest.raises(InputError, match="nothing of this model is owned; call fully_shard"):
        shardwright.owned_params(fully_shard(model))


def test_a_layout_that_cannot_be_is_refused_and_nothing_is_sharded_or_owned():
    run_ranks(1, layouts_that_cannot_be)


@pytest.mark.parametrize(
    "make",
    [lambda: Blocks(0), lambda: Blocks(elements=0)]
    + [lambda s=s: Blocks(shares=s) for s in ((0, 0), (), (1, float("nan")), (1, float("inf")))],
)
def test_blocks_of_nothing_are_refused(make):
    with pytest.raises(InputError, match="got Blocks"):
        make()


def shares_of_owners(rank, world, make):
    model = make()
    fully_shard(model, layout="owner")
    owned = shardwright.owned_params(model)
    return sum(p.nbytes for p in owned), sum(newton_schulz_flops(p.shape) for p in owned)


def transformer():
    block = {
        "qkv": nn.Linear(24, 72),
        "out": nn.Linear(24, 24),
        "up": nn.Linear(24, 96),
        "down": nn.Linear(96, 24),
    }
    return nn.ModuleList(copy.deepcopy(nn.ModuleDict(block)) for _ in range(12))


def experts():
    return nn.ModuleList(Block() for _ in range(12))


@pytest.mark.parametrize("make", [transformer, experts])
def test_eight_ranks_own_equally_much_of_what_one_call_is_given(make):
    for costs, most in zip(
        zip(*run_ranks(8, shares_of_owners, make), strict=True), (1.05, 1.10), strict=True
    ):
        assert max(costs) <= most * sum(costs) / 8


def trained_block(block):
    block(
        torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ).square().mean().backward()


def stage_of_owned(rank, world, folder):
    mesh = shardwright.mesh(pp=2, dp=2)
    block = Net().double().blocks[mesh.pp.get_local_rank()]
    model = nn.ModuleDict({"blocks": nn.ModuleDict({str(mesh.pp.get_local_rank()): block})})
    fully_shard(block, mesh=mesh.shard, layout="owner")
    optimizer = Orthogonal([{"params": shardwright.owned_params(model)}])
    trained_block(block)
    optimizer.step()
    checkpoint.save(folder, model=model, optimizer=optimizer, step=1, pp=mesh.pp)


def test_stages_of_a_pipeline_save_what_their_ranks_own_as_one_model(tmp_path):
    run_ranks(4, stage_of_owned, str(tmp_path))
    models, optimizers = [], []
    for _ in range(2):
        models.append(nn.ModuleDict({"blocks": Net().double().blocks}))
        optimizers.append(Orthogonal([p for p in models[-1].parameters() if p.ndim > 1]))
    checkpoint.load(str(tmp_path), model=models[0], optimizer=optimizers[0])
    for block in models[1]["blocks"]:
        trained_block(block)
    optimizers[1].step()
    for ours, theirs in zip(*(each.parameters() for each in models), strict=True):
        assert (ours - theirs).abs().max() < 1e-12
        if ours.ndim > 1:
            momenta = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (ours, theirs), strict=True)]
            assert (momenta[0] - momenta[1]).abs().max() < 1e-12


def owners_that_differ(rank, world):
    if rank:
        fully_shard(nn.Linear(6, 4), layout="owner")  # which changes who comes next
    model = sharded("owner")
    with pytest.raises(Diverged, match=r"(?s)ranks have sharded different models.*in rows \["):
        loss_of(model, 0, slice(None))


def test_ranks_that_have_chosen_different_owners_are_told_before_anything_is_gathered():
    run_ranks(2, owners_that_differ)


def muon_of_a_recipe(rank, world, tied):
    torch.Tensor.bfloat16 = torch.Tensor.clone  # torch's iterates in the dtype of the gradients
    # As wide as the vocabulary of bytes: the output of a block isn't the head.
    model = Transformer(ModelConfig(num_layers=2, dim=256, num_heads=2, hidden_dim=24, tied_embedding=tied))
    other = copy.deepcopy(model)
    fully_shard(model, layout="owner")
    ours = build_optimizer(OptimizerConfig(kind="muon", lr=0.02, weight_decay=0.3), model)
    for group in ours.param_groups[:1]:
        group["ns_dtype"] = "float32"
    inside = [p for p in other.blocks.parameters() if p.ndim == 2]
    rest = [p for p in other.parameters() if all(p is not each for each in inside)]
    theirs = [torch.optim.Muon(inside, 0.02, 0.3, adjust_lr_fn="match_rms_adamw")]
    for decay, ndim in ((0.3, 2), (0.0, 1)):
        group = [p for p in rest if p.ndim == ndim]
        theirs.append(torch.optim.AdamW(group, 0.02, (0.9, 0.95), weight_decay=decay))
    for step in range(3):
        tokens = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(step))
        for each, optimizers in ((model, [ours]), (other, theirs)):
            nn.functional.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert worst(whole_of(model), other.state_dict()) < 1e-6


@pytest.mark.parametrize("tied", [True, False])
def test_a_recipe_has_torchs_muon_for_the_matrices_of_the_blocks_and_adamw_for_the_rest(tied):
    run_ranks(1, muon_of_a_recipe, tied)
