"""What an evaluator is given, and what it must be able to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unshard.evaluate.jobs import Request

__all__ = ["Evaluator", "Profile", "Work"]


class Profile(Protocol):
    """An evaluator as the server is configured with it."""

    @property
    def name(self) -> str:
        """What clients call it."""

    @property
    def kind(self) -> str:
        """Which evaluator it is."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that are set for it, whatever is scrubbed from the server's own."""

    @property
    def timeout_s(self) -> float:
        """How long one attempt may evaluate."""

    @property
    def retries(self) -> int:
        """How many attempts follow one that failed."""

    @property
    def gpus(self) -> int:
        """How many GPUs a job takes that does not say."""

    @property
    def keep(self) -> str:
        """Which merged models stay after evaluation: none, best or all."""

    @property
    def best_metric(self) -> str | None:
        """What "best" is measured by; with a leading "-", the lowest value is the best."""


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt, as an evaluator sees it.

    Attributes:
        model: a Hugging Face directory.
        output: where its results belong; fresh and empty when it starts.
        directory: the attempt's own, for configuration files; it holds `output` and the log.
        request: what was asked for.
        profile: how the evaluator is configured.
    """

    model: Path
    output: Path
    directory: Path
    request: Request
    profile: Profile


class Evaluator(Protocol):
    """Knows how to start one kind of evaluator, and how to read what it left."""

    def command(self, work: Work) -> list[str]:
        """Return the arguments of its process, the interpreter first.

        May write files into the attempt's directory.
        """

    def metrics(self, work: Work, returncode: int) -> Mapping[str, float]:
        """Return what was measured, by "task/metric".

        Raises:
            EvaluationError: what was asked for is not there.
        """

    def results_file(self, work: Work) -> Path | None:
        """Return the evaluator's own file of results, if there is one."""
