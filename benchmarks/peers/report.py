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
_NOT_TOOLS = {UNSHARD, UNSHARD_ASYNC, *FLOORS}

_BEGIN, _END = "<!-- peers: generated -->", "<!-- peers: end -->"
_HEAD = """\
| {} | tool | time, durable | time | CPU | memory | unshard's | values | config |
|---|---|--:|--:|--:|--:|--:|---|---|
"""
_INTRODUCTION = """\
# Compared with other tools

![Time and peak memory of every tool, on the same checkpoints](peers.svg)

Every tool merges the same checkpoints of Qwen2.5, written by torch in the layout that the tool
reads. Times and CPU are multiples of unshard's: 2 takes twice as long. *Time, durable* ends when
the output is on disk; *time* ends with the process, and unshard then runs without its fsync. CPU is
that of all processes. Memory is the peak, in MB. *Values* compares every tensor, bit for bit, with
the trained ones; *config* is whether the output has a config.json. verl's and lmms-engine's mergers
cast to bfloat16, so unshard does the same on their layouts. `dcp_to_torch_save` writes a pickle.

This page is generated. To measure it again, all of it (hours) or one table of it:

```console
make bench-peers
make bench-peers PEERS="cells report --size 1.5b --ranks 4 --dtype bfloat16"
```

"""
_FLOORS = """
## Plain copies

Time until the copy is on disk, as a multiple of unshard's merge: a loop that copies the pieces of a
merge in one thread, `cp` and `cat` of the shards.

"""


def page(results: Results) -> str:
    """Return docs/peers.md: one table for each layout, and one of the copies."""
    machine = results["machine"]
    parts = [
        _INTRODUCTION,
        f"Measured on {machine['cores']} cores with {machine['memory_gb']} GB of memory, ",
        f"{machine['file_system']}, Linux {machine['kernel']}. ",
        "Versions: " + "; ".join(_versions(of) for of in results["versions"].values()),
        ".\n",
    ]
    groups: dict[str, dict[str, Any]] = {layout: {} for layout in LAYOUTS}
    for one in sorted(results["cells"].values(), key=_order):
        groups[one["cell"]["layout"]][_label(one)] = one
    for layout, cells in groups.items():
        parts.append(f"\n## {layout}\n\n{_table('checkpoint', cells)}")
    parts += [_FLOORS, _copies(groups)]
    return "".join(parts)


def section(text: str, results: Results) -> str:
    """Return docs/performance.md with the summary's table between its two marks."""
    before, _, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{SECTION} does not have the marks {_BEGIN} and {_END}")
    cells = {one["cell"]["layout"]: one for one in headline_cells(results)}
    ordered = {layout: cells[layout] for layout in LAYOUTS if layout in cells}
    return f"{before}{_BEGIN}\n{_table('layout', ordered)}{_END}{after}"


def headline_cells(results: Results) -> list[Any]:
    """Return the cells of the summary, one for each layout."""
    return [one for one in results["cells"].values() if HEADLINE.items() <= one["cell"].items()]


def _versions(versions: dict[str, str]) -> str:
    main, *rest = (f"{name} {version}" for name, version in versions.items())
    return main if not rest else f"{main} ({', '.join(rest)})"


def _order(one: Any) -> tuple[str, int, str]:
    return one["cell"]["size"], one["cell"]["ranks"], one["cell"]["dtype"]


def _label(one: Any) -> str:
    size, ranks, dtype = _order(one)
    return f"{size.upper()} {dtype}, {ranks} ranks"


def _table(heading: str, cells: dict[str, Any]) -> str:
    names = [known.name for known in CONTENDERS if known.name not in _NOT_TOOLS]
    return _HEAD.format(heading) + "".join(
        _row(label, name, one["contenders"])
        for (label, one), name in product(cells.items(), names)
        if name in one["contenders"]
    )


def _row(label: str, name: str, measured: dict[str, Any]) -> str:
    taken, ours, ours_async = measured[name], measured[UNSHARD], measured[UNSHARD_ASYNC]
    if taken["error"] is not None:
        reason = taken["error"].replace("|", "\\|")[:160]
        return f"| {label} | {name} | failed: `{reason}` | | | | | | |\n"
    cells = (
        label,
        name,
        f"{durable(taken) / durable(ours):.2f}",
        f"{middle(taken, 'seconds') / middle(ours_async, 'seconds'):.2f}",
        f"{middle(taken, 'cpu_seconds') / middle(ours, 'cpu_seconds'):.2f}",
        f"{middle(taken, 'peak_bytes') / 1e6:,.0f}",
        f"{middle(ours, 'peak_bytes') / 1e6:,.0f}",
        taken["verdict"],
        "yes" if taken["has_config"] else "no",
    )
    return f"| {' | '.join(cells)} |\n"


def _copies(groups: dict[str, dict[str, Any]]) -> str:
    """Return the table of the copies: a row for each checkpoint, a column for each layout."""
    head = f"| {', '.join(FLOORS)} | {' | '.join(groups)} |\n|---|{'--:|' * len(groups)}\n"
    labels = dict.fromkeys(label for cells in groups.values() for label in cells)
    rows = ([label, *(_copied(cells.get(label)) for cells in groups.values())] for label in labels)
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _copied(one: Any) -> str:
    if one is None:
        return ""
    ours = durable(one["contenders"][UNSHARD])
    return ", ".join(f"{durable(one['contenders'][name]) / ours:.2f}" for name in FLOORS)


def middle(taken: Any, what: str) -> float:
    """Return the median of one measure."""
    return float(median(one[what] for one in taken["rounds"]))


def durable(taken: Any) -> float:
    """Return the median time until the output was on disk."""
    return float(median(one["seconds"] + one["flush_seconds"] for one in taken["rounds"]))
