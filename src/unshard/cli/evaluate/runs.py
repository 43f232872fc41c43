"""The commands of `unshard eval` about whole runs: `watch`, `export` and `adopt`."""

import contextlib
import json
import logging
import sys
import time
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unshard.cli.evaluate.commands import (
    FAILED,
    URL,
    BaseModel,
    RandomSeed,
    ServerUrl,
    TokenFile,
    check_installed,
    connect,
)
from unshard.cli.options import Json, flag, one_of, option
from unshard.cli.parser.parameters import argument
from unshard.cli.running import say
from unshard.console import counted
from unshard.errors import UsageError
from unshard.evaluate.tables import on_one_line, write_number

if TYPE_CHECKING:
    from unshard.evaluate.trainer.config import EvalConfig
    from unshard.evaluate.trainer.watcher import Watching

_SEND_S = 30.0  # the longest wait of --once for a server
_ANSWER_S = 2.0  # the longest wait for the server's answers; the next look prints the rest
_SETTLE_S = 2.0  # the longest time between the two looks of --once

Server = Annotated[
    str | None,
    option("URL", f"URL of the server.  [default: {URL}]", envvar="UNSHARD_EVAL_SERVER"),
]


def watch(
    directory: Annotated[
        Path,
        argument("DIR", "The run's directory of checkpoints, or its address in an object store."),
    ],
    tasks: Annotated[str | None, option("A,B", "Tasks to evaluate.")] = None,
    profile: Annotated[
        str | None,
        option("NAME", "Evaluator, as the server's configuration names it.  [default: lm-eval]"),
    ] = None,
    weights: Annotated[
        str | None, option("model,ema", "Weight sets, a job for each.  [default: model]")
    ] = None,
    every: Annotated[
        int | None,
        option("N", "Only the first checkpoint at or after every Nth step.", limits=(1, None)),
    ] = None,
    run: Annotated[
        str | None, option("RUN", "Name of the training run.  [default: the directory's]")
    ] = None,
    base: BaseModel = None,
    seed: RandomSeed = None,
    config: Annotated[
        Path | None,
        option("FILE", "A YAML file with the callbacks' settings; options given here override it."),
    ] = None,
    interval: Annotated[float, option("SECONDS", "Polling interval.", limits=(0.05, None))] = 30.0,
    once: Annotated[
        bool,
        flag(
            "--once", "Submit complete checkpoints and exit; exit code 1 unless all are accepted."
        ),
    ] = False,
    again: Annotated[
        bool,
        flag("--again", "Evaluate steps again that were measured before the profile changed."),
    ] = False,
    work_dir: Annotated[
        Path,
        option("DIR", "For a run in an object store: local directory of submissions and results."),
    ] = Path("unshard-watch"),
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Evaluate a run's checkpoints as they are saved, by any trainer.

    A checkpoint is submitted once, when it is complete. Hard links keep it until it is evaluated,
    except in an object store. Ctrl-C stops watching; the same command resumes.
    """
    check_installed("httpx", "pydantic", "yaml")
    from unshard.evaluate.logs import log_to_stderr
    from unshard.evaluate.trainer.watcher import Watching
    from unshard.stores.remote_path import RemotePath, path_of

    log_to_stderr(logging.WARNING, "%(asctime)s %(message)s")
    options: dict[str, object] = {
        "server_url": server,
        "profile": profile,
        "tasks": tasks,
        "weights": weights,
        "eval_steps": every,
        "run": run,
        "base": base,
        "seed": seed,
        "token_file": token_file and str(token_file),
    }
    options = {key: value for key, value in options.items() if value is not None}
    configuration = _configure(config, options, interval)
    path = path_of(directory)
    _wait_for_directory(path, None if once else interval)
    state = None
    if isinstance(path, RemotePath):
        state = work_dir.joinpath(path.parts[1].removesuffix(":"), *path.parts[2:])
    with Watching(path, configuration, state, is_again=again) as watching:
        if once:
            _watch_once(watching, min(interval, _SETTLE_S))
            return
        try:
            while True:
                _look(watching)
                time.sleep(interval)
        except KeyboardInterrupt:
            if table := watching.summary():
                print(table, flush=True)
            raise


def export(
    to: Annotated[
        str,
        one_of(("tensorboard", "wandb", "mlflow", "trackio", "jsonl"), "The tracker."),
    ],
    run: Annotated[
        str | None, option("RUN", "Only this run.  [default: all runs, each separately]")
    ] = None,
    directory: Annotated[
        Path,
        option(
            "DIR",
            "Directory of files (tensorboard: a training run's log directory) and of the record "
            "of exported results.",
        ),
    ] = Path("unshard-exports"),
    project: Annotated[
        str, option("NAME", "The project of wandb or trackio, or the experiment of mlflow.")
    ] = "",
    server: Server = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Export results to a tracker at their steps (safe to repeat)."""
    from unshard.evaluate.sinks.export import Destination, Tracker, export_all

    if to not in list(Tracker):
        raise UsageError(f"--to {to}: unknown", expected=", ".join(Tracker))
    destination = Destination(Tracker(to), directory, project, is_for_one=run is not None)
    with connect(server or URL, token_file) as client:
        results = client.results(run=run)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # trackers print
            exported = export_all(results, destination)
    except OSError as error:
        raise UsageError(f"--directory {directory}: cannot be written", found=str(error)) from error
    if as_json:
        print(json.dumps({"runs": [asdict(one) for one in exported]}))
        return
    for one in exported:
        left_out = f", {one.without_step} without a step left out" if one.without_step else ""
        written = f"{counted(one.written, 'job')} written, {one.present} already there"
        print(f"{one.run}: {written}{left_out}")
    if not exported:
        print("the server has no results" + (f" of {run}" if run else ""))


def adopt(
    run: Annotated[Path, argument("RUN", "The run's directory.")],
    server: ServerUrl = URL,
    token_file: TokenFile = None,
) -> None:
    """Continue the curves of a run that was moved.

    A run on another disk looks like a copy, and would otherwise start new curves.
    """
    from unshard.evaluate.client.v1 import ServerAwayError
    from unshard.evaluate.run_folder import RunFolder

    directory = run.resolve()
    if not directory.is_dir():
        raise UsageError(f"{run}: there is no such directory", expected="the directory of a run")
    try:
        RunFolder(directory).adopt()
    except OSError as error:
        raise UsageError(f"{run}: cannot be written to", found=str(error)) from error
    with connect(server, token_file) as client:
        try:
            print(f"{run} is the run {client.see_run(str(directory))['label']}")
        except ServerAwayError as error:
            say(f"the server notices it with the run's next checkpoint: {error}")


def _configure(file: Path | None, options: dict[str, object], interval: float) -> "EvalConfig":
    """Return the configuration of a file, if there is one, changed by the options."""
    from unshard.evaluate.trainer.config import EvalConfig

    if not isfinite(interval):
        raise UsageError("--interval", expected="seconds, above 0", found=str(interval))
    if file is None:
        default = {"server_url": URL, "profile": "lm-eval", "poll_interval": interval}
        return EvalConfig.from_dict({**default, **options})
    base = EvalConfig.from_yaml(file)
    needed = {"server_url": base.server_url, "profile": base.profile, "tasks": base.tasks}
    changed = EvalConfig.from_dict({**needed, **options})
    return replace(base, **{key: getattr(changed, key) for key in options})


def _wait_for_directory(directory: Path, interval: float | None) -> None:
    """Wait until a trainer has made a directory; fail if it is missing and `interval` is None."""
    from unshard.stores.remote_path import look_again

    if directory.is_dir():
        return
    if interval is None or directory.exists():
        found = "a file" if directory.exists() else "nothing"
        raise UsageError(f"{directory} cannot be watched", expected="a directory", found=found)
    say(f"waiting for {directory}, which does not exist yet")
    while not directory.is_dir():
        time.sleep(interval)
        look_again(directory)


def _watch_once(watching: "Watching", apart: float) -> None:
    has_decisions = _look(watching)
    time.sleep(apart)  # a file that is still growing is not complete
    has_decisions |= _look(watching)
    is_sent = watching.wait_until_sent(_SEND_S)
    has_decisions |= _print_decisions(watching)
    if not is_sent:
        say("not submitted: the server does not accept jobs now; the next `watch` resends")
    if not is_sent or watching.has_refusals or watching.held_back:
        raise SystemExit(FAILED)
    if not has_decisions:
        say(f"nothing to submit in {watching.run}")
        for reason in watching.left_out() or ["it has no steps"]:
            say(f"  {reason}")


def _print_decisions(watching: "Watching") -> bool:
    """Print which submissions the server accepted or refused; return whether there were any."""
    decisions = watching.decisions()
    for one in decisions:
        weights = ", ".join(one.weights)
        if one.refused is None:
            print(f"step {one.step}: submitted ({weights})", flush=True)
        else:
            say(f"step {one.step}: refused ({weights}): {one.refused}")
    return bool(decisions)


def _look(watching: "Watching") -> bool:
    """Submit complete checkpoints, print news; return whether the server has decided on any."""
    before = watching.held_back
    if watching.look():
        watching.wait_until_sent(_ANSWER_S)
    has_decisions = _print_decisions(watching)
    if watching.held_back not in (0, before):
        say(f"{watching.held_back} more waiting for room in the pin quota")
    for step, metrics in watching.completed():
        for name, value in metrics.items():
            print(f"step {step}: {on_one_line(name)} = {write_number(value, 6)}", flush=True)
    return has_decisions
