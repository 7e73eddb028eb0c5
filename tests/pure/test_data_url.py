"""Data under a URL is copied to the host once, and read as local data is."""

import fsspec
import pytest

from shardwright.checkpoint.url import ObjectStore
from shardwright.data import text as data
from shardwright.data.sources import find
from shardwright.data.text import read_corpus
from shardwright.errors import DataError, InputError, StorageError
from shardwright.recipe.config import DataConfig


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A bucket in this process, a cache of its own, and the names of what is downloaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data._copy_of.cache_clear()
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    downloads, download = [], ObjectStore.download

    def noted(self, path, file):
        downloads.append(path.name)
        download(self, path, file)

    monkeypatch.setattr(ObjectStore, "download", noted)
    return memory, downloads


def write(store, names, text):
    for name in names:
        store.pipe_file(f"/bucket/{name}", (text * 20).encode())


def test_a_corpus_under_a_url_is_the_local_one_and_is_downloaded_once(store, tmp_path):
    memory, downloads = store
    names = ["a.txt", "b.py", "below/c.txt"]
    write(memory, names, "some text\n")
    for name in names:
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_text("some text\n" * 20)
    local = read_corpus(DataConfig(path=str(tmp_path / "local")))
    for _ in range(2):  # as two ranks of a host
        data._copy_of.cache_clear()
        found = read_corpus(DataConfig(path="memory://bucket"))
        assert (found.sha256, found.num_files) == (local.sha256, 3)
    assert sorted(downloads) == ["a.txt", "b.py", "c.txt"]
    write(memory, ["b.py"], "other text\n")
    data._copy_of.cache_clear()
    assert read_corpus(DataConfig(path="memory://bucket")).sha256 != local.sha256
    assert sorted(downloads) == ["a.txt", "b.py", "b.py", "c.txt"]


def test_records_under_a_url_are_found_with_their_names(store):
    memory, downloads = store
    memory.pipe_file("/bucket/chats.jsonl", b'{"prompt": "1 + 1", "completion": "2"}\n' * 3)
    source = find(DataConfig(path="memory://bucket/chats.jsonl"))
    assert [row.record["completion"] for row in source.rows()] == ["2"] * 3
    assert [file.name for file in source.files] == downloads == ["chats.jsonl"]


def test_what_is_not_there_or_cut_or_of_an_unknown_kind_is_told_with_the_remedy(store, monkeypatch, tmp_path):
    memory, _ = store
    write(memory, ["a.txt"], "some text\n")
    with pytest.raises(DataError, match=r"data\.path = 'memory://bucket/nosuch': no such object"):
        read_corpus(DataConfig(path="memory://bucket/nosuch"))
    with pytest.raises(InputError, match="give a URL that fsspec knows"):
        read_corpus(DataConfig(path="nosuch://bucket"))
    monkeypatch.setattr(ObjectStore, "download", lambda self, path, file: file.write_bytes(b"some"))
    with pytest.raises(StorageError, match="got 4 bytes of 200; the download was cut"):
        read_corpus(DataConfig(path="memory://bucket/a.txt"))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert read_corpus(DataConfig(path="memory://bucket/a.txt")).num_files == 1  # nothing half is kept
