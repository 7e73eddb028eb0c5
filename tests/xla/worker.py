"""One process of a multi-process run: ``python -m tests.xla.worker RANK PROCESSES PORT FOLDER OPTIMIZER``.

Trains on its rows of each batch, saves in both formats, and prints its losses as JSON. After that the first
process can't write, or can't read, and what each process is told is printed too.
The first one is late: it builds its model when the last has.
"""

import json
import sys
import time
from pathlib import Path

import jax

rank, processes, port = (int(arg) for arg in sys.argv[1:4])
folder = sys.argv[4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)

import torch  # noqa: E402 (jax.distributed must start before anything asks jax for its devices)

from shardwright import xla  # noqa: E402
from shardwright.checkpoint.xla import load_xla, save_xla  # noqa: E402
from shardwright.errors import CheckpointError  # noqa: E402
from shardwright.xla.checkpoint import load_rank_files, save_rank_files  # noqa: E402
from tests.xla.models import MODELS, UNITS, batch, loss_fn, optimizers  # noqa: E402

built = Path(folder) / "built"
jax.devices()  # waits for every process; from here on none is needed until the first step
for _ in range(400 if rank == 0 else 0):
    time.sleep(0 if built.exists() else 0.05)
built_alone = rank > 0 or built.exists()
plain = MODELS["mlp"]()
model = xla.fully_shard(plain, None, UNITS["mlp"])
step = xla.make_train_step(model, loss_fn, optimizers(sys.argv[5], plain)[0], clip_norm=0.5)
built.touch()
torch.manual_seed(1)
losses = []
for number in range(3):
    rows = batch("mlp")
    losses.append(float(step(*(tensor.chunk(processes)[rank] for tensor in rows))))
    if number == 1:
        save_xla(folder, model=model, train_step=step, step=2)
        save_rank_files(f"{folder}/ckpt", model, step)
blocked = Path(folder) / "file"  # where the first process can neither write nor read
blocked.write_text("")
elsewhere = Path(folder) / "elsewhere"
elsewhere.mkdir(exist_ok=True)
told = []
for attempt in (
    lambda: save_xla(blocked / "step", model=model, train_step=step, step=1),
    lambda: save_rank_files(str((elsewhere if rank else blocked) / "ckpt"), model, step),
    lambda: load_xla(blocked / "step" if rank == 0 else folder, model=model, train_step=step),
    lambda: load_rank_files(f"{blocked}/ckpt" if rank == 0 else f"{folder}/ckpt", model, step),
):
    try:
        attempt()
    except CheckpointError as error:
        told.append(str(error))
load_xla(folder, model=model, train_step=step)
again = float(step(*(tensor.chunk(processes)[rank] for tensor in rows)))
outputs = model(rows[0].chunk(processes)[rank]).shape
found = {"losses": losses, "again": again, "rows": outputs[0], "devices": len(jax.devices())}
found["built_alone"] = built_alone
print(json.dumps([found, told]))
