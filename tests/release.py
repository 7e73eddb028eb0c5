"""Why this tree can't be released: ``python -m tests.release``, which `make dist` begins with. ``--now``, of
`make release`, also asks that the change log is closed and all is committed (docs/releasing.md).
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = {
    "CITATION.cff": r"^version: (\S+)$",
    "docs/install.md": r"\bshardwright-([\w.]+)-py3-none-any\.whl",
}
"""Files that name the version of pyproject.toml, and where."""


def version_of(root: Path) -> str:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]


def newest_section(root: Path) -> tuple[str, str]:
    """Heading and text of the first section of the change log."""
    _, heading, text, *_ = re.split(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return heading, text


def of_version(root: Path) -> Iterator[str]:
    """Where another version is named than in pyproject.toml."""
    version = version_of(root)
    for name, pattern in NAMED.items():
        found = re.findall(pattern, (root / name).read_text(), re.MULTILINE)
        if set(found) != {version}:
            yield f"{name} names {found or 'no version'}, pyproject.toml {version}: change one of them."
    heading, text = newest_section(root)
    if not re.fullmatch(rf"{re.escape(version)}( \(\d{{4}}-\d\d-\d\d\))?", heading):
        yield (
            f"CHANGELOG.md begins with the section {heading!r}, expected '{version}' or "
            f"'{version} (YEAR-MONTH-DAY)': rename it, or change the version in pyproject.toml."
        )
    if "\n- " not in text:
        yield f"CHANGELOG.md says nothing under {heading!r}: add what users notice."


def of_commit(root: Path) -> Iterator[str]:
    """What of the tree isn't closed, isn't committed, or is released already."""
    version, heading = version_of(root), newest_section(root)[0]
    if heading == version:
        yield f"CHANGELOG.md has no date after '## {version}': close the section with ' (YEAR-MONTH-DAY)'."
    if changed := _git(root, "status", "--porcelain").splitlines():
        names = ", ".join(line[3:] for line in changed[:3])
        yield f"Files differ from the commit, such as {names}: commit or remove them."
    if _git(root, "tag", "--list", f"v{version}"):
        yield f"Version {version} has been released, as the tag v{version} says: choose the next one."


def _git(root: Path, *command: str) -> str:
    return subprocess.run(("git", *command), cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit("\n".join([*of_version(ROOT), *(of_commit(ROOT) if "--now" in sys.argv else ())]) or None)
