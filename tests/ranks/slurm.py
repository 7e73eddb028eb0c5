"""What a SLURM cluster does to an sbatch file, as far as the files of deploy/ ask for it.

``submit`` reads the #SBATCH lines, and runs the file's body as it stands, with these commands at hand:

    srun COMMAND            starts it once per task, with SLURM's variables, on the nodes of STUB_NODES
    scancel --signal=S JOB  sends S to the tasks, and not to the body
    scontrol                show hostnames; requeue JOB is written down
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Node:
    """Its name, and the words that start a command on it."""

    name: str = "localhost"
    prefix: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """A body that runs, and what its #SBATCH lines asked for. requeued: written by ``scontrol requeue``."""

    body: subprocess.Popen[str]
    asked: dict[str, str]
    requeued: Path

    def is_told(self) -> None:
        """The time is nearly over: what ``--signal=B:USR1@...`` does."""
        to, name, seconds = re.fullmatch(r"(B):(\w+)@(\d+)", self.asked["signal"]).groups()  # type: ignore[union-attr]
        assert (to, int(seconds) >= 60) == ("B", True)
        self.body.send_signal(signal.Signals[f"SIG{name}"])


@dataclass
class Cluster:
    """Where jobs run, in ``folder``; ``restarts`` counts how often the job was requeued."""

    folder: Path
    nodes: Sequence[Node] = (Node(),)
    tasks_per_node: int = 1
    restarts: int = 0
    job_id: int = 4217
    environment: dict[str, str] = field(default_factory=dict)

    def submit(self, file: Path, *arguments: str) -> Job:
        """``sbatch FILE ARGUMENTS``, at once."""
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", file.read_text(), re.MULTILINE))
        commands = self.folder / "bin"
        commands.mkdir(exist_ok=True)
        for name in ("srun", "scancel", "scontrol"):
            words = shlex.join([sys.executable, str(Path(__file__).absolute()), name])
            (commands / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (commands / name).chmod(0o755)
        names = ",".join(node.name for node in self.nodes)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "STUB_FOLDER": str(self.folder),
            "STUB_NODES": json.dumps([[node.name, list(node.prefix)] for node in self.nodes]),
            "SLURM_JOB_ID": str(self.job_id),
            "SLURM_JOB_NODELIST": names,
            "SLURM_NODELIST": names,
            "SLURM_JOB_NUM_NODES": str(len(self.nodes)),
            "SLURM_NTASKS": str(len(self.nodes) * self.tasks_per_node),
            "SLURM_NTASKS_PER_NODE": str(self.tasks_per_node),
            "SLURM_TASKS_PER_NODE": f"{self.tasks_per_node}(x{len(self.nodes)})",
            # A body is no task of srun, and has these all the same.
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            **({"SLURM_RESTART_COUNT": str(self.restarts)} if self.restarts else {}),
            **self.environment,
        }
        body = subprocess.Popen(
            ["bash", str(file), *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return Job(body, asked, self.folder / "requeued")


def _srun(command: list[str]) -> int:
    per_node, tasks = int(os.environ["SLURM_NTASKS_PER_NODE"]), []
    for node, (name, prefix) in enumerate(json.loads(os.environ["STUB_NODES"])):
        for local in range(per_node):
            place = {
                "SLURM_PROCID": len(tasks),
                "SLURM_LOCALID": local,
                "SLURM_NODEID": node,
                "SLURMD_NODENAME": name,
                "SLURM_STEP_ID": 0,
                "SLURM_STEP_NUM_TASKS": os.environ["SLURM_NTASKS"],
                "SLURM_STEP_NODELIST": os.environ["SLURM_NODELIST"],
                "SLURM_STEP_TASKS_PER_NODE": os.environ["SLURM_TASKS_PER_NODE"],
            }
            variables = {**os.environ, **{key: str(value) for key, value in place.items()}}
            tasks.append(subprocess.Popen([*prefix, *command], env=variables))
    pids = Path(os.environ["STUB_FOLDER"], "tasks")
    pids.with_suffix(".part").write_text(" ".join(str(task.pid) for task in tasks))
    pids.with_suffix(".part").replace(pids)
    return max(abs(task.wait()) for task in tasks)


def _scancel(option: str, job: str) -> int:
    assert job == os.environ["SLURM_JOB_ID"]
    number = signal.Signals[f"SIG{option.removeprefix('--signal=')}"]
    for pid in Path(os.environ["STUB_FOLDER"], "tasks").read_text().split():
        os.kill(int(pid), number)
    return 0


def _scontrol(verb: str, *words: str) -> int:
    if verb == "requeue":
        Path(os.environ["STUB_FOLDER"], "requeued").write_text(*words)
    else:
        assert (verb, words[0]) == ("show", "hostnames")
        print("\n".join(words[1].split(",")))
    return 0


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    commands = {"srun": lambda *command: _srun(list(command)), "scancel": _scancel, "scontrol": _scontrol}
    sys.exit(commands[name](*arguments))
