"""Display of events: a progress bar on a terminal or in a notebook, lines anywhere else.

Everything goes to stderr, and a failure to write there is ignored: display must not fail the work.
Python callers without a listener get Python's warnings instead of lines.
"""

import contextlib
import inspect
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import RLock
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakSet

from unshard import signals
from unshard.errors import UnshardWarning
from unshard.fronts import PYTHON, Front, Mention, additions, reword_warning
from unshard.progress import Advanced, Chosen, Event, Listener, Stage, Warned, ignore

if TYPE_CHECKING:
    from tqdm.std import tqdm

Clock = Callable[[], float]

_UNITS = ("B", "kB", "MB", "GB", "TB")
_LINE_S = 10.0  # seconds between two lines of a log
_PACKAGE = str(Path(__file__).parent)
_INSIDE = (_PACKAGE, contextlib.__file__)  # contextlib: `@contextmanager` adds frames


def human_size(count: float) -> str:
    """Return a number of bytes with a unit: 1.5 GB."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def counted(count: int, noun: str) -> str:
    """Return a number and a noun: 1 rank, 2 ranks."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def having(count: int, noun: str) -> str:
    """Return subject and verb: 1 tensor has, 2 tensors have."""
    return f"{counted(count, noun)} {'has' if count == 1 else 'have'}"


def plain(number: object) -> str:
    """Return a value as text, a whole float without its point: 102560."""
    return str(number).removesuffix(".0") if isinstance(number, float) else str(number)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and the number of others: a, b, c and 2 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@contextmanager
def listener_or_default(listener: Listener | None) -> Iterator[Listener]:
    """Yield the caller's listener; without one, a listener that warns and shows a progress bar.

    Its warnings are `UnshardWarning`; the bar is on stderr, if that is a terminal or a notebook.
    """
    if listener is not None:
        yield listener
        return
    with listening(quiet=not (is_terminal() or is_notebook())) as show:

        def warn_or_show(event: Event) -> None:
            match event:
                case Warned():
                    _warn(event.message)
                case Stage() | Advanced():
                    show(event)

        yield warn_or_show


def _warn(message: str) -> None:
    """Warn with the location of the caller's code, outside this package and its decorators."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UnshardWarning, stacklevel=level)


@contextmanager
def listening(
    *, quiet: bool, clock: Clock = time.monotonic, front: Front = PYTHON
) -> Iterator[Listener]:
    """Show events for as long as the context lasts; in a command, raise signals from here on.

    Args:
        quiet: show nothing, not even warnings.
        clock: a monotonic clock, in seconds.
        front: writes the options of warnings, and the last line, with all options to add.
    """
    bars = _import_bars() if not quiet and (is_terminal() or is_notebook()) else None
    signals.raise_them()  # only now, because the slow imports are done
    if quiet:
        yield ignore
        return
    with nullcontext(_as_lines(clock)) if bars is None else _as_bar(bars) as show:
        added: list[Mention] = []

        def reword(event: Event) -> None:
            if isinstance(event, Warned):
                added.extend(additions(event.text))
                event = Warned(reword_warning(event.text, front))
            show(event)

        yield reword
    if added:
        _say(f"use: {front.line(added, is_done=True)}")


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


def _write_pace(stage: Stage, written: int, seconds: float) -> str:
    """Return the bytes done, their rate and the time left; "" if the total is unknown."""
    total = stage.total_bytes
    if not total:
        return ""
    rate = written / max(seconds, 1e-3)
    text = f"{human_size(written)} of {human_size(total)}, {human_size(rate)}/s"
    return f"{text}, {_write_duration(max(total - written, 0) / rate)} left" if rate else text


def _write_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _say(text: str, end: str = "\n") -> None:
    with suppress(OSError, ValueError, AttributeError):  # a full disk, a closed stream, None
        sys.stderr.write(text + end)
        sys.stderr.flush()


def _as_lines(clock: Clock) -> Listener:
    """Return a listener that prints a line when a stage begins, and every ten seconds.

    The first stage, reading, gets no line: the first line is about the chosen checkpoint.
    """
    stage, written = Stage(""), 0
    began = printed = clock()

    def show(event: Event) -> None:
        nonlocal stage, written, began, printed
        match event:
            case Stage(name, total):
                if name and (total or stage.name):
                    _say(f"{name} {human_size(total)}" if total else name)
                stage, written = event, 0
                began = printed = clock()
            case Advanced(count):
                written += count
                if clock() - printed >= _LINE_S:
                    printed = clock()
                    _say(f"{stage.name} {_write_pace(stage, written, printed - began)}")
            case Chosen() | Warned():
                _say(_write_message(event))

    return show


def _write_message(event: Chosen | Warned) -> str:
    return f"warning: {event.text}" if isinstance(event, Warned) else event.message


def _import_bars() -> "type[tqdm]":
    """Return a tqdm class that does not affect the caller's tqdm.

    It has no monitor thread and no multiprocessing lock. Making that lock would fix the start
    method of multiprocessing for the caller's whole program.
    """
    from tqdm.std import tqdm

    class Bars(tqdm):  # type: ignore[misc]  # tqdm has no types
        monitor_interval = 0
        _instances: ClassVar[WeakSet[object]] = WeakSet()

    Bars.set_lock(RLock())
    return Bars


def _terminal_width() -> int:
    """Return the columns of stderr's terminal (`shutil` would ask about stdout)."""
    with suppress(OSError, ValueError):  # a notebook, or a closed stream
        if "COLUMNS" not in os.environ:
            return os.get_terminal_size(sys.stderr.fileno()).columns
    return shutil.get_terminal_size().columns


@contextmanager
def _as_bar(bars: "type[tqdm]") -> Iterator[Listener]:
    """Yield a listener that redraws one line with carriage returns, as notebooks support too."""
    bar = bars(disable=True)
    # Its own stream, because tqdm's failure to write must not fail the work.
    stderr = SimpleNamespace(write=partial(_say, end=""), flush=lambda: None)

    def show(event: Event) -> None:
        nonlocal bar
        match event:
            case Stage(name, total):
                bar.close()
                style = {"unit": "B", "unit_scale": True} if total else {"bar_format": "{desc}"}
                style |= {"ascii": "-#", "ncols": _terminal_width(), "position": 0}
                style |= {} if name else {"disable": True}
                bar = bars(desc=name, total=total, file=stderr, leave=False, miniters=1, **style)
            case Advanced(count):
                bar.update(count)
            case Chosen() | Warned():
                bars.write(_write_message(event), file=stderr)

    try:
        yield show
    finally:
        bar.close()
