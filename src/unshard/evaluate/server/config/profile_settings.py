"""The settings of a profile that are more than a number or a name: read, and checked.

Knows what programs, directories and arguments must be like, not what a profile is.
"""

import shutil
from pathlib import Path

from unshard.errors import CorruptError
from unshard.evaluate.server.config.arguments import join_arguments
from unshard.evaluate.server.config.placeholders import PLACEHOLDERS, placeholders_in
from unshard.evaluate.server.config.settings import Settings
from unshard.evaluate.values import Scalar
from unshard.read.beside.model_config import read_config

__all__ = [
    "read_command",
    "read_environment",
    "read_include_paths",
    "read_interpreter",
    "read_model_args",
    "read_model_config",
    "read_results",
]


def read_interpreter(settings: Settings, default: str) -> str:
    """Return a program that is there; a link to it is not resolved, or its environment is lost."""
    return _program(settings, "interpreter", settings.text("interpreter", default))


def _program(settings: Settings, key: str, text: str) -> str:
    if "/" in text:
        text = str(settings.base / Path(text).expanduser())
    if shutil.which(text) is None:
        raise settings.wrong(key, expected="a program that can be run")
    return text


def read_environment(settings: Settings) -> dict[str, str]:
    """Return variables; a boolean is refused, because YAML makes one of yes, no, on and off."""
    values = settings.scalars("environment")
    for name, value in values.items():
        if isinstance(value, bool) or "=" in name or "\0" in f"{name}{value}":
            expected = 'a mapping of names to strings or numbers (`"true"` in quotes)'
            raise settings.wrong("environment", expected=expected)
    return {name: str(value) for name, value in values.items()}


def read_include_paths(settings: Settings, *, most: int) -> tuple[Path, ...]:
    """Return directories with tasks, `most` of them at most."""
    paths = settings.paths("include_paths")
    if len(paths) > most:
        raise settings.wrong("include_paths", expected=f"at most {most}")
    if not all(path.is_dir() for path in paths):
        raise settings.wrong("include_paths", expected="directories that are there")
    return paths


def read_model_args(settings: Settings) -> dict[str, Scalar]:
    """Return the model's fixed arguments, which lmms-eval must be able to read back."""
    arguments = settings.scalars("model_args")
    join_arguments(arguments, what=f"{settings.where}: model_args")
    return arguments


def read_model_config(settings: Settings) -> Path | None:
    """Return a config.json that is a model's, or a directory that has one."""
    path = settings.path("config")
    if path is None:
        return None
    file = path / "config.json" if path.is_dir() else path
    expected = "a config.json, or a directory with config.json and tokenizer"
    if not file.is_file():
        raise settings.wrong("config", expected=expected)
    try:
        read_config(file)
    except CorruptError as error:
        raise settings.wrong("config", expected=expected) from error
    return path


def read_command(settings: Settings, *, needed: bool) -> tuple[str, ...]:
    """Return a command's arguments, whose placeholders are known ones.

    A program that is a path starts at the file's directory, and is there.
    """
    command = settings.texts("command")
    if placeholders_in(command) - PLACEHOLDERS or (needed and not command):
        known = ", ".join(f"{{{name}}}" for name in sorted(PLACEHOLDERS))
        expected = f"a list of arguments, which may have {known}; {{{{ and }}}} are braces"
        raise settings.wrong("command", expected=expected)
    if command and "/" in command[0]:
        return (_program(settings, "command", command[0]), *command[1:])
    return command


def read_results(settings: Settings, default: str) -> str:
    """Return the name of a file below the output directory."""
    text = settings.text("results", default)
    if Path(text).is_absolute() or ".." in Path(text).parts:
        raise settings.wrong("results", expected="a file below the output directory")
    return text
