"""Two ranks that publish versions of a small Llama, with a step between: torchrun trainer.py FOLDER."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import full_state_dict, fully_shard, publish

VERSIONS = 2


def train(folder: Path) -> None:
    """Publish a version, keep it whole for the test, and go on once the test has seen it."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = fully_shard(LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with publish(model, "tcp://127.0.0.1:0", dtype=torch.bfloat16) as publisher:
        for version in range(1, VERSIONS + 1):
            publisher.send()
            state = full_state_dict(model)
            if dist.get_rank() == 0:
                left = {"address": publisher.address, "state": {n: t.bfloat16() for n, t in state.items()}}
                torch.save(left, folder / "part")
                (folder / "part").rename(folder / f"version{version}")
            while not (folder / f"seen{version}").exists():
                time.sleep(0.1)
            tokens = torch.randint(0, 256, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
