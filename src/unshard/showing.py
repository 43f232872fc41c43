"""How events look: a progress bar on a terminal or in a notebook, and lines anywhere else.

Everything goes to stderr. What cannot be written there is dropped: showing must not fail the work.
A caller in Python who gives no listener gets Python's warnings instead of the lines.
"""

import contextlib
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from unshard import signals
from unshard.errors import UnshardWarning
from unshard.fronts import PYTHON, Front, reword_warning
from unshard.progress import Advanced, Chosen, Event, Listener, Stage, Warned, ignore

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Clock = Callable[[], float]

_UNITS = ("B", "kB", "MB", "GB", "TB")
_LINE_S = 10.0  # between two lines of a log
_REDRAW_S = 0.25  # between two states of a notebook's bar
_BAR_WIDTH = 30
_PACKAGE = str(Path(__file__).parent)
_INSIDE = (_PACKAGE, contextlib.__file__)  # of which some decorators are made


def human_size(count: float) -> str:
    """Return a number of bytes for people: 1.5 GB."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def counted(count: int, noun: str) -> str:
    """Return a number of things: 1 rank, 2 ranks."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@contextmanager
def hearing(listener: Listener | None) -> Iterator[Listener]:
    """Yield the caller's listener; without one, a listener that warns and shows a progress bar.

    Its warnings are `UnshardWarning`; the bar is on stderr, if that is a terminal or a notebook.
    """
    if listener is not None:
        yield listener
        return
    with listening(quiet=not (is_terminal() or is_notebook())) as shown:

        def tell(event: Event) -> None:
            match event:
                case Warned():
                    _warn(event.message)
                case Stage() | Advanced():
                    shown(event)

        yield tell


def _warn(message: str) -> None:
    """Warn at the line of the caller's code, outside this package and its decorators."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UnshardWarning, stacklevel=level)


@contextmanager
def listening(
    *, quiet: bool, clock: Clock = time.monotonic, front: Front = PYTHON
) -> Iterator[Listener]:
    """Show events for as long as the context lasts.

    In a command: from here on there may be something to clean up after a signal.

    Args:
        quiet: show nothing, not even warnings.
        clock: seconds that only grow.
        front: whose words warnings use.
    """
    bar = _make_bar() if not quiet and is_terminal() else None
    signals.raise_them()  # only now: what takes time is imported
    if quiet:
        yield ignore
        return
    with ExitStack() as stack:
        if bar is not None:
            show = _on_terminal(stack.enter_context(bar), clock)
        else:
            show = stack.enter_context(_in_notebook(clock)) if is_notebook() else _as_lines(clock)
        yield lambda event: show(
            Warned(reword_warning(event.text, front)) if isinstance(event, Warned) else event
        )


def is_terminal() -> bool:
    """Return whether stderr is a terminal that can redraw a line."""
    dumb = os.environ.get("TERM", "").lower() in {"dumb", "unknown"}
    return sys.stderr is not None and sys.stderr.isatty() and not dumb


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook (Jupyter, Colab)."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return False
    return "ZMQ" in type(ipython.get_ipython()).__name__


class _Pace:
    """How far a stage is, and how fast.

    Args:
        stage: the stage, which begins now.
        clock: seconds that only grow.
    """

    def __init__(self, stage: Stage, clock: Clock) -> None:
        self.stage = stage
        self._clock = clock
        self._started = clock()
        self._written = 0

    def advance(self, count: int) -> None:
        """Take `count` more bytes into account."""
        self._written += count

    @property
    def share(self) -> float:
        """The part of the stage that is done, 0 to 1."""
        return min(1.0, self._written / self.stage.total_bytes) if self.stage.total_bytes else 0.0

    def __str__(self) -> str:
        """Return the bytes done, their rate and the time left, or nothing where nothing counts."""
        if not self.stage.total_bytes:
            return ""
        rate = self._written / max(self._clock() - self._started, 1e-3)
        done, total = human_size(self._written), human_size(self.stage.total_bytes)
        text = f"{done} of {total}, {human_size(rate)}/s"
        if not rate:
            return text
        return f"{text}, {_write_duration((1 - self.share) * self.stage.total_bytes / rate)} left"


def _write_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _say(text: str, end: str = "\n") -> None:
    with suppress(OSError, ValueError, AttributeError):  # full, closed, or None
        sys.stderr.write(text + end)
        sys.stderr.flush()


def _as_lines(clock: Clock) -> Listener:
    """Return what prints a line when a stage begins, and one more every ten seconds.

    The first stage, reading, has no line: the first line reports what was found.
    """
    pace = _Pace(Stage(""), clock)
    printed = clock()

    def show(event: Event) -> None:
        nonlocal pace, printed
        match event:
            case Stage(name, total):
                if total or pace.stage.name:
                    _say(f"{name} {human_size(total)}" if total else name)
                pace, printed = _Pace(event, clock), clock()
            case Advanced(count):
                pace.advance(count)
                if clock() - printed >= _LINE_S:
                    printed = clock()
                    _say(f"{pace.stage.name} {pace}")
            case Chosen(message):
                _say(message)
            case Warned(message):
                _say(f"warning: {message}")

    return show


@contextmanager
def _in_notebook(clock: Clock) -> Iterator[Listener]:
    """Yield what redraws one line by carriage returns, which every notebook understands."""
    pace = _Pace(Stage(""), clock)
    drawn, width = clock(), 0

    def draw(text: str, end: str = "") -> None:
        nonlocal drawn, width
        _say(f"\r{text:<{width}}", end)
        drawn, width = clock(), 0 if end else len(text)

    def show(event: Event) -> None:
        nonlocal pace
        match event:
            case Stage():
                pace = _Pace(event, clock)
                draw(_draw_bar(pace))
            case Advanced(count):
                pace.advance(count)
                if pace.share == 1 or clock() - drawn >= _REDRAW_S:
                    draw(_draw_bar(pace))
            case Chosen(message):
                draw(message, end="\n")
            case Warned(message):
                draw(f"warning: {message}", end="\n")

    try:
        yield show
    finally:
        draw("", end="\r")


def _draw_bar(pace: _Pace) -> str:
    if not pace.stage.total_bytes:
        return pace.stage.name
    done = round(pace.share * _BAR_WIDTH)
    return f"{pace.stage.name:<10} [{'#' * done}{'-' * (_BAR_WIDTH - done)}] {pace}"


def _make_bar() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TextColumn("{task.fields[pace]}"),
        console=Console(stderr=True),
        transient=True,
    )


def _on_terminal(progress: "Progress", clock: Clock) -> Listener:
    pace = _Pace(Stage(""), clock)
    task: TaskID | None = None

    def show(event: Event) -> None:
        nonlocal pace, task
        match event:
            case Stage(name, total):
                if task is not None:
                    progress.remove_task(task)
                pace = _Pace(event, clock)
                task = progress.add_task(name, total=total or None, pace=pace)
            case Advanced(count) if task is not None:
                pace.advance(count)
                progress.advance(task, count)
            case Chosen(message):
                progress.console.print(message, markup=False, highlight=False, soft_wrap=True)
            case Warned(message):
                warning = f"warning: {message}"
                progress.console.print(
                    warning, style="yellow", markup=False, highlight=False, soft_wrap=True
                )
            case _:
                pass

    return show
