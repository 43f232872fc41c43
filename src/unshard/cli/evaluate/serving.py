"""`unshard eval serve` and `drain`: the life of the server."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from unshard.cli.evaluate.commands import (
    FAILED,
    URL,
    ServerUrl,
    TokenFile,
    check_installed,
    connect,
)
from unshard.cli.options import Json, option
from unshard.errors import UsageError

_Config = Annotated[Path | None, option("FILE", "A YAML file; every setting has a default.")]
_Root = Annotated[
    list[Path] | None,
    option(
        "DIR",
        "A directory that may contain checkpoints, or s3://bucket/folder; may be "
        "repeated.  "
        "[default: the current directory]",
    ),
]
_Gpus = Annotated[
    str | None,
    option(
        "0,1|N",
        "GPU numbers (0,1; with a comma for one GPU: 3,), ids (GPU-..., MIG-...) or a count.  "
        "[default: all]",
    ),
]
_Host = Annotated[str | None, option("HOST", "Address to listen on.  [default: 127.0.0.1]")]
_Port = Annotated[
    int | None,
    option("PORT", "Port to listen on; 0 picks a free one.  [default: 8000]", limits=(0, 65535)),
]
_Networks = Annotated[
    list[str] | None,
    option("CIDR", "A network whose clients need no token; may be repeated."),
]
_WorkDir = Annotated[
    Path | None,
    option("DIR", "Directory for jobs, logs and results.  [default: unshard-eval]"),
]


def serve(
    config: _Config = None,
    root: _Root = None,
    gpus: _Gpus = None,
    host: _Host = None,
    port: _Port = None,
    token_file: TokenFile = None,
    allow_unauthenticated: _Networks = None,
    work_dir: _WorkDir = None,
    log_format: Annotated[
        str | None,
        option(
            "text|json",
            "Format of the log: text, or a JSON object per line.  [default: text]",
        ),
    ] = None,
    root_path: Annotated[
        str | None, option("/PATH", "Path of the server behind a proxy, such as /eval.")
    ] = None,
) -> None:
    """Run the evaluation server."""
    check_installed("fastapi", "uvicorn", "httpx", "pydantic", "yaml")
    from unshard.evaluate.server.serve import ServeOptions, serve

    networks = tuple(allow_unauthenticated or ())
    options = ServeOptions(
        *(config, tuple(root or ()), gpus, host, port, token_file, networks, work_dir, log_format),
        root_path=root_path,
    )
    try:
        serve(options)
    except KeyboardInterrupt as error:
        why = "Stopped. Running evaluations continue; the next server will pick them up."
        raise KeyboardInterrupt(why) from error


def doctor(
    config: _Config = None,
    root: _Root = None,
    gpus: _Gpus = None,
    host: _Host = None,
    port: _Port = None,
    token_file: TokenFile = None,
    allow_unauthenticated: _Networks = None,
    work_dir: _WorkDir = None,
    checkpoint: Annotated[
        Path | None, option("DIR", "A checkpoint to evaluate, for --try.")
    ] = None,
    trials: Annotated[
        list[str] | None,
        option(
            "PROFILE=TASK,...",
            "Evaluate the checkpoint with a profile, one document of each task; may be repeated.",
            None,
            "--try",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a server's configuration. Exits 1 on any problem."""
    check_installed("fastapi", "uvicorn", "httpx", "pydantic", "yaml")
    from unshard.evaluate.server.doctor import Trial, examine
    from unshard.evaluate.server.serve import ServeOptions

    networks = tuple(allow_unauthenticated or ())
    options = ServeOptions(
        config, tuple(root or ()), gpus, host, port, token_file, networks, work_dir
    )
    if bool(trials) is not (checkpoint is not None):
        raise UsageError("--try and --checkpoint are given together, or neither")
    trial = Trial(checkpoint.absolute(), _tasks_of(trials)) if checkpoint and trials else None
    is_fine = True
    for check in examine(options, trial):
        is_fine &= check.is_fine
        if as_json:
            print(json.dumps(asdict(check)), flush=True)
        else:
            state = "ok" if check.is_fine else "WRONG"
            print(f"{state:<6}{check.subject}: {check.text}", flush=True)
    if not is_fine:
        raise SystemExit(FAILED)


def _tasks_of(trials: Sequence[str]) -> dict[str, list[str]]:
    by_profile = dict[str, list[str]]()
    for trial in trials:
        name, _, tasks = trial.partition("=")
        if not name or not tasks:
            raise UsageError(f"--try {trial}: cannot be read", expected="PROFILE=TASK,TASK")
        by_profile.setdefault(name, []).extend(tasks.split(","))
    return by_profile


def drain(server: ServerUrl = URL, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Stop starting jobs; exit when running jobs finish."""
    with connect(server, token_file) as client:
        counts = client.drain()
    running, queued = counts["running"], counts["queued"]
    if as_json:
        print(json.dumps({"running": running, "queued": queued}))
    else:
        print(f"draining: {running} running, {queued} queued for the next server")
