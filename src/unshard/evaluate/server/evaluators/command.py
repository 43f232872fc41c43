"""Any other program, which a profile has the command of.

It writes a JSON file with `{task: {metric: number}}`, or flat: `{"task/metric": number}`,
`{task: number}` (the metric is then called "score"), or for one task `{metric: number}`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, ValidationInfo

from unshard.errors import UsageError
from unshard.evaluate.jobs import OPTIONS, Arguments
from unshard.evaluate.server.config.arguments import PLACEHOLDERS, fill, placeholders_in
from unshard.evaluate.server.config.keys import NonEmptyText, Texts, find_program
from unshard.evaluate.server.evaluators.documents import check_tasks, read_results
from unshard.evaluate.server.evaluators.work import Measured, Profile, Work
from unshard.evaluate.server.roots import not_accepted
from unshard.evaluate.values import expects

COMMAND_EXPECTED = (
    "a list of arguments, which may have "
    + ", ".join(f"{{{name}}}" for name in sorted(PLACEHOLDERS))
    + "; {{ and }} are braces"
)


def _started(command: tuple[str, ...], info: ValidationInfo[Path | None]) -> tuple[str, ...]:
    """Return a command whose program exists, if it is a path: others may be in another PATH."""
    return (find_program(command[0], info), *command[1:]) if "/" in command[0] else command


def _is_command(command: tuple[str, ...]) -> bool:
    return command != () and placeholders_in(command) <= PLACEHOLDERS


def _is_below_output(text: str) -> bool:
    return not Path(text).is_absolute() and ".." not in Path(text).parts


class CommandProfile(Profile):
    """A profile of any other program."""

    needs_config: ClassVar[bool] = False
    kind: Literal["command"] = "command"
    command: Annotated[Texts, expects(COMMAND_EXPECTED, _is_command), AfterValidator(_started)]
    """The arguments, with placeholders such as {checkpoint}; no shell reads them."""
    results: Annotated[
        NonEmptyText, expects("a file below the output directory", _is_below_output)
    ] = "results.json"
    """The file below {output} that the command writes its numbers to."""

    @property
    def start(self) -> tuple[str, ...]:
        """The command, whose placeholders each job fills in."""
        return self.command

    def list_unfitting(self, chosen: Arguments) -> Iterator[UsageError]:
        """Yield the arguments that the command would ignore silently."""
        taken = {"num_gpus", *placeholders_in(self.command)}
        for name, value in chosen.given().items():
            if name not in taken:
                why = f"has no {{{name}}}" if name in OPTIONS else f"takes no {name}"
                yield not_accepted(name, value, expected=f"nothing: the profile's command {why}")

    def command_line(self, work: Work) -> list[str]:
        """Fill in the profile's arguments; each stays one argument, whatever is filled in."""
        request = work.request
        values = {
            "checkpoint": str(work.model),
            "output": str(work.output),
            "tasks": ",".join(request.tasks),
            "step": "" if request.step is None else str(request.step),
            "weights": request.weights,
            "run": request.run,
            **dict.fromkeys(OPTIONS, ""),
            **{name: str(value) for name, value in request.arguments.options().items()},
        }
        return [fill(part, values) for part in self.command]

    def measured(self, work: Work, returncode: int) -> Measured:
        """Return the numbers of all tasks, whatever form the program chose."""
        path, tasks = work.output / self.results, work.request.tasks
        file = path if path.is_file() else None
        document = read_results(work, file, returncode, expected=self.results)
        results: dict[str, dict[str, object]] = {}
        for name, value in document.items():
            if isinstance(value, Mapping):
                results.setdefault(name, {}).update(value)
                continue
            task, slash, metric = name.rpartition("/")
            if name in tasks:
                task, metric = name, "score"
            elif not slash:
                task = tasks[0] if len(tasks) == 1 else ""
            if task:
                results.setdefault(task, {})[metric] = value
        return check_tasks(
            {"results": results, "higher_is_better": document.get("higher_is_better")},
            tasks,
            program=work.program,
            file=file,
        )
