"""`unshard eval`: the server, and the commands about jobs."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unshard.cli.evaluate.live import show_again
from unshard.cli.evaluate.show import job_lines, print_jobs, result_lines, wait_for
from unshard.cli.options import Json, flag, option
from unshard.cli.parser.parameters import argument
from unshard.cli.running import error_fields, front_of, say
from unshard.errors import UnshardError, UsageError, how_to_install

if TYPE_CHECKING:
    from unshard.evaluate.client.v1 import EvalClient

URL = "http://127.0.0.1:8000"
_ALL = 1_000_000  # jobs
FAILED = 1
"""The exit code if a job did not complete, or a checkpoint was not accepted."""

ServerUrl = Annotated[
    str,
    option("URL", "URL of the server.", None, "--server", envvar="UNSHARD_EVAL_SERVER"),
]
TokenFile = Annotated[
    Path | None,
    option("FILE", "A file that contains the server's token.", envvar="UNSHARD_EVAL_TOKEN_FILE"),
]
JobId = Annotated[str, argument("JOB", "The job's id, or its beginning.")]
BaseModel = Annotated[
    str | None,
    option(
        "MODEL",
        "The model that training began with, evaluated once as step 0: a Hugging Face "
        "directory, or the id of a model that was downloaded from the hub.",
    ),
]
RandomSeed = Annotated[
    int | None,
    option(
        "N",
        "Seed of the evaluator's random generators.  [default: the evaluator's own]",
        limits=(0, 2**32 - 1),
    ),
]


Watch = Annotated[
    bool,
    flag(
        "--watch",
        "Show it again and again, until Ctrl-C; where stdout is not a terminal, print it when "
        "it has changed.",
    ),
]
Interval = Annotated[
    float, option("SECONDS", "How often --watch asks the server.", limits=(0.05, None))
]
Csv = Annotated[bool, flag("--csv", "Print CSV.")]
HigherIsBetter = Annotated[
    bool | None,
    flag(
        "--higher-is-better/--lower-is-better",
        "Which value is the best.  [default: what the evaluator says of the metric]",
    ),
]


def connect(url: str, token_file: Path | None) -> "EvalClient":
    """Return a client of the server; nothing is sent yet.

    Raises:
        UsageError: httpx is not installed, or the URL or the token cannot be one.
    """
    check_installed("httpx", "pydantic")
    from unshard.evaluate.client.v1 import EvalClient
    from unshard.evaluate.credentials import read_token, split_url

    split_url(url, what="--server")
    what = f"--token-file {token_file}"
    token = None if token_file is None else read_token(token_file, what=what)
    return EvalClient(url, token=token)


def check_installed(*modules: str) -> None:
    """Raise UsageError, with the command that installs them, unless all modules are there."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        packages = " ".join("pyyaml" if name == "yaml" else name for name in missing)
        raise UsageError(f"not installed: {packages}", hint=how_to_install(packages, "eval"))


