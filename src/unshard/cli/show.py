"""What a command shows while it works, and the processes that work."""

import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unshard.fronts import Front
from unshard.progress import Event, Listener, Stage
from unshard.showing import counted, listening, size

if TYPE_CHECKING:
    from unshard.engines.threads import RunPlan

__all__ = ["counted", "listening", "print_row", "size", "working"]

_log = logging.getLogger(__name__)

_TITLE = 13  # characters of the first column of a table


def print_row(title: str, text: str) -> None:
    """Print one row of a table: on a terminal broken between words, elsewhere in one line."""
    row = f"{title:<{_TITLE}} {text}"
    if sys.stdout.isatty():
        columns = max(shutil.get_terminal_size().columns, 2 * _TITLE)
        indent = " " * (_TITLE + 1)
        lines = textwrap.TextWrapper(columns, subsequent_indent=indent, break_long_words=False)
        lines.break_on_hyphens = False
        row = lines.fill(row)
    print(row)


@contextmanager
def working(*, quiet: bool, front: Front) -> Iterator[tuple[Listener, "RunPlan"]]:
    """Yield who listens and who makes the files: all processes of a torchrun, if there is one."""
    from unshard import api

    with listening(quiet=quiet, front=front) as listener:
        yield _logged(listener), api.crew()


def _logged(listener: Listener) -> Listener:
    """Return a listener that also logs when each stage began, and so how long it took."""

    def both(event: Event) -> None:
        if isinstance(event, Stage):
            _log.info("%s", event.name)
        listener(event)

    return both
