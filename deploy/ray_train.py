"""A loop of one's own on Ray Train's workers: python deploy/ray_train.py /shared/runs/mine --workers 8 --gpu

Ray starts the workers, makes their process group, and starts all of them again when one fails; then the loop
goes on from its newest checkpoint. The folder is on a disk that all workers share.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import latest, load, save


def train(config: dict) -> int:
    """Train as one worker; every worker calls. Returns the number of steps done."""
    folder, steps = config["folder"], config["steps"]
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = load(folder, model=model, optimizer=optimizer).step if latest(folder) else 0
    while step < steps:
        torch.manual_seed(step * torch.distributed.get_world_size() + torch.distributed.get_rank())
        inputs = torch.randn(16, 8, device=device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0 or step == steps:
            save(folder, model=model, optimizer=optimizer, step=step, keep=2)
    return step


if __name__ == "__main__":
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    known = parser.parse_args()
    TorchTrainer(
        train,
        train_loop_config={"folder": str(known.folder.absolute()), "steps": known.steps},
        scaling_config=ScalingConfig(num_workers=known.workers, use_gpu=known.gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
