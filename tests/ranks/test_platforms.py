"""Without what only Linux has, ranks train all the same, and say once over what they talk and why."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NOT_LINUX = """
import os
for name in ("memfd_create", "pidfd_open", "pipe2", "sched_yield", "sched_getaffinity"):
    delattr(os, name)
"""

WINDOWS = (
    NOT_LINUX
    + """
import builtins, ctypes, mmap, signal, socket, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for name in ("pread", "pwrite", "preadv", "pwritev", "register_at_fork", "fork", "killpg", "posix_fadvise"):
    delattr(os, name)
kept = ("SIG_DFL", "SIG_IGN", "SIGABRT", "SIGINT", "SIGTERM")
for name in list(vars(signal)):
    if name.startswith(("SIG", "pthread_")) and name not in kept:
        delattr(signal, name)
for name in list(vars(mmap)):
    if name.startswith(("MAP_", "MADV_", "PROT_")):
        delattr(mmap, name)

class Missing:
    def __get__(self, *_):
        raise AttributeError

socket.socket.sendmsg = socket.socket.recvmsg_into = Missing()
load, open_file = ctypes.CDLL.__init__, builtins.open

def library(self, name, *args, **options):
    if name is None:
        raise TypeError("bad argument type for built-in operation")  # as on Windows
    load(self, name, *args, **options)

def opened(file, *args, **options):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", file)
    return open_file(file, *args, **options)

ctypes.CDLL.__init__, builtins.open = library, opened
"""
)

TRAIN = """
import torch, torch.distributed as dist
from torch import nn

def after_a_step(model, ranks):
    inputs = torch.arange(40.0).view(4, 10).sin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rank in ranks:
        (model(inputs[2 * rank : 2 * rank + 2]).square().mean() / len(ranks)).backward()
    optimizer.step()
    return model

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 30000), nn.Tanh(), nn.Linear(30000, 3))

plain = after_a_step(build(), [0, 1]).state_dict()  # torch has imported what it needs
{blocked}
import shardwright
model = shardwright.fully_shard(build())
rank = dist.get_rank()
sharded = shardwright.full_state_dict(after_a_step(model, [rank]))
if rank == 0:
    for name, value in plain.items():
        torch.testing.assert_close(sharded[name], value)
    print("equal after a step on", dist.get_world_size())
"""


def trained(blocked):
    """(stdout, stderr) of two ranks together that train a step without what ``blocked`` takes away."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = TRAIN.format(blocked=blocked)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    return "".join(out for out, _ in told), "".join(err for _, err in told)


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("blocked", "line"),
    [
        ("", ""),
        (NOT_LINUX, "ranks talk over TCP sockets: no shared memory (rank N: it takes Linux)\n"),
        (
            WINDOWS,
            "ranks talk over torch's collectives on Gloo: no shared memory (rank N: it takes Linux), "
            "no sockets of our own (rank N: Python has no sendmsg here); they sum in another order, so bits "
            "may differ, and send up to twice the bytes\n",
        ),
    ],
    ids=["linux", "not_linux", "windows"],
)
def test_ranks_train_without_what_only_linux_has_and_say_once_over_what_they_talk(blocked, line):
    out, err = trained(blocked)
    assert out == "equal after a step on 2\n"
    assert re.sub(r"rank \d", "rank N", err) == line  # whichever was the first to say why
