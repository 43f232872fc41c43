"""The tutorial runs as it is written, with a server; only its port is another."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from evaluation.running import child_environment
from evaluation.servers import Live, started
from waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "async_eval.md"
FILES = {"python": "evaluate.py", "yaml": "server.yaml"}
SERVE, DRAIN = "unshard eval serve ", "unshard eval drain"
JOB = re.compile(r"\b[0-9a-f]{8}\b")


def blocks() -> list[tuple[str, str]]:
    """Return the tutorial's blocks: their language and text."""
    section = PAGE.read_text("utf-8").partition("\n## Try it\n")[2].partition("\n## ")[0]
    for name in FILES.values():
        assert f"`{name}`" in section
    return re.findall(r"^```(\w*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console with the output that the page shows for it."""
    for part in text.removeprefix("$ ").split("\n$ "):
        command, _, output = part.partition("\n")
        yield command, output.strip()


def timeless(text: str) -> str:
    """Return an output without what differs each time: ids, times, and the widths of columns."""
    text = JOB.sub("JOB", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with what a clone has for the tutorial, and `unshard` in its PATH."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bin").mkdir()
    python = shlex.quote(sys.executable)
    for name, start in (("unshard", f"{python} -m unshard"), ("python3", python)):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


class Reader:
    """Does what the tutorial shows: writes its files, starts its server, runs its commands."""

    def __init__(self, clone: Path) -> None:
        self.server = Live(clone)
        self.printed: dict[str, str] = {}

    def run(self, command: str, output: str) -> None:
        """Run a command and compare its output with the page's, if that shows any."""
        for shown in JOB.findall(command):  # the page's id becomes the last one that was printed
            command = command.replace(shown, JOB.findall("".join(self.printed.values()))[-1])
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.server.directory,
            env={**child_environment(), "UNSHARD_EVAL_SERVER": self.server.url},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert not output or timeless(done.stdout) == timeless(output), command
        self.printed[command] = done.stdout

    def see_page(self) -> None:
        """Open the address that the tutorial gives, as a browser does."""
        (path,) = re.findall(r"`http://127\.0\.0\.1:8000(/\S+)`", PAGE.read_text("utf-8"))
        answer = self.server.call("GET", path, headers={"Accept": "text/html"})
        assert answer.is_success
        assert "<title>my-run" in answer.text
        assert "norms" in answer.text


def test_the_tutorial_runs_as_it_is_written(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{clone / 'bin'}{os.pathsep}{os.environ['PATH']}")
    reader, written = Reader(clone), iter(blocks())
    assert next(written) == ("", 'pip install ".[eval]"\n')
    with ExitStack() as stack:
        for language, text in written:
            if language in FILES:
                (clone / FILES[language]).write_text(text)
                continue
            assert language == "console"
            for command, output in commands(text):
                if command.startswith(SERVE):
                    options = shlex.split(command.removeprefix(SERVE))
                    stack.enter_context(started(reader.server, *options, "--port=0"))
                    continue
                if command == DRAIN:
                    reader.see_page()
                reader.run(command, output)
                if "--wait" in command:
                    reader.server.all_ended(2)
        assert reader.server.process is not None
        assert DRAIN in reader.printed
        assert reader.server.process.wait(LIMIT_S) == 0
    exported = (clone / "exported" / "my-run.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in exported] == [10, 20]
