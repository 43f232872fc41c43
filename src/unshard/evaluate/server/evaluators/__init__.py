"""The evaluators: which command line each has, and how its results are read."""

from typing import assert_never

from unshard.evaluate.server.config.profiles import Kind, Profile
from unshard.evaluate.server.evaluators.command import CommandEvaluator
from unshard.evaluate.server.evaluators.lm_eval import LmEvalEvaluator
from unshard.evaluate.server.evaluators.lmms_eval import LmmsEvalEvaluator
from unshard.evaluate.server.evaluators.work import Evaluator

__all__ = ["make_evaluator"]


def make_evaluator(profile: Profile) -> Evaluator:
    """Return the evaluator of a profile."""
    match profile.kind:
        case Kind.LM_EVAL:
            return LmEvalEvaluator()
        case Kind.LMMS_EVAL:
            return LmmsEvalEvaluator()
        case Kind.COMMAND:
            return CommandEvaluator()
    assert_never(profile.kind)
