"""Add up the reports of several runs of pytest: `python tools/sums.py build/results test left-out`.

Prints a line for each run, and a last one with the sums. A case that two runs have counts twice:
`make test` tries properties with fewer examples than `make test-all`.
"""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET


def main(directory: Path, names: list[str]) -> None:
    """Print the counts of the named runs' reports.

    Raises:
        SystemExit: a run left no report, or one that cannot be read.
    """
    counts: dict[str, Counter[str]] = {}
    missing = []
    for name in names:
        try:
            counts[name] = counts_of(directory / f"{name}.xml")
        except (OSError, ET.ParseError) as error:
            missing.append(f"error: {name} left no report: {error}")
    counts["tests"] = sum(counts.values(), Counter())
    for name, one in counts.items():
        sys.stdout.write(f"{name}: {shown(one)}\n")
    if missing:
        sys.exit("\n".join(missing))


def counts_of(report: Path) -> Counter[str]:
    """Return how many cases of a run passed, failed (with errors) and were skipped."""
    suites = ET.parse(report).getroot().iter("testsuite")  # noqa: S314 (our own report)
    counts: Counter[str] = Counter()
    for suite in suites:
        number = {name: int(value) for name, value in suite.attrib.items() if value.isdigit()}
        failed = number["failures"] + number["errors"]
        passed = number["tests"] - failed - number["skipped"]
        counts.update(passed=passed, failed=failed, skipped=number["skipped"])
    return counts


def shown(counts: Counter[str]) -> str:
    """Return counts as one line."""
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
