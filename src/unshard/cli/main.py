"""The `unshard` command: its groups, its exit codes, and how errors are shown."""

import json
import sys
from collections.abc import Sequence

import typer

from unshard import __version__
from unshard.cli.inspect import inspect
from unshard.cli.merge import merge
from unshard.errors import UnshardError

__all__ = ["app", "main"]

_INTERRUPTED = 130

app = typer.Typer(
    name="unshard",
    help="Turn sharded training checkpoints into Hugging Face models, without torch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(merge)
app.command()(inspect)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"unshard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exit with the codes of `unshard.errors`, 0 and 130."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(given)
    except UnshardError as error:
        _show(error, as_json="--json" in given)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(_INTERRUPTED)


def _show(error: UnshardError, *, as_json: bool) -> None:
    if as_json:
        fields = {
            "type": type(error).__name__,
            "code": error.exit_code,
            "message": error.subject,
            "expected": error.expected,
            "found": error.found,
            "hint": error.hint,
        }
        print(json.dumps({"error": fields}))
    print(f"error: {error}", file=sys.stderr)
