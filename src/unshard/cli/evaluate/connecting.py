"""What the commands of `unshard eval` share: where the server is, and a client of it."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unshard.errors import UsageError, how_to_install

if TYPE_CHECKING:
    from unshard.evaluate.client.v1 import EvalClient

__all__ = ["FAILED", "URL", "TokenFile", "check_installed", "connect"]

URL = "http://127.0.0.1:8000"
FAILED = 1
"""The exit code if a job did not complete, or a checkpoint was not accepted."""

TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="UNSHARD_EVAL_TOKEN_FILE",
        help="A file that contains the server's token.",
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
