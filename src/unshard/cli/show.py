"""What a command shows while it works, and the processes that work."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unshard.fronts import Front
from unshard.progress import Event, Listener, Stage
from unshard.showing import listening

if TYPE_CHECKING:
    from unshard.engines.threads import RunPlan

__all__ = ["working"]

_log = logging.getLogger(__name__)


@contextmanager
def working(*, quiet: bool, front: Front) -> Iterator[tuple[Listener, "RunPlan"]]:
    """Yield who listens and who makes the files: all processes of a torchrun, if there is one."""
    from unshard import api

    with listening(quiet=quiet, front=front) as listener:

        def logged(event: Event) -> None:
            if isinstance(event, Stage):  # the times of the log's lines show how long it took
                _log.info("%s", event.name)
            listener(event)

        yield logged, api.crew()
