"""Results as metrics of an MLflow run. MLflow accepts steps in any order.

It refuses names (mlflow/utils/validation.py) that have some characters, are longer than 250
characters, or are not plain relative paths. Such a name is changed. If two names would become
equal, or a name has to be cut, it ends in a hash of the whole name, which `results.jsonl` has.
"""

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping

import mlflow
from mlflow.entities import Metric

_TAG = "unshard_eval.run"
_NOT_ALLOWED = re.compile(r"[^\w\-. /:]")
_LONGEST_NAME = 250
_LONGEST_TAG = 5000
_LARGEST_BATCH = 1000


class MlflowSink:
    """Writes to an existing run, on the server of `tracking_uri` or else of the process."""

    def __init__(self, run_id: str, tracking_uri: str | None = None) -> None:
        self.name = f"mlflow-{run_id}"
        self._run_id = run_id
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)

    @classmethod
    def open(cls, project: str, group: str) -> "MlflowSink":
        """Return a sink for another process than the trainer's, with its own run in an experiment.

        The same names continue that run, on the server of the process's tracking URI.
        """
        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name(project)
        id_ = client.create_experiment(project) if experiment is None else experiment.experiment_id
        runs = [run for run in client.search_runs([id_]) if run.data.tags.get(_TAG) == group]
        if not runs:
            runs = [client.create_run(id_, run_name=f"{group}-eval", tags={_TAG: group})]
        return cls(runs[0].info.run_id)

    def describe(self, config: Mapping[str, object]) -> None:
        """Write the settings of results as tags, which may change; parameters may not."""
        for name, value in config.items():
            key = _fit_names([name])[name]
            self._client.set_tag(self._run_id, key, json.dumps(value)[:_LONGEST_TAG])

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write the metrics under valid names, in batches of 1,000, MLflow's limit."""
        del job_id
        now, names = int(time.time() * 1000), _fit_names(metrics)
        batch = [Metric(names[name], value, now, step) for name, value in metrics.items()]
        for start in range(0, len(batch), _LARGEST_BATCH):
            part = batch[start : start + _LARGEST_BATCH]
            self._client.log_batch(self._run_id, metrics=part, synchronous=True)

    def close(self) -> None:
        """Do nothing: every batch is written at once."""


def _fit_names(names: Collection[str]) -> dict[str, str]:
    """Return valid names for MLflow, all different, by the original names."""
    fitting = {}
    for name in names:
        parts = _NOT_ALLOWED.sub("_", name).split("/")
        fitting[name] = "/".join("_" if part in {"", ".", ".."} else part for part in parts)
    counts = Counter(fitting.values())
    for name, fit in fitting.items():
        if len(fit) > _LONGEST_NAME or (fit != name and counts[fit] > 1):
            digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:12]
            fitting[name] = f"{fit[: _LONGEST_NAME - 13]}-{digest}"
    return fitting
