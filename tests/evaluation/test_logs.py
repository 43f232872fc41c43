"""Lines of a log never control the terminal that shows them."""

import json
import logging
import unicodedata

import pytest

from unshard.errors import UsageError, printable
from unshard.evaluate.logs import log_to_stderr


def test_log_lines_control_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_stderr(logging.INFO, "%(name)s %(message)s")
    logging.getLogger("unshard.test").info("job %s", "\x1b[2J\r\u202eé\n\tthat")
    assert capsys.readouterr().err == "unshard.test job \\x1b[2J\\r\\u202eé\n\tthat\n"


def test_everything_that_controls_a_terminal_is_escaped_and_text_is_not() -> None:
    controls = {chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == "Cc"}
    turning = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x61C)}
    for character in controls | turning | {"\u2028", "\u2029", "\u200e", "\u200f"}:
        is_kept = character in "\n\t"
        assert (printable(character) == character) is is_kept
        assert is_kept or printable(character) == ascii(character)[1:-1]
    text = "Grüße 日本語 नमस्ते 👩\u200d🔬 \u0645\u200c\u062e a\xa0b\n\t\\x1b"
    assert printable(text) == printable(printable(text)) == text
    assert str(UsageError("job \x1b[2J", found="\x9b")) == "job \\x1b[2J\n  found:    \\x9b"


def test_objects_of_json_are_lines_whatever_they_quote(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_stderr(logging.INFO, "%(message)s", as_json=True)
    hostile = 'a"\n{"level": "info"}\r\u2028\x1b[2J\x85\ud800'
    about = {"job": "1a2b", "run": hostile, "step": 5}
    log = logging.getLogger("unshard.test")
    log.info("job %s", hostile, extra={"about": about})
    try:
        int(hostile)
    except ValueError:
        log.exception("it failed")
    lines = capsys.readouterr().err.splitlines()
    first, second = map(json.loads, lines)
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "unshard.test",
        "message": f"job {hostile}",
        **about,
    }
    assert second["level"] == "error"
    assert "ValueError" in second["exception"]
    assert all(line.isascii() and line.isprintable() for line in lines)
