"""What is shown while unshard works: lines in a log, one redrawn line in a notebook, or a bar."""

import io
import sys
from types import ModuleType

import pytest

from unshard import showing
from unshard.progress import Advanced, Chosen, Event, Listener, Stage, Warned
from unshard.showing import human_size, listening

GB = 10**9


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def play(listener: Listener, clock: Clock, *events: tuple[float, Event]) -> None:
    """Take each event after so many seconds."""
    for seconds, event in events:
        clock.now += seconds
        listener(event)


class ZMQInteractiveShell:
    """Named as ipykernel names the shell of a notebook."""


class TerminalInteractiveShell:
    """Named as IPython names its shell on a terminal."""


def use_ipython(monkeypatch: pytest.MonkeyPatch, shell: object) -> None:
    module = ModuleType("IPython")
    module.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e15, "2500.0 TB")]
)
def test_sizes_are_decimal(count: float, text: str) -> None:
    assert human_size(count) == text


def test_a_log_gets_a_line_when_a_stage_begins(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with listening(quiet=False, clock=clock) as listener:
        play(
            listener,
            clock,
            (0, Stage("reading")),
            (1, Chosen("merging a")),
            (1, Stage("writing", 40 * GB)),
            (9.9, Advanced(GB)),
            (100, Warned("careful")),
        )
    assert capsys.readouterr().err == "merging a\nwriting 40.0 GB\nwarning: careful\n"


def test_a_log_gets_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with listening(quiet=False, clock=clock) as listener:
        play(listener, clock, (3, Stage("writing", 40 * GB)), *[(2.5, Advanced(2 * GB))] * 11)
    assert capsys.readouterr().err.splitlines() == [
        "writing 40.0 GB",
        "writing 8.0 GB of 40.0 GB, 800.0 MB/s, 40 s left",
        "writing 16.0 GB of 40.0 GB, 800.0 MB/s, 30 s left",
    ]


def test_a_long_wait_is_shown_in_minutes_and_hours(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with listening(quiet=False, clock=clock) as listener:
        play(
            listener,
            clock,
            (0, Stage("writing", 1000 * GB)),
            (10, Advanced(GB)),
            (10, Advanced(19 * GB)),
        )
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].endswith("100.0 MB/s, 2 h 46 min left")
    assert lines[2].endswith("1.0 GB/s, 16 min left")


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(quiet=True) as listener:
        listener(Stage("writing", 10))
        listener(Warned("careful"))
    assert capsys.readouterr().err == ""


def test_a_notebook_gets_one_line_that_is_redrawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_ipython(monkeypatch, ZMQInteractiveShell())
    clock = Clock()
    with listening(quiet=False, clock=clock) as listener:
        play(
            listener,
            clock,
            (0, Stage("reading")),
            (0, Chosen("merging a")),
            (1, Stage("writing", 4 * GB)),
            (1, Advanced(GB)),
            (0.1, Advanced(GB)),  # too soon to be drawn
            (0, Warned("careful")),
            (1.9, Advanced(2 * GB)),
        )
    drawn = [text.rstrip() for text in capsys.readouterr().err.split("\r")]
    assert drawn == [
        "",
        "reading",
        "merging a",
        f"writing    [{'-' * 30}] 0 B of 4.0 GB, 0 B/s",
        f"writing    [{'#' * 8}{'-' * 22}] 1.0 GB of 4.0 GB, 1.0 GB/s, 3 s left",
        "warning: careful",
        f"writing    [{'#' * 30}] 4.0 GB of 4.0 GB, 1.3 GB/s, 0 s left",
        "",
        "",
    ]


@pytest.mark.parametrize("shell", [TerminalInteractiveShell(), None])
def test_ipython_on_a_terminal_is_not_a_notebook(
    monkeypatch: pytest.MonkeyPatch, shell: object
) -> None:
    use_ipython(monkeypatch, shell)
    assert not showing.is_notebook()


def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert showing.is_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert not showing.is_terminal()


def test_a_terminals_bar_has_the_pace_and_the_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    clock = Clock()
    with listening(quiet=False, clock=clock) as listener:
        play(
            listener,
            clock,
            (0, Stage("reading")),
            (0, Stage("writing", 4 * GB)),
            (1, Advanced(GB)),
            (0, Warned("[b]careful[/b]")),
        )
    assert "1.0 GB of 4.0 GB, 1.0 GB/s, 3 s left" in shown.getvalue()
    assert "warning: [b]careful[/b]" in shown.getvalue()


class Full(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [Full(), None])
def test_what_cannot_be_shown_does_not_end_the_work(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with listening(quiet=False) as listener:
        listener(Stage("writing", 10))
        listener(Warned("careful"))
