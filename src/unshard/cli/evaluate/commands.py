"""The commands of `unshard eval` about jobs and results."""

import contextlib
import json
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unshard.cli.evaluate.show import (
    csv_lines,
    job_lines,
    print_jobs,
    result_lines,
    show_lines,
    wait_for,
)
from unshard.cli.options import Json, flag, option
from unshard.cli.parser.parameters import argument
from unshard.cli.running import error_fields, front_of, say
from unshard.errors import UnshardError, UsageError, how_to_install
from unshard.evaluate.tables import terminal_width

if TYPE_CHECKING:
    from unshard.evaluate.client.v1 import EvalClient

URL = "http://127.0.0.1:8000"
FAILED = 1
"""The exit code if a job did not complete, or a checkpoint was not accepted."""
_ALL = 1_000_000  # jobs

ServerUrl = Annotated[
    str, option("URL", "URL of the server.", None, "--server", envvar="UNSHARD_EVAL_SERVER")
]
TokenFile = Annotated[
    Path | None,
    option("FILE", "A file that contains the server's token.", envvar="UNSHARD_EVAL_TOKEN_FILE"),
]
JobIds = Annotated[list[str], argument("JOB...", "The jobs' ids, or their beginnings.")]
BaseModel = Annotated[
    str | None,
    option(
        "MODEL",
        "Also evaluate this base model, once, as step 0: a Hugging Face directory, or the id of a "
        "model that was downloaded from the hub.",
    ),
]
RandomSeed = Annotated[
    int | None,
    option(
        "N",
        "Seed of all random generators.  [default: the evaluator's own]",
        limits=(0, 2**32 - 1),
    ),
]
Watch = Annotated[
    bool,
    flag("--watch", "Refresh until Ctrl-C; without a terminal, print again after each change."),
]
Interval = Annotated[float, option("SECONDS", "Refresh interval of --watch.", limits=(0.05, None))]
Csv = Annotated[bool, flag("--csv", "Print CSV.")]
HigherIsBetter = Annotated[
    bool | None,
    flag(
        "--higher-is-better/--lower-is-better",
        "Direction of the best value.  [default: the evaluator's, of each metric]",
    ),
]


def connect(url: str, token_file: Path | None) -> "EvalClient":
    """Return a client of the server; nothing is sent yet.

    Raises:
        UsageError: httpx is not installed, or the URL or the token is invalid.
    """
    check_installed("httpx", "pydantic")
    from unshard.evaluate.client.v1 import EvalClient
    from unshard.evaluate.credentials import read_token, split_url

    split_url(url, what="--server")
    if token_file is None:
        return EvalClient(url)
    return EvalClient(url, token=read_token(token_file, what=f"--token-file {token_file}"))


def check_installed(*modules: str) -> None:
    """Raise UsageError, with the command to install them, unless all modules are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        packages = " ".join("pyyaml" if name == "yaml" else name for name in missing)
        raise UsageError(f"not installed: {packages}", hint=how_to_install(packages, "eval"))


def submit(
    checkpoint: Annotated[Path, argument("CHECKPOINT", "The checkpoint.")],
    tasks: Annotated[str, option("A,B", "Tasks to evaluate.")],
    profile: Annotated[
        str, option("NAME", "Evaluator, as the server's configuration names it.")
    ] = "lm-eval",
    step: Annotated[
        int | None, option("N", "The training step.  [default: from the directory's name]")
    ] = None,
    run: Annotated[
        str,
        option(
            "RUN",
            "Name of the training run; or its directory, for a model outside of it.  "
            "[default: the run directory's name]",
        ),
    ] = "",
    weights: Annotated[str, option("model,ema", "Weight sets, a job for each.")] = "model",
    base: BaseModel = None,
    limit: Annotated[str | None, option("N", "Documents of each task; below 1, a share.")] = None,
    num_fewshot: Annotated[
        int | None, option("N", "Examples in each prompt.", limits=(0, None))
    ] = None,
    batch_size: Annotated[str | None, option("N|auto", "Batch size of the model.")] = None,
    num_gpus: Annotated[int | None, option("N", "GPUs of the job.", limits=(0, None))] = None,
    model_args: Annotated[str | None, option("KEY=VALUE,...", "Arguments of the model.")] = None,
    gen_kwargs: Annotated[str | None, option("KEY=VALUE,...", "Arguments of generation.")] = None,
    seed: RandomSeed = None,
    again: Annotated[bool, flag("--again", "Evaluate again, even if completed.")] = False,
    wait: Annotated[
        bool,
        flag(
            "--wait", "Print progress until the jobs have ended; exit code 1 unless all completed."
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
        # Only the server checks path and arguments: it may have other disks and evaluators.
        is_here = not is_url(checkpoint)
        path = os.path.realpath(checkpoint) if is_here else str(path_of(checkpoint))
        names = split_names(tasks)
        arguments: dict[str, Any] = {
            "limit": limit and read_scalar(limit),
            "batch_size": batch_size and read_scalar(batch_size),
            "model_args": model_args and parse_arguments(model_args, what="--model-args"),
            "num_fewshot": num_fewshot,
            "num_gpus": num_gpus,
            "gen_kwargs": gen_kwargs,
            "seed": seed,
            "again": again,
        }
        run, directory = ("", os.path.realpath(run)) if "/" in run else (run, None)
        base = None if base is None else find_base(base)
        arguments["run"] = run
        jobs: list[dict[str, object]] = []
        try:
            for name in split_names(weights):
                of_weights: dict[str, Any] = {**arguments, "directory": directory, "weights": name}
                jobs.append(client.submit(path, step, profile, names, **of_weights))
            if base is not None:
                arguments["directory"] = str(jobs[0]["run_directory"]) or None
                jobs.append(client.submit(base, BASE_STEP, profile, names, **arguments))
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
    jobs: JobIds,
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Queue ended jobs again. A completed job stays, and a new job evaluates again."""
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

        # If the server does not answer, the next request fails with the reason.
        with contextlib.suppress(ServerAwayError):
            for problem in client.problems():
                say(f"warning: the server accepts no jobs now: {problem}")

        def read() -> list[str]:
            jobs = [client.job(job)] if job else client.jobs(run=run)
            return job_lines(jobs, run=run, as_json=as_json)

        show_lines(read, interval if watch else None)


