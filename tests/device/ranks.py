"""The real runtime on simulated devices: ranks in threads, communicators that are streams, words at once."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.autograd import Variable
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from shardwright import nf4
from shardwright.engine.listeners import listeners
from shardwright.engine.step import hooks
from shardwright.engine.unit import units_in
from shardwright.errors import CommError
from shardwright.observe import attached
from shardwright.observe.watch import lifecycle
from shardwright.policy import CPUOffloadPolicy, DiskOffloadPolicy
from shardwright.torch_private import new_group_of
from shardwright.transport import mesh as meshes
from shardwright.transport.base import Comm, sum_in_rank_order
from shardwright.transport.process import LaunchLog, ProcessState, process_state
from shardwright.transport.process_group import ProcessGroupComm
from shardwright.transport.streams import Streams
from shardwright.transport.two_level import TwoLevelComm
from tests.device import cases
from tests.device.kernels import Kernels, put_on_host
from tests.device.sim import Address, BackendStream, Device, Event, Part, Stream, World, resizing

if not hasattr(ThreadLocalWorld, "comms"):
    ThreadLocalWorld.comms = property(lambda _: [])  # torch 2.11 asks for them, and has forgotten them there
saving = import_module("shardwright.checkpoint.save")  # the package shows the function of that name
_TABLES = {name: value.__wrapped__ for name, value in vars(nf4).items() if hasattr(value, "cache_clear")}
"""Functions that keep tensors on the device of a process."""


OF_NCCL = {torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.float32}
OF_NCCL |= {torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
"""The dtypes that NCCL's collectives take, as torch hands them on."""


class Communicator:
    """A process group of NCCL's, on one rank: collectives run in launch order, on a stream of their own."""

    def __init__(self, device: Device, ranks: Sequence[int], name: Any) -> None:
        self._device, self._ranks, self._name = device, list(ranks), name
        self._stream = Stream(device)
        self._launched = 0
        self._pairs: dict[int, Communicator] = {}

    def size(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return self._ranks.index(self._device.rank)

    def _address(self, tensor: torch.Tensor) -> Address:
        assert tensor.dtype in OF_NCCL, f"NCCL has no {tensor.dtype}"
        return self._device.memory.address(tensor)

    def _launch(self, read: Any, write: Any) -> "Work":
        self._launched += 1
        meeting = self._device.world.meeting((self._name, self._launched), self.size())
        part = meeting.parts[self.rank()] = Part(meeting, read, write)
        self._stream.wait_event(self._device.current[-1].record_event())
        self._stream.put(part)
        with _disable_current_modes():
            self._device.world.go_on()
        return Work(self._device, self._stream.record_event())

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, _: Any = None) -> "Work":
        address = self._address
        places, sources = [address(t) for t in outputs], [address(t) for t in inputs]

        def write(found: list[Any]) -> None:
            for index, place in enumerate(places):
                torch.cat([each[index] for each in found], out=place.tensor())

        return self._launch(lambda: [each.tensor().clone() for each in sources], write)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, _: Any = None) -> "Work":
        address, rank = self._address, self.rank()
        places, sources = [address(t) for t in outputs], [address(t) for t in inputs]

        def write(found: list[Any]) -> None:
            for index, place in enumerate(places):
                total = place.tensor()
                parts = [each[index].view(len(found), -1)[rank] for each in found]
                total.copy_(sum_in_rank_order([part.clone() for part in parts], total.dtype, None))

        return self._launch(lambda: [each.tensor().clone() for each in sources], write)

    # The names that torch 2.11 and 2.12 have.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def allreduce_coalesced(self, tensors: Any, _: Any = None) -> "Work":
        places = [*map(self._address, tensors)]

        def write(found: list[Any]) -> None:
            for index, place in enumerate(places):
                parts = [each[index].clone() for each in found]
                place.tensor().copy_(sum_in_rank_order(parts, parts[0].dtype, None))

        return self._launch(lambda: [each.tensor().clone() for each in places], write)

    def broadcast(self, tensors: Any, options: Any) -> "Work":
        (place,) = map(self._address, tensors)
        root = options.rootRank
        return self._launch(lambda: place.tensor().clone(), lambda found: place.tensor().copy_(found[root]))

    def reduce(self, tensors: Any, options: Any) -> "Work":
        (place,) = map(self._address, tensors)

        def write(found: list[Any]) -> None:
            if self.rank() == options.rootRank:
                place.tensor().copy_(
                    sum_in_rank_order([each.clone() for each in found], found[0].dtype, None)
                )

        return self._launch(lambda: place.tensor().clone(), write)

    def send(self, tensors: Any, to: int, _: int) -> "Work":
        place = self._device.memory.address(*tensors)
        return self._launch_between(to, lambda: place.tensor().clone(), lambda _: None)

    def recv(self, tensors: Any, sender: int, _: int) -> "Work":
        place = self._device.memory.address(*tensors)
        return self._launch_between(
            sender, lambda: None, lambda found: place.tensor().copy_(found[self.rank() < sender])
        )

    def _launch_between(self, other: int, read: Any, write: Any) -> "Work":
        """One message; two ranks have a communicator of their own."""
        if other not in self._pairs:
            ranks = sorted((self.rank(), other))
            name = (self._name, *ranks)
            self._pairs[other] = Communicator(self._device, [self._ranks[each] for each in ranks], name)
        return self._pairs[other]._launch(read, write)


