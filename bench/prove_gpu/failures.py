"""Section: one rank is killed or sleeps in a forward, in a backward or before the optimizer; what others say.

Ranks are started as they are, not by torchrun, which would end the others as soon as one has ended.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time

import torch

import shardwright
from bench.prove_gpu.blocks import Shape, Stack, inputs_of, made, norm_of
from bench.prove_gpu.device import Device
from bench.prove_gpu.rank import Rows, options

PLACES = ("forward", "backward", "optimizer")
KINDS = {"is killed": r"errors\.\w+: .*", "sleeps": r"\bslow: .*"}
"""What happens to the last rank, and what rank 0 is to print of it."""
SLEEP_S = 14.0
"""A wait is told once it has lasted 5 s."""
LIMIT_S = 90.0


def main() -> None:
    """A row for each place and kind. Ends with 1 where rank 0 doesn't name the rank."""
    told = options()
    device, rows = Device.of(told.device), Rows(told.rows, writes=True)
    world, failed = device.worlds[0], False
    for place in device.size(PLACES, PLACES[1:2]) if world > 1 else ():
        for kind in KINDS:
            said, status, seconds = _tried(told.device, world, place, kind)
            match = re.search(KINDS[kind], said)
            found = match.group() if match else ""
            columns = {"in": place, "rank 0": found[:150].replace("|", "/"), "exit status": str(status)}
            rows.add("what rank 0 says", rank=f"{world - 1} {kind}", **columns, s=round(seconds, 1))
            if f"rank {world - 1}" not in found:
                rows.fail(f"rank {world - 1} {kind} in {place}: rank 0 has said\n{said}")
                failed = True
    if world == 1:
        rows.add("what rank 0 says", rank="needs two ranks: see --share-card")
    sys.exit(int(failed))


def _tried(device: str, world: int, place: str, kind: str) -> tuple[str, int, float]:
    """What rank 0 prints, its exit status, and the seconds until all have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    shared |= {"LOCAL_WORLD_SIZE": str(world)}
    words = [sys.executable, "-m", "bench.prove_gpu.failures", "--device", device, "--rows", "", place, kind]
    began, ranks = time.monotonic(), []
    for rank in range(world):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(
            subprocess.Popen(words, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)
        )
    try:
        said = ranks[0].communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        ranks[0].kill()
        said = ranks[0].communicate()[0]
    for each in ranks:
        each.kill()
        each.wait()
    return said, ranks[0].returncode, time.monotonic() - began


def _rank(device: Device, place: str, kind: str) -> None:
    """Three steps; in the last one the last rank comes to that place."""
    where = device.join()
    torch.manual_seed(0)
    shape = Shape.on(device)
    model = Stack([shardwright.fully_shard(made(shape, where)) for _ in range(2)], norm_of(shape, where))
    shardwright.fully_shard(model)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), inputs_of(shape, where).float()
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    def happens(*_: object) -> None:
        if kind == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SLEEP_S)

    for step in range(3):
        comes = is_last and step == 2
        if comes and place == "forward":
            model.blocks[1].register_forward_pre_hook(happens)
        if comes and place == "backward":
            model.blocks[1].register_full_backward_pre_hook(happens)
        model(x).backward()
        if comes and place == "optimizer":
            happens()
        optimizer.step()
        optimizer.zero_grad()
        device.synchronize()
    model(x)  # where others are waited for after the last step
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 5:
        parser = argparse.ArgumentParser()
        parser.add_argument("--device")
        parser.add_argument("--rows")
        parser.add_argument("place")
        parser.add_argument("kind")
        asked = parser.parse_args()
        _rank(Device.of(asked.device), asked.place, asked.kind)
    else:
        main()
