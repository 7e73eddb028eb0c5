"""A rank that is told to stop makes all of them save the step they are in, in the loop that the docs show."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import StopRequest, load
from shardwright.errors import InputError
from tests.ranks.pool import run_ranks

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint.md"


def loop_of_the_docs() -> str:
    block = re.search(r"## Being told to stop\n.*?```python\n(.*?)```", DOCS.read_text(), re.S)
    assert block is not None
    return block[1]


def train_until_told(
    rank: int, world: int, path: str, told: tuple[int, ...]
) -> tuple[int, list[torch.Tensor]]:
    """Runs the docs' loop; ranks in ``told`` get SIGTERM in the middle of step 3. Returns the steps done."""
    os.chdir(path)
    torch.manual_seed(1)
    model = fully_shard(nn.Linear(6, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    done: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        for step in range(1, 100):
            yield torch.full((2, 6), float(step))

    def train(batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        if len(done) == 2 and rank in told:
            for _ in range(2):  # torchrun and the scheduler may both send one
                os.kill(os.getpid(), signal.SIGTERM)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done.append(1)

    before = signal.getsignal(signal.SIGTERM)
    exec(loop_of_the_docs(), {"model": model, "optimizer": optimizer, "batches": batches(), "train": train})
    assert signal.getsignal(signal.SIGTERM) == before
    return len(done), [p.detach().to_local().clone() for p in model.parameters()]


@pytest.mark.parametrize(("world", "told"), [(3, (1,)), (2, (0, 1)), (1, (0,))])
def test_the_step_in_which_any_rank_is_told_is_saved_by_all(tmp_path: Path, world: int, told) -> None:
    stopped = run_ranks(world, train_until_told, str(tmp_path), told)
    assert [steps for steps, _ in stopped] == [3] * world
    model = nn.Linear(6, 5)
    assert load(tmp_path / "runs/a", model=model).step == 3
    for param, parts in zip(model.parameters(), zip(*(p for _, p in stopped), strict=True), strict=True):
        assert torch.equal(param.detach(), torch.cat(parts))


def test_without_ranks_a_process_asks_itself() -> None:
    with StopRequest((signal.SIGUSR2,)) as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.agreed()
        assert stop.reason == "SIGUSR2"
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_in_another_thread_it_says_where_it_must_be_made() -> None:
    found: list[Exception] = []

    def make() -> None:
        try:
            StopRequest()
        except InputError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])
