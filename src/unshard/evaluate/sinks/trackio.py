"""Results as metrics of a trackio run: the trainer's own, or another. Steps come in any order."""

from collections.abc import Mapping

import trackio
from trackio import context_vars
from trackio.run import Run

__all__ = ["TrackioSink"]


class TrackioSink:
    """Writes to a run.

    Args:
        run: what `trackio.init` returned; it stays open, whoever made it finishes it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    @classmethod
    def beside(cls, project: str, group: str) -> "TrackioSink":
        """Write from another process: to a run of its own, in the training run's group.

        The same names again continue that run. `close` finishes it.
        """
        name = f"{group}-eval"
        run = trackio.init(
            project, name=name, group=group, resume="allow", auto_log_gpu=False, embed=False
        )
        return _OwnRun(run)

    @property
    def name(self) -> str:
        """Return the sink's name."""
        return f"trackio-{self._run.project}-{self._run.name}"

    def log(self, step: int | None, metrics: Mapping[str, float], job_id: str) -> None:
        """Write the metrics; trackio sends them from a thread of its own."""
        del job_id
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Leave the run to its owner."""


class _OwnRun(TrackioSink):
    def close(self) -> None:
        """Finish the run."""
        if context_vars.current_run.get() is self._run:
            context_vars.current_run.set(None)
        self._run.finish()  # type: ignore[no-untyped-call]  # trackio's own lacks its types
