"""What is told about each job that is completed or has failed: `on_result` of server.yaml."""

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from unshard.evaluate.server.config.keys import Bare, Environment, PlacedCommand, drop_nulls
from unshard.evaluate.values import expected, expects


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in {"http", "https"} and bool(parts.hostname)
    except ValueError:
        return False


class OnResult(BaseModel):
    """A command, or a URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    _read = model_validator(mode="before")(drop_nulls)

    command: PlacedCommand = ()
    """Run without a shell, in the work directory; what is told is JSON on its stdin."""
    url: Annotated[Bare, expects("an http or https URL", _is_url)] | None = None
    """Gets a POST of the same JSON."""
    environment: Environment = {}
    """Variables that the command gets in addition to the server's."""
    timeout: Annotated[float, Field(strict=True, gt=0, le=3600), expects("seconds, up to 3600")] = (
        30.0
    )
    """Seconds after which a try has failed."""
    backoff: Annotated[float, Field(strict=True, gt=0, le=900), expects("seconds, up to 900")] = 5.0
    """Seconds before the second try; doubled before each further one."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise expected("either a command or a url")
        return self
