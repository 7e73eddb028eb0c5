"""The corpus is the same everywhere, no two ranks see the same bytes, and a position says it all."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data.kinds import kind_of
from shardwright.data.text import FILE_START, Share, TrainBatches, corpus_files, heldout_windows, read_corpus
from shardwright.data.windows import Batch
from shardwright.errors import DataError
from shardwright.recipe.config import DataConfig


def test_a_batch_goes_to_a_device_through_pinned_memory_and_the_host_does_not_wait(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **how: asked.append(how) or tensor)
    batch = Batch(torch.zeros(1, 2), torch.zeros(1, 2), None, 2)
    batch.to(torch.device("cpu"))
    assert asked == [{}, {}]
    asked.clear()
    batch.to(torch.device("cuda", 0))
    assert asked == ["pinned", {"non_blocking": True}] * 2


def folder_of(tmp_path, files):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(tmp_path)


def test_the_standard_library_is_a_corpus_without_its_tests():
    corpus = read_corpus(DataConfig())
    assert corpus.num_files > 300
    assert len(corpus.train) > 5_000_000
    assert 0.03 < len(corpus.heldout) / len(corpus.train) < 0.06
    assert 2.5 < corpus.unigram_entropy < 4.0
    assert b"def test_support_skip_if" not in corpus.train.tobytes()


def test_files_are_whole_in_one_part_or_the_other(tmp_path):
    files = {f"{i % 3}/f{i}.txt": f"file {i} ".encode() * 40 for i in range(30)}
    corpus = read_corpus(DataConfig(path=folder_of(tmp_path, files), heldout_share=0.2))
    train, heldout = (set(part.tobytes().split(FILE_START)[1:]) for part in (corpus.train, corpus.heldout))
    assert train | heldout == set(files.values())
    assert not train & heldout
    assert 3 <= len(heldout) <= 6


def test_the_hash_follows_names_and_contents(tmp_path):
    files = {"a.txt": b"one" * 50, "b.txt": b"two" * 50}
    first = read_corpus(DataConfig(path=folder_of(tmp_path / "1", files)))
    again = read_corpus(DataConfig(path=folder_of(tmp_path / "2", files)))
    other = read_corpus(DataConfig(path=folder_of(tmp_path / "3", {**files, "b.txt": b"twO" * 50})))
    assert first.sha256 == again.sha256 != other.sha256
    assert (first.train == again.train).all()


def test_one_file_is_held_out_at_its_end(tmp_path):
    path = folder_of(tmp_path, {"a.txt": b"x" * 90 + b"y" * 10})
    corpus = read_corpus(DataConfig(path=f"{path}/a.txt", heldout_share=0.1))
    assert corpus.heldout.tobytes() == FILE_START + b"y" * 10


def test_hidden_and_binary_files_and_other_suffixes_are_left_out(tmp_path):
    files = {"a.txt": b"a" * 9, "b.txt": b"b" * 9, ".git/c.txt": b"c", "d.bin": b"d\0d", "e.md": b"e"}
    path = folder_of(tmp_path, files)
    corpus = read_corpus(DataConfig(path=path))
    assert (corpus.num_files, corpus.left_out) == (3, ("left out, as they are no text: d.bin",))
    assert read_corpus(DataConfig(path=path, suffixes=(".txt",))).num_files == 2


@pytest.mark.parametrize("files", [{}, {"a.txt": b""}, {"a.txt": b"", "b.txt": b""}])
def test_an_empty_corpus_is_refused(tmp_path, files):
    with pytest.raises(DataError, match="point it at"):
        read_corpus(DataConfig(path=folder_of(tmp_path, files)))


ROWS = [{"text": f"row {i}"} for i in range(50)]
AS_JSON = json.dumps(ROWS).encode()
NUMBERS = np.arange(9.0)


def written(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


OTHERS = {
    "Parquet": b"PAR1\x15\0\x15rows" + bytes(20) + b"\x90\0\0\0PAR1",
    "Arrow": b"ARROW1\0\0" + b"\xff\xff\xff\xff\x10\0\0\0" + bytes(20) + b"ARROW1",
    "an Arrow stream": b"\xff\xff\xff\xff\x10\0\0\0" + bytes(20) + b"\xff\xff\xff\xff\0\0\0\0",
    "gzip": gzip.compress(AS_JSON),
    "bzip2": bz2.compress(AS_JSON),
    "xz": lzma.compress(AS_JSON),
    "zip": written(lambda file: zipfile.ZipFile(file, "w").writestr("rows.json", AS_JSON)),
    "zip (of torch.save)": written(lambda file: torch.save(ROWS, file)),
    "a NumPy array": written(lambda file: np.save(file, NUMBERS)),
    **{f"a pickle (protocol {n})": pickle.dumps(ROWS, protocol=n) for n in range(6)},
    "a pickle (two)": pickle.dumps(ROWS, 0) + pickle.dumps(ROWS, 0),
    "a JSON array": b" " + AS_JSON + b"\n",
    "a JSON array (pretty)": json.dumps(ROWS, indent=2).encode(),
    "UTF-16": "text".encode("utf-16"),
    "binary (a NUL at byte 4)": b"text\0more text",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_data_that_is_no_text_is_refused_by_its_name_and_kind(tmp_path, kind):
    named = re.escape(kind if kind.startswith("binary") else kind.split(" (")[0])
    path = folder_of(tmp_path, {"data.jsonl": OTHERS[kind], "notes.md": b"text"})
    with pytest.raises(DataError, match=f"data.jsonl is {named}, expected text; [a-z]+ ") as refused:
        corpus_files(DataConfig(path=f"{path}/data.jsonl"))
    assert "data.suffixes" not in str(refused.value)
    with pytest.raises(DataError, match=f"data.jsonl is {named}.*data.suffixes"):
        corpus_files(DataConfig(path=path, suffixes=(".jsonl", ".md")))
    if kind.startswith("binary"):
        assert len(corpus_files(DataConfig(path=path))[0]) == 1
    else:
        with pytest.raises(DataError, match=f"data.jsonl is {named}.*data.suffixes"):
            corpus_files(DataConfig(path=path))


TEXTS = [
    "[1] a footnote",
    "[a list]",
    "[[wiki]]",
    "PAR1S",
    "ORCs.",
    "ARROW1",
    "N. Korea.",
    "Now we are here.",
]
TEXTS += ["]. So it ends.", "(hello).", "I5\n. A list.", ".", "{}", "\ufeffwith a mark", "\x80.", "'[1, 2]'"]
TEXTS += [json.dumps(ROWS[0]), "\n".join(map(json.dumps, ROWS)), "[" * 5000 + "]"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_taken_for_text(text):
    assert kind_of(text.encode()) is None


def test_a_corpus_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        read_corpus(DataConfig(path=str(tmp_path / "nosuch")))


def test_a_corpus_smaller_than_a_batch_is_refused_with_the_numbers():
    with pytest.raises(DataError, match=r"hold 9 sequences of 10.*takes 12 \(2 ranks x batch_size 6\)"):
        TrainBatches(np.zeros(100, dtype=np.uint8), 10, Share(0, 2, 6), seed=0)
    with pytest.raises(DataError, match="no sequence of 10"):
        heldout_windows(np.zeros(10, dtype=np.uint8), 10, 4)


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 40))
def test_an_epoch_is_every_window_once_whatever_the_ranks(world, batch_size, length, extra):
    num_windows = world * batch_size + extra
    data = (np.arange(num_windows * length + 1) % 251).astype(np.uint8)
    ranks = [TrainBatches(data, length, Share(r, world, batch_size), 3) for r in range(world)]
    one = TrainBatches(data, length, Share(0, 1, 1), 3)
    order = [one.at(p)[0] for p in range(2 * num_windows)]
    for position in range(0, 2 * num_windows - world * batch_size + 1, world * batch_size):
        got = torch.cat([rank.at(position)[0] for rank in ranks])
        assert torch.equal(got, torch.cat(order[position : position + world * batch_size]))
    for epoch in (order[:num_windows], order[num_windows:]):
        seen = sorted(tuple(window.flatten().tolist()) for window in epoch)
        assert seen == sorted(tuple((data[i : i + length]).tolist()) for i in range(0, len(data) - 1, length))


def test_targets_are_the_next_bytes():
    batches = TrainBatches(np.arange(101, dtype=np.uint8), 10, Share(0, 1, 4), seed=0)
    inputs, targets = batches.at(0)
    assert inputs.shape == targets.shape == (4, 10)
    assert torch.equal(inputs + 1, targets)


def test_heldout_windows_are_spread_over_all_of_it():
    windows = heldout_windows(np.arange(101, dtype=np.uint8), 10, 4)
    assert windows.shape == (4, 11)
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    assert len(heldout_windows(np.arange(101, dtype=np.uint8), 10, 99)) == 10


def test_a_limit_takes_whole_files_the_same_each_time(tmp_path):
    files = {f"{i}.txt": bytes([65 + i]) * 100 for i in range(20)}
    path = folder_of(tmp_path, {**files, "big.txt": b"b" * 5000})
    taken, _ = corpus_files(DataConfig(path=path, limit_nbytes=750))
    assert taken == corpus_files(DataConfig(path=path, limit_nbytes=750))[0]
    assert [name for name, _ in taken] != sorted(files)[:7]
    assert len(taken) == 7
    assert all(files[name] == content for name, content in taken)
    says = r"smallest file has 100 bytes, .*data.limit_nbytes = 50: .*or to 0 for all"
    with pytest.raises(DataError, match=says):
        corpus_files(DataConfig(path=path, limit_nbytes=50))


def test_the_source_of_torch_is_a_corpus():
    taken, _ = corpus_files(DataConfig(path="torch", limit_nbytes=100_000))
    assert 50_000 < sum(len(content) for _, content in taken) <= 100_000
    assert all(name.endswith(".py") for name, _ in taken)


def test_a_folder_of_the_corpus_that_cannot_be_read_is_an_error_and_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"closed can't be read \(Permission denied\)"):
        read_corpus(DataConfig(path=str(tmp_path)))
