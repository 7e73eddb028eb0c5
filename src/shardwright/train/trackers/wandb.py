"""Weights & Biases, by its own variables: ``WANDB_MODE=offline`` keeps rows in the run's folder."""
# pyright: reportMissingImports=false

from collections.abc import Mapping

from shardwright.extras import from_extra
from shardwright.train.trackers import TrackedRun

with from_extra("track"):
    import wandb


class WeightsAndBiases:
    """See ``Tracker``."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=run.project,
            name=run.folder.name,
            dir=str(run.folder),
            config={section: dict(values) for section, values in run.settings.items()},
            id=run.run_id or None,
            resume="allow" if run.run_id else None,
        )
        self.run_id: str = self._run.id

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See ``Tracker``."""
        self._run.log(dict(numbers), step=step)

    def close(self, finished: bool) -> None:
        """See ``Tracker``."""
        self._run.finish(exit_code=0 if finished else 1)


open_run = WeightsAndBiases
