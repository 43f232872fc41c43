"""What a command shows while it works, and the processes that work."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from unshard.progress import Event, Listener, Stage
from unshard.showing import listening, size

if TYPE_CHECKING:
    from unshard.engines.threads import RunPlan

__all__ = ["listening", "size", "working"]

_log = logging.getLogger(__name__)


@contextmanager
def working(*, quiet: bool) -> Iterator[tuple[Listener, "RunPlan"]]:
    """Yield who listens and who makes the files; end here for all but the leader of a torchrun."""
    from unshard import api

    with api.crew() as crew:
        if not crew.leads:
            raise typer.Exit
        with listening(quiet=quiet) as listener:
            yield _logged(listener), crew.engine


def _logged(listener: Listener) -> Listener:
    """Return a listener that also logs when each stage began, and so how long it took."""

    def both(event: Event) -> None:
        if isinstance(event, Stage):
            _log.info("%s", event.name)
        listener(event)

    return both
