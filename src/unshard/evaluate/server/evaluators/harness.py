"""What lm-eval and lmms-eval have in common: keys, command lines, and what clients may choose."""

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from unshard.errors import UsageError
from unshard.evaluate.jobs import Arguments
from unshard.evaluate.server.config.arguments import (
    has_separator,
    is_name,
    join_arguments,
    matches,
    parse_arguments,
)
from unshard.evaluate.server.config.harmless import (
    GENERATION_ARGUMENTS,
    METADATA,
    MODEL_ARGUMENTS,
)
from unshard.evaluate.server.config.keys import (
    Folders,
    ModelArgs,
    NonEmptyText,
    Texts,
    find_program,
)
from unshard.evaluate.server.evaluators.revision import installed_versions
from unshard.evaluate.server.evaluators.unknown_tasks import UnknownTasksError
from unshard.evaluate.server.evaluators.work import EvalInput, Profile
from unshard.evaluate.server.processes.bounded_log import last_lines
from unshard.evaluate.server.processes.supervise import LOG_NAME
from unshard.evaluate.server.roots import not_accepted
from unshard.evaluate.values import LARGEST, Scalar, expects

_MOST_ARGUMENTS = 64
_LONGEST_VALUE = 4000
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)

_LOG_LINES = 100
_NOT_FOUND = re.compile(r"Tasks not found: (.*?)(?:\. Try .*)?$", re.MULTILINE)


