"""Makes the pictures of docs/ again, each of a run of this machine.

    python -m bench.pictures                       all of them, into docs/pictures; five minutes on two cores
    python -m bench.pictures verdict losses        some of them
    python -m bench.pictures step --redraw         of what the last run has left in runs/pictures

``step`` makes a link out of network namespaces, which takes root.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import matplotlib

from bench.pictures import ledger, losses, step, verdict

PICTURES = {"verdict": verdict, "losses": losses, "ledger": ledger, "step": step}


def main() -> None:
    """Record and draw what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}; none: all")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="folder of the pictures")
    parser.add_argument("--redraw", action="store_true", help="draw what the last run has recorded")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PICTURES):
        parser.error(f"no picture is named {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "pictures"  # the same file of the same records
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # without the date
    records = Path("runs/pictures")
    records.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        record = records / f"{name}.json"
        if not options.redraw:
            with tempfile.TemporaryDirectory() as folder:
                record.write_text(json.dumps(PICTURES[name].record(Path(folder)), indent=1))
        out = options.out / f"{name}.svg"
        PICTURES[name].draw(json.loads(record.read_text()), out)
        print(f"{out}: {out.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
