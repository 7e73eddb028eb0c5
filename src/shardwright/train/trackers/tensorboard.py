"""TensorBoard: event files in the run's folder, ``tensorboard --logdir runs/quickstart``."""

from collections.abc import Mapping
from pathlib import Path

from shardwright.extras import from_extra
from shardwright.train.trackers import TrackedRun

with from_extra("track"):
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """See ``Tracker``. A run that goes on has one more event file, and what is undone is hidden."""

    def __init__(self, run: TrackedRun) -> None:
        folder: Path = run.folder / "tensorboard"
        self.run_id = str(folder)
        self._writer = SummaryWriter(str(folder), purge_step=run.step + 1 if run.step else None)
        if not run.step:
            text = "\n".join(f"    {key} = {value!r}" for key, value in run.flat_settings.items())
            self._writer.add_text("recipe", text)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See ``Tracker``; the time of an event is the row's."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, walltime=numbers.get("time"))
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """See ``Tracker``."""
        self._writer.close()


open_run = TensorBoard
