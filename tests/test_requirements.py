"""The locked lists in tests/requirements have what is asked for, with hashes (`make lock`)."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTS = sorted((ROOT / "tests" / "requirements").glob("*.txt"))
PIN = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;\\]+)")


def pins(lines: list[str]) -> set[tuple[str, str]]:
    found = [PIN.match(line) for line in lines]
    return {(re.sub(r"[_.]", "-", one[1]).lower(), one[2]) for one in found if one}


def asked_for(name: str) -> set[tuple[str, str]]:
    """Return the exact versions from which a list is made."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if name == "test":
        return pins(project["optional-dependencies"]["test"])
    return pins((ROOT / "tests" / "requirements" / f"{name}.in").read_text().splitlines())


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_a_list_has_what_is_asked_for_with_hashes_and_not_torch(path: Path) -> None:
    entries = re.split(r"(?m)^(?=[^\s#])", path.read_text())[1:]
    locked = pins(entries)
    assert asked_for(path.stem)
    assert asked_for(path.stem) <= locked
    assert all("--hash=sha256:" in one and "://" not in one for one in entries)
    assert "torch" not in {name for name, _ in locked}  # its build depends on the machine


def test_the_table_of_supported_versions_has_those_that_are_tested() -> None:
    page = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
    table = page.partition("## Supported versions")[2].partition("\n## ")[0]
    shown = set(re.findall(r"`([\w-]+)` (\d+(?:\.\d+)+)", table))
    assert len(shown) > 15
    locked = {pin for path in LISTS for pin in pins(path.read_text().splitlines())}
    assert {(name.replace("_", "-"), version) for name, version in shown} <= locked


def test_there_is_a_list_for_every_file_that_names_packages() -> None:
    named = {path.stem for path in (ROOT / "tests" / "requirements").glob("*.in")}
    assert {path.stem for path in LISTS} == named | {"test"}
