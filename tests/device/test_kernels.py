"""How many kernels the runtime gives a device for a group in a step, and which copy what was gathered.

A group's parameters are received where they are used: between the end of an all-gather and their use there is
a kernel only where they lie in another order (one for all that are cut alike) or are encoded.
"""

import random
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright
from bench.counting import KernelCount, is_around_autograd
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.unit import units_in
from tests.device import cases
from tests.device.cases import KINDS, ON_DIM_1, Layer, is_supported
from tests.device.kernels import Kernels
from tests.device.ranks import Job

FOLDER = shardwright.__file__.rpartition("/")[0]
MOST = 8
MORE = {
    "another dim": 4,  # where the world doesn't divide: two copies each way for matrices that are cut alike
    "quantised, sharded over all": 4,  # as the next
    "quantised in a smaller world": 4,  # codes, scales and the rest differ in dtype, and are kept by copies
    "quantized/nf4.py": 5,  # for each weight that is decoded, unless bitsandbytes does it in one
    "params/rows.py": 70,  # for a table: ranks tell each other which rows they use, twice
}
"""Kernels besides, of a way to gather or of a file."""


EACH_KIND = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            not is_supported(kind), reason=f"torch {torch.__version__} has no new_group(sort_ranks=)"
        ),
    )
    for kind in KINDS
]


class DeviceKernels(KernelCount):
    """What the package's own lines have given a device, without what a caller's class does inside of them.

    transfers: copies between host and device, which are no kernels. arrivals: kernels of ``ParamGroup.wait``.
    """

    def __init__(self, device):
        super().__init__(FOLDER)
        self.device, self.transfers, self.arrivals = device, Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before, launched = self.kernels.copy(), self.device.num_launched
        result = super().__torch_dispatch__(func, types, args, kwargs)
        new = self.kernels - before
        if self.device.num_launched == launched:
            self.kernels = before
        elif any(self._on_host(each) for each in torch.utils._pytree.tree_leaves((args, kwargs))):
            self.kernels, self.transfers = before, self.transfers + new
        elif ParamGroup.wait.__code__ in _stack():
            self.arrivals += new
        return result

    def _on_host(self, value):
        return isinstance(value, torch.Tensor) and self.device.memory.find(value).stream is None

    def _site(self):
        frame = sys._getframe(2)
        while frame is not None and (
            "/torch/" in frame.f_code.co_filename
            or frame.f_code.co_filename == __file__
            or is_around_autograd(frame)
        ):
            frame = frame.f_back
        return super()._site() if frame and frame.f_code.co_filename.startswith(FOLDER) else None


def _stack():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


class Counting(Job):
    """A job whose ranks train steadily; each returns what its third step launches, and how many groups."""

    def _train(self, rank, number):
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=self.size)
        device = self.world.devices[rank]
        try:
            with Kernels(device):
                model, inputs = cases.model_of(self.kind, number, rank, random.Random(number))
                self._offload(model)
                optimizer = torch.optim.SGD(model.parameters(), 1e-3)
                for _ in range(2):
                    model(next(inputs)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with DeviceKernels(device) as counted:
                    model(next(inputs)).square().mean().backward()
                device.synchronize()
                return counted, sum(1 for _ in units_in(model))
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("kind", EACH_KIND)
def test_a_group_gives_the_device_few_kernels_a_step(kind):
    counted, num_groups = Counting(kind, 0).run(0)[0]
    files, operations = Counter(), Counter()
    for (operation, site), number in counted.kernels.items():
        files[site.partition(":")[0]] += number
        operations[operation] += number
    assert files.pop("quantized/nf4.py", 0) <= MORE["quantized/nf4.py"] * operations["aten::index_select"]
    assert files.pop("params/rows.py", 0) <= MORE["params/rows.py"]
    assert 0 < files.total() <= (MOST + MORE.get(kind, 0)) * num_groups, counted.kernels


ARRIVING = {
    "another dim": "params/binding.py",
    "rows in use": "params/rows.py",
    "quantised": "quantized/nf4.py",
}


@pytest.mark.parametrize("kind", EACH_KIND)
def test_what_is_gathered_is_received_where_it_is_used(kind):
    counted, _ = Counting(kind, 0).run(0)[0]
    decodes = "quantised" in kind and "where it is read" not in kind
    file = ARRIVING["quantised"] if decodes else ARRIVING.get(kind)
    assert {site.partition(":")[0] for _, site in counted.arrivals} == ({file} if file else set())


@pytest.mark.parametrize(("inner", "num_kinds"), [(4, 1), (8, 2)])
def test_matrices_cut_alike_on_another_dim_are_put_in_order_by_one_copy(monkeypatch, inner, num_kinds):
    def layers(draw):
        return nn.Sequential(*(Layer(4, inner) for _ in range(2)), nn.Linear(4, 4)), 4

    monkeypatch.setitem(KINDS, "even", (2, layers, ON_DIM_1))
    counted, num_groups = Counting("even", 0).run(0)[0]
    assert {operation for operation, _ in counted.arrivals} == {"aten::copy_"}
    # The first layer is gathered twice; the second stays from forward to backward, as the last matrix does.
    assert counted.arrivals.total() == 3 * num_kinds + 1
    assert counted.kernels.total() <= (MOST + 1) * num_groups