def submit(
    checkpoint: Annotated[Path, argument("CHECKPOINT", "The checkpoint.")],
    tasks: Annotated[str, option("A,B", "Tasks to evaluate.")],
    profile: Annotated[
        str, option("NAME", "One of the evaluators that the server offers.")
    ] = "lm-eval",
    step: Annotated[
        int | None, option("N", "The training step.  [default: from the directory's name]")
    ] = None,
    run: Annotated[
        str,
        option(
            "RUN",
            "The training run: a name for it, or for a model that is in no run's directory, "
            "this directory.  [default: the run directory's name]",
        ),
    ] = "",
    weights: Annotated[str, option("model,ema", "Which weights; one job for each.")] = "model",
    base: BaseModel = None,
    limit: Annotated[
        str | None,
        option("N", "Documents of each task; below 1, a share of them."),
    ] = None,
    num_fewshot: Annotated[
        int | None, option("N", "Examples in each prompt.", limits=(0, None))
    ] = None,
    batch_size: Annotated[
        str | None, option("N|auto", "Batch size of the evaluator's model.")
    ] = None,
    num_gpus: Annotated[
        int | None, option("N", "How many GPUs the job gets.", limits=(0, None))
    ] = None,
    model_args: Annotated[
        str | None,
        option("KEY=VALUE,...", "Arguments of the evaluator's model."),
    ] = None,
    gen_kwargs: Annotated[str | None, option("KEY=VALUE,...", "Arguments of generation.")] = None,
    seed: RandomSeed = None,
    again: Annotated[bool, flag("--again", "Evaluate again what has been evaluated.")] = False,
    wait: Annotated[
        bool,
        flag(
            "--wait",
            "Wait until the jobs have ended, and print their progress; exit code 1 unless all "
            "completed.",
        ),
    ] = False,
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Queue evaluations of a checkpoint."""
    from unshard.evaluate.jobs import BASE_STEP
    from unshard.evaluate.server.config.arguments import parse_arguments, read_scalar
    from unshard.evaluate.trainer.base_model import find_base
    from unshard.evaluate.values import split_names
    from unshard.stores.remote_path import is_url, path_of

    with connect(server, token_file) as client:
        # The server checks it: it may see other paths.
        is_here = not is_url(checkpoint)
        path = os.path.realpath(checkpoint) if is_here else str(path_of(checkpoint))
        names = split_names(tasks)
        chosen: dict[str, Any] = {  # which the server checks
            "limit": limit and read_scalar(limit),
            "batch_size": batch_size and read_scalar(batch_size),
            "model_args": model_args and parse_arguments(model_args, what="--model-args"),
            "num_fewshot": num_fewshot,
            "num_gpus": num_gpus,
            "gen_kwargs": gen_kwargs,
            "seed": seed,
            "again": again,
        }
        run, place = ("", os.path.realpath(run)) if "/" in run else (run, None)
        base = None if base is None else find_base(base)
        jobs: list[dict[str, object]] = []
        try:
            for one in split_names(weights):
                of_run: dict[str, Any] = {"run": run, "directory": place, "weights": one}
                jobs.append(client.submit(path, step, profile, names, **of_run, **chosen))
            if base is not None:
                place = str(jobs[0]["run_directory"]) or None
                of_run = {"run": run, "directory": place}
                jobs.append(client.submit(base, BASE_STEP, profile, names, **of_run, **chosen))
        except UnshardError as error:
            error.front = front_of(submit, {"checkpoint": checkpoint})
            _print_refused(error, jobs, as_json=as_json)
        if wait:
            jobs = wait_for(client, [str(job["id"]) for job in jobs])
    print_jobs(jobs, as_json=as_json)
    if wait and any(job["status"] != "completed" for job in jobs):
        raise SystemExit(FAILED)


def _print_refused(error: UnshardError, jobs: list[dict[str, object]], *, as_json: bool) -> None:
    """Print the jobs that the server accepted, then why it refused the next one, and exit."""
    if not jobs:
        raise error
    if as_json:
        print(json.dumps({"jobs": jobs, "error": error_fields(error)}))
    else:
        print_jobs(jobs, as_json=False)
    say(f"error: {error}")
    raise SystemExit(error.exit_code) from error


def retry(
    jobs: Annotated[list[str], argument("JOB...", "Ids of jobs, or their beginnings.")],
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Queue jobs again that have ended. A completed job stays, and a new one evaluates again."""
    queued: list[dict[str, object]] = []
    with connect(server, token_file) as client:
        try:
            for job in jobs:
                queued.append(client.retry(job))  # noqa: PERF401  (some, if one is refused)
        except UnshardError as error:
            _print_refused(error, queued, as_json=as_json)
    print_jobs(queued, as_json=as_json)


def status(
    job: Annotated[
        str | None,
        argument("JOB", "A job's id, or its beginning.  [default: the newest 100 jobs]"),
    ] = None,
    run: Annotated[str | None, option("RUN", "Only jobs of this run.")] = None,
    watch: Watch = False,
    interval: Interval = 2.0,
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show the status of jobs."""
    with connect(server, token_file) as client:
        from unshard.evaluate.client.v1 import ServerAwayError

        # If the server does not answer this, the next request fails with the reason.
        with contextlib.suppress(ServerAwayError):
            for problem in client.problems():
                say(f"warning: the server accepts no jobs now: {problem}")

        def read() -> list[str]:
            jobs = [client.job(job)] if job else client.jobs(run=run)
            return job_lines(jobs, run=run, as_json=as_json)

        _show(read, interval if watch else None)


def cancel(
    job: Annotated[str | None, argument("JOB", "The job's id, or its beginning.")] = None,
    profile: Annotated[
        str | None,
        option("NAME", "Instead of a job: all that wait for this profile."),
    ] = None,
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Cancel a job, or all that wait for a profile."""
    if (job is None) == (profile is None):
        raise UsageError("cancel takes a job, or --profile NAME", expected="one of the two")
    with connect(server, token_file) as client:
        waiting = [] if profile is None else client.jobs(status="queued", limit=_ALL)
        names = [str(one["id"]) for one in waiting if profile in _names_of(one["profile"])]
        jobs = [client.cancel(name) for name in ([job] if job else names)]
        if jobs or as_json:
            print_jobs(jobs, as_json=as_json)
        else:
            print(f"no jobs of profile {profile} wait")


def _names_of(profile: object) -> tuple[str, str]:
    """Return the names by which a job's profile is known: "profile:type", and "profile"."""
    return str(profile), str(profile).partition(":")[0]


def logs(
    job: JobId,
    follow: Annotated[
        bool, flag("--follow", "Keep printing until the job ends.", None, "-f")
    ] = False,
    server: ServerUrl = URL,
    token_file: TokenFile = None,
) -> None:
    """Print a job's log."""
    with connect(server, token_file) as client:
        offset = 0
        while True:
            part = client.log(job, offset)
            # Each state of a progress bar is a separate line.
            lines = str(part["text"]).replace("\r\n", "\n").replace("\r", "\n")
            print(lines, end="", flush=True)
            if part["ended"] or not (follow or part["text"]):
                return
            after = int(str(part["offset"]))
            if after == offset:
                time.sleep(1)
            offset = after


def results(
    run: Annotated[str | None, option("RUN", "Only results of this run.")] = None,
    best: Annotated[
        list[str] | None,
        option(
            "TASK/METRIC",
            "Mark the step of each run with the best value; repeated: with the best mean.",
        ),
    ] = None,
    higher_is_better: HigherIsBetter = None,
    hidden: Annotated[
        bool, flag("--hidden", "Print those that are hidden, too, with the reason.")
    ] = False,
    watch: Watch = False,
    interval: Interval = 2.0,
    as_csv: Csv = False,
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Print all results, each with its training step."""
    if higher_is_better is not None and not best:
        raise UsageError(
            "--higher-is-better and --lower-is-better apply to --best, which was not given",
            hint="add --best TASK/METRIC",
        )
    with connect(server, token_file) as client:
        from unshard.evaluate.comparing import as_results, best_numbers

        def read() -> list[str]:
            found, marked = client.results(run=run, hidden=hidden), None
            if best:
                better = higher_is_better
                shown = [one for one in as_results(found) if one.hidden is None]
                marked = best_numbers(shown, best, higher_is_better=better)
            return result_lines(found, run=run, as_csv=as_csv, as_json=as_json, best=marked)

        _show(read, interval if watch else None)


def _show(read: Callable[[], list[str]], every_s: float | None) -> None:
    """Print lines, once or again and again."""
    if every_s is None:
        print("\n".join(read()))
    else:
        show_again(read, every_s)