def cancel(
    job: Annotated[str | None, argument("JOB", "The job's id, or its beginning.")] = None,
    profile: Annotated[
        str | None, option("NAME", "Instead of a job: all queued jobs of this profile.")
    ] = None,
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Cancel a job, or all queued jobs of a profile."""
    if (job is None) == (profile is None):
        raise UsageError("cancel takes a job, or --profile NAME", expected="one of the two")
    with connect(server, token_file) as client:
        queued = [] if profile is None else client.jobs(status="queued", limit=_ALL)
        # A job's profile is "profile" or "profile:type".
        ids = [str(one["id"]) for one in queued if f"{one['profile']}:".startswith(f"{profile}:")]
        jobs = [client.cancel(id_) for id_ in ([job] if job else ids)]
        if jobs or as_json:
            print_jobs(jobs, as_json=as_json)
        else:
            print(f"profile {profile} has no queued jobs")


def logs(
    job: Annotated[str, argument("JOB", "The job's id, or its beginning.")],
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
    hidden: Annotated[bool, flag("--hidden", "Include hidden results, with the reason.")] = False,
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
            rows, numbers = client.results(run=run, hidden=hidden), None
            if best:
                visible = [one for one in as_results(rows) if one.hidden is None]
                numbers = best_numbers(visible, best, higher_is_better=higher_is_better)
            return result_lines(rows, run=run, as_csv=as_csv, as_json=as_json, best=numbers)

        show_lines(read, interval if watch else None)


def compare(
    runs: Annotated[list[str], argument("RUN...", "Names of training runs.")],
    higher_is_better: HigherIsBetter = None,
    as_csv: Csv = False,
    as_markdown: Annotated[bool, flag("--markdown", "Print Markdown.")] = False,
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Compare the best step with the last. Runs are compared with the first one named."""
    with connect(server, token_file) as client:
        from unshard.evaluate.comparing import as_results, compare_runs
        from unshard.evaluate.summary import tables_of

        by_name = {run: as_results(client.results(run=run)) for run in runs}
    for run, of_run in by_name.items():
        if all(one.step is None for one in of_run):
            raise UsageError(
                f"run {run!r} has no results that belong to a step",
                hint="unshard eval results lists all results of the server",
            )
    results = [one for of_run in by_name.values() for one in of_run]
    labels = list(dict.fromkeys(one.run for one in results))  # several runs may have a name
    compared = compare_runs(labels, results, higher_is_better=higher_is_better)
    rows = [one.as_row() for one in compared]
    if as_json:
        print(json.dumps({"comparisons": rows}))
    elif as_csv:
        print("\n".join(csv_lines(list(rows[0]), rows)))
    else:
        print("\n".join(tables_of(compared, as_markdown=as_markdown, width=terminal_width())))


def hide(
    jobs: JobIds,
    reason: Annotated[str, option("TEXT", "Reason, stored with the job.")],
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Leave results out of curves, tables and exports.

    Nothing is removed, and `unshard eval show` brings them back.
    """
    with connect(server, token_file) as client:
        print_jobs([client.hide(job, reason) for job in jobs], as_json=as_json)


def show(
    jobs: JobIds, server: ServerUrl = URL, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """Show hidden results again.

    Also results of a branch that training has left by resuming from an older step.
    """
    with connect(server, token_file) as client:
        print_jobs([client.show(job) for job in jobs], as_json=as_json)
