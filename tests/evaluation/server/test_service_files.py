"""The examples that run the server as a service: their commands are ones that unshard has."""

import json
import re
import shlex
import tomllib
from configparser import ConfigParser
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from command_tree import commands_of
from unshard.cli.main import app

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
KNOWN = {"CMD", "COPY", "ENV", "EXPOSE", "FROM", "RUN", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}


def parsed(words: list[str]) -> dict[str, object]:
    """Return what the real parser makes of a command line, by option."""
    command: Any = app
    rest = words[1:]
    while commands := commands_of(command):
        command = commands[rest.pop(0)]
    params: dict[str, object] = command.make_context(command.name, rest).params
    return params


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a container file, each on one line."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None, delimiters=("=",))
    vars(parser)["optionxform"] = str  # names have capitals
    parser.read(EXAMPLES / "unshard-eval.service")
    return parser


def test_the_unit_and_the_container_start_a_server() -> None:
    container = (EXAMPLES / "Containerfile").read_text()
    service = unit()["Service"]
    ran = dict(instructions(container))["CMD"]
    of_unit, of_container = parsed(shlex.split(service["ExecStart"])), parsed(json.loads(ran))
    assert of_unit["config"] == Path("/etc/unshard-eval/server.yaml")
    assert of_container["token_file"] == Path("/run/secrets/unshard-token")
    for one in (of_unit, of_container):
        assert one["work_dir"] == Path("/var/lib/unshard-eval/work")
        assert one["log_format"] == "json"
    (looked,) = re.findall(r"unshard-eval (unshard eval doctor .*)$", container, re.MULTILINE)
    assert parsed(shlex.split(looked))["root"] == (Path("/data/runs"),)


def test_the_unit_stops_by_a_drain_and_leaves_evaluators_alone() -> None:
    service = unit()["Service"]
    assert (service["KillMode"], service["KillSignal"]) == ("process", "SIGUSR1")
    assert service["Restart"] == "on-failure"  # a drained server ends with code 0
    work = Path(service["WorkingDirectory"])
    assert work == Path("/var/lib") / service["StateDirectory"]  # writable: the rest is not
    assert service["ReadWritePaths"] == unit()["Unit"]["RequiresMountsFor"] == "/data/runs"


def test_the_container_installs_this_project_and_its_extras() -> None:
    """It is built in a clone: what it copies is there, and is all that the package is made of."""
    found = instructions((EXAMPLES / "Containerfile").read_text())
    assert {name for name, _ in found} <= KNOWN
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = [name for key, rest in found if key == "COPY" for name in rest.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", project["readme"], *project["license-files"], "src"} == set(copied)
    (installs,) = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
    ours, evaluator = shlex.split(installs)[-2:]
    place, extras = ours.removesuffix("]").split("[")
    assert all(rest.split()[-1].startswith(place) for name, rest in found if name == "COPY")
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    tested = (ROOT / "tests" / "requirements" / "eval.in").read_text().splitlines()
    assert evaluator in tested
    image = dict(found)["FROM"]
    version = image.partition(":")[2].removesuffix("-slim")
    assert SpecifierSet(project["requires-python"]).contains(version)
    assert dict(found)["STOPSIGNAL"] == "SIGUSR1"
