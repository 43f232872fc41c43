"""Print the lowest version of each package that pyproject.toml allows: `pip install $(...)`.

`make test-lowest` installs these. Left out are torch, whose lowest version has no build for CPUs,
the engines vLLM and Ray, which have environments of their own, and the extra `test`, of which only
the tools and oracles come along, by the exact versions that `make test` has.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
EXTRAS = "eval", "serve", "remote", "s3-copy", "zstd", "torch"
TOOLS = {"hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "moto", "flask", "flask-cors"}
TOOLS |= {"accelerate", "peft"}
REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(\[[\w,-]+\])?([>=]=)([0-9.]+)")


def main() -> None:
    """Print them, separated by blanks."""
    sys.stdout.write(" ".join(lowest()) + "\n")


def lowest() -> Iterator[str]:
    """Yield a requirement of an exact version for each package.

    pip takes `==1.26` for 1.26.0, the first of its series.
    """
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(one for name in EXTRAS for one in extras[name])]
    pinned = [one for one in extras["test"] if "==" in one]
    for name, extra, _, version in map(parts, asked):
        if name != "torch":
            yield f"{name}{extra}=={version}"
    for name, extra, _, version in map(parts, pinned):
        if name in TOOLS:
            yield f"{name}{extra}=={version}"


def parts(requirement: str) -> tuple[str, str, str, str]:
    """Return name, extra, operator and version of a requirement."""
    match = REQUIREMENT.match(requirement)
    if match is None:
        raise SystemExit(f"error: {PROJECT.name}: {requirement}: has no lowest version")
    name, extra, operator, version = match.groups()
    return name, extra or "", operator, version


if __name__ == "__main__":
    main()
