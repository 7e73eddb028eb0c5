"""Mistakes that were silent, or told in words of another layer: each is told at once, with what to do."""

import ast
import copy
import io
import linecache
import pickle
import re
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

import shardwright
from shardwright import (
    FullyShardedDataParallel,
    checkpoint,
    full_state_dict,
    fully_shard,
    install,
    pickle_shards,
    set_transport,
    uninstall,
)
from shardwright.clients.strategies import _groups_for
from shardwright.engine.unit import units_in
from shardwright.errors import InputError, MisuseError
from shardwright.wrapper import StateDictType
from tests.ranks.models import warned
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.scripts import run_scripts

PACKAGE = Path(shardwright.__file__).parent


def small():
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4)))


def wrap(module):
    """In torch's wrapper class."""
    return torchs.FullyShardedDataParallel(module, device_id=torch.device("cpu"))


SHARDINGS = {
    "fully_shard": fully_shard,
    "groups": lambda model: fully_shard(model, groups=[["1"]]),
    "wrapper": FullyShardedDataParallel,
    "policy": lambda model: FullyShardedDataParallel(
        model, auto_wrap_policy=lambda recurse, module, **_: recurse or isinstance(module, nn.Linear)
    ),
}
INSIDE = {
    "torch.distributed.fsdp.fully_shard": torchs.fully_shard,
    "torch.distributed.fsdp.FullyShardedDataParallel": wrap,
    "DistributedDataParallel": DistributedDataParallel,
    "replicate": replicate,
}


@on_ranks(2)
def test_other_data_parallelism_inside_of_ours_is_refused_and_both_are_named():
    for name, inside in INSIDE.items():
        for sharding, shard in SHARDINGS.items():
            model = small()
            model[0] = inside(model[0])
            with pytest.raises(MisuseError, match=f"'0', .*{name}.* shardwright.fully_shard") as told:
                shard(model)
            assert "instead" in str(told.value), (name, sharding)
            assert not units_in(model)  # nothing half done
        with pytest.raises(MisuseError, match=name):
            fully_shard(inside(small()))
    model = small()  # who leaves it alone may have it
    model[0] = DistributedDataParallel(model[0])
    fully_shard(model, ignored_params=set(model[0].parameters()))
    model(torch.ones(2, 4)).sum().backward()
    model = small()
    model[0] = DistributedDataParallel(model[0])
    FullyShardedDataParallel(model, ignored_modules=[model[0]])(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_torchs_data_parallelism_around_ours_is_refused_and_both_are_named():
    named = r"torch's fully_shard.* shardwright.fully_shard has sharded.* instead"
    for shard in (lambda model: fully_shard(model[0]), fully_shard):
        model = small()
        shard(model)
        with pytest.raises(MisuseError, match=named):
            torchs.fully_shard(model)
    with pytest.raises(MisuseError, match=named):
        torchs.fully_shard(nn.Sequential(FullyShardedDataParallel(small())))
        with pytest.raises(MisuseError, match=named):
            wrap(model)
    model = small()
    fully_shard(model[0])
    assert get_model_state_dict(model).keys() == model.state_dict().keys()  # asks the same registry
    FullyShardedDataParallel(model)(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_a_module_without_a_parameter_anywhere_is_told_of_and_a_root_around_sharded_ones_is_not():
    with pytest.warns(UserWarning, match=r"ReLU has no parameter.*nothing was sharded"):
        fully_shard(nn.ReLU())
    with pytest.warns(UserWarning, match=r"Flatten has no parameter.*nothing was sharded"):
        FullyShardedDataParallel(nn.Flatten())
    with warnings.catch_warnings(action="error"):
        model = small()
        fully_shard(list(model))
        fully_shard(model)  # a root around sharded modules
        FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4)), nn.ReLU()))


@on_ranks(2)
def test_a_dtensor_on_a_mesh_without_names_is_refused_by_its_name(world):
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    model = nn.Linear(4, 4)
    torch.distributed.tensor.parallel.parallelize_module(
        model, mesh, torch.distributed.tensor.parallel.ColwiseParallel()
    )
    with pytest.raises(InputError, match=r"'weight' is a DTensor already .* one init_device_mesh"):
        fully_shard(model)


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return optimizer


