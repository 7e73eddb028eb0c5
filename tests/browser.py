"""A page in a browser without a network: headless Chromium (Debian's package)."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

needs_chromium = pytest.mark.skipif(
    not shutil.which("chromium") and "CI" not in os.environ,  # in CI it fails instead
    reason="needs Debian's package chromium",
)
COMMAND = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]


def opened(page: Path, script: str = "", served_at: str = "") -> dict[str, str]:
    """The data attributes of the page's body once it is drawn, and ``script`` has run after that.

    served_at: the URL of the page's folder, where it isn't to be opened from the disk.
    """
    copy = page.with_name(f"opened-{page.name}")
    copy.write_text(page.read_text() + f"<script>{script}</script>")
    command = [
        *COMMAND,
        f"--user-data-dir={page.parent}/profile",
        "--dump-dom",
        f"{served_at or page.parent.as_uri()}/{copy.name}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    body = re.search(r"<body([^>]*)>", done.stdout)
    assert body, done.stderr[-2000:]
    return dict(re.findall(r'data-(\w+)="([^"]*)"', body[1]))
