"""What a sink is given is what the file holds, whichever way the file system takes it."""

import errno
import fcntl
import os
import random

import pytest

from shardwright.checkpoint.background import Pace
from shardwright.checkpoint.sink import Cached, Direct

DIRECT = getattr(os, "O_DIRECT", 0)


def written(path, make):
    """Parts of any size, through the sink that ``make`` makes: what was given, and what the file holds."""
    numbers = random.Random(3)
    given = [numbers.randbytes(size) for size in (0, 64, 5, 4096, 1 << 20, 9 << 20, 3, (8 << 20) + 1, 77)]
    with open(path, "xb", buffering=0) as file:
        sink = make(file.fileno())
        for part in given:
            sink.write(memoryview(part))
        sink.finish()
    return b"".join(given), path.read_bytes()


def direct(fd):
    return Direct(fd, Pace())


@pytest.mark.parametrize("make", [Cached, direct])
def test_a_sink_writes_all_that_it_is_given_in_order(tmp_path, make):
    given, found = written(tmp_path / "file", make)
    assert found == given


def test_a_file_system_that_can_not_write_past_the_cache_is_written_through_it(tmp_path, monkeypatch):
    write, refused = os.write, []

    def refusing(fd, data):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data)

    monkeypatch.setattr(os, "write", refusing)
    given, found = written(tmp_path / "file", direct)
    assert found == given
    assert len(refused) <= 1  # asked once, and not again for each block


def test_a_write_that_ends_early_is_taken_up_where_it_ended(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(
        os, "write", lambda fd, data: write(fd, data[: max(1, len(data) // 4096 // 2 * 4096)])
    )
    given, found = written(tmp_path / "file", direct)
    assert found == given


def test_a_full_disk_is_an_error_also_past_the_cache(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", direct)