def assert_equal_states(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.placements == theirs[name].placements
        assert torch.equal(tensor.to_local(), theirs[name].to_local()), name


@on_ranks(2)
def test_pickling_what_is_sharded_is_refused_but_for_files_of_each_rank_on_purpose(rank, world, tmp_path):
    folder = str(tmp_path)
    torch.save(nn.Linear(4, 4).state_dict(), io.BytesIO())  # no business of ours
    model = fully_shard(small())
    optimizer, state = trained(model), model.state_dict()
    path = Path(folder, f"rank-{rank}.pt")
    wrong = [
        state,
        {name: tensor.clone() for name, tensor in state.items()},
        list(model.parameters()),
        optimizer.state_dict(),
        [param.grad for param in model.parameters()],
    ]
    remedies = r"\[4(, 4)?\] .*this rank holds \[2(, 4)?\].*full_state_dict\(model\).*pickle_shards\(\)"
    for each in wrong:
        for save in (torch.save, pickle.dump):
            with pytest.raises(InputError, match=remedies):
                save(each, path.open("wb"))
    whole = full_state_dict(model)
    torch.save(whole, io.BytesIO())
    with pickle_shards():
        torch.save({"model": state, "optimizer": optimizer.state_dict()}, path)
    with pytest.raises(InputError, match=remedies):
        pickle.dumps(state)
    other = fully_shard(small())
    loaded = torch.load(path, weights_only=True)
    other.load_state_dict(loaded["model"])
    assert_equal_states(other.state_dict(), state)
    another = trained(other)
    another.load_state_dict(loaded["optimizer"])
    mesh = torch.distributed.init_device_mesh("cpu", (world, 1))  # a mesh of the caller's
    pickle.dumps(torch.distributed.tensor.distribute_tensor(torch.ones(4), mesh))


@on_ranks(1)
def test_a_world_of_one_holds_all_and_may_be_pickled():
    pickle.loads(pickle.dumps(fully_shard(small()).state_dict()))


@on_ranks(2)
def test_copies_and_checkpoints_of_what_is_sharded_still_work(tmp_path):
    folder = str(tmp_path)
    model = fully_shard(small())
    optimizer, state = trained(model), model.state_dict()
    assert_equal_states(copy.deepcopy(state), state)
    assert_equal_states(copy.deepcopy(model).state_dict(), state)
    copy.deepcopy(optimizer.state_dict())
    assert_equal_states({"weight": copy.copy(state["0.0.weight"])}, {"weight": state["0.0.weight"]})
    dcp.save({"model": state, "optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/dcp")
    dcp.async_save({"model": state}, checkpoint_id=f"{folder}/async").result()
    checkpoint.async_save(f"{folder}/ours", model=model, optimizer=optimizer, step=1).wait()
    for name in ("dcp", "async"):
        other = fully_shard(small())
        loaded = other.state_dict()
        dcp.load({"model": loaded}, checkpoint_id=f"{folder}/{name}")
        assert_equal_states(loaded, state)
    other = fully_shard(small())
    checkpoint.load(f"{folder}/ours", model=other)
    assert_equal_states(other.state_dict(), state)


SAVED_BY_A_PROCESS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from shardwright import fully_shard

if __name__ == "__main__":
    dist.init_process_group("gloo")
    state = fully_shard(torch.nn.Linear(4, 4)).state_dict()
    how = AsyncCheckpointerType.PROCESS
    dcp.async_save({"model": state}, checkpoint_id=sys.argv[1], async_checkpointer_type=how).result()
    loaded = fully_shard(torch.nn.Linear(4, 4)).state_dict()
    dcp.load({"model": loaded}, checkpoint_id=sys.argv[1])
    assert all(torch.equal(loaded[name].to_local(), state[name].to_local()) for name in state)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_a_process_of_torchs_saves_in_the_background_reaches_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SAVED_BY_A_PROCESS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, str(script), str(tmp_path / "saved")], check=True, timeout=100)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@pytest.mark.each_case
