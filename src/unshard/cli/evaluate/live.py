"""What a command shows again and again, until Ctrl-C: `--watch`."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unshard.cli.running import say
from unshard.errors import printable

if TYPE_CHECKING:
    from rich.live import Live


def show_again(read: Callable[[], Sequence[str]], every_s: float) -> None:
    """Show lines again and again, until a signal.

    On a terminal they replace the ones before. Elsewhere they are printed when they have changed.
    While the server is away, the lines stay, and the reason is shown.

    Args:
        read: asks the server, and returns the lines.
        every_s: seconds between two requests.
    """
    from unshard.evaluate.client.v1 import ServerAwayError

    lines: Sequence[str] = ()
    printed: Sequence[str] | None = None
    was_away = False
    with _screen() as screen:
        while True:
            away = ""
            try:
                lines = read()
            except ServerAwayError as error:
                away = f"waiting: {error}"
            if screen is not None:
                _redraw(screen, lines, away)
            elif away and not was_away:
                say(away)
            elif not away and lines != printed:
                print("\n".join(lines if printed is None else ["", *lines]), flush=True)
                printed = lines
            was_away = bool(away)
            time.sleep(every_s)


def _redraw(screen: "Live", lines: Sequence[str], away: str) -> None:
    from rich.text import Text

    foot = f"{time.strftime('%H:%M:%S')}  Ctrl-C ends"
    text = printable("\n".join([*lines, "", *([away] if away else []), foot]))
    screen.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)


@contextmanager
def _screen() -> "Iterator[Live | None]":
    """Yield a display on stdout; None if stdout is not a terminal that can redraw."""
    dumb = os.environ.get("TERM", "").lower() in {"", "dumb", "unknown"}
    if not sys.stdout.isatty() or dumb:
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    # stdout itself escapes what controls a terminal; `_redraw` does it before.
    number, encoding = sys.stdout.fileno(), sys.stdout.encoding
    with (
        open(number, "w", encoding=encoding, errors="backslashreplace", closefd=False) as plain,
        Live(
            console=Console(file=plain),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as screen,
    ):
        yield screen
