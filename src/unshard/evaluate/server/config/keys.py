"""The types of values in server.yaml, and the keys of its `on_result`.

The path of the file that is read is pydantic's context: relative paths start at its directory, and
programs must exist.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)

from unshard.errors import CheckpointError
from unshard.evaluate.values import Scalar, expected, expects
from unshard.read.model_config import read_config
from unshard.stores.remote_path import is_url, path_of


def drop_nulls(value: object) -> object:
    """Leave out keys without a value, except `keep_days`, where null means no limit."""
    if isinstance(value, BaseModel):
        return value
    if not isinstance(value, dict):
        raise expected("a mapping")
    # Keys become strings, because YAML makes a boolean of a bare `on`.
    return {str(key): item for key, item in value.items() if item is not None or key == "keep_days"}


def _list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def _absolute(value: object, info: ValidationInfo[Path | None]) -> Path:
    if isinstance(value, Path):
        return value
    if info.context is None or not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return info.context.absolute().parent / Path(value).expanduser()


def _absolute_or_address(value: object, info: ValidationInfo[Path | None]) -> Path:
    """Return a directory, or an address in an object store."""
    return path_of(value) if isinstance(value, str) and is_url(value) else _absolute(value, info)


def find_program(text: str, info: ValidationInfo[Path | None]) -> str:
    """Return a program, which must exist here unless a cluster runs it on its nodes.

    A link is not resolved, because its directory identifies an environment.
    """
    if info.context is None:
        return text
    program = str(_absolute(text, info)) if "/" in text else text
    if not info.data.get("launch") and shutil.which(program) is None:
        raise expected("a program that can be run")
    return program


def _placed(command: tuple[str, ...], info: ValidationInfo[Path | None]) -> tuple[str, ...]:
    """Return a command whose program, if it is a path, starts at the file's directory."""
    if info.context is None or not command or "/" not in command[0]:
        return command
    return (str(_absolute(command[0], info)), *command[1:])


def _as_text(value: object) -> object:
    """Return a number as text; a boolean is refused, because YAML makes it of yes, no, on, off."""
    return str(value) if type(value) in {int, float} else value


def _is_model_config(path: Path) -> bool:
    try:
        read_config(path / "config.json" if path.is_dir() else path)
    except (CheckpointError, OSError):
        return False
    return True


Bare = Annotated[str, Field(strict=True, pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
NonEmptyText = Annotated[Bare, expects("a string that is not empty")]
Texts = Annotated[tuple[Bare, ...], BeforeValidator(_list), expects("a list of strings")]
Place = Annotated[Path, BeforeValidator(_absolute), expects("a string that is not empty")]
Places = Annotated[tuple[Place, ...], BeforeValidator(_list), expects("a list of strings")]
Root = Annotated[
    Path, BeforeValidator(_absolute_or_address), expects("a directory, or s3://bucket/folder")
]
Roots = Annotated[tuple[Root, ...], BeforeValidator(_list), expects("a list of strings")]
Folders = Annotated[
    Places, expects("directories that exist", lambda paths: all(map(Path.is_dir, paths)))
]
Environment = Annotated[
    Mapping[
        Annotated[str, Field(strict=True, pattern=r"^[^=\x00]+$")],
        Annotated[str, BeforeValidator(_as_text), Field(strict=True, pattern=r"^[^\x00]*$")],
    ],
    expects('a mapping of names to strings or numbers (`"true"` in quotes)'),
]
ModelConfig = Annotated[
    Place,
    expects("a config.json, or a directory with config.json and tokenizer", _is_model_config),
]
ModelArgs = Annotated[
    Mapping[Annotated[str, Field(min_length=1)], Scalar],
    expects("a mapping of names to strings, numbers or booleans"),
]
PlacedCommand = Annotated[Texts, expects("a list of arguments"), AfterValidator(_placed)]


class OnResult(BaseModel):
    """A command; a list is short for a mapping with only `command`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: PlacedCommand = ()
    """Run without a shell, in the work directory, with JSON on its stdin."""
    environment: Environment = {}
    """Variables in addition to those of an evaluator."""
    timeout: Annotated[float, Field(strict=True, gt=0, le=3600), expects("seconds, up to 3600")] = (
        30.0
    )
    """Seconds after which the command is ended."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        return drop_nulls({"command": value} if isinstance(value, list) else value)

    @model_validator(mode="after")
    def _has_command(self) -> Self:
        if not self.command:
            raise expected("a command: a list of arguments")
        return self
