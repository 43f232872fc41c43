"""lm-eval (lm_eval 0.4.13): `python -m lm_eval run --config job.yaml`.

Everything is written into the YAML file, where a value is a value: nothing in it can become another
argument. The exit code is honest, but for results that cannot be saved (a warning in its log).
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import yaml

from unshard.evaluate.server.config.arguments import parse_arguments
from unshard.evaluate.server.evaluators.documents import (
    check_exit,
    check_known,
    check_tasks,
    demand_empty,
    launch,
    newest,
    read_document,
    table,
)
from unshard.evaluate.server.evaluators.work import Work

__all__ = ["LmEvalEvaluator"]

_PROGRAM = "lm-eval"


class LmEvalEvaluator:
    """Runs lm-eval's own command line."""

    def command(self, work: Work) -> list[str]:
        """Write the job's configuration and return the command that reads it."""
        demand_empty(work.output)
        path = work.directory / "job.yaml"
        path.write_text(yaml.safe_dump(_configuration(work), sort_keys=False), encoding="utf-8")
        return [*launch(work, "lm_eval"), "run", f"--config={path}"]

    def metrics(self, work: Work, returncode: int) -> Mapping[str, float]:
        """Return the numbers of all tasks and groups."""
        if returncode != 0:
            check_known(work, _PROGRAM)
        check_exit(_PROGRAM, returncode)
        document = read_document(
            self.results_file(work),
            program=_PROGRAM,
            expected="results_TIME.json",
            most_bytes=work.profile.results_bytes,
        )
        tasks = _tags_replaced(document, work.request.tasks)
        return check_tasks(document, tasks, program=_PROGRAM)

    def results_file(self, work: Work) -> Path | None:
        """Return the file of results."""
        return newest(work.output, "results_*.json")


def _configuration(work: Work) -> dict[str, object]:
    """Return the keys of lm_eval/config/evaluate_config.py that differ from their defaults.

    The output is named as a file: below a directory, lm-eval would make another with the whole path
    of the model in its name, fail when that is longer than a file name can be, and say nothing.
    """
    request, profile = work.request, work.profile
    chosen = request.arguments
    given: dict[str, object] = {
        **chosen.options(),
        "gen_kwargs": parse_arguments(chosen.gen_kwargs or "", what="gen_kwargs") or None,
        "include_path": [str(path) for path in profile.include_paths] or None,
        "device": None if work.gpus else "cpu",
    }
    return {
        "model": profile.model,
        "model_args": {
            **chosen.model_args,
            **profile.model_args,
            profile.checkpoint_key: str(work.model),
        },
        "tasks": list(request.tasks),
        "output_path": str(work.output / "results.json"),
        "log_samples": True,
        **{key: value for key, value in given.items() if value is not None},
    }


def _tags_replaced(document: Mapping[str, object], tasks: Collection[str]) -> Collection[str]:
    """Replace tags, of which the results keep no record, by the tasks that nothing else explains.

    lm-eval has ended well and is known to refuse names that mean nothing.
    """
    results, groups = table(document, "results"), table(document, "group_subtasks")
    named = [task for task in tasks if task in results or task in groups]
    explained, waiting = set[str](), list(named)
    while waiting:
        task = waiting.pop()
        parts = groups.get(task)
        if task not in explained and isinstance(parts, list):
            waiting += [str(part) for part in parts]
        explained.add(task)
    tagged = sorted(results.keys() - explained)
    return [*named, *tagged] if tagged else tasks
