"""lm-eval (lm_eval 0.4.13): `python -m lm_eval run --config job.yaml`.

All arguments are in the YAML file, so that no value can become another argument. The exit code is
reliable, except for results that cannot be saved (a warning in its log). Without a merge,
`evaluators.direct` runs it.
"""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import Field

from unshard.errors import UsageError
from unshard.evaluate.jobs import Arguments
from unshard.evaluate.server.config.keys import NonEmptyText
from unshard.evaluate.server.evaluators.direct import MODEL_TYPE
from unshard.evaluate.server.evaluators.documents import (
    check_tasks,
    find_newest,
    read_results,
    replace_tags,
)
from unshard.evaluate.server.evaluators.harness import HarnessKeys, generation_args
from unshard.evaluate.server.evaluators.work import EvalInput, Scores, WarmEngine
from unshard.evaluate.values import expects

DIRECT = "unshard.evaluate.server.evaluators.direct"  # the module that runs lm-eval without a merge
_VLLM = "vllm"
_DIRECT_MODELS = ("hf", _VLLM)  # types that can load shards
_WORKER = "unshard.evaluate.server.warm.worker"
_CLIENT = "unshard.evaluate.server.warm.client"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_MARGIN_S = 60.0  # in which a server, if there is one, ends the worker first

_log = logging.getLogger(__name__)


class LmEvalProfile(HarnessKeys):
    """A profile of lm-eval."""

    module: ClassVar[str] = "lm_eval"
    listing: ClassVar[str] = "lm_eval ls tasks"
    confirms_unsafe_code: ClassVar[bool] = True

    kind: Literal["lm-eval"] = "lm-eval"
    model: NonEmptyText = "hf"
    idle_timeout: Annotated[
        float, Field(strict=True, gt=0, le=1e9), expects("seconds, above zero")
    ] = 600.0
    """With `weights: direct` and `model: vllm`: seconds for which an idle engine is kept."""

    @property
    def modules(self) -> tuple[str, ...]:
        """lm-eval, and modules that load a model from shards."""
        of_shards = ("unshard", "torch") if self.weights == "direct" else ()
        of_engine = (_VLLM,) if self.engine else ()
        return (self.module, *of_shards, *of_engine)

    @property
    def engine(self) -> WarmEngine | None:
        """The engine of vLLM, which loads one checkpoint after the other from shards."""
        if self.weights == "merged" or self.model != _VLLM:
            return None
        command = (self.interpreter, "-m", _WORKER, str(self.idle_timeout + _MARGIN_S))
        return WarmEngine(command, self.idle_timeout, self.environment)

    def check(self, where: str) -> None:
        """Raise if `weights: direct`, `idle_timeout`, `launch` or an argument is not possible."""
        is_direct = self.weights == "direct"
        if is_direct and self.model not in _DIRECT_MODELS:
            raise UsageError(
                f"{where}: weights: direct is not possible with this type of model",
                expected=f"model: {' or '.join(_DIRECT_MODELS)}; or `weights: merged`",
                found=f"model: {self.model}",
            )
        if is_direct and self.keep != "none":
            raise UsageError(
                f"{where}: weights: direct is not possible with `keep: {self.keep}`: there is no "
                "merged model to keep",
                expected="`keep: none`, or `weights: merged`",
            )
        self.check_launch(where)
        if "idle_timeout" in self.model_fields_set and not self.engine:
            raise UsageError(
                f"{where}: idle_timeout has no effect without a kept engine",
                expected="`weights: direct` with `model: vllm`, or no idle_timeout",
            )
        self.check_arguments(where)

    def list_unfitting(self, chosen: Arguments) -> Iterator[UsageError]:
        """Yield the arguments that are not allowed, also for a kept engine."""
        yield from super().list_unfitting(chosen)
        asked = self.chosen(chosen).model_args | dict(self.model_args)
        count = asked.get("data_parallel_size", 1)
        if self.engine and count != 1:
            yield UsageError(
                "data_parallel_size is not possible with `weights: direct`, which keeps one engine",
                expected="1",
                found=str(count),
                hint="jobs on other GPUs have engines of their own; several GPUs of one engine are "
                "used by tensor_parallel_size",
            )

    def command_line(self, work: EvalInput) -> list[str]:
        """Write the keys of lm_eval/config/evaluate_config.py that differ from their defaults.

        With a kept engine, the command sends them to its worker, which the caller appends.

        The output is a file, because below a directory lm-eval would make another one with the
        whole path of the model in its name, and fail silently if that is too long for a file name.
        """
        chosen = work.arguments
        if chosen.apply_chat_template is None and _has_template(work.model):
            _warn_of_template(work.request.profile)
        is_ours = self.weights == "direct" and not self.engine
        options: dict[str, object] = {
            "model": MODEL_TYPE if is_ours else self.model,
            "model_args": self.model_args_of(work, work.model),
            "tasks": list(work.request.tasks),
            "output_path": str(work.output / "results.json"),
            "log_samples": True,
            **chosen.options(),
            "metadata": chosen.metadata or None,
            "confirm_run_unsafe_code": self.arguments.confirm_run_unsafe_code or None,
            "gen_kwargs": generation_args(work) or None,
            "include_path": [str(path) for path in self.include_paths] or None,
            "device": None if work.gpus else "cpu",
        }
        keys = {key: value for key, value in options.items() if value is not None}
        path = work.directory / "job.yaml"
        path.write_text(yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")
        run = ["run", f"--config={path}"]
        if self.engine:
            return [sys.executable, "-m", _CLIENT, *run]
        return [*self.module_command(work, DIRECT if is_ours else self.module), *run]

    def read_scores(self, work: EvalInput, returncode: int) -> Scores:
        """Return the numbers of all tasks and groups."""
        if returncode != 0:
            self.check_known(work)
        file = find_newest(work.output, "results_*.json")
        document = read_results(work, file, returncode, expected="results_TIME.json")
        tasks = replace_tags(document, work.request.tasks)
        return check_tasks(document, tasks, program=work.program, file=file)


def _has_template(model: Path) -> bool:
    """Return whether the tokenizer in a model's directory has a chat template."""
    if any((model / name).exists() for name in _TEMPLATES):
        return True
    with suppress(OSError, ValueError, AttributeError):
        document = json.loads((model / "tokenizer_config.json").read_bytes())
        return bool(document.get("chat_template"))
    return False


@cache
def _warn_of_template(profile: str) -> None:
    _log.warning(
        "profile %s: the model has a chat template, which the profile does not apply: set "
        "`arguments: apply_chat_template` to true, or to false to silence this",
        profile,
    )
