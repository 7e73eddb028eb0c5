"""The examples run, each as its first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchax", reason="the extra shardwright[xla] isn't installed (make setup-xla)")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments, devices=2):
    environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_mnist_saves_per_rank_files_whose_consolidation_is_as_accurate():
    """As many steps as hung for want of threads: see ``shardwright.xla``."""
    out = run("xla_mnist.py", "--fake-data", "--images", "8000", "--epochs", "2")
    found = dict(re.findall(r"(sharded|consolidated) +accuracy (\S+)", out))
    assert float(found["sharded"]) > 0.9
    assert float(found["consolidated"]) == pytest.approx(float(found["sharded"]), abs=0.002)


def test_a_vision_transformer_trains_and_is_planned():
    assert run("xla_vit.py", "--size", "tiny", "--steps", "2").count("loss") == 2
    assert "temporary, at most" in run("xla_vit.py", "--size", "tiny", "--plan")


@pytest.mark.parametrize("model", ["resnet26", "vit"])
def test_imagenet_trains_saves_and_goes_on(tmp_path, model):
    options = ["--fake-data", "--model", model, "--image", "32", "--rows", "4", "--steps", "2"]
    options += ["--save", str(tmp_path)]
    assert "from epoch 1" in run("xla_imagenet.py", *options, "--epochs", "1")
    out = run("xla_imagenet.py", *options, "--epochs", "2")
    assert "from epoch 2" in out
    assert re.search(r"epoch 2  loss \d", out)
