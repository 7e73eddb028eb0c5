"""One process of a multi-process run: ``python -m tests.xla.worker RANK PROCESSES PORT FOLDER``.

Trains on its rows of each batch, saves in both formats, and prints its losses as JSON.
"""

import json
import sys

import jax

rank, processes, port = (int(arg) for arg in sys.argv[1:4])
folder = sys.argv[4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)

import torch  # noqa: E402 (jax.distributed must start before anything asks jax for its devices)

from shardwright import xla  # noqa: E402
from shardwright.checkpoint.xla import load_xla, save_xla  # noqa: E402
from shardwright.xla.checkpoint import save_rank_files  # noqa: E402
from tests.xla.models import MODELS, UNITS, batch, loss_fn  # noqa: E402

model = xla.fully_shard(MODELS["mlp"](), None, UNITS["mlp"])
step = xla.make_train_step(model, loss_fn, xla.AdamW(1e-3, eps=1e-3), clip_norm=0.5)
torch.manual_seed(1)
losses = []
for number in range(3):
    rows = batch("mlp")
    losses.append(float(step(*(tensor.chunk(processes)[rank] for tensor in rows))))
    if number == 1:
        save_xla(folder, model=model, train_step=step, step=2)
        save_rank_files(f"{folder}/ckpt", model, step)
load_xla(folder, model=model, train_step=step)
again = float(step(*(tensor.chunk(processes)[rank] for tensor in rows)))
outputs = model(rows[0].chunk(processes)[rank]).shape
print(json.dumps({"losses": losses, "again": again, "rows": outputs[0], "devices": len(jax.devices())}))
