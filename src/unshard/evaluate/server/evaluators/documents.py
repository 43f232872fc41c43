"""Find and read the file of results that an evaluator wrote, and see whether it is complete."""

import json
import os
import re
import signal
from collections.abc import Collection, Mapping
from pathlib import Path

from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.server.evaluators.metrics import metrics_of, without_numbers
from unshard.evaluate.server.evaluators.unknown_tasks import UnknownTasksError
from unshard.evaluate.server.evaluators.work import Work
from unshard.evaluate.server.processes.bounded_log import last_lines
from unshard.evaluate.server.processes.supervise import LOG_NAME

__all__ = [
    "check_exit",
    "check_known",
    "check_tasks",
    "demand_empty",
    "launch",
    "newest",
    "read_document",
    "table",
]

_LOG_LINES = 100
_NOT_FOUND = re.compile(r"Tasks not found: (.*?)(?:\. Try .*)?$", re.MULTILINE)
_LISTING = {"lm-eval": "lm_eval ls tasks", "lmms-eval": "lmms_eval --tasks list"}
_LOG = "the log of the job says why"
_MOST_METRICS = 10_000
_MOST_NAMES = 1 << 20  # bytes of all names together: a job is one answer of the server


def launch(work: Work, module: str) -> list[str]:
    """Return the beginning of a command line that runs a module, on all GPUs that the work has.

    `accelerate launch` is left out for one process: it would start it without the variables that
    `Accelerator()` then asks for. Port 0 lets it choose a free one, so that jobs do not meet.
    """
    start = [work.profile.interpreter, "-m"]
    if work.gpus > 1 and work.profile.launcher == "accelerate":
        start += ["accelerate.commands.launch", "--multi_gpu", f"--num_processes={work.gpus}"]
        start += ["--num_machines=1", "--main_process_port=0", "-m"]
    return [*start, module]


def demand_empty(directory: Path) -> None:
    """Raise unless there is nothing in a directory: what is there later is then new."""
    if directory.is_dir() and any(directory.iterdir()):
        raise EvaluationError(
            f"{directory} already contains files", expected="a fresh directory for every attempt"
        )


def check_exit(program: str, returncode: int) -> None:
    """Raise unless the program ended well."""
    if returncode == 0:
        return
    raise EvaluationError(f"{program} failed", found=_ending(returncode), hint=_LOG)


def _ending(returncode: int) -> str:
    if returncode > 0:
        return f"exit code {returncode}"
    names = {number.value: number.name for number in signal.Signals}
    return f"ended by {names.get(-returncode, f'signal {-returncode}')}"


def check_known(work: Work, program: str) -> None:
    """Raise if the evaluator's log says that it does not know a task that it was asked for.

    Both evaluators end in the line "ValueError: Tasks not found: a, b" (lm_eval 0.4.13,
    config/evaluate_config.py; lmms_eval 0.7.3, __main__.py, where a sentence follows).
    """
    log = last_lines(work.directory / LOG_NAME, _LOG_LINES)
    named = {name for line in _NOT_FOUND.findall(log) for name in line.split(", ")}
    if unknown := [task for task in work.request.tasks if task in named]:
        raise UnknownTasksError(
            program,
            unknown,
            hint=f"see `{work.profile.interpreter} -m {_LISTING[program]}`; files of further tasks "
            "belong in a directory of the profile's `include_paths`",
        )


def newest(directory: Path, pattern: str) -> Path | None:
    """Return the file below a directory that was written last, of those whose name fits."""
    files = [path for path in directory.rglob(pattern) if path.is_file() and not path.is_symlink()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def read_document(
    path: Path | None, *, program: str, expected: str, most_bytes: int
) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        EvaluationError: there is no file, or it is too large, or has something else in it.
    """
    if path is None:
        raise EvaluationError(f"{program} wrote no results", expected=expected, hint=_LOG)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise EvaluationError(
                    f"{path}: {program}'s results are too large to be read",
                    expected=f"at most {most_bytes} bytes",
                    found=f"{size} bytes",
                    hint="set `results_bytes` of the profile in the server's configuration",
                )
            document = json.loads(file.read(size))
    except (OSError, ValueError, RecursionError) as error:
        raise EvaluationError(f"{path}: {program}'s results cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise EvaluationError(f"{path}: {program}'s results cannot be read", expected="an object")
    return document


def table(document: Mapping[str, object], key: str) -> dict[str, object]:
    """Return the mapping under a key; empty if there is none."""
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def check_tasks(
    document: Mapping[str, object], tasks: Collection[str], *, program: str
) -> dict[str, float]:
    """Return the metrics of a document that names every one of the tasks, with numbers.

    A group has numbers if it has its own or all of its tasks have.

    Raises:
        EvaluationError: a task is not named, or has no finite number; or there are too many.
    """
    metrics = metrics_of(table(document, "results"))
    size = sum(len(name.encode("utf-8", "backslashreplace")) for name in metrics)
    if len(metrics) > _MOST_METRICS or size > _MOST_NAMES:
        raise EvaluationError(
            f"{program}'s results have too many numbers, or too long names",
            expected=f"at most {_MOST_METRICS} numbers, whose names have {_MOST_NAMES} bytes",
            found=f"{len(metrics)} numbers, whose names have {size} bytes",
        )
    missing = without_numbers(_leaves(document, tasks, metrics), metrics)
    if metrics and not missing:
        return metrics
    there = f"{', '.join(sorted(table(document, 'results'))):.1000}" or "no task"
    raise EvaluationError(
        f"{program}'s results have no finite number for: {', '.join(missing or tasks)}",
        expected=", ".join(tasks),
        found=there,
        hint=_LOG,
    )


def _leaves(
    document: Mapping[str, object], tasks: Collection[str], metrics: Mapping[str, float]
) -> list[str]:
    """Replace each group that has no numbers of its own by its tasks, however deep."""
    groups = table(document, "group_subtasks")
    leaves: dict[str, None] = {}
    waiting, seen = list(tasks), set[str]()
    while waiting:
        task = waiting.pop()
        if task in seen:
            continue
        seen.add(task)
        parts = groups.get(task)
        if isinstance(parts, list) and parts and without_numbers([task], metrics):
            waiting += [str(part) for part in parts]
        else:
            leaves[task] = None
    return sorted(leaves)
