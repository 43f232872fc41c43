"""The `unshard` command and its groups."""

import re
import sys
from importlib import import_module
from itertools import pairwise
from typing import Any

import click

from unshard import __version__, signals

_EMPTY_VALUE = re.compile(r"--[a-z0-9-]+=")
_HELP = {"help_option_names": ["-h", "--help"]}
_ENGINE = {"allow_extra_args": True, "ignore_unknown_options": True}  # for the engine itself
# The module and summary of each command; `--help` imports none of the modules.
_COMMANDS = {
    "merge": ("commands", "Merge a sharded checkpoint into a Hugging Face directory."),
    "inspect": ("commands", "Describe a checkpoint, and the output of its merge."),
    "hint": ("hinting", "Print the lines to paste that merge and evaluate this run."),
    "verify": ("commands", "Compare a merged model with a checkpoint, a model, or checksums."),
    "diff": ("comparing", "Show what changed between two checkpoints, models or steps."),
    "checksums": ("comparing", "Print the SHA-256 of each tensor that merge would write."),
    "average": ("commands", "Average checkpoints into a Hugging Face directory, in one pass."),
    "reshard": ("commands", "Write a checkpoint for other ranks or in another format."),
    "push": ("commands", "Upload the model of a merge to the hub, without a local copy."),
    "delta": ("comparing", "Write what changed between two checkpoints, for engines to apply."),
    "apply": ("comparing", "Apply deltas to a checkpoint, and write the model."),
    "vllm": ("engines", "Serve a checkpoint with this environment's vLLM, unmerged."),
    "sglang": ("engines", "Serve a checkpoint with this environment's SGLang, unmerged."),
    "env": ("environment", "Print versions and the machine's features, for bug reports."),
}
_OF_EVAL = {
    "submit": ("evaluate.commands", "Queue evaluations of a checkpoint."),
    "retry": ("evaluate.commands", "Queue ended jobs again."),
    "status": ("evaluate.commands", "Show the status of jobs."),
    "cancel": ("evaluate.commands", "Cancel a job, or all queued jobs of a profile."),
    "logs": ("evaluate.commands", "Print a job's log."),
    "results": ("evaluate.commands", "Print all results, each with its training step."),
    "serve": ("evaluate.serving", "Run the evaluation server."),
    "drain": ("evaluate.serving", "Stop starting jobs; exit when running jobs finish."),
    "doctor": ("evaluate.serving", "Check a server's configuration."),
    "watch": ("evaluate.runs", "Evaluate a run's checkpoints as they are saved, by any trainer."),
    "export": ("evaluate.runs", "Export results to a tracker at their steps (safe to repeat)."),
    "compare": ("evaluate.commands", "Compare the best step with the last."),
    "hide": ("evaluate.commands", "Leave results out of curves, tables and exports."),
    "show": ("evaluate.commands", "Show hidden results again."),
    "adopt": ("evaluate.runs", "Continue the curves of a run that was moved."),
}


class _Commands(click.Group):
    """A group that imports the module of a command only when the command is used."""

    def __init__(self, name: str, table: dict[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(name, no_args_is_help=True, **settings)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names in the order of `--help`."""
        return list(dict.fromkeys([*self.table, *self.commands]))

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002
        cmd_name: str,
    ) -> click.Command | None:
        """Return a command, or None if the name is unknown."""
        if cmd_name in self.table and cmd_name not in self.commands:
            from unshard.cli.options import Grouped
            from unshard.cli.parser.parameters import command
            from unshard.cli.running import guarded, import_numpy

            module = self.table[cmd_name][0]
            function = getattr(import_module(f"unshard.cli.{module}"), cmd_name)
            settings = {**_HELP, **(_ENGINE if module == "engines" else {})}
            needs_numpy = module in ("commands", "comparing")
            function = guarded(function, import_numpy if needs_numpy else None)
            self.commands[cmd_name] = command(function, Grouped, context_settings=settings)
        return self.commands.get(cmd_name)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the name and summary of each command."""
        rows = {name: group.help or "" for name, group in self.commands.items()}
        rows = {name: summary for name, (_, summary) in self.table.items()} | {
            name: summary for name, summary in rows.items() if name not in self.table
        }
        with formatter.section("Commands"):
            formatter.write_dl(list(rows.items()))


def _print_version(context: click.Context, _parameter: object, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        print(f"unshard {__version__}")
        context.exit()


def _complete(context: click.Context, parameter: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        from unshard.cli.parser import completion

        act = completion.install if parameter.name == "install_completion" else completion.show
        act(app)
        context.exit()


def _flag(name: str, text: str, callback: Any) -> click.Option:
    more = {"is_flag": True, "is_eager": True, "expose_value": False}
    return click.Option([name], help=text, callback=callback, **more)


app = _Commands(
    "unshard",
    _COMMANDS,
    help="Turn sharded training checkpoints into Hugging Face models, without torch.",
    params=[
        _flag("--version", "Print the version.", _print_version),
        _flag("--install-completion", "Install completion for the current shell.", _complete),
        _flag(
            "--show-completion",
            "Show completion for the current shell, to copy it or customize the installation.",
            _complete,
        ),
    ],
    context_settings=_HELP,
)
app.add_command(
    _Commands(
        "eval",
        _OF_EVAL,
        help="Evaluate checkpoints during training (extra `eval`).",
        callback=signals.raise_them,  # their jobs continue after Ctrl-C, and they print that
    )
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line in this process; `unshard.__main__` sets up the process first."""
    _refuse_empty(sys.argv[1:] if arguments is None else arguments)
    app(arguments, prog_name="unshard")


def _refuse_empty(arguments: list[str]) -> None:
    """Refuse an empty argument (an unset variable), which as a path is the current directory."""
    for before, argument in pairwise(["unshard", *arguments]):
        if argument == "" or _EMPTY_VALUE.fullmatch(argument):
            option = before if before.startswith("-") and not argument else argument
            where = f"the value of {option.removesuffix('=')}" if option else "an argument"
            print(f"error: {where} is empty", file=sys.stderr)
            print("  hint:     is a variable of your shell unset?", file=sys.stderr)
            raise SystemExit(2)
