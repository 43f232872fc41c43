"""Make the documents from results.json: ratios of medians, never one absolute time."""

from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from peers.cells import LAYOUTS
from peers.contenders import CONTENDERS, FLOORS, UNSHARD, UNSHARD_ASYNC

__all__ = ["GROWTH", "HEADLINE", "PAGE", "SECTION", "headline_cells", "page", "section"]

Results = dict[str, Any]

_DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = _DOCS / "peers.md"
SECTION = _DOCS / "performance.md"
HEADLINE = {"size": "1.5b", "ranks": 4, "dtype": "bfloat16"}
"""The cells that the summary shows."""
GROWTH = ("bytes", "ranks", "tensors")

_BEGIN, _END = "<!-- peers: generated -->", "<!-- peers: end -->"
_HEAD = """\
| layout | tool | time, durable | time | CPU | peak memory | read | written | values | config |
|---|---|--:|--:|--:|--:|--:|--:|---|---|
"""
_INTRODUCTION = """\
# Beside other tools: all figures

This page is generated from `benchmarks/peers/results.json` by `make bench-peers`, which also
explains how it is measured ([Performance](performance.md)).

"""


def page(results: Results) -> str:
    """Return docs/peers.md: one table for each model, number of ranks and dtype."""
    machine = results["machine"]
    parts = [
        _INTRODUCTION,
        f"Measured on {machine['cores']} cores with {machine['memory_gb']} GB of memory, ",
        f"{machine['file_system']}, Linux {machine['kernel']}. ",
        "Versions: " + "; ".join(_versions(of) for of in results["versions"].values()),
        ".\n",
    ]
    groups: dict[tuple[str, int, str], list[Any]] = {}
    for one in results["cells"].values():
        cell = one["cell"]
        groups.setdefault((cell["size"], cell["ranks"], cell["dtype"]), []).append(one)
    for (size, ranks, dtype), cells in sorted(groups.items()):
        parts.append(f"\n## Qwen2.5 {size.upper()}, {dtype}, {ranks} ranks\n\n{_table(cells)}")
    return "".join(parts)


def section(text: str, results: Results) -> str:
    """Return docs/performance.md with the summary's table between its two marks."""
    before, _, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{SECTION} does not have the marks {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}\n{_table(headline_cells(results))}{_END}{after}"


def headline_cells(results: Results) -> list[Any]:
    """Return the cells of the summary, one for each layout."""
    return [one for one in results["cells"].values() if HEADLINE.items() <= one["cell"].items()]


def _versions(versions: dict[str, str]) -> str:
    main, *rest = (f"{name} {version}" for name, version in versions.items())
    return main if not rest else f"{main} ({', '.join(rest)})"


def _table(cells: list[Any]) -> str:
    ordered = sorted(cells, key=lambda one: LAYOUTS.index(one["cell"]["layout"]))
    return _HEAD + "".join(
        _row(one["cell"]["layout"], known.name, one["contenders"][known.name], one)
        for one, known in product(ordered, CONTENDERS)
        if known.name in one["contenders"] and known.name != UNSHARD_ASYNC
    )


def _row(layout: str, name: str, taken: Any, cell: Any) -> str:
    if taken["error"] is not None:
        reason = taken["error"].replace("|", "\\|")[:160]
        return f"| {layout} | {name} | failed: `{reason}` | | | | | | | |\n"
    ours, ours_async = cell["contenders"][UNSHARD], cell["contenders"][UNSHARD_ASYNC]
    own = ours_async if name == UNSHARD else taken
    cells = (
        layout,
        f"**{name}**" if name == UNSHARD else name,
        f"{durable(taken) / durable(ours):.2f} x",
        f"{middle(own, 'seconds') / middle(ours_async, 'seconds'):.2f} x",
        f"{middle(taken, 'cpu_seconds') / middle(ours, 'cpu_seconds'):.2f} x",
        f"{middle(taken, 'peak_bytes') / 1e6:,.0f} MB",
        f"{middle(taken, 'bytes_read') / 1e9:.2f} GB",
        f"{middle(taken, 'bytes_written') / 1e9:.2f} GB",
        "a copy" if name in FLOORS else taken["verdict"],
        "" if name in FLOORS else ("yes" if taken["has_config"] else "no"),
    )
    return f"| {' | '.join(cells)} |\n"


def middle(taken: Any, what: str) -> float:
    """Return the median of one measure."""
    return float(median(one[what] for one in taken["rounds"]))


def durable(taken: Any) -> float:
    """Return the median time until the output was on disk."""
    return float(median(one["seconds"] + one["flush_seconds"] for one in taken["rounds"]))
