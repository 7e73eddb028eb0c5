"""Print the page of the command: the `--help` of each verb and of each verb's verbs, by the command."""

import contextlib
import io
import os
import re

os.environ["COLUMNS"] = "100"

from shardwright.cli import VERBS, main


def help_of(*verbs: str) -> str:
    """What ``shardwright VERBS --help`` prints; where its extra is missing, the line that says so."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main([*verbs, "--help"])
    if not out.getvalue().startswith("usage: ") and "this needs " not in err.getvalue():
        raise SystemExit(f"shardwright {' '.join(verbs)} --help printed no help: {err.getvalue()}")
    return (out.getvalue() or err.getvalue()).strip()


def section(*verbs: str) -> str:
    """One command's heading and help, and those of its verbs."""
    text = help_of(*verbs)
    parts = [f"{'#' * (1 + len(verbs))} {' '.join(('shardwright', *verbs))}\n\n```text\n{text}\n```\n"]
    verbs_of = re.search(r"^usage: [^{]*\{([\w,]+)\} \.\.\.$", text.split("\n\n")[0], re.MULTILINE)
    found = verbs_of[1].split(",") if verbs_of else []
    if not verbs:
        found = list(VERBS)
    return "\n".join([*parts, *(section(*verbs, verb) for verb in found)])


print(section())
