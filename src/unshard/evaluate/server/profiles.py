"""Which profile a client's name means, and its evaluator."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from unshard.errors import UsageError
from unshard.evaluate.server.config.harmless import CHECKPOINT_KEYS, GUARDED_TYPES, MODEL_TYPES
from unshard.evaluate.server.config.profiles import Kind, Profile
from unshard.evaluate.server.evaluators.programs import make_evaluator
from unshard.evaluate.server.evaluators.work import Evaluator

__all__ = ["Profiles", "profile_named", "resolve_name"]

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)


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


def profile_named(profiles: Mapping[str, Profile], name: str) -> Profile:
    """Return a profile; "name:type" is a profile of lmms-eval with another type of model.

    Raises:
        UsageError: no profile has this name, or it does not allow the type.
    """
    base, _, model = name.partition(":")
    if base not in profiles:
        known = ", ".join(sorted(profiles)) or "none"
        raise UsageError(f"profile {base!r:.200}: unknown", expected=f"one of: {known}")
    profile = profiles[base]
    if name == base:
        return profile
    if profile.kind is not Kind.LMMS_EVAL:
        raise UsageError(f"profile {base}: its model cannot be chosen", found=f"{name!r:.200}")
    if model == profile.model:
        return profile
    if not _MODEL.fullmatch(model) or not _allows_model(profile, model):
        raise UsageError(
            f"profile {base}: model {model!r:.200} is not allowed",
            expected=", ".join([profile.model, *profile.allowed_models]),
            hint="other types may run code of a checkpoint: the profile can allow them by "
            "`allowed_models`",
        )
    key = CHECKPOINT_KEYS.get(model, "pretrained")
    if not _is_trusted(profile, model):
        guarded = {**profile.model_args, "trust_remote_code": False}
        profile = replace(profile, model_args=guarded)
    return replace(profile, model=model, checkpoint_key=key)


def resolve_name(profiles: Mapping[str, Profile], name: str) -> str:
    """Return the profile that a name means: its own, or "profile:type" for a type of model.

    lmms-engine and lmms-eval's clients name a type of model: then the best is a profile for
    lmms-eval of this type, else one that allows it.

    Raises:
        UsageError: no profile fits.
    """
    if ":" in name or name in profiles:
        return name
    lmms = {key: one for key, one in profiles.items() if one.kind is Kind.LMMS_EVAL}
    fitting = [key for key, profile in lmms.items() if profile.model == name]
    fitting += [f"{key}:{name}" for key, profile in lmms.items() if _allows_model(profile, name)]
    if fitting:
        return fitting[0]
    known = ", ".join(sorted(profiles)) or "none"
    raise UsageError(
        f"{name!r:.200}: no profile of this name"
        + (", and no type of model that one for lmms-eval allows" if lmms else ""),
        expected=f"one of: {known}",
        hint="a profile can allow more types of model by `allowed_models`" if lmms else "",
    )


def _allows_model(profile: Profile, model: str) -> bool:
    """Return whether a client may choose a type of model."""
    is_default = profile.allowed_models == MODEL_TYPES
    return _is_trusted(profile, model) or (is_default and model in GUARDED_TYPES)


def _is_trusted(profile: Profile, model: str) -> bool:
    return any(fnmatchcase(model, pattern) for pattern in profile.allowed_models)
