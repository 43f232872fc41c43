"""Results as metrics of an MLflow run. MLflow takes steps in any order."""

import re
import time
from collections.abc import Mapping

import mlflow
from mlflow.entities import Metric

__all__ = ["MlflowSink"]

_TAG = "unshard_eval.run"
_NOT_ALLOWED = re.compile(r"[^\w\-. /:]")


class MlflowSink:
    """Writes to a run that is there: the trainer's, or another.

    Args:
        run_id: of the run.
        tracking_uri: where; None: where the process tracks.
    """

    def __init__(self, run_id: str, tracking_uri: str | None = None) -> None:
        self._run_id = run_id
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)

    @classmethod
    def beside(cls, project: str, group: str) -> "MlflowSink":
        """Write from another process: to a run of its own in the experiment `project`.

        The same names again continue that run; the process's own tracking URI says where it is.
        """
        client, name = mlflow.MlflowClient(), f"{group}-eval"
        experiment = client.get_experiment_by_name(project)
        place = (
            client.create_experiment(project) if experiment is None else experiment.experiment_id
        )
        tagged = [run for run in client.search_runs([place]) if run.data.tags.get(_TAG) == group]
        if tagged:
            return cls(tagged[0].info.run_id)
        return cls(client.create_run(place, run_name=name, tags={_TAG: group}).info.run_id)

    @property
    def name(self) -> str:
        """Return the sink's name."""
        return f"mlflow-{self._run_id}"

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write the metrics, all or none; a character that MLflow refuses becomes `_`."""
        del job_id
        now = int(time.time() * 1000)
        batch = [
            Metric(_NOT_ALLOWED.sub("_", name), value, now, step) for name, value in metrics.items()
        ]
        self._client.log_batch(self._run_id, metrics=batch, synchronous=True)

    def close(self) -> None:
        """Do nothing: every batch is written at once."""
