"""Completion of `unshard` in a shell."""

import os
import sys
from pathlib import Path

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

_PATHS = {
    "bash": ".local/share/bash-completion/completions/unshard",
    "zsh": ".zfunc/_unshard",
    "fish": ".config/fish/completions/unshard.fish",
}
_CLASSES = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_MORE = {"zsh": "~/.zshrc needs: fpath+=~/.zfunc; autoload -Uz compinit; compinit"}


def show(app: click.Command) -> None:
    """Print the script of the current shell."""
    print(_script(app, _shell()))


def install(app: click.Command) -> None:
    """Write the script to the current shell's directory of completions, and print its path."""
    shell = _shell()
    path = Path.home() / _PATHS[shell]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_script(app, shell))
    print(f"{path} completes unshard in a new {shell}", _MORE.get(shell, ""), sep="\n", end="")


def _shell() -> str:
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in _PATHS:
        sys.exit(f"error: no completion for the shell {shell!r}; $SHELL must be bash, zsh or fish")
    return shell


def _script(app: click.Command, shell: str) -> str:
    return _CLASSES[shell](app, {}, "unshard", "_UNSHARD_COMPLETE").source()
