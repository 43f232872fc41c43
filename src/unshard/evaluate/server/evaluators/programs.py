"""The evaluators: the keys of each kind, and what runs it."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field

from unshard.evaluate.server.config.profiles import Profile, drop_nulls, profile_named
from unshard.evaluate.server.evaluators.command import Command, CommandProfile
from unshard.evaluate.server.evaluators.lm_eval import LmEval, LmEvalProfile
from unshard.evaluate.server.evaluators.lmms_eval import LmmsEval, LmmsEvalProfile
from unshard.evaluate.server.evaluators.work import Evaluator

ProfileKeys = Annotated[
    LmEvalProfile | LmmsEvalProfile | CommandProfile,
    Field(discriminator="kind"),
    BeforeValidator(drop_nulls),
]
"""A profile in a file, where `kind` must be given."""
KINDS: Mapping[str, tuple[type[Profile], Callable[..., Evaluator]]] = {
    "lm-eval": (LmEvalProfile, LmEval),
    "lmms-eval": (LmmsEvalProfile, LmmsEval),
    "command": (CommandProfile, Command),
}
"""The keys of each kind, and the evaluator of a profile."""


def default_profiles(gpus: tuple[str, ...]) -> dict[str, Profile]:
    """Return a profile of every kind, for a server with these GPUs.

    lm-eval and lmms-eval are those of this Python, if it has them; the command measures the weights
    themselves.
    """
    program = (sys.executable, "-m", "unshard.evaluate.server.evaluators.weights")
    return {
        "lm-eval": LmEvalProfile(gpus=min(1, len(gpus))),
        "lmms-eval": LmmsEvalProfile(gpus=min(1, len(gpus))),
        "command": CommandProfile(
            command=(*program, "{checkpoint}", "{output}/results.json", "{tasks}"),
            allowed_tasks=("size", "values"),
            gpus=0,
        ),
    }


def make_evaluator(profile: Profile) -> Evaluator:
    """Return the evaluator of a profile."""
    _, make = KINDS[profile.kind]
    return make(profile)


@dataclass(frozen=True, slots=True)
class Profiles:
    """The profiles of a server, by name, and what makes their evaluators."""

    configured: Mapping[str, Profile]
    make: Callable[[Profile], Evaluator] = make_evaluator

    def find(self, name: str) -> tuple[Profile, Evaluator]:
        """Return a profile, and its evaluator.

        Raises:
            UsageError: see `profile_named`.
        """
        profile = profile_named(self.configured, name)
        return profile, self.make(profile)
