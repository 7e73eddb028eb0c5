"""One rank of one section: joins the others, measures, and leaves rows for the page."""

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.prove_gpu.device import Device

ERROR_LINES = 25


class Rows:
    """A file with a JSON object in each line: a row of a table, or an error."""

    def __init__(self, file: str, writes: bool) -> None:
        self._file, self._writes = file, writes

    def add(self, table: str, **columns: Any) -> None:
        """One row; written at once, so that it stays where the process is ended later."""
        self._write({"table": table, "row": columns})

    def fail(self, error: str) -> None:
        """What went wrong, for the page."""
        self._write({"error": "\n".join(error.strip().splitlines()[-ERROR_LINES:])})

    def _write(self, line: dict[str, Any]) -> None:
        if self._writes:
            with open(self._file, "a") as file:
                file.write(json.dumps(line) + "\n")


def options() -> argparse.Namespace:
    """What a section is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", required=True)
    return parser.parse_args()


def run(measure: Callable[[Device, torch.device, Rows], None]) -> None:
    """Join, measure, leave; exits with 1 where that raises, and the error of this rank is in the rows."""
    told = options()
    device = Device.of(told.device)
    rows = Rows(told.rows, writes=True)
    try:
        place = device.join()
        rows = Rows(told.rows, writes=dist.get_rank() == 0)
        torch.manual_seed(0)
        measure(device, place, rows)
        device.together()
        dist.destroy_process_group()
    except Exception:
        Rows(told.rows, writes=True).fail(traceback.format_exc())
        sys.stdout.flush()
        raise


def largest(value: float, place: torch.device) -> float:
    """The largest of all ranks' values; every rank calls it."""
    found = torch.tensor(float(value), device=place)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def mib(nbytes: float) -> float:
    """Bytes in MiB, to a tenth."""
    return round(nbytes / 2**20, 1)
