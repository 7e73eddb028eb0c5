"""trackio: a data base on this host (``TRACKIO_DIR``), which ``trackio show`` opens."""
# pyright: reportMissingImports=false

from collections.abc import Mapping

from shardwright.extras import from_extra
from shardwright.train.trackers import TrackedRun

with from_extra("track"):
    import trackio


class Trackio:
    """See ``Tracker``. A run is known by its name there."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=run.project,
            name=run.run_id or None,
            config=run.flat_settings,
            resume="must" if run.run_id else "never",
            embed=False,
        )
        self.run_id: str = self._run.name

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See ``Tracker``; it has times of its own."""
        self._run.log({name: value for name, value in numbers.items() if name != "time"}, step=step)

    def close(self, finished: bool) -> None:
        """See ``Tracker``."""
        self._run.finish()


open_run = Trackio
