"""The command of the benchmark: `python -m peers [cells] [growth] [report] [options]`."""

import argparse
import json
import os
import platform
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import unshard
from peers import report
from peers.cells import DTYPES, LAYOUTS, SIZES, Cell
from peers.environments import ENVIRONMENTS, install, python_of, versions

_HERE = Path(__file__).parent
RESULTS = _HERE / "results.json"
_STEPS = ("cells", "growth", "report")


def main() -> None:
    """Measure what is asked for, add it to results.json, and make the documents from that."""
    options = parse()
    results: dict[str, Any] = {"cells": {}, "growth": {}}
    if options.results.exists():
        results = json.loads(options.results.read_bytes())
    if "cells" in options.steps:
        measure_cells(options, results)
    if "growth" in options.steps:
        measure_growth(options, results)
    if "report" in options.steps:
        write_report(options.results, results)


def parse() -> argparse.Namespace:
    """Return the options; every choice that is not made means all."""
    parser = argparse.ArgumentParser(prog="python -m peers")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(_STEPS))
    parser.add_argument("--size", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--ranks", nargs="+", type=int, choices=(4, 8), default=(4, 8))
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--grow", nargs="+", choices=report.GROWTH, default=report.GROWTH)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("build/peers"), help="to work in")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.steps = options.steps or _STEPS
    if unknown := set(options.steps) - set(_STEPS):
        parser.error(f"unknown step: {', '.join(unknown)}")
    return options


def measure_cells(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Measure one checkpoint after another; each is saved as soon as it is measured."""
    from peers.measure import measure

    for size, ranks, layout, dtype in product(
        options.size, options.ranks, options.layout, options.dtype
    ):
        cell = Cell(size, ranks, layout, dtype)
        print(cell.label, flush=True)
        results["cells"][cell.label] = measure(cell, options.directory, options.rounds)
        save(options, results)


def measure_growth(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Measure unshard alone on what grows."""
    from peers.growth import grow

    for what in options.grow:
        print(f"more {what}", flush=True)
        results["growth"][what] = grow(what, options.directory, options.rounds)
        save(options, results)


def save(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write results.json, with where and with what it was measured."""
    results["machine"] = {
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "kernel": platform.release().partition("-")[0],
        "file_system": file_system(options.directory),
    }
    installed = [name for name in ENVIRONMENTS if name != "charts" and python_of(name).exists()]
    results["versions"] = {"unshard": {"unshard": unshard.__version__}}
    results["versions"] |= {name: versions(name) for name in installed}
    text = json.dumps(results, indent=1, sort_keys=True)
    options.results.write_text(f"{text}\n", encoding="utf-8")


def file_system(directory: Path) -> str:
    """Return the type of the file system that a directory is on."""
    stat = ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(directory)]
    return subprocess.run(stat, capture_output=True, text=True, check=True).stdout.strip()


def write_report(path: Path, results: dict[str, Any]) -> None:
    """Write docs/peers.md, the table in docs/performance.md and the charts."""
    report.PAGE.write_text(report.page(results), encoding="utf-8")
    text = report.SECTION.read_text(encoding="utf-8")
    report.SECTION.write_text(report.section(text, results), encoding="utf-8")
    if (error := install("charts")) is not None:
        raise SystemExit(f"the charts were not drawn: {error}")
    charts = [str(python_of("charts")), "-m", "peers.charts", str(path.resolve())]
    subprocess.run([*charts, str(report.PAGE.parent)], check=True, cwd=_HERE.parent)


if __name__ == "__main__":
    main()