class Work:
    """A collective in flight."""

    def __init__(self, device: Device, event: Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        """Make the current stream wait."""
        self._device.current[-1].wait_event(self._event)


class _Words(Comm):
    """The hosts' transport beside their devices'. ``say(ranks, words)``: what there is in place of it."""

    streams = None

    def __init__(
        self, log: LaunchLog, say: Callable[[Sequence[int], Sequence[int]], list[list[int]]]
    ) -> None:
        self.log, self.say = log, say

    def exchange(self, words: Sequence[int], key: str) -> list[list[int]]:
        """See ``Comm.exchange``."""
        return self.say(self.log.ranks, words)


class _Comm(ProcessGroupComm):
    """A transport of devices, on which no words go."""

    def exchange(self, words: Sequence[int], key: str) -> list[list[int]]:
        """Not for it."""
        raise AssertionError(f"{key}: words would wait for a device; exchange them on ``host``")


class Simulated(cases.Place):
    """The device of one rank. sharded: is called with a model that was sharded."""

    def __init__(self, accelerator: Device, sharded: Callable[[torch.nn.Module], None]) -> None:
        self._accelerator, self.sharded = accelerator, sharded
        self._groups: dict[Any, Communicator] = {}

    def _group(self, group: Any) -> Communicator:
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._groups:
            self._groups[ranks] = Communicator(self._accelerator, ranks, ("custom", ranks))
        return self._groups[ranks]

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, group: Any) -> Work:
        return self._group(group).all_gather_single_coalesced([whole], [own])

    def reduce_scatter(self, total: torch.Tensor, values: torch.Tensor, group: Any) -> Work:
        return self._group(group).reduce_scatter_single_coalesced([total], [values])

    def all_reduce(self, total: torch.Tensor, operation: Any, group: Any) -> None:
        assert operation == dist.ReduceOp.SUM
        if self._group(group).size() > 1:
            self._group(group).allreduce_coalesced([total.view(1)]).wait()

    def stream(self) -> BackendStream:
        return BackendStream(self._accelerator)

    def beside(self, call: Callable[[], Any]) -> Event:
        stream = Stream(self._accelerator)
        stream.wait_event(self._accelerator.current[-1].record_event())
        with stream:
            call()
        return stream.record_event()

    def is_idle(self) -> bool:
        return not any(stream.items for stream in self._accelerator.streams)

    def read(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self._accelerator.synchronize()
        return [self._accelerator.read(each) for each in tensors]


class Engine:
    """Autograd's, which on an accelerator runs all nodes of a rank in a thread of their own, with their hooks
    and what is called at the end, while the caller waits."""

    def __init__(self, device: Callable[[], Device]) -> None:
        self._device, self._own = device, Variable._execution_engine
        self._threads: dict[Device, ThreadPoolExecutor] = {}
        self._inside: list[Device] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def run_backward(self, *arguments: Any, **options: Any) -> Any:
        """As the engine's; in one that runs, it is run by the same thread."""
        device, groups, modes = (
            self._device(),
            ThreadLocalWorld._world.world,
            _get_current_dispatch_mode_stack(),
        )

        def run() -> Any:
            ThreadLocalWorld._world.world = groups
            with ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode)
                return self._own.run_backward(*arguments, **options)

        if device in self._inside:
            return self._own.run_backward(*arguments, **options)
        thread = self._threads.setdefault(device, ThreadPoolExecutor(1))
        self._inside.append(device)
        try:
            return thread.submit(run).result()
        finally:
            self._inside.remove(device)


