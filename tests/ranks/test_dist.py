"""`make dist` leaves a package for one's own project: the same by either way, and it trains from there."""

import os
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.dist import complaints
from tests.fences import fences

ROOT = Path(__file__).parents[2]
TORCH = "import torch; print(torch.__version__, torch.version.cuda, torch.__path__)"


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


LINES = next(fence.commands for fence in fences("install.md") if "--index-url" in fence.text)
SCRIPTS = [fence.text for name in ("README.md", "start.md") for fence in fences(name) if fence.is_file]


def test_the_readme_and_the_page_install_by_the_same_two_lines_without_a_gpu():
    shown = [command for fence in fences("README.md") for command in fence.commands if "pip" in command]
    assert shown == LINES and len(LINES) == 2


@pytest.mark.slow  # installs torch
def test_the_two_files_and_the_two_lines_of_the_pages_install_into_an_empty_environment_and_train(
    dist, tmp_path
):
    wheel, source = map(str, dist)
    venv.create(tmp_path / "venv", with_pip=True)
    bin_ = tmp_path / "venv" / "bin"

    def here(name, *arguments, limit_s=100.0):
        return run(str(bin_ / name), *arguments, cwd=tmp_path, limit_s=limit_s)

    def install(*what):
        lock = str(ROOT / "requirements.lock")
        here("pip", "install", "--quiet", "--constraint", lock, *what, limit_s=900.0)

    # The first line, but for its index, which machines of tests don't reach: the lock's torch in its place.
    first, second = (shlex.split(line)[2:] for line in LINES)
    assert first[1:] == ["--index-url", "https://download.pytorch.org/whl/cpu"]
    install(first[0])
    torch_alone = here("python", "-c", TORCH)
    assert str(tmp_path) in torch_alone
    install(wheel)
    (tmp_path / "train.py").write_text(SCRIPTS[0])
    here("python", "train.py")
    command = (bin_ / "shardwright", "train", "x")
    refused = subprocess.run(command, env={}, capture_output=True, text=True, timeout=60)
    assert refused.stderr.endswith("is not installed: pip install 'shardwright[train]'\n"), refused.stderr
    install(second[0].replace("/path/to/the/clone", wheel))
    here("pip", "check")
    assert here("python", "-c", TORCH) == torch_alone
    here("torchrun", "--nproc-per-node", "2", "train.py")
    for script in SCRIPTS[1:]:
        (tmp_path / "next.py").write_text(script)
        here("python", "next.py")
    assert "recipe" in here("shardwright", "--help")
    (tmp_path / "mine.toml").write_text(here("shardwright", "recipe", "quickstart"))
    here("shardwright", "train", "mine.toml", "--training.steps", "2", "--heldout.num_windows", "2")
    assert (tmp_path / "runs" / "quickstart" / "model.safetensors").exists()
    install("--force-reinstall", "--no-deps", source)  # built by pip, with what [build-system] asks for
    here("python", "train.py")
