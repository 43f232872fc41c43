"""Results as metrics of a trackio run: the trainer's own, or another. Steps come in any order.

If the trainer logs without a step (transformers' callback does that), trackio counts the steps
itself, from the highest that it has seen. A result has its own step and must not move that counter,
so the counter is restored. Only the trainer's thread moves it, so results are written there.
"""

from collections.abc import Mapping

import trackio
from trackio import context_vars
from trackio.run import Run


class TrackioSink:
    """Writes to a run, from the process and thread that logs to it.

    Its owner finishes the run, even before the last result.
    """

    is_ready = True  # always: every result is a separate row

    def __init__(self, run: Run) -> None:
        self.name = f"trackio-{run.project}-{run.name}"
        self._run = run

    @classmethod
    def open(cls, project: str, group: str) -> "TrackioSink":
        """Return a sink for another process than the trainer's, with its own run in the group.

        The same names continue that run. `close` finishes it.
        """
        name, current = f"{group}-eval", context_vars.current_run.get()
        run = trackio.init(
            project, name=name, group=group, resume="allow", auto_log_gpu=False, embed=False
        )
        context_vars.current_run.set(current)  # else `close` would leave the new run open
        return cls(run)

    def describe(self, config: Mapping[str, object]) -> None:
        """Add the settings of results to the run's config, which is sent with its first row."""
        self._run.config |= config

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write the metrics; trackio sends them from its own thread."""
        del job_id
        following = self._run._next_step  # noqa: SLF001  (no public name)
        self._run.log(dict(metrics), step=step)
        self._run._next_step = following  # noqa: SLF001

    def log_now(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write the metrics after the last log call of the trainer."""
        self.log(step, metrics, job_id)

    def close(self) -> None:
        """Finish the run, so that the last results are sent, unless it is the current one.

        The owner of the current run finishes it: transformers' callback does before any callback of
        a user is called at the end.
        """
        if context_vars.current_run.get() is not self._run:
            self._run.finish()  # type: ignore[no-untyped-call]  # trackio's own lacks its types
