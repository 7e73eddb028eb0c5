"""What `make docs` adds to the pages of docs/: README, CONTRIBUTING and CHANGELOG as pages, the page of the
command out of the command itself, and drawings that take the colours of the page.
"""

import posixpath
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Files beside docs/, and the pages that they become."""
COMMAND = "reference/command.md"
LINK = re.compile(r"(\]\()([^)#:\s]+)([^)\s]*\))")
DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)


def on_files(files, config):
    """Add the pages that have no file in docs/."""
    for source, page in PAGES.items():
        text = LINK.sub(lambda found: found[1] + moved(found[2]) + found[3], (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def moved(target: str) -> str:
    """Where a link of a page beside docs/ leads on the site."""
    return PAGES.get(target, target.removeprefix("docs/"))


def command_page() -> str:
    """Every command's ``--help``, as the command prints it in the environment that has most extras."""
    pythons = [ROOT / name / "bin" / "python" for name in (".venv-hf", ".venv")]
    python = next(path for path in pythons if path.exists())
    done = subprocess.run([python, ROOT / "docs" / "site" / "commands.py"], capture_output=True, text=True)
    if done.returncode:
        raise PluginError(f"docs/site/commands.py failed: {done.stderr}")
    return done.stdout


def on_page_markdown(markdown, page, **_):
    """Put drawings of class ``drawing`` into the page itself, where its style reaches them; on a page that
    came from beside docs/, links of pages to these are followed, too."""
    if page.file.src_uri == COMMAND:
        return command_page()
    folder = posixpath.dirname(page.file.src_uri)
    markdown = LINK.sub(lambda found: found[1] + inside(found[2], folder) + found[3], markdown)
    return DRAWING.sub(lambda found: drawn(found, ROOT / "docs" / folder), markdown)


def inside(target: str, folder: str) -> str:
    """A link out of docs/ to a file that has become a page, as a link to that page."""
    path = posixpath.normpath(posixpath.join("docs", folder, target))
    return posixpath.relpath(PAGES[path], folder or ".") if path in PAGES else target


def drawn(found: re.Match, folder: Path) -> str:
    """The drawing itself in place of its name; as it stands where it isn't one of ours."""
    text = (folder / found[2]).read_text()
    root = ElementTree.fromstring(text)
    if root.get("class") != "drawing":
        return found[0]
    text = re.sub(r"<\?xml.*?\?>|<style>.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{found[1]}" ', 1)
    return re.sub(r"\n\s*", "\n", text).strip()
