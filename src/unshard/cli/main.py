"""The `unshard` command: its groups."""

import re
import sys
from itertools import pairwise

import typer

from unshard import __version__
from unshard.cli.commands import average, inspect, merge, push, reshard, verify
from unshard.cli.engines import sglang, vllm
from unshard.cli.environment import env
from unshard.cli.evaluate.commands import app as evaluate
from unshard.cli.evaluate.commands import cancel, logs, results, retry, status, submit
from unshard.cli.evaluate.compare import compare
from unshard.cli.evaluate.correcting import adopt, hide, show
from unshard.cli.evaluate.runs import export, watch
from unshard.cli.evaluate.serving import doctor, drain, serve
from unshard.cli.hinting import hint
from unshard.cli.options import Grouped
from unshard.cli.running import guarded

_EMPTY_VALUE = re.compile(r"--[a-z0-9-]+=")

app = typer.Typer(
    name="unshard",
    help="Turn sharded training checkpoints into Hugging Face models, without torch.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (merge, inspect, hint, verify, average, reshard, push):
    app.command()(guarded(_command))
for _engine in (vllm, sglang):
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        guarded(_engine)
    )
app.command()(guarded(env))
_of_jobs = (submit, retry, status, cancel, logs, results)
for _of_eval in (*_of_jobs, serve, drain, doctor, watch, export, compare, hide, show, adopt):
    evaluate.command()(guarded(_of_eval))
for _registered in app.registered_commands + evaluate.registered_commands:
    _registered.cls = Grouped
app.add_typer(evaluate)


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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line in this process as it is; `unshard.__main__` is the command itself."""
    _refuse_empty(sys.argv[1:] if arguments is None else arguments)
    app(arguments)


def _refuse_empty(arguments: list[str]) -> None:
    """Refuse an empty argument: a shell's unset variable, which would be the current directory."""
    for before, argument in pairwise(["unshard", *arguments]):
        if argument == "" or _EMPTY_VALUE.fullmatch(argument):
            named = before if before.startswith("-") and not argument else argument
            where = f"the value of {named.removesuffix('=')}" if named else "an argument"
            print(f"error: {where} is empty", file=sys.stderr)
            print("  hint:     is a variable of your shell unset?", file=sys.stderr)
            raise SystemExit(2)
