"""The keys of `on_result` in server.yaml: what is run for each job that has ended."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from unshard.evaluate.server.config.keys import Environment, PlacedCommand, drop_nulls
from unshard.evaluate.values import expected, expects


class OnResult(BaseModel):
    """A command; a list is short for a mapping with the command alone."""

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
