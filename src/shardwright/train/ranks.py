"""A rank's place in the job, and the few words that ranks exchange besides parameters and gradients.

All collectives of the training loop are here. They move scalars over the CPU side of
the default process group, so that agreeing to stop never waits for a GPU, and never queues behind the bulk
traffic (which has groups of its own).
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright import clock
from shardwright.checkpoint import StopRequest
from shardwright.columns import in_words
from shardwright.data.text import Share
from shardwright.engine.listeners import listeners
from shardwright.errors import CheckpointError, ConfigError, DataError, InputError
from shardwright.observe.watch.lifecycle import keep_watch, leave, set_watch
from shardwright.observe.watch.status_exchange import store_address
from shardwright.parallel.mesh import Mesh, mesh
from shardwright.recipe.config import LaunchConfig, MeshConfig, Recipe
from shardwright.train.launch import (
    CLOSED_PIPE,
    CPU_RANKS,
    FAILURE_VARIABLE,
    STOP_SIGNALS,
    STORE_VARIABLE,
    Failure,
)
from shardwright.transport.attempt import join_job
from shardwright.transport.host_limits import limit_in
from shardwright.transport.host_memory import anonymous_nbytes, free_nbytes
from shardwright.transport.jobstore import job_store
from shardwright.transport.process import LaunchLog, process_state

_MEETING_S = 0.1


@dataclass(frozen=True)
class RankPlace:
    """A ``TrainingProcess`` that is one rank: which one, on which device, and what it shares with which."""

    rank: int
    world: int
    device: torch.device
    mesh: Mesh

    @property
    def device_type(self) -> str:
        """As ``cpu`` or ``cuda``."""
        return self.device.type

    @property
    def num_samples(self) -> int:
        """See ``TrainingProcess``."""
        return self.mesh.num_samples

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes the whole files."""
        return self.rank == 0

    @property
    def store_address(self) -> str:
        """Where the job's store can be reached; "" for a rank that is alone."""
        return store_address() if self.world > 1 else ""

    def shares(self, batch_size: int) -> list[Share]:
        """The one share of this rank; the same on ranks that share sequences or layers."""
        return [Share(self.mesh.sample_rank, self.num_samples, batch_size)]

    def total(self, *values: float) -> list[float]:
        """The sums over all ranks of each value. Every rank calls."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, *values: float) -> list[float]:
        """The maximum over all ranks of each value. Every rank calls."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def wait_for_all(self) -> None:
        """Return when every rank has called this (so that what rank 0 wrote is there for all)."""
        self.total(0.0)

    def meet(self, name: str) -> None:
        """Return when every rank has called this with ``name``, however long one of them takes: unlike in
        ``wait_for_all`` there is no time limit.

        Raises: CommError that says which, where a rank failed or was lost before.
        """
        if self.world == 1:
            return
        store = job_store()
        keys = [f"shardwright/{name}/{rank}" for rank in range(self.world)]
        store.set(keys[self.rank], "")
        with self._log.waiting(self._log.launch(name)):
            while not store.check(keys):
                process_state.raise_diagnosis()
                clock.sleep(_MEETING_S)

    @cached_property
    def _log(self) -> LaunchLog:
        """The watch explains these collectives, and ends them, as it does those of a step."""
        log = LaunchLog(range(self.world), "training loop ")
        assert dist.group.WORLD is not None
        log.travels_on(dist.group.WORLD)
        return log

    def _reduce(self, values: tuple[float, ...], op: dist.ReduceOp.RedOpType) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64)
        with self._log.waiting(self._log.launch(f"{len(values)} number(s) of the training loop")):
            dist.all_reduce(numbers, op)
        return numbers.tolist()


class LaunchedStop(StopRequest):
    """Asked for by SIGINT, SIGTERM, or the end of our launcher."""

    def __init__(self) -> None:
        super().__init__(STOP_SIGNALS)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if STORE_VARIABLE in os.environ:
            threading.Thread(target=self._follow_launcher, daemon=True).start()

    def _follow_launcher(self) -> None:
        while os.read(sys.stdin.fileno(), 1):  # nothing is ever written; it returns when the launcher is gone
            pass
        self.ask("the launcher's end")


