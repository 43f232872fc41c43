"""The `unshard` command: its groups."""

import typer

from unshard import __version__
from unshard.cli.average import average
from unshard.cli.environment import env
from unshard.cli.evaluate import app as evaluate
from unshard.cli.evaluate_runs import export, watch
from unshard.cli.guard import guarded
from unshard.cli.inspect import inspect
from unshard.cli.logs import logged
from unshard.cli.merge import merge
from unshard.cli.options import Grouped
from unshard.cli.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="unshard",
    help="Turn sharded training checkpoints into Hugging Face models, without torch.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (merge, inspect, verify, average):
    app.command(cls=Grouped)(logged(guarded(_command)))
app.command()(guarded(env))
evaluate.command()(guarded(watch))
evaluate.command()(guarded(export))
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
    app(arguments)
