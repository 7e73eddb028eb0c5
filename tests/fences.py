"""The fenced blocks of README.md and docs/: what a reader would paste, taken out as it stands, and run.

A fence with a line that begins with ``$ `` is a console: its commands run in a shell, one after another, in a
copy of the repository in which ``.venv`` is there, and in which ``python``, ``pytest``, ``torchrun`` and
``shardwright`` are those of ``.venv/bin``. A fence that imports shardwright is a file: it is written to disk
and run. The fences of a document run in their order, in one folder. Of labels only a title counts: the file
of that name is for the commands after it (``follow``, for the tutorials).
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r'title="([^"]+)"')
_IMPORT = re.compile(r"^\s*(import|from) shardwright\b", re.MULTILINE)


class Fence(NamedTuple):
    """A block: the document that it stands in, the line where it begins, its text, and its title."""

    document: str
    line: int
    text: str
    title: str = ""

    @property
    def commands(self) -> list[str]:
        """What a console's reader types, without what is said of it."""
        found = [line.strip()[2:] for line in self.text.splitlines() if line.strip().startswith("$ ")]
        return [re.sub(r"\s+#.*", "", command) for command in found]

    @property
    def is_file(self) -> bool:
        """Whether it is a Python file that uses us."""
        return not self.commands and _IMPORT.search(self.text) is not None


def fences(pattern: str = "*") -> list[Fence]:
    """Those of README.md and of docs/, of documents whose name fits; in order."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [fence for path in paths if path.match(pattern) for fence in in_text(path.name, path.read_text())]


def in_text(document: str, text: str) -> list[Fence]:
    """Those of one document."""
    return [
        Fence(
            document,
            text[: found.start()].count("\n") + 1,
            re.sub(f"(?m)^{found[1]}", "", found[3]),
            title[1] if (title := _TITLE.search(found[2])) else "",
        )
        for found in _FENCE.finditer(text)
    ]


def copy_repository(folder: Path) -> Path:
    """What git would have, in ``folder``, and the environments of this checkout, which count as installed."""
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "runs", "__pycache__", ".*_cache", ".hypothesis", "out"
    )
    copied = shutil.copytree(ROOT, folder / "repository", ignore=ignored)
    for environment in sorted(ROOT.glob(".venv*")):  # .venv first: the others are newer than it
        (copied / environment.name).mkdir()
        for part in environment.iterdir():
            if part.name != ".installed":
                (copied / environment.name / part.name).symlink_to(part)
        (copied / environment.name / ".installed").touch()  # make finds it up to date
    return copied


def installed(folder: Path) -> Path:
    """Below ``folder`` what pip installs of a wheel of this tree; what it needs is in this environment."""
    site, options = folder / "site", "--no-index --no-deps --disable-pip-version-check"
    build, install = f"hatchling build --target wheel --directory {folder}", f"pip install {options} --target"
    for line in (build, f"{install} {site} --find-links {folder} shardwright"):
        command = [sys.executable, "-m", *line.split()]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return site


def follow(document: str, folder: Path) -> None:
    """Do in an empty folder what a page says, word for word: each file that it names is written, and each
    command is run, with Shardwright from a wheel (the line of pip itself: test_dist.py)."""
    site, place = installed(folder), folder / "empty"
    place.mkdir()
    where = run_command("python -c 'import shardwright; print(shardwright.__file__)'", place, site=site)
    assert where.startswith(str(site)), where
    for fence in fences(document):
        if fence.title:
            (place / fence.title).write_text(fence.text)
        else:
            assert not fence.is_file, f"{document}:{fence.line}: a file without a title"
        for command in fence.commands:
            if not command.startswith("pip install "):
                run_command(command, place, limit_s=300, site=site)


def run_command(command: str, folder: Path, limit_s: float = 120.0, site: Path | None = None) -> str:
    """Run it in a shell in ``folder``; what it wrote. Raises: AssertionError with that where it fails.

    site: where Shardwright is ``installed``; None: as this process has it.
    """
    ours = [] if site is None else [f"{site}/bin"]
    environment = {
        **os.environ,
        **({"PYTHONPATH": str(site)} if ours else {}),
        "PATH": os.pathsep.join([*ours, str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(folder.parent),  # where the documents say ~
    }
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s
    )
    wrote = done.stdout + done.stderr
    assert done.returncode == 0, f"$ {command}\nended with {done.returncode}:\n{wrote[-6000:]}"
    return wrote


def toy(command: str) -> str:
    """The command, so that it takes seconds: of a bench the documented ``--toy``."""
    return f"{command} --toy" if re.search(r"\bbench/(?!report\b)\w+\.py\b", command) else command


def excuse_for(command: str, excuses: Iterable[tuple[str, str]]) -> str:
    """Why the command isn't run here; "" for one that is."""
    return next((reason for pattern, reason in excuses if re.search(pattern, command)), "")
