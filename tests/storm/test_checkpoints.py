"""Whatever a disk and its processes do: what was saved is there, what loads is what was saved, and the next
save succeeds."""

import errno
import itertools
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from shardwright import clock
from shardwright.checkpoint.folder import published
from shardwright.errors import CheckpointError
from tests.storm.checkpoints import WHAT, every_operation, every_operation_of_a_load, night
from tests.storm.disk import Disk, Killed, Op, error

KEPT = {
    "the folders that the first save makes are lost in a power cut": 2,
    "what goes on in the folder is taken for the line that is saved": 3,
    "a lock file that a power cut has torn stops all saves": 12,
    "an error at closing the lock is no CheckpointError": 19,
    "an old checkpoint that can't be looked at stops all saves": 40,
    "keep counts what another run has saved under a name of this line": 42,
    "a checkpoint that has just been removed is taken for a damaged one": 83,
    "an error at reading the lock leaves it open": 91,
    "a disk that lets nothing be removed leaves what was torn": 504966673,
}
"""Nights that have found something, by what was wrong."""


@pytest.mark.parametrize("seed", KEPT.values(), ids=KEPT)
def test_a_night_that_once_went_wrong_goes_well(seed):
    night(seed)


@pytest.mark.exhaustive
def test_new_nights_go_well():
    end, seeds = clock.monotonic() + 4.0, Random()
    while clock.monotonic() < end:
        night(seeds.randrange(10**9))


def test_a_night_is_the_same_again():
    assert night(1) == night(1)


KINDS = ("kill", "cut", "EIO", "ENOSPC", "EACCES")
CASES = [
    pytest.param(what, kind, stride, marks=() if stride > 1 else pytest.mark.exhaustive)
    for number, (what, kind) in enumerate(itertools.product(WHAT, KINDS))
    for stride in ((1, 5) if number % 6 == 0 else (1,))
]


@pytest.mark.parametrize(("what", "kind", "stride"), CASES)
def test_whichever_operation_of_a_save_fails_nothing_is_lost_and_the_next_save_succeeds(what, kind, stride):
    assert every_operation(what, kind, stride) > 20


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("what", ["fails", "is removed", "is replaced"])
def test_a_load_succeeds_whichever_operation_fails_once_or_finds_it_removed_or_replaced(world, what):
    assert every_operation_of_a_load(world, what) > 50


def write_file(torn: Path) -> None:
    with open(torn, "w") as file:
        file.write("whole")


def write_folder(torn: Path) -> None:
    (torn / "inner").mkdir(parents=True)
    write_file(torn / "index")
    write_file(torn / "inner" / "weights")


@pytest.mark.parametrize("write", [write_file, write_folder])
@pytest.mark.parametrize("kind", ["killed", "once", "from then on"])
def test_what_is_published_is_there_whole_or_not_at_all_whichever_operation_fails(tmp_path, kind, write):
    whole = ["whole"] * {write_file: 1, write_folder: 2}[write]
    for at, into in itertools.product(range(1, 60), ("there", "made/for/it")):
        root, said = tmp_path / f"{at} {into[:5]}", "killed"
        (root / "there").mkdir(parents=True)
        disk, out = Disk(root, Random(at)), root / into / "out"

        def before(op: Op, at: int = at) -> None:
            if op.number == at or (op.number > at and kind == "from then on"):
                raise Killed if kind == "killed" else error(errno.EIO, op.path)

        disk.before = before
        with suppress(Killed), disk:
            try:
                with published(out) as torn:
                    write(torn)
                said = ""
            except CheckpointError as failed:
                said = str(failed)
                assert f"can't write {out}" in said
        assert kind != "once" or not [*root.rglob(".torn-*")], "something is left"
        disk.crash()
        found = [file.read_text() for file in (out, *out.rglob("*")) if file.is_file()]
        assert found == whole or (said and not found), found
    assert disk.count < at, "there are more operations"
