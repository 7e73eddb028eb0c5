"""Runs a script of this folder once per rank, each in its place on a link."""

import os
import subprocess
import sys
import tempfile

from bench.links import places


def launch(link: str, world: int, script: str, limit_s: float) -> None:
    """Start ``script`` with this process' arguments and ``--rank``, ``--store`` once per rank; end them all.

    Exits with a message where a rank fails or runs past ``limit_s``. Raises: LinkError.
    """
    with tempfile.TemporaryDirectory() as folder, places(link, world) as homes:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, home in enumerate(homes):
                words = [*home.prefix, sys.executable, script, *sys.argv[1:]]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": home.interface}
                inner = ["--rank", str(rank), "--store", f"{folder}/store"]
                ranks.append(subprocess.Popen([*words, *inner], env=environment))
            failed = [rank for rank, process in enumerate(ranks) if process.wait(limit_s)]
        except subprocess.TimeoutExpired:
            sys.exit(f"bench: a rank ran past {limit_s:g} s (--limit-s)")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if failed:
        sys.exit(f"bench: ranks {failed} ended with an error")
