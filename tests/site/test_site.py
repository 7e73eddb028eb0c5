"""The site as `make docs` has built it into build/site: what a browser gets, and what makes a build fail."""

import html
import os
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import shardwright
from tests import browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="make docs builds the site")

LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=[\"']?([^\"'\s>]+)"
    r"|<link\b(?![^>]*rel=[\"']?(?:canonical|next|prev))[^>]*?\bhref=[\"']?([^\"'\s>]+)"
    r"|@import\s+[\"']([^\"']+)|url\(\s*[\"']?([^\"')]+)"
)
"""What a browser fetches by itself; links that a reader may follow aren't."""
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def pages() -> dict[str, str]:
    """Path on the site -> HTML."""
    return {path.relative_to(SITE).as_posix(): path.read_text() for path in sorted(SITE.rglob("*.html"))}


def text_of(page: str) -> str:
    """What a page says, without its code blocks' colours and other tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def test_no_page_and_no_style_loads_anything_from_another_host():
    fetched = {}
    for path in [*SITE.rglob("*.html"), *SITE.rglob("*.css")]:
        for groups in LOADED.findall(path.read_text()):
            fetched.setdefault("".join(groups), path.name)
    assert any(name.endswith(".css") for name in fetched) and any(name.endswith(".js") for name in fetched)
    elsewhere = {name: page for name, page in fetched.items() if re.match(r"(https?:)?//", name)}
    assert not elsewhere


@pytest.fixture(scope="module")
def address():
    """Where the site is served on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@browser.needs_chromium
@pytest.mark.parametrize(("scheme", "light"), [(1, True), (0, False)])
def test_a_page_opens_without_a_network_in_light_and_dark(scheme, light, address, monkeypatch):
    flags = (f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=5000")
    monkeypatch.setattr(browser, "COMMAND", [*browser.COMMAND[:-1], *flags, NO_NETWORK])
    script = """
      setTimeout(() => {
        const names = performance.getEntriesByType('resource').map(each => each.name);
        document.body.dataset.loaded = names.length;
        document.body.dataset.elsewhere = names.filter(name => !name.startsWith(location.origin)).join(' ');
        document.body.dataset.colour = getComputedStyle(document.body).backgroundColor;
      }, 1000);
    """
    page = SITE / "reference" / "shard.html"
    found = browser.opened(page, script, f"{address}/reference")
    page.with_name(f"opened-{page.name}").unlink()
    shutil.rmtree(page.parent / "profile")
    assert int(found["loaded"]) >= 4 and not found["elsewhere"]  # styles, scripts and the search's index
    brightness = [int(part) for part in re.findall(r"\d+", found["colour"])[:3]]
    assert (min(brightness) > 200) if light else (max(brightness) < 60)


def test_readme_is_the_first_page_and_every_link_of_it_leads_to_a_page():
    first = (SITE / "index.html").read_text()
    assert "Train models larger than one device" in text_of(first)
    body = first[first.index("<article") : first.index("</article")]
    links = [link.split("#")[0] for link in re.findall(r'<a\s[^>]*href="([^"#:]+[^":]*)"', body)]
    assert "changelog.html" in links and "contributing.html" in links
    assert all((SITE / link).is_file() for link in links)


def test_every_public_name_has_its_docstring_on_a_page_of_the_reference():
    reference = {path: page for path, page in pages().items() if path.startswith("reference/")}
    everything = "".join(reference.values())
    missing = [name for name in shardwright.__all__ if f'id="shardwright.{name}"' not in everything]
    assert not missing
    says = " ".join(text_of(reference["reference/shard.html"]).split())
    assert " ".join((shardwright.fully_shard.__doc__ or "").split()[:12]) in says


def test_the_page_of_the_command_has_the_help_of_every_verb():
    page = text_of((SITE / "reference" / "command.html").read_text())
    for words in ("shardwright train", "shardwright checkpoint convert", "shardwright trace"):
        assert f"usage: {words} " in page
    assert "--training.sequence_length" in page


def test_what_reads_as_a_list_or_a_table_or_code_is_one_on_every_page():
    for path, page in pages().items():
        for paragraph in re.findall(r"<p>(.*?)</p>", page, re.DOTALL):
            assert not re.search(r"^(- |\d+\. |\||```|:::)", paragraph, re.MULTILINE), (
                f"{path}: {paragraph[:200]}"
            )


def test_a_broken_link_and_a_broken_anchor_fail_the_build(tmp_path):
    for name in ("docs", "mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for name in ("src", ".venv", ".venv-extras"):
        (tmp_path / name).symlink_to(ROOT / name)
    start = tmp_path / "docs" / "start.md"
    start.write_text(start.read_text() + "\n[one](no-such-page.md) [two](watch.md#no-such-heading)\n")
    done = subprocess.run(
        [".venv-extras/bin/mkdocs", "build"],
        cwd=tmp_path,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "no-such-page.md" in done.stderr and "no-such-heading" in done.stderr
