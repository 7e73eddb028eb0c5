"""Section: fine-tuning beside what else a user could take, as `bench/finetune.py` does on CPUs."""

from statistics import median

import torch
import torch.distributed as dist

from bench.adapted import SYSTEMS, held_nbytes, missing
from bench.model import Size, tokens
from bench.prove_gpu.device import Device
from bench.prove_gpu.rank import Rows, largest, mib, run

WARM_UP = 2
REAL, TOY = Size(layers=16, width=2048, vocab=32000, sequence=1024, batch=2), Size(1, 64, 256, 32, 1)


def measure(device: Device, place: torch.device, rows: Rows) -> None:
    """A row for each way of fine-tuning whose packages are installed; a table of their own for the others."""
    size = device.size(REAL, TOY)
    for system, made in SYSTEMS.items():
        if system == "qlora-sockets":  # a transport of hosts
            continue
        if lacking := missing(system):
            rows.add("left out", system=system, **{"not installed": " and ".join(lacking)})
            continue
        torch.manual_seed(0)
        with place:  # what a library quantises lies where it is used
            model = made(size)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
        taken, peak = [], 0
        for step in range(WARM_UP + device.size(10, 2)):
            batch = tokens(size, dist.get_rank(), step).to(place)

            def train(model=model, optimizer=optimizer, batch=batch) -> None:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

            if step == WARM_UP - 1:
                peak, _ = device.peak_nbytes(train)
                continue
            device.together()
            begin = device.mark()
            train()
            end = device.mark()
            device.synchronize()
            taken.append(device.between_ms(begin, end))
        per_step = size.batch * size.sequence * dist.get_world_size()
        rows.add(
            f"adapters of rank 8, {size.layers} blocks of width {size.width}, bfloat16",
            world=dist.get_world_size(),
            system=system,
            **{
                "tokens/s": round(1e3 * per_step / largest(median(taken[WARM_UP - 1 :]), place)),
                "at rest MiB": mib(held_nbytes(model, optimizer)),
                "peak of a step MiB": mib(largest(peak, place)),
            },
        )
        del model, optimizer, train
        device.empty_cache()


if __name__ == "__main__":
    run(measure)
