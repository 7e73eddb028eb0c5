"""A small model on every rank, for ever: the job that is killed in the picture ``verdict``."""

import os
import time
from pathlib import Path

import torch
from torch import nn

from shardwright import fully_shard

model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
rank = torch.distributed.get_rank()
Path(f"rank-{rank}.pid").write_text(str(os.getpid()))
for step in range(1, 100_000):
    loss = model(torch.randn(4, 16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
    if rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
