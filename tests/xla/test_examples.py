"""The examples run, each as its first lines say."""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchax", reason="the extra shardwright[xla] isn't installed (make setup-xla)")

import torch
from jax import numpy as jnp

from shardwright import xla
from tests.fences import fences

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments, devices=2, folder=None):
    environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_mnist_saves_per_rank_files_whose_consolidation_is_as_accurate():
    """As many steps as hung for want of threads: see ``shardwright.xla``."""
    rows = "--shard_param_on_dim_0"
    assert accuracies("xla_mnist.py", "--fake_data", "--images", "8000", "--epochs", "2", rows) > 0.9


def accuracies(*arguments):
    """What the sharded model has of what was held out; as much as the consolidated one."""
    found = dict(re.findall(r"(sharded|consolidated) +accuracy (\S+)", run(*arguments)))
    assert float(found["consolidated"]) == pytest.approx(float(found["sharded"]), abs=0.002)
    return float(found["sharded"])


ORIGINAL_MNIST = shlex.split(
    "--batch_size 16 --drop_last --num_epochs 2 --use_nested_fsdp --shard_param_on_dim_0 "
    "--pin_layout_in_collective_ops"
)
ORIGINAL_IMAGENET = shlex.split(
    "--drop_last --model resnet50 --test_set_batch_size 64 --eval_interval 10 --lr 0.4 --batch_size 128 "
    "--num_warmup_epochs 5 --lr_scheduler_divide_every_n_epochs 30 --lr_scheduler_divisor 10 "
    "--num_epochs 100 --use_nested_fsdp --shard_param_on_dim_0 --pin_layout_in_collective_ops"
)
TOY = shlex.split(
    "--model resnet26 --image 32 --batch_size 8 --test_set_batch_size 16 --num_epochs 2 --steps 2"
)
"""Options of which the last one counts."""


def test_the_command_line_of_the_originals_mnist_trains_on_scikit_learns_digits():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    assert accuracies("xla_mnist.py", *ORIGINAL_MNIST) > 0.95


@pytest.mark.slow
def test_it_reads_nearly_all_real_digits_that_were_held_out():
    """Where SHARDWRIGHT_MNIST names a folder with MNIST's files."""
    folder = os.environ.get("SHARDWRIGHT_MNIST")
    if not folder:
        pytest.skip("SHARDWRIGHT_MNIST names no folder with MNIST's files")
    assert accuracies("xla_mnist.py", *ORIGINAL_MNIST, "--datadir", folder) > 0.975


def write_digits(folder, count):
    """Images of scikit-learn's digits as files: train/<digit>/<number>.png, and val."""
    image, datasets = pytest.importorskip("PIL.Image"), pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    for number in range(2 * count):
        place = folder / ("train" if number < count else "val") / str(digits.target[number])
        place.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[number] * 15.9).astype("uint8")
        image.fromarray(pixels).resize((40, 40)).save(place / f"{number}.png")


def test_the_command_line_of_the_originals_imagenet_trains_on_image_files(tmp_path):
    """The same line; what follows makes it a toy."""
    write_digits(tmp_path, 64)
    out = run("xla_imagenet.py", "--datadir", str(tmp_path), *ORIGINAL_IMAGENET, *TOY)
    assert "4 steps, from epoch 1" in out
    assert re.search(r"epoch 2  accuracy 0\.\d", out)


def test_a_vision_transformer_trains_as_the_page_says_and_is_planned(tmp_path):
    (command,) = [c for fence in fences("examples.md") for c in fence.commands if ".venv-xla/" in c]
    start = "XLA_FLAGS=--xla_force_host_platform_device_count=4 .venv-xla/bin/python examples/xla_vit.py"
    assert command == f"{start} --steps 40"
    assert run("xla_vit.py", "--steps", "2", devices=4, folder=tmp_path).count("loss") == 2
    picture = (tmp_path / "runs" / "xla_vit" / "picture.svg").read_text()
    assert "unsharded" in picture and picture.count("<!-- cpu:") == 4  # a bar for each device
    assert "temporary, at most" in run("xla_vit.py", "--size", "tiny", "--plan")


LIKE_THE_ORIGINAL = ["--shard_param_on_dim_0", "--pin_layout_in_collective_ops", "--no_sync_buffers"]


def test_a_vision_transformer_trains_alike_in_rows_and_without_checkpointing(tmp_path):
    tiny = ["--size", "tiny", "--steps", "2", "--out", str(tmp_path)]
    plain, rows = run("xla_vit.py", *tiny), run("xla_vit.py", *tiny, *LIKE_THE_ORIGINAL, "--no_grad_ckpt")
    losses, others = (list(map(float, re.findall(r"loss (\S+)", out))) for out in (plain, rows))
    assert losses == pytest.approx(others, abs=2e-4)


def imagenet(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("xla_imagenet")


def test_resnet50_is_the_known_one_and_its_step_is_built(monkeypatch):
    example = imagenet(monkeypatch)
    with torch.device("meta"):
        model = example.ResNet(example.DEPTHS["resnet50"], 1000)
    xla.fully_shard(model, 2, (example.Bottleneck,), shard_param_on_dim_0=True)
    stats = xla.stats(model)
    assert (stats.param_numel, stats.num_units) == (25_557_032, 1 + 16)
    xla.materialize(model)
    step = xla.make_train_step(model, lambda m, x, y: m(x).logsumexp(1).mean() + 0 * y.sum(), xla.SGD(0.1))
    text = step.lower(torch.empty(2, 3, 64, 64, device="meta"), torch.empty(2, device="meta")).as_text()
    assert (
        text.count("stablehlo.convolution") >= 53 * 3 - 1
    )  # forward, and both gradients but the first input's


def test_the_rate_of_imagenet_is_the_original_recipe(monkeypatch):
    example = imagenet(monkeypatch)
    options = argparse.Namespace(lr=0.4, warmup=5, divide_every=30, divisor=10)
    rates = [float(example.rate_at(jnp.float32(epoch), options)) for epoch in (0, 2.5, 5, 29.9, 30, 60, 89)]
    assert rates == pytest.approx([0, 0.2, 0.4, 0.4, 0.04, 0.004, 0.004])


@pytest.mark.parametrize("model", ["resnet26", "vit"])
def test_imagenet_trains_saves_and_goes_on(tmp_path, model):
    options = ["--fake_data", "--model", model, "--image", "32", "--rows", "4", "--steps", "2"]
    options += ["--save", str(tmp_path), *LIKE_THE_ORIGINAL]
    assert "from epoch 1" in run("xla_imagenet.py", *options, "--epochs", "1")
    out = run("xla_imagenet.py", *options, "--epochs", "2")
    assert "from epoch 2" in out
    assert re.search(r"epoch 2  loss \d", out)
