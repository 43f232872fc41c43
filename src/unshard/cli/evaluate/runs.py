"""`unshard eval watch` and `unshard eval export`: commands about whole runs."""

import contextlib
import json
import logging
import sys
import time
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unshard.cli.evaluate.commands import (
    FAILED,
    URL,
    BaseModel,
    RandomSeed,
    TokenFile,
    check_installed,
    connect,
)
from unshard.cli.options import Json, flag, one_of, option
from unshard.cli.parser.parameters import argument
from unshard.cli.running import say
from unshard.errors import UsageError
from unshard.evaluate.tables import on_one_line, write_number
from unshard.showing import counted

if TYPE_CHECKING:
    from unshard.evaluate.trainer.config import EvalConfig
    from unshard.evaluate.trainer.watcher import Watching

_SEND_S = 30.0  # how long --once waits for a server
_ANSWER_S = 2.0  # how long a look waits for the server's answers; the next look prints the rest
_SETTLE_S = 2.0  # how far apart the two looks of --once are, at most

Server = Annotated[
    str | None,
    option("URL", f"URL of the server.  [default: {URL}]", envvar="UNSHARD_EVAL_SERVER"),
]


def watch(
    directory: Annotated[
        Path,
        argument(
            "DIR",
            "The directory where the trainer saves checkpoints, or its address in an object store.",
        ),
    ],
    tasks: Annotated[str | None, option("A,B", "Tasks to evaluate.")] = None,
    profile: Annotated[
        str | None,
        option("NAME", "One of the evaluators that the server offers.  [default: lm-eval]"),
    ] = None,
    weights: Annotated[
        str | None,
        option("model,ema", "Which weights.  [default: model]"),
    ] = None,
    every: Annotated[
        int | None,
        option("N", "Only the first checkpoint at or after every Nth step.", limits=(1, None)),
    ] = None,
    run: Annotated[
        str | None, option("RUN", "The training run.  [default: the directory's name]")
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
            "--once",
            "Submit the checkpoints that are complete and exit; exit code 1 if the server did "
            "not accept all of them.",
        ),
    ] = False,
    again: Annotated[
        bool,
        flag(
            "--again",
            "Evaluate again what was measured before the profile changed.  [default: kept]",
        ),
    ] = False,
    work_dir: Annotated[
        Path,
        option(
            "DIR", "For a run in an object store: the local directory of submissions and results."
        ),
    ] = Path("unshard-watch"),
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Evaluate a run's checkpoints as they are saved, by any trainer.

    A checkpoint is submitted once, when it is complete, and hard links keep it until it has been
    evaluated; there are none in an object store. Ctrl-C stops watching; the same command resumes.
    """
    check_installed("httpx", "pydantic", "yaml")
    from unshard.evaluate.logs import log_to_stderr
    from unshard.evaluate.trainer.watcher import Watching
    from unshard.stores.remote_path import RemotePath, path_of

    log_to_stderr(logging.WARNING, "%(asctime)s %(message)s")
    given: dict[str, object] = {
        "server_url": server,
        "profile": profile,
        "tasks": tasks,
        "weights": weights,
        "eval_steps": every,
        "run": run,
        "base": base,
        "seed": seed,
        "token_file": None if token_file is None else str(token_file),
    }
    chosen = {key: value for key, value in given.items() if value is not None}
    configured = _configure(config, chosen, interval)
    place = path_of(directory)
    _wait_for_directory(place, None if once else interval)
    own = None
    if isinstance(place, RemotePath):
        own = work_dir.joinpath(place.parts[1].removesuffix(":"), *place.parts[2:])
    with Watching(place, configured, own, is_again=again) as watching:
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
            "Where to write files (tensorboard: a training run's log directory) and the "
            "record of what has been exported.",
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
    destination.check()
    with connect(server or URL, token_file) as client:
        found = client.results(run=run)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # trackers print
            done = export_all(found, destination)
    except OSError as error:
        raise UsageError(f"--directory {directory}: cannot be written", found=str(error)) from error
    if as_json:
        names = ("run", "written", "present", "without_step")
        print(json.dumps({"runs": [{name: getattr(one, name) for name in names} for one in done]}))
        return
    for one in done:
        left = f", {one.without_step} left out: they have no step" if one.without_step else ""
        print(
            f"{one.run}: {counted(one.written, 'job')} written, {one.present} already there{left}"
        )
    if not done:
        print("the server has no results" + (f" of {run}" if run else ""))


def _configure(file: Path | None, chosen: dict[str, object], interval: float) -> "EvalConfig":
    """Return the configuration of a file, if there is one, with the given options in its place."""
    from dataclasses import replace

    from unshard.evaluate.trainer.config import EvalConfig

    if not isfinite(interval):
        raise UsageError("--interval", expected="seconds, above 0", found=str(interval))
    if file is None:
        default = {"server_url": URL, "profile": "lm-eval", "poll_interval": interval}
        return EvalConfig.from_dict({**default, **chosen})
    base = EvalConfig.from_yaml(file)
    least = {"server_url": base.server_url, "profile": base.profile, "tasks": base.tasks}
    read = EvalConfig.from_dict({**least, **chosen})
    return replace(base, **{key: getattr(read, key) for key in chosen})


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
    has_said = _look(watching)
    time.sleep(apart)  # a file that still grows is not complete
    has_said |= _look(watching)
    is_sent = watching.wait_until_sent(_SEND_S)
    has_said |= _say_decisions(watching)
    if not is_sent:
        say("not sent: the server accepts nothing now; the next `watch` resends")
    if not is_sent or watching.has_refusals or watching.held_back:
        raise SystemExit(FAILED)
    if not has_said:
        say(f"nothing to submit in {watching.run}")
        for reason in watching.left_out() or ["it has no steps"]:
            say(f"  {reason}")


def _say_decisions(watching: "Watching") -> bool:
    """Print what the server accepted and what it refused; return whether there was anything."""
    decisions = watching.decisions()
    for one in decisions:
        weights = ", ".join(one.weights)
        if one.refused is None:
            print(f"step {one.step}: submitted ({weights})", flush=True)
        else:
            say(f"step {one.step}: refused ({weights}): {one.refused}")
    return bool(decisions)


def _look(watching: "Watching") -> bool:
    """Submit what is complete and print what is new; return whether the server decided anything."""
    before = watching.held_back
    if watching.look():
        watching.wait_until_sent(_ANSWER_S)
    has_decided = _say_decisions(watching)
    if watching.held_back not in (0, before):
        say(f"{watching.held_back} more waiting for room among the pins")
    for step, metrics in watching.completed():
        for name, value in metrics.items():
            print(f"step {step}: {on_one_line(name)} = {write_number(value, 6)}", flush=True)
    return has_decided
