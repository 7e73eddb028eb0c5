"""The package keeps to the rules of house.py, and every rule catches what it is there for."""

import re
from pathlib import Path

import pytest

from tests.pure import house

ROOT = Path(__file__).parents[2] / "src" / house.PACKAGE
PACKAGE = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


PRIVATE = house.private_names(PACKAGE[house.PRIVATE_FILE])


def stray_private_names(package):
    return house.stray_private_names(package, PRIVATE)


RULES = [
    house.arrows_up,
    house.circles,
    house.stray_bridges,
    house.local_imports,
    house.bad_names,
    house.foreign_runtime,
    house.stray_hooks,
    house.stray_stages,
    house.stray_streams,
    house.stray_kind_tests,
    house.device_types,
    stray_private_names,
    house.unbounded_groups,
    house.pickles_between_ranks,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    complaints = rule(PACKAGE)
    assert not complaints, "\n".join(complaints)


def test_every_warning_goes_by_the_function_that_finds_the_line_of_the_script():
    assert [path for path, text in PACKAGE.items() if "warnings.warn(" in text] == ["errors.py"]


def test_every_test_that_is_listed_as_slow_is_there():
    tests = Path(__file__).parents[1]
    listed = [line.split("::") for line in (tests / "slow.txt").read_text().split("\n") if "::" in line]
    assert [name for file, name in listed if f"def {name}(" not in (tests / file).read_text()] == []


def test_the_package_was_found():
    assert {"__init__.py", "errors.py"} <= PACKAGE.keys()


COMMS = {"transport/base.py": "class Comm(Protocol): pass", "transport/shm.py": "class Shm(base.Comm): pass"}
BAD = [
    (
        house.arrows_up,
        {"schedule/layout.py": "from shardwright.engine.groups.group import X", "engine/groups/group.py": ""},
    ),
    (
        house.arrows_up,
        {"schedule/layout.py": "import shardwright.engine.groups.group", "engine/groups/group.py": ""},
    ),
    (house.arrows_up, {"schedule/layout.py": "from ..engine import group", "engine/groups/group.py": ""}),
    (house.arrows_up, {"schedule/layout.py": "from shardwright import fully_shard", "__init__.py": ""}),
    (
        house.arrows_up,
        {
            "checkpoint/live.py": "from shardwright.xla.spmd_model import spmd_model_of",
            "xla/spmd_model.py": "",
        },
    ),
    (house.arrows_up, {"xla/files.py": "from shardwright.checkpoint import load", "checkpoint/load.py": ""}),
    (
        house.arrows_up,
        {"transport/cpu/shm.py": "from shardwright.observe.steps import trace", "observe/steps/trace.py": ""},
    ),
    (house.arrows_up, {"engine/costs.py": "import_module('shardwright.plan.apply')", "plan/apply.py": ""}),
    (house.arrows_up, {"somewhere/new.py": ""}),
    (
        house.circles,
        {"schedule/a.py": "from shardwright.schedule import b", "schedule/b.py": "from .a import x"},
    ),
    (house.circles, {"a.py": "from . import b", "b.py": "from . import c", "c.py": "from .a import x"}),
    (house.stray_bridges, {"xla/step.py": "import torchax"}),
    (house.stray_bridges, {"api.py": "from transformers.models import x"}),
    (house.local_imports, {"api.py": "def f():\n    import json\n"}),
    (house.local_imports, {"api.py": "class A:\n    async def f(self):\n        from os import path\n"}),
    (house.bad_names, {"transport/utils.py": ""}),
    (house.bad_names, {"context/x.py": ""}),
    (house.bad_names, {"_misc.py": ""}),
    (house.foreign_runtime, {"api.py": "from torch.distributed.fsdp import fully_shard"}),
    (house.foreign_runtime, {"api.py": "from torch.distributed import fsdp"}),
    (house.foreign_runtime, {"api.py": "import torch.distributed.fsdp._fully_shard as f"}),
    (house.foreign_runtime, {"api.py": "import torch\nx = torch.distributed.fsdp.FSDPModule"}),
    (house.foreign_runtime, {"api.py": "import_module('torch.distributed.fsdp')"}),
    (house.stray_hooks, {"api.py": "m.register_forward_pre_hook(f)"}),
    (house.stray_hooks, {"engine/step/runtime.py": "p.register_post_accumulate_grad_hook(f)"}),
    (house.stray_hooks, {"api.py": "class F(torch.autograd.Function): pass"}),
    (house.stray_hooks, {"api.py": "from torch.autograd import Function"}),
    (house.stray_hooks, {"api.py": "from torch.autograd.graph import register_multi_grad_hook"}),
    (house.stray_hooks, {"api.py": "getattr(m, 'register_forward_hook')(f)"}),
    (
        house.stray_hooks,
        {"api.py": f"from torch.optim.optimizer import {house.OPTIMIZER_HOOK[1].split('.')[-1]}"},
    ),
    (house.unbounded_groups, {"api.py": "group = dist.new_group([0, 1], backend='gloo')"}),
    (house.stray_streams, {"checkpoint/save.py": "torch.accelerator.current_stream().synchronize()"}),
    (house.stray_streams, {"engine/costs.py": "torch.accelerator.synchronize()"}),
    (house.stray_streams, {"transport/process_group.py": "stream = torch.Stream(device)"}),
    (house.stray_streams, {"params/offload.py": "from torch.cuda import Event"}),
    (house.stray_streams, {"transport/device_times.py": "event.synchronize()"}),
    (house.stray_stages, {"engine/step/executor.py": "def f(group):\n    group.stage = Stage.SHARDED"}),
    (house.stray_stages, {"engine/groups/group.py": "def f(self):\n    self.stage, x = Stage.SHARDED, 1"}),
    (house.stray_stages, {"api.py": "def f(group):\n    object.__setattr__(group, 'stage', 0)"}),
    (house.device_types, {"engine/building/build.py": "kind = 'cuda'"}),
    (house.device_types, {"transport/mesh.py": "make = f'init_device_mesh(\"cuda\", {world})'"}),
    (house.device_types, {"checkpoint/save.py": "torch.cuda.synchronize()"}),
    (house.device_types, {"params/param.py": "pinned = local.is_xpu"}),
    (house.stray_kind_tests, COMMS | {"api.py": "isinstance(comm, Shm)"}),
    (house.stray_kind_tests, COMMS | {"api.py": "isinstance(comm, int | shm.Shm)"}),
    (house.stray_kind_tests, COMMS | {"api.py": "x = type(comm) is not Shm"}),
    (house.stray_kind_tests, COMMS | {"api.py": "x = type(comm).__name__ == 'Shm'"}),
    (house.stray_kind_tests, COMMS | {"api.py": "x = comm.__class__ in (Shm, int)"}),
    (house.stray_kind_tests, COMMS | {"api.py": "match comm:\n    case Shm(): pass"}),
    (house.stray_kind_tests, COMMS | {"api.py": "class Other(Shm): pass", "loss.py": "issubclass(x, Other)"}),
    (house.stray_kind_tests, COMMS | {"transport/shm.py": "isinstance(comm, Comm)"}),
    (stray_private_names, {"api.py": "from torch.utils._pytree import tree_map"}),
    (stray_private_names, {"api.py": "from torch.utils import _pytree as pytree"}),
    (stray_private_names, {"api.py": "import torch.utils._pytree as pytree"}),
    (stray_private_names, {"api.py": "import torch\nx = torch._C.something"}),
    (stray_private_names, {"api.py": "import torch.distributed as dist\nx = dist.distributed_c10d._world"}),
    (stray_private_names, {"api.py": "from torch import nn\nx = nn.modules.conv._ConvNd"}),
    (stray_private_names, {"api.py": "import torch\naten = torch.ops.aten\nx = aten._fused_adam_"}),
    (stray_private_names, {"api.py": "import_module('torch.distributed._composable.fsdp')"}),
    (stray_private_names, {"params/binding.py": "def f(param):\n    return param._version"}),
    (stray_private_names, {"xla/state.py": "def f(m):\n    return getattr(m, '_parameters')"}),
    (stray_private_names, {"module.py": "class A:\n    def f(self):\n        super()._apply(1)"}),
    (house.unbounded_groups, {"api.py": "init_process_group('gloo', rank=0)"}),
    (house.pickles_between_ranks, {"api.py": "dist.all_gather_object(said, own)"}),
    (house.pickles_between_ranks, {"api.py": "from torch.distributed import broadcast_object_list as b"}),
    (house.pickles_between_ranks, {"fabric.py": "path = self.broadcast(path)"}),
    (house.pickles_between_ranks, {"transport/channel.py": "told = pickle.loads(data)"}),
    (house.pickles_between_ranks, {"engine/step/consensus.py": "told = torch.load(io.BytesIO(data))"}),
]


@pytest.mark.parametrize(("rule", "package"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_every_rule_catches_a_breach(rule, package):
    assert rule(package)


GOOD = {
    "__init__.py": "from shardwright.api import fully_shard",
    "api.py": '"""Doc."""\nfrom .engine import hooks\nfrom shardwright import errors\n',
    "engine/step/hooks.py": "m.register_forward_hook(f)\nclass F(torch.autograd.Function): pass",
    "engine/step/runtime.py": "from shardwright.schedule.layout import X\nimport torch.distributed as dist",
    "torch_private.py": "from torch import _C\nx = attrgetter('_version')",
    "module.py": "import torch\n\nclass A:\n    def _apply(self):\n        super()._apply(1)\n        "
    "self._own = torch.nn.__version__",
    "transport/base.py": '"""As cuda."""\nclass Comm(Protocol): pass\nx = "cpu"',
    "transport/shm.py": "class Shm(Comm): pass\nx = isinstance(comm, Shm)\ny = isinstance(x, int)",
    "transport/streams.py": "torch.accelerator.synchronize()\nmake = torch.Stream",
    "observe/watch/exchange.py": "stopped = threading.Event()\nevent.record()",
    "transport/mesh.py": "dist.new_group(ranks, T)\ninit_process_group(timeout=T)",
    "schedule/layout.py": "from shardwright.errors import InputError\n\ndef f(a): pass",
    "schedule/schedule.py": "from .layout import X\n\nclass A:\n    def f(self, a, b, c, d, e, g): pass",
    "errors.py": 'def f():\n    """' + "doc\n" * 80 + '"""\n',
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_rule_complains_of_a_good_house(rule):
    assert rule(GOOD) == []


def test_every_file_that_may_read_a_pickle_reads_one():
    without = {path: house.pickles_between_ranks({f"x/{path}": PACKAGE[path]}) for path in house.UNPICKLES}
    assert all(without.values()), without


def test_time_is_read_by_one_door():
    """``clock`` alone imports ``time``: a simulation sets others there and decides the time."""
    reads = re.compile(r"^\s*(import time\b|from time )", re.MULTILINE)
    assert [path for path, source in PACKAGE.items() if reads.search(source)] == ["clock.py"]
