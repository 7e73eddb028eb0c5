"""`make dist` and `make release` refuse a tree that isn't ready, with a sentence that says what to change."""

import re
import shutil
import subprocess

import pytest

from tests.release import NAMED, ROOT, newest_section, of_commit, of_version, version_of

VERSION = version_of(ROOT)
CLOSED = f"## {VERSION} (2026-12-01)"


@pytest.fixture
def tree(tmp_path):
    """A copy of the files that name the version, with the change log closed."""
    for name in ("pyproject.toml", "CHANGELOG.md", *NAMED):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    edit(tmp_path / "CHANGELOG.md", f"## {newest_section(ROOT)[0]}\n", f"{CLOSED}\n")
    return tmp_path


def edit(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def git(tree, *command):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(("git", *who, *command), cwd=tree, check=True)


def test_this_tree_names_one_version():
    assert list(of_version(ROOT)) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("CITATION.cff", f"version: {VERSION}", "version: 9", "CITATION.cff names ['9'], pyproject.toml "),
        ("CITATION.cff", "\nversion: ", "\n# ", "CITATION.cff names no version"),
        ("docs/install.md", f"wright-{VERSION}-py3", "wright-9-py3", "docs/install.md names ['9']"),
        ("CHANGELOG.md", CLOSED, "## Unreleased", "begins with the section 'Unreleased'"),
        ("CHANGELOG.md", CLOSED, "## 9", "begins with the section '9'"),
        ("CHANGELOG.md", "\n- ", "\n", "CHANGELOG.md says nothing under"),
    ],
)
def test_a_package_is_not_made_of_a_tree_that_names_two_versions(tree, name, old, new, complaint):
    assert list(of_version(tree)) == []
    edit(tree / name, old, new)
    (told,) = of_version(tree)
    assert complaint in told


def test_a_new_version_is_asked_for_at_every_place_that_names_it(tree):
    edit(tree / "pyproject.toml", f'version = "{VERSION}"', 'version = "9.1"')
    told = list(of_version(tree))
    assert [re.match(r"\S+", line)[0] for line in told] == [*NAMED, "CHANGELOG.md"]


def test_a_release_is_a_commit_with_a_closed_change_log_and_no_tag_yet(tree):
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "all")
    assert list(of_commit(tree)) == []
    git(tree, "tag", f"v{VERSION}")
    (tree / "new.py").touch()
    edit(tree / "CHANGELOG.md", " (2026-12-01)", "")
    undated, changed, tagged = of_commit(tree)
    assert undated.startswith(f"CHANGELOG.md has no date after '## {VERSION}'")
    assert changed.startswith("Files differ from the commit, such as CHANGELOG.md, new.py")
    assert tagged.startswith(f"Version {VERSION} has been released")
