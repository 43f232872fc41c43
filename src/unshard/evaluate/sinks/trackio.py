"""Results as metrics of a trackio run: the trainer's own, or another. Steps come in any order.

trackio counts the steps of a run itself where its owner names none (as transformers' callback
does), from behind the highest that it has seen. A result has a step of its own, and must not move
that counter: it is put back, in the thread of the trainer, which alone moves it.
"""

from collections.abc import Mapping

import trackio
from trackio import context_vars
from trackio.run import Run

__all__ = ["TrackioSink"]


class TrackioSink:
    """Writes to a run, from the process and thread that logs to it.

    Args:
        run: what `trackio.init` returned; whoever made it finishes it, even before the last result.
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

    @property
    def is_ready(self) -> bool:
        """Whether it can take a result now: always, a result is a row of its own."""
        return True

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write the metrics; trackio sends them from a thread of its own."""
        del job_id
        following = self._run._next_step  # noqa: SLF001  (no public name)
        self._run.log(dict(metrics), step=step)
        self._run._next_step = following  # noqa: SLF001

    def log_now(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write the metrics when the trainer logs no more."""
        self.log(step, metrics, job_id)

    def close(self) -> None:
        """Leave the run to its owner; if that has finished it, see that the last results are sent.

        transformers' callback finishes it before any callback of a user hears of the end.
        """
        if context_vars.current_run.get() is not self._run:
            self._run.finish()  # type: ignore[no-untyped-call]  # trackio's own lacks its types


class _OwnRun(TrackioSink):
    def close(self) -> None:
        """Finish the run."""
        if context_vars.current_run.get() is self._run:
            context_vars.current_run.set(None)
        self._run.finish()  # type: ignore[no-untyped-call]  # trackio's own lacks its types
