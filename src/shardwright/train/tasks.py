"""A rank that a scheduler has started: SLURM's srun, or mpirun of Open MPI, MPICH and Intel MPI.

They start the same command once per task and say in variables of their own which task it is. Here these
become the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
which all other code reads. Else each task would be a job of its own, and all would train in one folder.
"""

import os
import re
from collections.abc import Mapping, MutableMapping

from shardwright.errors import ConfigError

MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Which task a process is, in the variables of ``mpirun``: rank, ranks, and both among those of its host."""

_NO_TASK = 0xFFFFFFF0
"""SLURM's steps from here on are shells of a job (batch, interactive, extern), no tasks of an srun."""


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one rank of a job (of torchrun, of our launcher, or after ``take_part``)."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def take_part(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables to what a scheduler's say, if it has started several tasks.

    Raises: ConfigError, with the line to use, where tasks were asked for and can't be one job.
    """
    if is_rank(environment):
        return
    for name, keys in MPI.items():
        if int(environment.get(keys[1], "1")) > 1 and keys[2] in environment:
            environment.update(_of_mpi(name, keys, environment))
            return
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        environment.update(_of_slurm(environment))
    elif int(environment.get("PMI_SIZE", "1")) > 1:
        raise ConfigError(
            f"this is one of {environment['PMI_SIZE']} processes of a launcher that doesn't say which of its "
            "host it is (no MPI_LOCALRANKID): start one torchrun on each host, see docs/launchers.md"
        )


def _of_mpi(name: str, keys: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, str]:
    if missing := [key for key in ("MASTER_ADDR", "MASTER_PORT") if key not in environment]:
        give, size = ("-x", "=") if name == "Open MPI" else ("-genv", " "), environment[keys[1]]
        raise ConfigError(
            f"this is one of {size} processes of {name}, which doesn't say where rank 0 is "
            f"({' and '.join(missing)} not set): on the first host, mpirun {give[0]} MASTER_ADDR{give[1]}"
            f"$(hostname) {give[0]} MASTER_PORT{give[1]}29500 -n {size} shardwright train ..."
        )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: environment[key] for name, key in zip(names, keys, strict=True)}


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    step = int(environment.get("SLURM_STEP_ID", _NO_TASK))
    if step >= _NO_TASK:
        raise ConfigError(
            f"this SLURM job has {environment['SLURM_NTASKS']} tasks, and srun has not started this process: "
            "write srun shardwright train ... (one rank per task), or srun --ntasks 1 shardwright train ... "
            "(which starts its own ranks)"
        )
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or "localhost"
    # Steps may run side by side on a node. Linux gives no port below 32768 to outgoing connections.
    port = 12_000 + (int(environment.get("SLURM_JOB_ID", "0")) + 997 * step) % 20_000
    # With devices for each task, a task sees only its own, and the first of these is 0.
    own = "SLURM_GPUS_PER_TASK" in environment
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"]),
        "LOCAL_RANK": "0" if own else environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": "1" if own else _on_this_node(environment),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_node(nodes)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def _on_this_node(environment: Mapping[str, str]) -> str:
    """Tasks of this step on this node, of ``2(x3),1``: three nodes with two each, then one with one."""
    written = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if not written:
        return environment["SLURM_NTASKS"]
    counts: list[str] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", written):
        counts += [count] * int(times or 1)
    return counts[int(environment.get("SLURM_NODEID", "0"))]


def first_node(nodes: str) -> str:
    """The first host of a SLURM list, where task 0 is: ``gpu[07-09,12]-ib,login`` -> ``gpu07-ib``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else nodes
