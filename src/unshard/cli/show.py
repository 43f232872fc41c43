"""How events look: a progress bar on a terminal, plain lines elsewhere, nothing when quiet."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from unshard.progress import Advanced, Event, Listener, Stage, Warned, ignore

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from unshard.engines.threads import RunPlan

__all__ = ["listening", "size", "working"]

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: float) -> str:
    """Return a number of bytes for people: 1.5 GB."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


@contextmanager
def listening(*, quiet: bool) -> Iterator[Listener]:
    """Show events on stderr for as long as the context lasts."""
    if quiet:
        yield ignore
    elif sys.stderr.isatty():
        with _bar() as progress:
            yield _on_terminal(progress)
    else:
        yield _as_lines


@contextmanager
def working(*, quiet: bool) -> Iterator[tuple[Listener, "RunPlan"]]:
    """Yield who listens and who makes the files; end here for all but the leader of a torchrun."""
    from unshard import api

    with api.crew() as crew:
        if not crew.leads:
            raise typer.Exit
        with listening(quiet=quiet) as listener:
            yield listener, crew.engine


def _as_lines(event: Event) -> None:
    match event:
        case Stage(name, 0):
            print(name, file=sys.stderr)
        case Stage(name, total):
            print(f"{name} {size(total)}", file=sys.stderr)
        case Warned(message):
            print(f"warning: {message}", file=sys.stderr)
        case Advanced():
            pass


def _bar() -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _on_terminal(progress: "Progress") -> Listener:
    task: TaskID | None = None

    def show(event: Event) -> None:
        nonlocal task
        match event:
            case Stage(name, total):
                if task is not None and total:
                    progress.remove_task(task)
                    task = None
                if task is None:
                    task = progress.add_task(name, total=total or None)
                else:
                    progress.update(task, description=name)
            case Advanced(count) if task is not None:
                progress.advance(task, count)
            case Warned(message):
                progress.console.print(f"warning: {message}", style="yellow", markup=False)
            case _:
                pass

    return show
