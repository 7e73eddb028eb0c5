"""What is wrong with a wheel and a source distribution of this tree: ``python -m tests.dist FOLDER``.

`make dist` ends with it, so that what it leaves can be given away as it is.
"""

import base64
import csv
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwright"
IN_SOURCE = ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "requirements.lock", "tests/dist.py")
"""Some of what a source distribution must have beside the package."""


def complaints(wheel: Path, source: Path) -> list[str]:
    """Whatever of the two files differs from this tree, or doesn't install and import."""
    return [*_of_metadata(wheel), *_of_contents(wheel), *_of_source(source), *_of_import(wheel)]


def _of_metadata(wheel: Path) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = message_from_bytes(archive.read(name))
    expected = {
        "Name": project["name"],
        "Version": project["version"],
        "Summary": project["description"],
        "License-Expression": project["license"],
        "License-File": "LICENSE",
        "Description-Content-Type": "text/markdown",
    }
    for key, value in expected.items():
        if found[key] != value:
            yield f"{wheel.name}: {key} is {found[key]!r}, expected {value!r}"
    if found.get_payload(decode=True) != (ROOT / "README.md").read_bytes():
        yield f"{wheel.name}: its description isn't README.md"
    extras = set(found.get_all("Provides-Extra", ()))
    if extras != project["optional-dependencies"].keys():
        yield f"{wheel.name}: has the extras {sorted(extras)}"
    core = [line for line in found.get_all("Requires-Dist", ()) if "extra ==" not in line]
    if sorted(core) != sorted(project["dependencies"]):
        yield f"{wheel.name}: needs {core} without an extra"


def _of_contents(wheel: Path) -> Iterator[str]:
    kept = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(PACKAGE.parent).as_posix(): path.read_bytes() for path in kept}
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    ours = {name: data for name, data in files.items() if ".dist-info/" not in name}
    for name in sorted(name for name in {*ours, *expected} if ours.get(name) != expected.get(name)):
        yield f"{wheel.name}: {name} isn't that of src/"
    (record,) = (data.decode() for name, data in files.items() if name.endswith(".dist-info/RECORD"))
    for name, checksum, _ in csv.reader(record.splitlines()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files.get(name, b"")).digest()).rstrip(b"=").decode()
        if checksum and checksum != f"sha256={digest}":
            yield f"{wheel.name}: {name} isn't the file that RECORD lists"


def _of_source(source: Path) -> Iterator[str]:
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in sorted({*IN_SOURCE, "src/shardwright/recipes/quickstart.toml"} - names):
        yield f"{source.name}: has no {name}"


def _of_import(wheel: Path) -> Iterator[str]:
    """Whether pip installs the wheel into an empty folder, and Python imports it from there."""
    with tempfile.TemporaryDirectory() as folder:
        alone = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
        environment = {**os.environ, "PYTHONPATH": folder, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        where = "import shardwright; shardwright.fully_shard; print(shardwright.__file__)"
        for command in ((*alone, "--target", folder, str(wheel)), ("-c", where)):
            done = subprocess.run(
                (sys.executable, *command), cwd=folder, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                yield f"{wheel.name}: {' '.join(command[:3])} failed:\n{done.stderr}"
                return
        if not done.stdout.startswith(folder):
            yield f"{wheel.name}: {done.stdout.strip()} was imported, not what is in the wheel"


def main(folder: Path) -> int:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (wheel,), source = folder.glob(f"shardwright-{version}-*.whl"), folder / f"shardwright-{version}.tar.gz"
    found = complaints(wheel, source)
    print("\n".join(found) or f"{wheel.name}, {source.name}: metadata and files are right, and it imports")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
