"""The evaluators: which command line each has, and how its results are read.

lm-eval (lm_eval 0.4.13) is `python -m lm_eval run --config job.yaml`. Everything is written into
the YAML file, where a value is a value: nothing in it can become another argument. The exit code is
honest, but for results that cannot be saved (a warning in its log). Where nothing is merged,
`evaluators.direct` runs it.

lmms-eval (lmms_eval 0.7.3) is `python -m lmms_eval --model ... --model_args key=value,...`. Its
exit code is 0 whatever happens (lmms_eval/__main__.py ends in `sys.exit(0)` after an error is
printed). So the results alone count: new, and with numbers for every task that was asked for. Tags
are refused by this: the results keep no record of them.

Any other program writes a JSON file with `{task: {metric: number}}`, or flat:
`{"task/metric": number}`, `{task: number}` (the metric is then called "score"), or for one task
`{metric: number}`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from unshard.evaluate.jobs import OPTIONS, EvaluationError
from unshard.evaluate.server.config.arguments import (
    fill,
    has_separator,
    join_arguments,
    parse_arguments,
)
from unshard.evaluate.server.config.profiles import (
    CommandProfile,
    HarnessProfile,
    LmEvalProfile,
    LmmsEvalProfile,
    Profile,
    keeps_engine,
    profile_named,
)
from unshard.evaluate.server.evaluators.answers import place_of_answers
from unshard.evaluate.server.evaluators.direct import MODEL_TYPE
from unshard.evaluate.server.evaluators.documents import (
    check_known,
    check_tasks,
    find_newest,
    read_results,
    replace_tags,
)
from unshard.evaluate.server.evaluators.installed import MODULES, is_direct
from unshard.evaluate.server.evaluators.work import Evaluator, Measured, Work
from unshard.evaluate.values import Scalar

DIRECT = "unshard.evaluate.server.evaluators.direct"
"""The module that runs lm-eval where nothing is merged."""

_WORKER = "unshard.evaluate.server.warm.worker"
_CLIENT = "unshard.evaluate.server.warm.client"
_MARGIN_S = 60.0  # in which the server ends it first, if there is one


def make_evaluator(profile: Profile) -> Evaluator:
    """Return the evaluator of a profile."""
    match profile:
        case LmEvalProfile():
            return _LmEval(profile)
        case LmmsEvalProfile():
            return _LmmsEval(profile)
        case CommandProfile():
            return _Command(profile)


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


@dataclass(frozen=True, slots=True)
class _LmEval:
    """Runs lm-eval's own command line."""

    profile: LmEvalProfile

    def command(self, work: Work) -> list[str]:
        """Write the keys of lm_eval/config/evaluate_config.py that differ from their defaults.

        Where an engine is kept, the command hands them over to its worker, which is to be added.

        The output is named as a file: below a directory, lm-eval would make another with the whole
        path of the model in its name, fail when that is longer than a file name can be, and say
        nothing.
        """
        _demand_empty(work.output)
        options: dict[str, object] = {
            "model": _model_type(self.profile),
            "model_args": _model_args(self.profile, work, work.model),
            "tasks": list(work.request.tasks),
            "output_path": str(work.output / "results.json"),
            "log_samples": True,
            "use_cache": place_of_answers(work) if self.profile.resume else None,
            **work.request.arguments.options(),
            "gen_kwargs": _generation(work) or None,
            "include_path": [str(path) for path in self.profile.include_paths] or None,
            "device": None if work.gpus else "cpu",
        }
        given = {key: value for key, value in options.items() if value is not None}
        path = work.directory / "job.yaml"
        path.write_text(yaml.safe_dump(given, sort_keys=False), encoding="utf-8")
        return [*_module_command(self.profile, work), "run", f"--config={path}"]

    def measured(self, work: Work, returncode: int) -> Measured:
        """Return the numbers of all tasks and groups."""
        if returncode != 0:
            check_known(work, self.profile)
        results = self.results_file(work)
        document = read_results(work, results, returncode, expected="results_TIME.json")
        tasks = replace_tags(document, work.request.tasks)
        return check_tasks(document, tasks, program=work.program)

    def results_file(self, work: Work) -> Path | None:
        """Return the file of results."""
        return find_newest(work.output, "results_*.json")


