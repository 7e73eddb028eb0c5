"""A rank that is told to stop makes all of them save the step they are in, in the loop that the docs show."""

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright import WatchPolicy, set_watch
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
    """Runs the docs' text; ranks in ``told`` get SIGTERM in the middle of step 3. Returns the steps done."""
    os.chdir(path)
    done: list[int] = []

    def in_step(*_: object) -> None:
        done.append(1)
        if len(done) == 3 and rank in told:
            for _ in range(2):  # torchrun and the scheduler may both send one
                os.kill(os.getpid(), signal.SIGTERM)

    handle = register_optimizer_step_pre_hook(in_step)
    names: dict[str, Any] = {}
    exec(loop_of_the_docs(), names)
    handle.remove()
    set_watch(WatchPolicy(on=False))  # which had found the signal free
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return len(done), [p.detach().to_local().clone() for p in names["model"].parameters()]


@pytest.mark.parametrize(("world", "told"), [(3, (1,)), (2, (0, 1)), (1, (0,))])
def test_the_step_in_which_any_rank_is_told_is_saved_by_all(tmp_path, world, told):
    stopped = run_ranks(world, train_until_told, str(tmp_path), told)
    assert [steps for steps, _ in stopped] == [3] * world
    model = nn.Linear(8, 1)
    assert load(tmp_path / "runs/stopped", model=model).step == 3
    for param, parts in zip(model.parameters(), zip(*(p for _, p in stopped), strict=True), strict=True):
        assert torch.equal(param.detach(), torch.cat(parts))


def test_without_ranks_a_process_asks_itself():
    with StopRequest((signal.SIGUSR2,)) as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.agreed()
        assert stop.reason == "SIGUSR2"
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_in_another_thread_it_says_where_it_must_be_made():
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
