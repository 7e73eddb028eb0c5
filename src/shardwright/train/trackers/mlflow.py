"""MLflow: to ``MLFLOW_TRACKING_URI``, or files in the run's folder."""
# pyright: reportMissingImports=false

import os
from collections.abc import Mapping

from shardwright import clock
from shardwright.extras import from_extra
from shardwright.train.trackers import TrackedRun

with from_extra("track"):
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient


class MLflow:
    """See ``Tracker``."""

    def __init__(self, run: TrackedRun) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it asks for a server or data base
            place = (run.folder / "mlruns").resolve().as_uri()
        self._client = MlflowClient(place)
        if run.run_id:
            self.run_id = run.run_id
            self._client.update_run(run.run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        self.run_id = self._client.create_run(number, run_name=run.folder.name).info.run_id
        params = [Param(key, str(value)) for key, value in run.flat_settings.items()]
        self._client.log_batch(self.run_id, params=params)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See ``Tracker``."""
        at_ms = int(1000 * numbers.get("time", clock.time()))
        self._client.log_batch(
            self.run_id, [Metric(name, float(value), at_ms, step) for name, value in numbers.items()]
        )

    def close(self, finished: bool) -> None:
        """See ``Tracker``."""
        self._client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")


open_run = MLflow
