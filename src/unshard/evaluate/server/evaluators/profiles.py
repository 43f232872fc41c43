"""The evaluators of a server (profiles), and their lookup by a client's name.

Only the server's configuration decides which program runs, with which code; a client only chooses
a profile by its name, the key in server.yaml.
"""

import sys
from collections.abc import Mapping
from typing import Annotated, get_args

from pydantic import BeforeValidator, Field

from unshard.errors import UsageError
from unshard.evaluate.server.config.arguments import matches
from unshard.evaluate.server.config.keys import drop_nulls
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.lmms_eval import LmmsEvalProfile
from unshard.evaluate.server.evaluators.work import Profile

_Kinds = LmEvalProfile | LmmsEvalProfile | CommandProfile
KINDS: Mapping[str, type[Profile]] = {
    kind.model_fields["kind"].default: kind for kind in get_args(_Kinds)
}
ProfileKeys = Annotated[_Kinds, Field(discriminator="kind"), BeforeValidator(drop_nulls)]
"""A profile in a file; `kind` is required."""


def default_profiles(gpus: tuple[str, ...]) -> dict[str, Profile]:
    """Return a profile of every kind, for a server with these GPUs.

    lm-eval and lmms-eval run in this Python; the command measures the weights themselves.
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


def base_of(name: str) -> str:
    """Return the profile's name in "profile:type"."""
    return name.partition(":")[0]


def profile_named(profiles: Mapping[str, Profile], name: str) -> Profile:
    """Return the profile "name", or "name:type" for lmms-eval; UsageError if it is not allowed."""
    base, _, model = name.partition(":")
    if base not in profiles:
        names = ", ".join(sorted(profiles)) or "none"
        raise UsageError(f"unknown profile {base!r:.200}", expected=f"one of: {names}")
    return profiles[base] if name == base else profiles[base].with_model(model, name=base)


def resolve_name(profiles: Mapping[str, Profile], name: str) -> str:
    """Return the profile for a name: the name itself, or "profile:type" for a type of model.

    lmms-engine and lmms-eval's clients send a type of model: a profile for lmms-eval of this type
    is preferred to a profile that allows it.

    Raises:
        UsageError: no profile fits.
    """
    if ":" in name or name in profiles:
        return name
    models = {key: profile.client_models for key, profile in profiles.items()}
    fitting = [key for key, allowed in models.items() if allowed[:1] == (name,)]
    fitting += [f"{key}:{name}" for key, allowed in models.items() if matches(name, allowed[1:])]
    if fitting:
        return fitting[0]
    names = ", ".join(sorted(profiles)) or "none"
    lmms = any(models.values())
    raise UsageError(
        f"unknown profile {name!r:.200}",
        expected=f"one of: {names}",
        hint="for another type of model of lmms-eval: `allowed_models` of a profile"
        if lmms
        else "",
    )
