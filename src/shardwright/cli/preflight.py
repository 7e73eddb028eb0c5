"""Whether a job can train on the ranks that its launcher starts: found out, told, and measured."""

import argparse
import json
import os
import socket
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch

from shardwright import clock
from shardwright.cli.bench import measured_cluster, told
from shardwright.errors import CommError
from shardwright.observe.preflight.page import page
from shardwright.observe.preflight.ranks import Check
from shardwright.train.tasks import is_rank, take_part
from shardwright.transport.attempt import join_job
from shardwright.transport.mesh import default_backend


def run(known: argparse.Namespace) -> int:
    """Find out, and print it on rank 0. Every rank returns 1 where something is wrong anywhere."""
    take_part()
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")) if is_rank() else (0, 1)
    check = Check(rank, world, Path(known.folder).absolute(), known.seconds)
    try:
        found, troubles = check.all()
        if rank == 0:
            failed = [trouble._asdict() for trouble in troubles]
            as_json = known.json and json.dumps({**asdict(found), "failed": failed})
            print(as_json or page(found, troubles, check.passed_s), flush=True)
        verdict = check.share_verdict(troubles)
    except (CommError, RuntimeError) as error:  # the second one: the store's own
        said = f"shardwright preflight: rank {rank} on {socket.gethostname()}: {error}"
        print(said, file=sys.stderr, flush=True)
        # Who leaves now takes the other ranks of its launcher along, before they have said anything.
        clock.sleep(max(known.seconds - check.passed_s, 0.0) if "TORCHELASTIC_RUN_ID" in os.environ else 0.0)
        return 1
    finally:
        check.close()
    if known.out and verdict["measure"]:
        _measure(Path(known.out), known.dtype, world, known.seconds, quiet=known.json)
    elif known.out and rank == 0:
        print(f"not written: {known.out}. Links are measured once ranks can meet", file=sys.stderr)
    return 1 if verdict["failed"] else 0


def _measure(path: Path, dtype: str, world: int, seconds: float, *, quiet: bool) -> None:
    if world > 1:
        join_job(default_backend(), timedelta(seconds=3 * seconds))
    found = measured_cluster(path, getattr(torch, dtype))
    if int(os.environ.get("RANK", "0")) == 0:
        found.save(path)
        lines = [f"written: {path}"] if quiet else [told(found), f"written: {path}"]
        print(*lines, sep="\n", file=sys.stderr if quiet else None)