class HarnessKeys(Profile):
    """Keys of the profiles of lm-eval and lmms-eval."""

    module: ClassVar[str]
    """What the evaluator is imported as, and run."""
    listing: ClassVar[str]
    """What shows its tasks, behind `python -m`."""
    is_lmms_form: ClassVar[bool] = True
    trial: ClassVar[Arguments] = Arguments(limit=1)
    settings: ClassVar[frozenset[str]] = frozenset({"model", "checkpoint_key", "model_args"})

    interpreter: Annotated[NonEmptyText, AfterValidator(find_program)] = sys.executable
    """The Python in which the evaluator is installed."""
    include_paths: Folders = ()
    """Directories with further tasks (lmms-eval: one); paths in a task must be absolute."""
    model: NonEmptyText
    """The type of model, as the evaluator calls it."""
    checkpoint_key: NonEmptyText = "pretrained"
    """The argument of the model that takes the checkpoint."""
    model_args: ModelArgs = {}  # noqa: RUF012  (pydantic copies it)
    """Arguments of the model that no client can change."""
    allowed_model_args: Texts = ()
    """Shell patterns of names in `model_args`, `gen_kwargs` and `metadata` that clients may set in
    addition to those known to be harmless."""
    launcher: Annotated[Literal["accelerate", "none"], expects("accelerate, none")] = "accelerate"
    """With several GPUs: one process for each, with the whole model and a part of the data; or one
    process, whose model spreads over them (vllm)."""

    @property
    def start(self) -> tuple[str, ...]:
        """The interpreter."""
        return (self.interpreter,)

    @property
    def modules(self) -> tuple[str, ...]:
        """The evaluator's module, and those that its model needs."""
        return (self.module,)

    @property
    def version(self) -> str | None:
        """The version that the interpreter would import."""
        return installed_versions(self.interpreter, self.module, self.environment)[0]

    @property
    def versions(self) -> str:
        """The versions of the interpreter, the module, and others that it would import."""
        return installed_versions(self.interpreter, self.module, self.environment)[1]

    @property
    def files(self) -> Mapping[str, Path]:
        """The config, and the directories with further tasks."""
        tasks = {f"include_paths.{place}": path for place, path in enumerate(self.include_paths)}
        return {**super().files, **tasks}

    def check_arguments(self, where: str) -> None:
        """Raise if an argument of the profile cannot be handed over."""
        super().check_arguments(where)
        join_arguments(self.model_args, what=f"{where}: model_args")
        own = self.arguments
        join_arguments(own.model_args, what=f"{where}: arguments: model_args")
        parse_arguments(own.gen_kwargs or "", what=f"{where}: arguments: gen_kwargs")
        if twice := sorted({self.checkpoint_key, *self.model_args} & own.model_args.keys()):
            raise UsageError(
                f"{where}: arguments: model_args has what is already set: {', '.join(twice)}",
                expected="in `model_args`, what no submission can change; in `arguments`, what "
                "submissions can change",
            )

    def list_unfitting(self, chosen: Arguments) -> Iterator[UsageError]:
        """Yield the arguments that are neither harmless nor allowed, or that the server sets."""
        yield from super().list_unfitting(chosen)
        for key in chosen.metadata:
            if key not in METADATA and not matches(key, self.allowed_model_args):
                yield not_accepted(
                    "metadata",
                    key,
                    expected=", ".join(sorted(METADATA)),
                    hint="others may name what a task loads; the profile can allow them by "
                    "`allowed_model_args`, or set them by `arguments: metadata`",
                )
        yield from self._list_unfitting("model_args", chosen.model_args, MODEL_ARGUMENTS)
        fixed = {self.checkpoint_key, *self.model_args}
        for key in sorted(fixed.intersection(chosen.model_args)):
            yield not_accepted(
                "model_args", key, expected="an argument that the server does not set itself"
            )
        try:
            pairs = parse_arguments(chosen.gen_kwargs or "", what="gen_kwargs")
        except UsageError as error:
            yield error
        else:
            yield from self._list_unfitting("gen_kwargs", pairs, GENERATION_ARGUMENTS)

    def _list_unfitting(
        self, field: str, pairs: Mapping[str, Scalar], harmless: Collection[str]
    ) -> Iterator[UsageError]:
        if len(pairs) > _MOST_ARGUMENTS:
            yield not_accepted(field, len(pairs), expected=f"at most {_MOST_ARGUMENTS}")
            return
        for key, value in pairs.items():
            if not is_name(key, _KEY):
                yield not_accepted(
                    field, key, expected="an identifier of ASCII letters, digits and `_`"
                )
            elif key not in harmless and not matches(key, self.allowed_model_args):
                yield not_accepted(
                    field,
                    key,
                    expected="an argument that is known to load neither code nor another model",
                    hint="the profile can allow it by `allowed_model_args`, or set it by "
                    "`model_args`",
                )
            elif not _is_plain(value):
                yield not_accepted(
                    f"{field}: {key}",
                    value,
                    expected="a finite number, a boolean, or one line of text without comma, "
                    "equals sign, quotes, brackets and slashes, and not only dots",
                )

    def module_command(self, work: EvalInput, module: str) -> list[str]:
        """Return the command line that runs a module on all GPUs of the work.

        `accelerate launch` is left out for one process: it would start it without the variables
        that `Accelerator()` then asks for. Port 0 lets it choose a free one, so that jobs do not
        meet.
        """
        start = [self.interpreter, "-m"]
        if work.gpus > 1 and self.launcher == "accelerate":
            start += ["accelerate.commands.launch", "--multi_gpu", f"--num_processes={work.gpus}"]
            start += ["--num_machines=1", "--main_process_port=0", "-m"]
        return [*start, module]

    def model_args_of(self, work: EvalInput, model: Path) -> dict[str, Scalar]:
        """Return the arguments of the model; the profile's win over the client's."""
        chosen = work.arguments.model_args
        return {**chosen, **self.model_args, self.checkpoint_key: str(model)}

    def check_known(self, work: EvalInput) -> None:
        """Raise if the evaluator's log says that it does not know a task that it was asked for.

        Both evaluators end in the line "ValueError: Tasks not found: a, b" (lm_eval 0.4.13,
        config/evaluate_config.py; lmms_eval 0.7.3, __main__.py, where a sentence follows).
        """
        log = last_lines(work.directory / LOG_NAME, _LOG_LINES)
        named = {name for line in _NOT_FOUND.findall(log) for name in line.split(", ")}
        if unknown := [task for task in work.request.tasks if task in named]:
            raise UnknownTasksError(
                work.program,
                unknown,
                hint=f"see `{self.interpreter} -m {self.listing}`; files of "
                "further tasks belong in a directory of the profile's `include_paths`",
            )


def _is_plain(value: object) -> bool:
    """Return whether a value is plain: one with a slash may be a path, or a repository of code."""
    if isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return abs(value) <= LARGEST  # false for NaN, too
    return (
        isinstance(value, str)
        and 0 < len(value) <= _LONGEST_VALUE
        and value.isprintable()
        and not has_separator(value)
        and "/" not in value
        and set(value) != {"."}
    )


def generation_args(work: EvalInput) -> dict[str, Scalar]:
    """Return the arguments of generation."""
    return parse_arguments(work.arguments.gen_kwargs or "", what="gen_kwargs")
