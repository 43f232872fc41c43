"""Tables of text: columns with headings, aligned, and cut to the width of a terminal."""

import shutil
import sys
from collections.abc import Mapping, Sequence

from unshard.errors import printable

Row = Mapping[str, object]
"""A line of a table, by heading; None is shown as "-"."""

_NAMES = frozenset({"run", "tasks", "task", "metric", "profile"})  # may be cut
_LEFT_OUT = ("ended (local)", "completed (local)", "submitted (local)", "weights", "profile")
_LEAST = 10  # cells of a name that is cut
_GAP = "  "
_CUT = "..."


def terminal_width() -> int | None:
    """Return how many cells a line of stdout has; None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def on_one_line(name: str) -> str:
    r"""Return a name without control characters: evaluators may put `\n` or a tab into one."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def lay_out_table(
    rows: Sequence[Row], *, numbers: frozenset[str], width: int | None = None
) -> list[str]:
    """Return the lines of a table, the headings first.

    Args:
        rows: with the same headings; at least one.
        numbers: the headings of what is aligned at its end.
        width: of the terminal, cells. In a narrow one columns are left out and names cut, but never
            ids, states and numbers: then lines may still be wider. None: as wide as it needs.
    """
    from rich.cells import cell_len

    headings = {name: name for name in rows[0]}
    cells = [{name: _cell(value) for name, value in row.items()} for row in (headings, *rows)]
    widths = {name: max(cell_len(row[name]) for row in cells) for name in headings}
    if width is not None:
        widths = _fit(widths, width)
    lines = (
        [
            _align(row[name], room, at_end=name in numbers, is_cut=name in _NAMES)
            for name, room in widths.items()
        ]
        for row in cells
    )
    return [_GAP.join(line).rstrip() for line in lines]


def write_markdown(rows: Sequence[Row], *, numbers: frozenset[str]) -> list[str]:
    """Return the lines of a table in Markdown."""
    headings = {name: name for name in rows[0]}
    rule = ["--:" if name in numbers else "---" for name in headings]
    cells = [
        [_cell(value).replace("|", "\\|") for value in row.values()] for row in (headings, *rows)
    ]
    return [f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:])]


def _cell(value: object) -> str:
    return "-" if value is None else on_one_line(str(value))


def _align(text: str, room: int, *, at_end: bool, is_cut: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    missing = room - cell_len(text)
    if missing < 0 and is_cut:
        return set_cell_size(text, room - len(_CUT)) + _CUT
    return " " * missing + text if at_end else text + " " * missing


def _fit(widths: Mapping[str, int], width: int) -> dict[str, int]:
    """Return the columns that stay, with their widths."""
    fitted = dict(widths)

    def excess(least: Mapping[str, int]) -> int:
        return sum(least.values()) + len(_GAP) * (len(least) - 1) - width

    def narrowest() -> dict[str, int]:
        return {
            name: min(room, _LEAST) if name in _NAMES else room for name, room in fitted.items()
        }

    for name in _LEFT_OUT:
        if excess(narrowest()) <= 0:
            break
        fitted.pop(name, None)
    while excess(fitted) > 0 and fitted != narrowest():
        widest = max(_NAMES & fitted.keys(), key=lambda name: (fitted[name], name))
        fitted[widest] -= 1
    return fitted
