"""What is shown while unshard works: lines in a log, one redrawn line in a notebook, or a bar."""

import io
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

from unshard import console
from unshard.console import human_size, listening, plain
from unshard.fronts import PYTHON, Call, Command, Front, Text
from unshard.progress import Advanced, Chosen, Event, Listener, Stage, Warned

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


@pytest.mark.parametrize(
    ("number", "text"),
    [(102560.0, "102560"), (0.1 + 0.2, "0.30000000000000004"), (1e20, "1e+20"), ([1.0], "[1.0]")],
)
def test_numbers_that_differ_are_shown_as_different(number: object, text: str) -> None:
    assert plain(number) == text


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


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    ("front", "text"),
    [
        (Command(), "give --config FILE|DIR or --base MODEL"),
        (
            Command({"base": "--hf_model"}, Call("unshard merge", ("a", "b"))),
            "give --config FILE|DIR or --hf_model MODEL (use: unshard merge a b --config FILE)",
        ),
        (PYTHON, "give config=… or base=…"),
    ],
)
def test_a_warning_is_in_the_words_of_its_front(
    monkeypatch: pytest.MonkeyPatch, front: Front, text: str, *, terminal: bool
) -> None:
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with listening(quiet=False, front=front) as listener:
        listener(Warned("give ⟦--config FILE|DIR⟧ or ⟦--base MODEL⟧"))
    assert shown.getvalue().strip() == f"warning: {text}"


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(quiet=True) as listener:
        listener(Stage("writing", 10))
        listener(Warned("careful"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("in_notebook", [True, False])
def test_a_bar_is_one_line_that_is_redrawn(
    monkeypatch: pytest.MonkeyPatch, *, in_notebook: bool
) -> None:
    shown, clock = io.StringIO() if in_notebook else Terminal(), Clock()
    if in_notebook:
        use_ipython(monkeypatch, ZMQInteractiveShell())
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("tqdm.std.time", clock)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    with listening(quiet=False, clock=clock) as listener:
        play(
            listener,
            clock,
            (0, Stage("reading")),
            (0, Chosen("merging a")),
            (1, Stage("writing", 4 * GB)),
            (1, Advanced(GB)),
            (0.05, Advanced(GB)),  # too soon to be drawn
            (0, Warned("[b]careful[/b]")),
            (0.95, Advanced(2 * GB)),
        )
    drawn = [text.rstrip() for text in re.split(r"[\r\n]", shown.getvalue())]
    assert [text for text in drawn if text] == [
        "reading",
        "merging a",
        "reading",
        "writing:   0%|------------------| 0.00/4.00G [00:00<?, ?B/s]",
        "writing:  25%|##-------| 1.00G/4.00G [00:01<00:02, 1.00GB/s]",
        "warning: [b]careful[/b]",
        "writing:  50%|####-----| 2.00G/4.00G [00:01<00:01, 1.00GB/s]",
        "writing: 100%|#########| 4.00G/4.00G [00:02<00:00, 2.18GB/s]",
    ]
    assert drawn[-1] == ""  # nothing of the bar is left


def test_a_bar_leaves_no_thread_and_multiprocessing_undecided() -> None:
    """tqdm's own lock would fix the start method of processes in the caller's program."""
    code = (
        "import multiprocessing, sys, threading\n"
        "from unshard.progress import Stage\n"
        "from unshard.console import listening\n"
        "sys.stderr.isatty = lambda: True\n"
        "with listening(quiet=False) as listener: listener(Stage('writing', 10))\n"
        "assert 'tqdm' in sys.modules\n"
        "multiprocessing.set_start_method('spawn')\n"
        "assert threading.active_count() == 1\n"
    )
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "writing:   0%|" in done.stderr


@pytest.mark.parametrize("shell", [TerminalInteractiveShell(), None])
def test_ipython_on_a_terminal_is_not_a_notebook(
    monkeypatch: pytest.MonkeyPatch, shell: object
) -> None:
    use_ipython(monkeypatch, shell)
    assert not console.is_notebook()


def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert console.is_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert not console.is_terminal()


class Full(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(28, "No space left on device")


class FullTerminal(Full, Terminal):
    pass


@pytest.mark.parametrize("stream", [Full(), FullTerminal(), None])
def test_what_cannot_be_shown_does_not_end_the_work(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with listening(quiet=False) as listener:
        listener(Stage("writing", 10))
        listener(Warned("careful"))


def test_warnings_end_with_one_line_that_has_all_they_advise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    front = Command(None, Call("unshard merge", ("a", "b c"), {"step": 3}))
    with listening(quiet=False, front=front) as listener:
        for text in ("cast: ⟦+--dtype config⟧", "see ⟦--role x⟧", "add ⟦+--also DIR⟧"):
            listener(Warned(Text(text)))
    *warnings, line = capsys.readouterr().err.splitlines()
    assert warnings == [
        "warning: cast: --dtype config",
        "warning: see --role x",
        "warning: add --also DIR",
    ]
    use = "use: unshard merge a 'b c' --step 3 --dtype config --also DIR --overwrite"
    assert line == use
    with pytest.raises(KeyError), listening(quiet=False, front=front) as listener:
        listener(Warned(Text("cast: ⟦+--dtype config⟧")))
        raise KeyError
    assert "use:" not in capsys.readouterr().err
