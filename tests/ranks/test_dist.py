"""`make dist` leaves a package for one's own project: the same by either way, and it trains from there."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.dist import complaints

ROOT = Path(__file__).parents[2]
INSTALLED = (
    "import torch, shardwright; print('installed: torch', torch.__version__, 'in', shardwright.__path__[0])"
)


def run(*command, cwd, limit_s=100.0):
    """stdout of a command that must succeed, without this process's rank or its paths to packages."""
    ours = ("PYTHONPATH", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["OMP_NUM_THREADS"] = "1"  # beside other tests, threads that wait took 44 s of CPU time, not 5
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """(wheel, sdist) of this tree; nothing is installed anew for it but twine, once."""
    folder, python = tmp_path_factory.mktemp("dist"), Path(sys.executable)
    to = (f"BIN={python.parent}", f"PYTHON={python}", f"DIST={os.path.relpath(folder, ROOT)}")
    told = run("make", "--old-file=setup", "dist", *to, cwd=ROOT, limit_s=300.0)
    assert told.count("PASSED") == 2, told  # twine's word for each
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def files_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {
            info.filename: info.CRC for info in archive.infolist() if not info.filename.endswith("RECORD")
        }


def test_the_wheel_has_the_package_and_its_recipes_and_is_the_one_of_the_sources(dist, tmp_path):
    wheel, source = dist
    files = files_of(wheel)
    assert "shardwright/recipes/quickstart.toml" in files and "shardwright/py.typed" in files
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert (unpacked / "recipes" / "quickstart.toml").is_file()
    build = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path))
    run(*build, cwd=unpacked)
    assert files_of(next(tmp_path.glob("*.whl"))) == files


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("METADATA", b"\nVersion: ", b"\nVersion: 9.", "Version is '9."),
        ("METADATA", b"# Shardwright", b"# Other", "description isn't README"),
        ("METADATA", b"numpy>=1.26", b"numba>=1.26", "needs ["),
        ("shardwright/errors.py", b"Every error", b"Each error", "shardwright/errors.py isn't that of src/"),
        ("shardwright/errors.py", b"Every error", b"Each error", "isn't the file that RECORD lists"),
        ("shardwright/__init__.py", b"import", b"impart", "-c import shardwright"),
    ],
)
def test_make_dist_refuses_a_wheel_that_is_not_of_this_tree(dist, tmp_path, file, old, new, complaint):
    wheel, source = dist
    bad = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as good, zipfile.ZipFile(bad, "w") as archive:
        for name in good.namelist():
            data = good.read(name)
            archive.writestr(name, data.replace(old, new) if name.endswith(file) else data)
    assert any(complaint in line for line in complaints(bad, source))


@pytest.mark.slow  # installs torch
def test_the_first_scripts_run_where_only_the_wheel_is_installed(dist, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python, bin_ = str(tmp_path / "venv" / "bin" / "python"), tmp_path / "venv" / "bin"
    install = ("-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "requirements.lock"))
    run(python, *install, dist[0], cwd=tmp_path, limit_s=900.0)
    first, *others = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(first)
    run(python, "train.py", cwd=tmp_path)
    refused = subprocess.run((bin_ / "shardwright", "train", "x"), capture_output=True, text=True, timeout=60)
    assert refused.stderr.endswith("is not installed: pip install 'shardwright[train]'\n"), refused.stderr
    line = re.search(
        r"pip install -c requirements.lock 'dist/\S+?(\[\S+\])'", (ROOT / "docs" / "install.md").read_text()
    )
    run(python, *install, f"{dist[0]}{line[1]}", cwd=tmp_path, limit_s=300.0)
    told = run(python, "-c", INSTALLED, cwd=tmp_path)
    print(told, end="")
    assert str(tmp_path) in told
    assert (
        "torch " + re.search(r"^torch==([\d.]+)$", (ROOT / "requirements.lock").read_text(), re.M)[1] in told
    )
    run(str(bin_ / "torchrun"), "--nproc-per-node", "2", "train.py", cwd=tmp_path)
    for script in others:
        (tmp_path / "next.py").write_text(script)
        run(python, "next.py", cwd=tmp_path)
    recipe = run(str(bin_ / "shardwright"), "recipe", "quickstart", cwd=tmp_path)
    (tmp_path / "mine.toml").write_text(recipe)
    short = ("--training.steps", "2", "--heldout.num_windows", "2")
    run(str(bin_ / "shardwright"), "train", "mine.toml", *short, cwd=tmp_path)
    assert (tmp_path / "runs" / "quickstart" / "model.safetensors").exists()
