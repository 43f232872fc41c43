"""Draw results.json as SVG: python -m peers.charts RESULTS DIRECTORY (needs matplotlib)."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from peers.contenders import UNSHARD, UNSHARD_ASYNC
from peers.report import GROWTH, durable, headline_cells, middle

_OURS, _OTHERS = "#1f6f5c", "#9aa5b1"


def draw_peers(results: dict[str, Any], path: Path) -> None:
    """Draw time and memory of every tool beside ours; each time as a multiple of ours."""
    times: dict[str, float] = {}
    memory: dict[str, float] = {}
    for cell in headline_cells(results):
        ours = durable(cell["contenders"][UNSHARD])
        for name, taken in cell["contenders"].items():
            if name in (UNSHARD_ASYNC, "copy loop", "cat") or taken["error"] is not None:
                continue
            times.setdefault(name, durable(taken) / ours)
            memory[name] = max(memory.get(name, 0), middle(taken, "peak_bytes") / 1e9)
    names = sorted(times, key=lambda name: (name != UNSHARD, times[name]), reverse=True)
    colours = [_OURS if name == UNSHARD else _OTHERS for name in names]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 0.38 * len(names) + 1), sharey=True)
    for axes, values, title, form in (
        (left, times, "time until durable, unshard = 1", "{:.1f}"),
        (right, memory, "peak memory, GB", "{:.2f}"),
    ):
        bars = axes.barh(names, [values[name] for name in names], color=colours)
        axes.bar_label(bars, [form.format(values[name]) for name in names], padding=3, fontsize=9)
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_xticks([])
        axes.set_xlim(0, max(values.values()) * 1.15)
    _save(figure, path)


def draw_growth(growth: dict[str, Any], path: Path) -> None:
    """Draw our time (the smallest point is 1) and memory with each thing that grows."""
    figure, rows = plt.subplots(2, len(GROWTH), figsize=(9, 4.5), sharex="col", sharey="row")
    for column, what in enumerate(GROWTH):
        values = [point[what] / (1e9 if what == "bytes" else 1) for point in growth[what]]
        first = durable(growth[what][0])
        rows[0][column].plot(values, [durable(one) / first for one in growth[what]], "o-", c=_OURS)
        megabytes = [middle(one, "peak_bytes") / 1e6 for one in growth[what]]
        rows[1][column].plot(values, megabytes, "o-", c=_OURS)
        rows[1][column].set_xlabel("gigabytes" if what == "bytes" else what, fontsize=10)
        rows[1][column].set_xscale("log", base=2)
        rows[1][column].set_xticks(values, [f"{value:g}" for value in values])
    rows[0][0].set_ylabel("time, first = 1")
    rows[1][0].set_ylabel("peak memory, MB")
    for axes in rows.flat:
        axes.set_ylim(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    mpl.rcParams |= {"svg.hashsalt": "unshard", "svg.fonttype": "none", "font.size": 10}
    measured = json.loads(Path(sys.argv[1]).read_bytes())
    draw_peers(measured, Path(sys.argv[2]) / "peers.svg")
    draw_growth(measured["growth"], Path(sys.argv[2]) / "growth.svg")