@on_ranks(2)
def test_the_wrappers_sharded_and_local_states_are_files_of_each_rank_on_purpose(rank, tmp_path, flat, kind):
    folder = str(tmp_path)

    def build():
        return FullyShardedDataParallel(small(), use_orig_params=not flat)

    model = build()
    optimizer = trained(model)
    path = Path(folder, f"rank-{rank}.pt")
    with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
        state = model.state_dict()
        of_optimizer = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        torch.save({"model": state, "optimizer": of_optimizer}, path)
    other = build()
    with FullyShardedDataParallel.state_dict_type(other, StateDictType[kind]):
        loaded = torch.load(path, weights_only=True)
        other.load_state_dict(loaded["model"])
    whole, expected = other.state_dict(), model.state_dict()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    with pytest.raises(InputError, match="full_state_dict"):
        torch.save(list(model.parameters()), path)


class Borrowing(nn.Module):
    """Computes with the weight of a module that it doesn't call."""

    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, tokens):
        return nn.functional.linear(self.block(self.embedding(tokens)), self.embedding.weight)


TOLD = r"mixed torch.Tensor and DTensor.*sharded parameter at rest.*with model.unsharded\(\)"


def borrowed(rank, world):
    model = Borrowing()
    fully_shard(model.embedding)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=TOLD) as told:
        model(torch.arange(8))
    assert str(told.value).count("unsharded") == 1
    assert model.block.weight.square().sum().full_tensor() > 0  # all of one kind: no mistake
    with model.unsharded():
        assert torch.equal(torch.eye(4) @ model.block.weight, model.block.weight)


def test_a_forward_that_computes_with_another_modules_weight_is_told_the_remedy():
    run_ranks(1, borrowed)
    run_ranks(2, borrowed)


def computed(rank, world):
    model = fully_shard(small())
    torch.ones(1, 4) @ model[1][0].weight.T


def test_a_script_that_computes_with_a_weight_at_rest_is_told_the_remedy():
    for rank in run_scripts(2, computed):
        assert rank.code == 1
        assert re.search(TOLD, rank.stderr), rank.stderr


def hooked(rank, world):
    fully_shard(small())
    before = sys.excepthook

    def told(*error):
        print("told", file=sys.stderr)
        before(*error)

    sys.excepthook = told
    fully_shard(small())
    time.sleep(2)  # the ranks have met
    raise ValueError("a mistake of the script")


def test_a_scripts_hook_for_exceptions_is_called_once_whatever_is_sharded_after_it():
    for rank in run_scripts(2, hooked):
        assert rank.stderr.count("told\n") == 1 and "ValueError: a mistake of the script" in rank.stderr
        assert "RecursionError" not in rank.stderr


