"""Any other program, by a profile's `command`.

It writes a JSON file with `{task: {metric: number}}`, or flat: `{"task/metric": number}`,
`{task: number}` (the metric is then called "score"), or for one task `{metric: number}`. For any
other form, `metrics` of the profile has the paths of the numbers.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from unshard.errors import UsageError
from unshard.evaluate.jobs import OPTIONS, Arguments, EvaluationError
from unshard.evaluate.server.config.arguments import (
    PLACEHOLDERS,
    fill,
    has_lone_brace,
    placeholders_in,
)
from unshard.evaluate.server.config.keys import NonEmptyText, Texts
from unshard.evaluate.server.evaluators.documents import (
    FACTS,
    Numbers,
    check_tasks,
    is_path_of_numbers,
    numbers_at,
    read_results,
)
from unshard.evaluate.server.evaluators.work import EvalInput, Profile, Scores, started
from unshard.evaluate.server.roots import not_accepted
from unshard.evaluate.values import expected, expects

COMMAND_EXPECTED = (
    "a list of arguments, which may have "
    + ", ".join(f"{{{name}}}" for name in sorted(PLACEHOLDERS))
    + "; {{ and }} are braces"
)


def _checked(command: tuple[str, ...]) -> tuple[str, ...]:
    """Raise for a brace without a meaning, or for text of clients inside other text."""
    for part in command:
        if has_lone_brace(part):
            raise expected(f"doubled braces, {{{{ and }}}}, where braces stay, in {part!r:.100}")
        if _FREE_TEXT in part and not _OWN_ARGUMENT.fullmatch(part):
            raise expected(
                f"{_FREE_TEXT} as an argument of its own, or right after an option and `=`"
            )
    return command


def _is_command(command: tuple[str, ...]) -> bool:
    return command != () and placeholders_in(command) <= PLACEHOLDERS


def _is_below_output(text: str) -> bool:
    try:
        next(Path(os.devnull).glob(text), None)
    except (ValueError, NotImplementedError):  # not a pattern, or an absolute path
        return False
    return ".." not in Path(text).parts


_FREE_TEXT = "{system_instruction}"
_OWN_ARGUMENT = re.compile(r"(?:--?[A-Za-z0-9][\w-]*=)?\{system_instruction\}", re.ASCII)


def _named_file(part: str) -> Path | None:
    """Return the file of an argument that is a path, or ends with `=` and a path."""
    for text in (part, part.partition("=")[2]):
        is_fixed = text.startswith("/") and not placeholders_in([text])
        if is_fixed and os.path.isfile(text):  # noqa: PTH113  (false where `is_file` would raise)
            return Path(text)
    return None


def _is_binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


class CommandProfile(Profile):
    """A profile of any other program."""

    needs_config: ClassVar[bool] = False
    settings: ClassVar[frozenset[str]] = frozenset({"results", "metrics"})
    kind: Literal["command"] = "command"
    command: Annotated[
        Texts,
        expects(COMMAND_EXPECTED, _is_command),
        AfterValidator(_checked),
        AfterValidator(started),
    ]
    """The program and its arguments; no shell reads them."""
    results: Annotated[
        NonEmptyText, expects("a file below the output directory", _is_below_output)
    ] = "results.json"
    """The file below {output} with the numbers; with `*`, the newest of these files."""
    metrics: Annotated[
        Texts,
        expects(
            "paths such as scores.*, or results.*.acc", lambda it: all(map(is_path_of_numbers, it))
        ),
    ] = ()
    """Where the numbers are in that file, as paths of keys; none: it has one of the four forms."""

    @property
    def start(self) -> tuple[str, ...]:
        """The command, whose placeholders each job fills in."""
        return self.command

    @property
    def files(self) -> Mapping[str, Path]:
        """The config, and files that the command names; not programs, which are installed."""
        named = {f"command.{index}": _named_file(part) for index, part in enumerate(self.command)}
        own = {key: path for key, path in named.items() if path and not _is_binary(path)}
        return {**super().files, **own}

    def list_settings(self) -> dict[str, object]:
        """Return the values of `settings`, and the command without the directories of files."""
        named = ((part, _named_file(part)) for part in self.command)
        parts = [part.replace(str(path), path.name) if path else part for part, path in named]
        parts[0] = re.sub(r"^python[0-9.]+$", "python", Path(parts[0]).name)
        return {**super().list_settings(), "command": parts}

    def list_untaken(self, chosen: Arguments) -> Iterator[UsageError]:
        """Yield also the arguments that the command would ignore."""
        yield from super().list_untaken(chosen)
        taken = {"num_gpus", *placeholders_in(self.command)}
        for name, value in chosen.given().items():
            if name not in taken:
                why = f"has no {{{name}}}" if name in OPTIONS else f"takes no {name}"
                yield not_accepted(name, value, expected=f"nothing: the profile's command {why}")

    def command_line(self, work: EvalInput) -> list[str]:
        """Fill in the placeholders; each argument stays one, whatever its values are."""
        request = work.request
        values = {
            "checkpoint": str(work.model),
            "output": str(work.output),
            "tasks": ",".join(request.tasks),
            "step": "" if request.step is None else str(request.step),
            "weights": request.weights,
            "run": request.run,
            **dict.fromkeys(OPTIONS, ""),
            **{name: _as_text(value) for name, value in work.arguments.options().items()},
        }
        return [fill(part, values) for part in self.command]

    def read_scores(self, work: EvalInput, returncode: int) -> Scores:
        """Return the numbers of all tasks, in any of the forms."""
        tasks, file = work.request.tasks, self._find_results(work.output)
        document = read_results(work, file, returncode, expected=self.results)
        results = (
            numbers_at(document, self.metrics, tasks) if self.metrics else _forms(document, tasks)
        )
        if self.metrics and not results:
            raise EvaluationError(
                f"{file}: {work.program}'s results have no number where the profile expects them",
                expected=f"metrics: {', '.join(self.metrics)}",
                found=f"keys: {', '.join(document)}"[:1000],
            )
        return check_tasks(
            {**document, "results": results, "group_subtasks": None},
            tasks,
            program=work.program,
            file=file,
        )

    def _find_results(self, output: Path) -> Path | None:
        """Return the results of the command, the newest of several files."""
        path = output / self.results
        files = [path] if path.is_file() or "*" not in self.results else output.glob(self.results)
        existing = filter(Path.is_file, files)
        return max(existing, key=lambda path: path.stat().st_mtime_ns, default=None)


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _forms(document: Mapping[str, object], tasks: Sequence[str]) -> Numbers:
    """Return the numbers of a document in any of the four forms."""
    results: Numbers = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            if name in tasks or name not in FACTS:
                results.setdefault(name, {}).update(value)
            continue
        task, slash, metric = name.rpartition("/")
        if name in tasks:
            task, metric = name, "score"
        elif not slash:
            task = tasks[0] if len(tasks) == 1 else ""
        if task:
            results.setdefault(task, {})[metric] = value
    return results