def ranks_to_start(config: LaunchConfig) -> int:
    """How many local ranks ``config`` asks for: where it says 0, as many as there are devices for them.

    Raises: ConfigError, as ``choose_device`` does for so many, and where they don't fit into memory, each of
        them with what this process holds, which has imported what they do.
    """
    devices = 0 if config.device == "cpu" else torch.accelerator.device_count()
    ranks = config.ranks or devices or CPU_RANKS
    choose_device(config, ranks)
    each, free = anonymous_nbytes(), free_nbytes()
    if free and ranks * each > free:
        raise ConfigError(
            f"launch.ranks = {ranks}: each takes {in_words(each)} before it holds a model, together "
            f"{in_words(ranks * each)}, and {in_words(free)} of memory are free: start at most {free // each}"
        )
    return ranks


def choose_device(config: LaunchConfig, local_ranks: int) -> str:
    """The kind of device, as ``cpu`` or ``cuda``, for ``local_ranks`` ranks on this machine.

    Raises:
        ConfigError: there are accelerators, but too few, or none of the kind that is asked for. Ranks never
            fall back to the CPU beside them.
    """
    devices = torch.accelerator.device_count()
    accelerator = torch.accelerator.current_accelerator() if devices else None
    kind = "cpu" if accelerator is None else accelerator.type
    if config.device == "cpu" or (config.device == "auto" and not devices):
        return "cpu"
    if config.device not in ("auto", kind):
        seen = f"{devices} of kind {kind!r}" if devices else "no accelerator"
        raise ConfigError(
            f'launch.device = "{config.device}", but this process sees {seen}: set it to auto or cpu'
        )
    if devices < local_ranks:
        raise ConfigError(
            f"{local_ranks} ranks on this host, but {devices} {kind} device(s) are visible: start {devices} "
            f"(launch.ranks = auto, or torchrun --nproc-per-node {devices}), or train on the CPU with "
            "--launch.device cpu"
        )
    return kind


def mesh_of(config: MeshConfig, device_type: str) -> Mesh:
    """The mesh that [mesh] says, of all ranks; every rank calls.

    Raises: InputError where its sizes don't make up the ranks that there are.
    """
    return mesh(**config.sizes(), device_type=device_type)


@contextmanager
def joined(recipe: Recipe) -> Iterator[RankPlace]:
    """Join the other ranks for the length of the block (every rank enters), under ``timeout_s``, and keep
    watch over them."""
    config = recipe.launch
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    kind = choose_device(config, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, local_rank)
    backend = "gloo"
    if kind != "cpu":
        torch.accelerator.set_device_index(local_rank)
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    store = os.environ.get(STORE_VARIABLE)
    timeout = timedelta(seconds=config.timeout_s)
    if store:  # our launcher's, new for each job
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
        )
    else:
        join_job(backend, timeout)
    set_watch(recipe.watch.policy())
    keep_watch()
    try:
        yield RankPlace(rank, world, device, mesh_of(recipe.mesh, kind))
    except BaseException as error:
        listeners.amend(error)
        leave(error)  # while the store is there for a note
        raise
    else:
        leave()
    finally:
        dist.destroy_process_group()


@contextmanager
def life_of_a_rank() -> Iterator[None]:
    """The block is all that this process is for: it ends with it, with code 0, or 1 when the block raises.

    A failure is told to our launcher, or stderr. The process ends at once, without clean-up: tearing down a
    process group whose peers are gone can block for as long as its time limit, while peers notice a closed
    connection within milliseconds; and taking down the interpreter was once seen to end a run that was done
    with SIGABRT ("terminate called without an active exception"), for a cause that was not found.
    """
    code = 0
    try:
        yield
    except BrokenPipeError:
        os._exit(CLOSED_PIPE)  # nobody reads the output: the launcher, or the shell, knows why
    except BaseException as error:
        code = 1
        rank = int(os.environ.get("RANK", "0"))
        limit = limit_in(error)
        wrong_input = bool(limit) or isinstance(error, (InputError, ConfigError, DataError, CheckpointError))
        message = limit or (str(error) if wrong_input else f"{type(error).__name__}: {error}")
        message = "\n".join([message, *getattr(error, "__notes__", ())])
        text = traceback.format_exc()
        if FAILURE_VARIABLE in os.environ:
            failure = Failure(rank, clock.time(), message, text, wrong_input)
            failure.write(Path(os.environ[FAILURE_VARIABLE]))
        else:
            print(f"rank {rank} failed: {message if wrong_input else text}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
