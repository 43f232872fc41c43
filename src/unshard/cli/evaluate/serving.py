"""`unshard eval serve` and `drain`: the life of the server."""

import json
from pathlib import Path
from typing import Annotated

import typer

from unshard.cli.evaluate.commands import URL, ServerUrl, TokenFile, check_installed, connect
from unshard.cli.options import Json

__all__ = ["drain", "serve"]


def serve(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A YAML file; every setting has a default.")
    ] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="A directory that may contain checkpoints, or s3://bucket/folder; may be "
            "repeated.  "
            "[default: the current directory]",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="0,1|N",
            help="GPU numbers (0,1; 3, for GPU 3 alone), ids (GPU-..., MIG-...) or how many.  "
            "[default: all]",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Address to listen on.  [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Port to listen on; 0 picks a free one.  [default: 8000]",
        ),
    ] = None,
    token_file: TokenFile = None,
    allow_unauthenticated: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR", help="A network whose clients need no token; may be repeated."
        ),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory for jobs, logs and results.  [default: unshard-eval]"
        ),
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="embedded|ray",
            help="What runs the evaluators: this machine, or the nodes of a Ray cluster (extra "
            "`ray`).  [default: embedded]",
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(
            metavar="text|json",
            help="What the log has: lines for people, or a JSON object per line.  [default: text]",
        ),
    ] = None,
) -> None:
    """Run the evaluation server."""
    check_installed("fastapi", "uvicorn", "httpx", "pydantic", "yaml")
    from unshard.evaluate.server.serve import Given, serve

    given = Given(
        config,
        tuple(root or ()),
        gpus,
        host,
        port,
        token_file,
        tuple(allow_unauthenticated or ()),
        work_dir,
        executor,
        log_format,
    )
    try:
        serve(given)
    except KeyboardInterrupt as error:
        why = "Stopped. Running evaluations continue; the next server will pick them up."
        raise KeyboardInterrupt(why) from error


def drain(server: ServerUrl = URL, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Let the server begin no more jobs, and end when none runs."""
    with connect(server, token_file) as client:
        found = client.drain()
    running, queued = found["running"], found["queued"]
    if as_json:
        print(json.dumps({"running": running, "queued": queued}))
    else:
        print(f"draining: {running} running, {queued} queued for the next server")