_axis_over_all = meshes._axis_over_all


def _mesh_on_host(mesh: Any) -> meshes.Axis:
    """A mesh finds its own coordinate by numbers, which a tensor of the simulated device hasn't."""
    with _disable_current_modes():
        return _axis_over_all(mesh)


def _new_group(ranks: list[int], backend: str, timeout: Any) -> dist.ProcessGroup:
    return new_group_of(ranks, timeout, "fake")


class Job:
    """One run of ``cases.train``, or of another function, on simulated ranks."""

    def __init__(
        self,
        kind: str,
        seed: int,
        rules: type[Streams] = Streams,
        function: Callable[..., Any] = cases.train,
        size: int | None = None,
        apart: bool = True,
    ) -> None:
        """size: ranks, where not those of the kind. apart: a backward has a thread of its own."""
        self.function = function
        self.size = size or cases.setting(kind)[0]
        self.kind, self.rules, self.apart = kind, rules, apart
        swapped = [(process_state, "__dict__"), (hooks, "_root_left_out")]
        swapped += [(saving, "_staging")]
        swapped += [(nf4, name) for name in _TABLES]
        self.world = World(self.size, seed, swapped)
        self._made: Counter[Any] = Counter()
        self._said: dict[Any, list[Any]] = {}
        self._num_said: Counter[Any] = Counter()
        self._come: dict[Any, list[float]] = {}
        self._places: dict[int, Simulated] = {}
        self._streams: dict[Device, Streams] = {}
        self._pins = self.world.random.random() < 0.7
        # One for gathers and reductions, as there is on an accelerator; two leave more orders to the device.
        self._is_shared = self.world.random.random() < 0.5

    def run(self, number: int) -> list[list[torch.Tensor]]:
        """What each rank gives of the model of that number."""
        stand_ins = [
            (lifecycle, "keep_watch", lambda: None),
            (attached, "keep_watch", lambda: None),
            (listeners, "sharding", []),
            (meshes, "_make_comm", self._make_comm),
            (dist, "all_reduce", self._all_reduce),
            (saving, "_is_on_device", lambda t: not self.world.device.memory.is_on_host(cases.inner_of(t))),
            (torch.accelerator, "current_stream", lambda: self.world.device.current[-1]),
            (torch.accelerator, "is_available", lambda: True),
            (torch.accelerator, "current_accelerator", lambda *_, **__: None),  # a torch with CUDA has one
            (torch.accelerator, "synchronize", lambda: self.world.device.synchronize()),
            (torch.Tensor, "data_ptr", lambda tensor: self.world.device.memory.pointer_of(tensor)),
            (meshes, "new_group", _new_group),
            (meshes, "_axis_over_all", _mesh_on_host),
            (TwoLevelComm, "host", property(lambda comm: comm.flat.host)),
            (dist.distributed_c10d, "_world", ThreadLocalWorld()),
            *cases.cutting(self.kind),
            *([(Variable, "_execution_engine", Engine(lambda: self.world.device))] if self.apart else []),
        ]
        before = [getattr(owner, name) for owner, name, _ in stand_ins]
        for owner, name, value in stand_ins:
            setattr(owner, name, value)
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # names of groups are each rank's own
        try:
            with resizing(self.world):
                return self.world.run(lambda rank: self._train(rank, number), self._fresh)
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
            for (owner, name, _), value in zip(stand_ins, before, strict=True):
                setattr(owner, name, value)

    def _fresh(self) -> list[Any]:
        tables = [cache(partial(self._made_once, made)) for made in _TABLES.values()]
        return [vars(ProcessState()), hooks._RootLeftOut(), {}, *tables]

    def _train(self, rank: int, number: int) -> list[torch.Tensor]:
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=self.size)
        device = self.world.devices[rank]
        try:
            place = self._places[rank] = Simulated(device, self._offload)
            with Kernels(device):
                return self.function(self.kind, number, rank, place)
        finally:
            dist.destroy_process_group()

    # ---- what stands in for the package's ways to other ranks

    def _make_comm(
        self, ranks: list[int], device_type: str, within: Any, host: Any = None
    ) -> ProcessGroupComm:
        device = self.world.device
        self._made[device.rank, tuple(ranks)] += 1
        name = tuple(ranks), self._made[device.rank, tuple(ranks)]
        if device not in self._streams:  # one set for all transports, as Streams.of
            self._streams[device] = self.rules(lambda: Stream(device), lambda: device.current[-1])
        streams = self._streams[device]
        gathers = Communicator(device, ranks, (name, "gather"))
        reductions = gathers if self._is_shared else Communicator(device, ranks, (name, "reduce"))
        log = LaunchLog(ranks, device_type)

        def make(_: LaunchLog) -> Any:
            return Communicator(device, ranks, (name, "asked"))

        words = _Words(log, self._exchange)
        return _Comm(gathers, reductions, log, streams, words, make)  # type: ignore[arg-type]

    def _made_once(self, made: Callable[..., Any], *args: Any) -> Any:
        """A table for a device. Of its numbers its host waits once, which isn't counted."""
        waits = self.world.device.waits
        before, table = len(waits), made(*args)
        del waits[before:]
        return table

    def _exchange(self, ranks: Sequence[int], words: Sequence[int]) -> list[list[int]]:
        """Hosts' words, for which no device is waited for."""
        rank = self.world.device.rank
        with _disable_current_modes():
            self.world.go_on()
        self._num_said[ranks, rank] += 1
        said = self._said.setdefault((ranks, self._num_said[ranks, rank]), [None] * len(ranks))
        said[ranks.index(rank)] = list(words)
        come = self._come.setdefault((ranks, self._num_said[ranks, rank]), [])
        come.append(self.world.device.host_ms)
        while None in said:
            self.world.yield_turn()
        self.world.device.host_ms = max(come) + self.world.durations.words_ms
        if len(set(map(len, said))) > 1:
            raise CommError("ranks are in different collectives")
        return said

    def _all_reduce(self, total: torch.Tensor, op: Any, group: Any) -> None:
        self._places[self.world.device.rank].all_reduce(total, op, group)

    def _offload(self, model: torch.nn.Module) -> None:
        device = self.world.device
        for param in (param for unit in units_in(model) for param in unit.params):
            offload = param.split.offload
            if param.split.on_host and not device.memory.is_on_host(param.local):
                in_files = isinstance(offload, DiskOffloadPolicy)
                assert not (in_files and param.local.numel()), f"{param.fqn} should lie in a file"
                pinned = self._pins and isinstance(offload, CPUOffloadPolicy) and not in_files
                put_on_host(device, param.local, pinned)
