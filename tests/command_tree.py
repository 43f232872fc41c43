"""The commands of a group, which it imports one by one."""

from typing import Any

import click

__all__ = ["commands_of"]


def commands_of(command: click.Command) -> dict[str, Any]:
    """Return the commands of a group by name; of a command that is none, nothing."""
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: one for name, one in found.items() if one is not None}
