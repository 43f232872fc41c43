"""What a command shows while it works, and the processes that work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from unshard.progress import Listener
from unshard.showing import listening, size

if TYPE_CHECKING:
    from unshard.engines.threads import RunPlan

__all__ = ["listening", "size", "working"]


@contextmanager
def working(*, quiet: bool) -> Iterator[tuple[Listener, "RunPlan"]]:
    """Yield who listens and who makes the files; end here for all but the leader of a torchrun."""
    from unshard import api

    with api.crew() as crew:
        if not crew.leads:
            raise typer.Exit
        with listening(quiet=quiet) as listener:
            yield listener, crew.engine
