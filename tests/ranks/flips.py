"""Trains under ``SHARDWRIGHT_CHECKSUMS=all`` while a bit of its memory flips now and then: each is told
before the optimizer's next step has used it, and nothing else is.

    python -m tests.ranks.flips COUNT SEED
"""

import random
import re
import sys

import torch
from torch import nn

from shardwright.errors import DamagedMemory
from shardwright.torch_private import local_of
from shardwright.transport.cpu.views import view_of
from tests.ranks.models import sharded


def flip(tensor: torch.Tensor, bit: int) -> None:
    """As a broken memory does: no version of a tensor counts it."""
    view_of(tensor)[bit // 8] ^= 1 << bit % 8


def main(count: int, seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, dtype=torch.float32))
    sharded(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=chance.random() < 0.5)
    shards = list(model.parameters())

    def step(flips: str = "") -> tuple[torch.Tensor, int] | None:
        """One step; where something is to flip, what has, and which bit."""
        done = None

        def broken(place: str) -> None:
            nonlocal done
            if place == flips:
                kind = place.split()[0]
                if kind == "shard":
                    tensor = local_of(chance.choice(shards))
                elif kind == "state":
                    state = optimizer.state[chance.choice(shards)]
                    tensor = local_of(state[chance.choice(["exp_avg", "exp_avg_sq"])])
                else:
                    tensor = chance.choice(list(model.parameters()))  # unsharded until the backward has ended
                done = tensor, chance.randrange(8 * tensor.nbytes)
                flip(*done)

        try:
            broken("shard before the forward")
            loss = model(torch.ones(2, 5)).square().sum()
            broken("gathered before the backward")
            broken("shard before the backward")
            loss.backward()
            broken("shard before the step")
            broken("state before the step")
            optimizer.step()
        except DamagedMemory as error:
            assert done is not None, f"a healthy step is accused: {error}"
            assert re.search(r"of rank 0 changed in the memory of .* after \d+ steps", str(error)), error
            flip(*done)
            model.reset_iter_state()
            return done
        finally:
            optimizer.zero_grad()
        assert done is None, f"{flips}: a bit that flipped was not told"
        return None

    places = ["shard before the forward", "gathered before the backward", "shard before the backward"]
    places += ["shard before the step", "state before the step"]
    for _ in range(3):
        step()
    for number in range(count):
        step(places[number % len(places)])
        step()
    print(f"{count} of {count} flips were told")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
