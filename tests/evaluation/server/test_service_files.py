"""The examples that run the server as a service: their commands are ones that unshard has."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import typer.main

from unshard.cli.main import app

EXAMPLES = Path(__file__).parents[3] / "examples"


def parsed(words: list[str]) -> dict[str, object]:
    """Return what the real parser makes of a command line, by option."""
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while commands := getattr(command, "commands", None):
        command = commands[rest.pop(0)]
    params: dict[str, object] = command.make_context(command.name, rest).params
    return params


def test_the_unit_and_the_container_start_a_server() -> None:
    unit = (EXAMPLES / "unshard-eval.service").read_text()
    container = (EXAMPLES / "Containerfile").read_text()
    (started,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    (ran,) = re.findall(r"^CMD (.*)$", container, re.MULTILINE)
    of_unit, of_container = parsed(shlex.split(started)), parsed(json.loads(ran))
    assert of_unit["config"] == Path("/etc/unshard-eval/server.yaml")
    assert of_container["token_file"] == Path("/run/secrets/unshard-token")
    for one in (of_unit, of_container):
        assert one["work_dir"] == Path("/var/lib/unshard-eval/work")
        assert one["log_format"] == "json"
    (looked,) = re.findall(r"unshard-eval (unshard eval doctor .*)$", container, re.MULTILINE)
    assert parsed(shlex.split(looked))["root"] == [Path("/data/runs")]
