"""examples/mnist.py: trains, and the consolidated model has the sharded one's accuracy."""

import argparse
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import mnist
from tests.ranks.pool import run_ranks


def run_example(rank, world, out, data=None, epochs=15):
    return mnist.run(argparse.Namespace(data=data, out=Path(out), epochs=epochs, rows=32, lr=0.003))


@pytest.mark.slow
def test_digits_held_out_are_read_by_the_sharded_and_by_the_consolidated_model(tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    for sharded, plain in run_ranks(2, run_example, str(tmp_path)):
        assert sharded == plain
        assert sharded > 0.97
    files = {path.name for path in (tmp_path / "checkpoint").rglob("shard-*")}
    assert len(files) == 2, "one file from each rank"


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    data = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_of_mnist_are_read_packed_or_not_with_and_without_the_training_part(tmp_path, suffix):
    images = np.random.default_rng(0).integers(0, 256, (10_000, 4, 4))
    labels = images[:, 0, 0] % 10
    write_idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}", images)
    write_idx(tmp_path / f"t10k-labels-idx1-ubyte{suffix}", labels)
    seen, held = mnist.mnist(tmp_path)
    assert (len(seen[1]), len(held[1])) == (8000, 2000)
    assert torch.equal(held[0][0, 0], torch.tensor(images[8000]) / 255)
    assert torch.equal(held[1], torch.tensor(labels[8000:]))
    write_idx(tmp_path / f"train-images-idx3-ubyte{suffix}", images[:7])
    write_idx(tmp_path / f"train-labels-idx1-ubyte{suffix}", labels[:7])
    seen, held = mnist.mnist(tmp_path)
    assert (len(seen[1]), len(held[1])) == (7, 10_000)
