"""The rings of all ranks, brought to one: through the job's store, which is there whatever collectives do."""

import contextlib
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright.observe.steps.rings import Ring, write
from shardwright.observe.steps.step_page import Predicted, save_page
from shardwright.transport.attempt import this_attempt
from shardwright.transport.jobstore import job_store
from shardwright.transport.process import process_state

_COME_S = 10.0  # that the first rank waits for the others' rings
_WRITE_S = 40.0  # that the others wait for it


def save_together(
    own: Ring, folder: str | Path, steps: int = 1, predicted: Predicted | None = None
) -> list[Path]:
    """Every rank calls it; the first rank writes the page of those that come within 10 s, and returns its
    files. Where the others don't hear from it each leaves its own ring in ``folder``, and returns that file.
    """
    if own.world == 1:
        return save_page([own], folder, steps, predicted)
    process_state.num_pages += 1
    attempt = this_attempt()
    attempt.meet_within(_COME_S)
    store = PrefixStore(f"shardwright/trace/{attempt.token}/{process_state.num_pages}", job_store())
    try:
        if own.rank:
            store.set(str(own.rank), own.to_bytes())  # pyright: ignore[reportArgumentType]
            store.wait(["written"], timedelta(seconds=_WRITE_S))
            return []
        found = [own, *_come(store, range(1, own.world))]
    except RuntimeError:  # the store has ended, or nobody has written
        return [write(folder, own)]
    written = save_page(found, folder, steps, predicted)
    with contextlib.suppress(RuntimeError):
        store.set("written", "")
    return written


def _come(store: Store, ranks: range) -> list[Ring]:
    found = []
    for rank in ranks:
        with contextlib.suppress(RuntimeError):
            store.wait([str(rank)], timedelta(seconds=_COME_S))
            found.append(Ring.from_bytes(store.get(str(rank))))
            store.delete_key(str(rank))
    return found
