"""What a command shows again and again, until Ctrl-C: `--watch`."""

import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    with _screen() as screen:
        show = _Lines() if screen is None else _Screen(screen)
        while True:
            away = ""
            try:
                lines = read()
            except ServerAwayError as error:
                away = str(error)
            show.update(lines, away)
            time.sleep(every_s)


class _Lines:
    """A stream that takes lines: they are printed when they have changed, after an empty line."""

    def __init__(self) -> None:
        self._shown: Sequence[str] | None = None
        self._is_away = False

    def update(self, lines: Sequence[str], away: str) -> None:
        """Show lines, and why the server is away, if it is."""
        if away and not self._is_away:
            say(f"waiting: {away}")
        self._is_away = bool(away)
        if not away and lines != self._shown:
            print("\n".join(lines if self._shown is None else ["", *lines]), flush=True)
            self._shown = lines


class _Screen:
    """A terminal."""

    def __init__(self, live: "Live") -> None:
        self._live = live

    def update(self, lines: Sequence[str], away: str) -> None:
        """Replace what is shown by lines, and why the server is away, if it is."""
        from rich.text import Text

        at = time.strftime("%H:%M:%S")
        foot = [f"waiting: {away}"] if away else []
        shown = printable("\n".join([*lines, "", *foot, f"{at}  Ctrl-C ends"]))
        self._live.update(Text(shown, no_wrap=True, overflow="crop"), refresh=True)


def _screen() -> "AbstractContextManager[Live | None]":
    """Return what redraws stdout, if that is a terminal that can."""
    dumb = os.environ.get("TERM", "").lower() in {"", "dumb", "unknown"}
    if not sys.stdout.isatty() or dumb:
        return nullcontext()
    from rich.console import Console
    from rich.live import Live

    # stdout itself escapes what controls a terminal; here that is done before.
    plain = io.TextIOWrapper(
        io.FileIO(sys.stdout.fileno(), "w", closefd=False),
        encoding=sys.stdout.encoding,
        errors="backslashreplace",
        write_through=True,
    )
    console = Console(file=plain, markup=False, highlight=False, emoji=False, soft_wrap=False)
    return Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
