"""What an evaluator is given, and what it must be able to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unshard.evaluate.jobs import Request
from unshard.evaluate.server.config.profiles import Profile

__all__ = ["Evaluator", "Profile", "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt, as an evaluator sees it.

    Attributes:
        model: a Hugging Face directory.
        output: where its results belong; fresh and empty when it starts.
        directory: the attempt's own, for configuration files; it holds `output` and the log, and
            the evaluator runs in it.
        request: what was asked for.
        profile: how the evaluator is configured.
    """

    model: Path
    output: Path
    directory: Path
    request: Request
    profile: Profile

    @property
    def gpus(self) -> int:
        """How many GPUs the attempt has."""
        asked = self.request.arguments.num_gpus
        return self.profile.gpus if asked is None else asked


class Evaluator(Protocol):
    """Knows how to start one kind of evaluator, and how to read what it left."""

    def command(self, work: Work) -> list[str]:
        """Return the arguments of its process, the interpreter first.

        May write files into the attempt's directory.
        """

    def metrics(self, work: Work, returncode: int) -> Mapping[str, float]:
        """Return what was measured, by "task/metric" or "task/metric,filter".

        Raises:
            EvaluationError: what was asked for is not there.
        """

    def results_file(self, work: Work) -> Path | None:
        """Return the evaluator's own file of results, if there is one."""
