"""Draws the losses that ddp.py and sharded.py have left in runs/own_script, and how far they are apart."""

import json
from pathlib import Path

from matplotlib import pyplot

FOLDER = Path("runs/own_script")


def main() -> None:
    ddp, sharded = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("ddp", "sharded"))
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 4), layout="constrained", height_ratios=[3, 1]
    )
    above.plot(ddp, color="#b5cde6", linewidth=6, label="ddp.py")
    above.plot(sharded, color="#111111", linewidth=1, label="sharded.py")
    above.set_ylabel("loss, nats per byte")
    above.legend(frameon=False)
    below.plot([ours - theirs for theirs, ours in zip(ddp, sharded, strict=True)], color="#111111")
    below.set_ylabel("sharded\nless ddp")
    below.set_xlabel("step")
    figure.savefig(FOLDER / "picture.svg", metadata={"Date": None})
    print(f"last loss: ddp.py {ddp[-1]:.4f}, sharded.py {sharded[-1]:.4f}")


if __name__ == "__main__":
    main()
