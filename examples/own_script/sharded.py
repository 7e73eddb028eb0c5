"""A language model of bytes, trained on several ranks. sharded.py is ddp.py with six lines of diff.

Each writes its losses into runs/own_script, of which compare.py makes a picture.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from shardwright import full_state_dict, fully_shard


class Windows(Dataset):
    """Pieces of a text: int64 [length] each, byte by byte, and the same one byte later."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text, self.length = torch.tensor(list(text)), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = number * self.length
        piece = self.text[start : start + self.length + 1]
        return piece[:-1], piece[1:]


class Model(nn.Module):
    """Bytes, int64 [rows, length] -> logits of the next byte, [rows, length, 256]."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text) + self.position(torch.arange(text.shape[1], device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], text.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=F.__file__, help="a text; default: a file of torch")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="bytes of a row")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch on each rank")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()

    dist.init_process_group()
    rank, device = dist.get_rank(), "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    data = Windows(options.data.read_bytes(), options.length)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, options.rows, sampler=sampler, drop_last=True)

    torch.manual_seed(0)  # the same weights on every rank
    model = Model(options.width, options.layers, options.length).to(device)
    model = fully_shard(model, groups="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps)

    losses = []
    while len(losses) < options.steps:
        sampler.set_epoch(len(losses))
        for text, following in loader:
            loss = F.cross_entropy(model(text.to(device)).flatten(0, 1), following.to(device).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            mean = loss.detach()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
            if rank == 0 and len(losses) % 20 == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.4f}")
            if len(losses) == options.steps:
                break

    weights = full_state_dict(model)
    if rank == 0:
        out = Path("runs/own_script") / Path(__file__).stem
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(losses))
        torch.save(weights, out.with_suffix(".pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