@pytest.mark.each_case
@pytest.mark.parametrize(("world", "ignored"), [(1, False), (2, False), (2, True)])
@on_ranks()
def test_an_optimizer_of_parameters_that_nobody_averages_says_so_once(world, ignored):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1])
    if ignored:
        fully_shard(model, ignored_params=set(model[0].parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    told = warned(lambda: optimizer.step() or optimizer.step())
    said = [each for each in told if "no fully_shard call has taken" in each]
    assert len(said) == (not ignored and world > 1)
    assert all("steps 2 parameters" in each and "[4, 4], [4]" in each for each in said)


@on_ranks(1)
def test_sharing_the_memory_of_a_sharded_model_is_refused():
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(InputError, match=r"share_memory\(\) of a sharded module.*full_state_dict"):
        model.share_memory()


@on_ranks(2)
def test_optimizers_that_torch_can_not_run_on_shards_are_named():
    model = fully_shard(nn.Linear(4, 4))
    before = [param.to_local().clone() for param in model.parameters()]
    for kind in (torch.optim.LBFGS, torch.optim.Rprop):
        optimizer = kind(model.parameters(), lr=0.1)

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            return loss

        with pytest.raises(InputError, match=rf"{kind.__name__} holds sharded parameters \('weight', ...\)"):
            optimizer.step(closure)
    assert all(map(torch.equal, before, (param.to_local() for param in model.parameters())))


def warn_in_every_way(rank, world):
    """The line that each warning points at, and the function of the package that warns."""
    tensor, told = torch.ones(2, 4), []
    show = warnings.showwarning

    def showing(message, category, filename, lineno, *rest):
        frame, callers = sys._getframe(1), []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE) and path.name != "errors.py":
                callers.append(f"{path.relative_to(PACKAGE).as_posix()} {frame.f_code.co_name}")
            frame = frame.f_back
        told.append((callers[0], linecache.getline(filename, lineno).strip()))

    warnings.simplefilter("always")
    warnings.showwarning = showing
    try:
        fully_shard(nn.ReLU())
        fully_shard(nn.Linear(4, 4), groups="auto")
        model = nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))
        model[0].set_reduce_scatter_divide_factor(2.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tensor).sum().backward()
        optimizer.step()
        FullyShardedDataParallel(model[1], ignored_modules=[model[1]])
        FullyShardedDataParallel(nn.ParameterList([nn.Parameter(torch.ones(2))]))
        muon = torch.optim.Muon([fully_shard(nn.Linear(4, 4, bias=False)).weight])
        muon.step()
        layers = [fully_shard(nn.Linear(4, 4)) for _ in range(2)]
        layers[1](layers[0](tensor))
        kept = nn.Sequential(nn.Linear(4, 4))
        kept.register_buffer("same", kept[0].weight.data)
        fully_shard(kept)
        late = fully_shard(nn.Sequential(nn.Linear(4, 4)))
        late.append(nn.Linear(4, 4))
        late(tensor)
        moments = fully_shard(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
        moments[0].running_mean.fill_(rank)
        moments(tensor)
        set_transport("sockets")
        _groups_for("auto", nn.Linear(4, 4))
        sys.modules["somebody"] = module = types.ModuleType("somebody")
        module.fully_shard = torchs.fully_shard
        install()
    finally:
        sys.modules.pop("somebody", None)
        uninstall()
        warnings.showwarning = show
    return told


# Of checkpoints: what a disk refuses is warned of in the thread that writes, and tests/ranks/test_checkpoint*
# let it happen; of receivers, in theirs: tests/ranks/test_publish.py; of XLA, tests/xla/test_inputs.py.
ELSEWHERE = ("checkpoint/", "publishing/server.py", "xla/")


def test_a_warning_points_at_the_line_of_the_script_that_it_is_about():
    told = dict(run_ranks(2, warn_in_every_way)[0])
    assert told == {
        "api.py shard_as": "fully_shard(nn.ReLU())",
        "engine/building/grouping.py chosen": 'fully_shard(nn.Linear(4, 4), groups="auto")',
        "setters.py set_reduce_scatter_divide_factor": "model[0].set_reduce_scatter_divide_factor(2.0)",
        "engine/optimizers/guard.py _warn_of_left_out": "optimizer.step()",
        "wrapper/fsdp1.py _ignored": "FullyShardedDataParallel(model[1], ignored_modules=[model[1]])",
        "wrapper/fsdp1.py _warn_of_container": (
            "FullyShardedDataParallel(nn.ParameterList([nn.Parameter(torch.ones(2))]))"
        ),
        "engine/optimizers/guard.py warn_of_roundings": "muon.step()",
        "engine/step/hooks.py enter": "layers[1](layers[0](tensor))",
        "engine/building/build.py _warn_of_references": "fully_shard(kept)",
        "engine/optimizers/guard.py warn_of_late": "late(tensor)",
        "engine/step/same_model.py compare_buffers": "moments(tensor)",
        "transport/mesh.py set_transport": 'set_transport("sockets")',
        "clients/strategies.py _groups_for": '_groups_for("auto", nn.Linear(4, 4))',
        "clients/install.py install": "install()",
    }
    assert {*told} == {place for place in places_that_warn() if not place.startswith(ELSEWHERE)}


def places_that_warn():
    """The functions of the package that call ``errors.warn``, which alone finds the line of the script."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name in ("warn", "_warn"):
                continue
            for call in ast.walk(function):
                name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
                assert name != "warnings.warn", f"{path}: {function.name} is to call errors.warn"
                if name == "warn":
                    yield f"{path.relative_to(PACKAGE).as_posix()} {function.name}"