@dataclass(frozen=True, slots=True)
class _LmmsEval:
    """Runs lmms-eval's own command line."""

    profile: LmmsEvalProfile

    def command(self, work: Work) -> list[str]:
        """Return the command; each option is one argument, so no value can become another option.

        lmms-eval appends the output to comma-separated arguments of its own, so it is checked, too.
        """
        _demand_empty(work.output)
        model = work.model
        if has_separator(str(model)):  # `runs/lr=1e-5,bs=8` would be three arguments
            model = work.directory / "model"
            model.symlink_to(work.model)
        join_arguments({"output_path": str(work.output)}, what=work.program)
        model_args = join_arguments(
            _model_args(self.profile, work, model), what=f"{work.program}: model_args"
        )
        generation = join_arguments(_generation(work), what=f"{work.program}: gen_kwargs")
        options: dict[str, object] = {
            "model": self.profile.model,
            "model_args": model_args,
            "tasks": ",".join(work.request.tasks),
            "output_path": work.output,
            **work.request.arguments.options(),
            "gen_kwargs": generation or None,
            "include_path": next(iter(self.profile.include_paths), None),
            "device": None if work.gpus else "cpu",
        }
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return [*_module_command(self.profile, work), *given, "--log_samples"]

    def measured(self, work: Work, returncode: int) -> Measured:
        """Return the numbers of all tasks and groups."""
        results = self.results_file(work)
        if results is None:
            check_known(work, self.profile)
        document = read_results(work, results, returncode, expected="TIME_results.json")
        return check_tasks(document, work.request.tasks, program=work.program)

    def results_file(self, work: Work) -> Path | None:
        """Return the file of results."""
        return find_newest(work.output, "*_results.json")


@dataclass(frozen=True, slots=True)
class _Command:
    """Runs the command of the profile, without a shell."""

    profile: CommandProfile

    def command(self, work: Work) -> list[str]:
        """Fill in the profile's arguments; each stays one argument, whatever is filled in."""
        _demand_empty(work.output)
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
        return [fill(part, values) for part in self.profile.command]

    def measured(self, work: Work, returncode: int) -> Measured:
        """Return the numbers of all tasks, whatever form the program chose."""
        results_file, tasks = self.results_file(work), work.request.tasks
        document = read_results(work, results_file, returncode, expected=self.profile.results)
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
        )

    def results_file(self, work: Work) -> Path | None:
        """Return the file that the profile names, if it is there."""
        path = work.output / self.profile.results
        return path if path.is_file() else None


def _demand_empty(directory: Path) -> None:
    """Raise unless a directory is empty: what is there later is then new."""
    if directory.is_dir() and any(directory.iterdir()):
        raise EvaluationError(
            f"{directory} already contains files", expected="a fresh directory for every attempt"
        )


def _module_command(profile: HarnessProfile, work: Work) -> list[str]:
    """Return the beginning of the command line of lm-eval or lmms-eval, on all GPUs of the work.

    `accelerate launch` is left out for one process: it would start it without the variables that
    `Accelerator()` then asks for. Port 0 lets it choose a free one, so that jobs do not meet.
    """
    if keeps_engine(profile):
        return [sys.executable, "-m", _CLIENT]
    start = [profile.interpreter, "-m"]
    if work.gpus > 1 and profile.launcher == "accelerate":
        start += ["accelerate.commands.launch", "--multi_gpu", f"--num_processes={work.gpus}"]
        start += ["--num_machines=1", "--main_process_port=0", "-m"]
    return [*start, DIRECT if is_direct(profile) else MODULES[profile.kind]]


def worker_command(profile: LmEvalProfile) -> list[str]:
    """Return the command line of a process that keeps an engine for a profile's jobs.

    It ends by itself, too, when it has no jobs: the server may be gone.
    """
    return [profile.interpreter, "-m", _WORKER, str(profile.idle_timeout + _MARGIN_S)]


def _model_type(profile: LmEvalProfile) -> str:
    """Return what lm-eval calls the type of model."""
    is_ours = is_direct(profile) and not keeps_engine(profile)
    return MODEL_TYPE if is_ours else profile.model


def _model_args(profile: HarnessProfile, work: Work, model: Path) -> dict[str, Scalar]:
    """Return the arguments of the model; the profile's win over the client's."""
    chosen = work.request.arguments.model_args
    return {**chosen, **profile.model_args, profile.checkpoint_key: str(model)}


def _generation(work: Work) -> dict[str, Scalar]:
    return parse_arguments(work.request.arguments.gen_kwargs or "", what="gen_kwargs")
