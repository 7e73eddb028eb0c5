"""Bytes of a file by a window that moves along it: the file's, or none; never a signal."""

import os
import random

from shardwright.checkpoint.shardfile import EXTENT_NBYTES, Window


def test_a_window_gives_the_bytes_of_the_file_wherever_it_is_asked(tmp_path):
    data = random.Random(5).randbytes(7 * EXTENT_NBYTES + 4321)
    (tmp_path / "file").write_bytes(data)
    with open(tmp_path / "file", "rb") as file:
        window = Window(file.fileno())
        places = ((0, 300_000), (777, 5 * EXTENT_NBYTES), (EXTENT_NBYTES - 3, 400_001), (12, 262_144))
        for start, nbytes in places:
            found = window.bytes_at(start, nbytes)
            assert found is not None
            assert min(nbytes, EXTENT_NBYTES) <= found.nbytes <= nbytes
            assert bytes(found) == data[start : start + found.nbytes]
        found[:] = 0  # the caller's own
        assert (tmp_path / "file").read_bytes() == data


def test_a_window_gives_nothing_where_there_is_little_or_the_file_ends(tmp_path):
    (tmp_path / "file").write_bytes(bytes(EXTENT_NBYTES))
    with open(tmp_path / "file", "rb") as file:
        window = Window(file.fileno())
        assert window.bytes_at(0, 1000) is None
        assert window.bytes_at(EXTENT_NBYTES - 300_000, 300_001) is None
        assert window.bytes_at(0, EXTENT_NBYTES) is not None
        os.truncate(tmp_path / "file", 4096)  # while it is mapped
        assert window.bytes_at(0, EXTENT_NBYTES) is None
