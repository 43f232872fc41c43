"""lmms-eval (lmms_eval 0.7.3): `python -m lmms_eval --model ... --model_args key=value,...`.

Its exit code is 0 whatever happens (lmms_eval/__main__.py ends in `sys.exit(0)` after an error is
printed). So the results alone count: new, and with numbers for every task that was asked for.
Tags are refused by this: the results keep no record of them.
"""

from collections.abc import Mapping
from pathlib import Path

from unshard.evaluate.server.config.arguments import has_separator, join_arguments, parse_arguments
from unshard.evaluate.server.evaluators.documents import (
    check_exit,
    check_known,
    check_tasks,
    demand_empty,
    launch,
    newest,
    read_document,
)
from unshard.evaluate.server.evaluators.work import Work

__all__ = ["LmmsEvalEvaluator"]

_PROGRAM = "lmms-eval"


class LmmsEvalEvaluator:
    """Runs lmms-eval's own command line."""

    def command(self, work: Work) -> list[str]:
        """Return the command; every value is checked to stay the one value that it is."""
        demand_empty(work.output)
        return [*launch(work, "lmms_eval"), *_arguments(work)]

    def metrics(self, work: Work, returncode: int) -> Mapping[str, float]:
        """Return the numbers of all tasks and groups."""
        if self.results_file(work) is None:
            check_known(work, _PROGRAM)
        check_exit(_PROGRAM, returncode)
        document = read_document(
            self.results_file(work),
            program=_PROGRAM,
            expected="TIME_results.json",
            most_bytes=work.profile.results_bytes,
        )
        return check_tasks(document, work.request.tasks, program=_PROGRAM)

    def results_file(self, work: Work) -> Path | None:
        """Return the file of results."""
        return newest(work.output, "*_results.json")


def _arguments(work: Work) -> list[str]:
    """Return the options, each as one argument, so that no value can be taken for an option.

    lmms-eval appends the output to comma-separated arguments of its own, so it is checked, too.
    """
    chosen, profile = work.request.arguments, work.profile
    model_args = {
        **chosen.model_args,
        **profile.model_args,
        profile.checkpoint_key: str(_named(work)),
    }
    join_arguments({"output_path": str(work.output)}, what=_PROGRAM)
    generation = parse_arguments(chosen.gen_kwargs or "", what="gen_kwargs")
    options: dict[str, object] = {
        "model": profile.model,
        "model_args": join_arguments(model_args, what=f"{_PROGRAM}: model_args"),
        "tasks": ",".join(work.request.tasks),
        "output_path": work.output,
        **chosen.options(),
        "gen_kwargs": join_arguments(generation, what=f"{_PROGRAM}: gen_kwargs") or None,
        "include_path": next(iter(profile.include_paths), None),
        "device": None if work.gpus else "cpu",
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*given, "--log_samples"]


def _named(work: Work) -> Path:
    """Return the model under a name that is one argument: `runs/lr=1e-5,bs=8` would be three."""
    if not has_separator(str(work.model)):
        return work.model
    link = work.directory / "model"
    link.symlink_to(work.model)
    return link
