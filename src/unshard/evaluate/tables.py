"""Text tables: columns with headings, aligned, and cut to the width of a terminal."""

import shutil
import sys
from collections.abc import Collection, Mapping, Sequence

from unshard.errors import printable

Row = Mapping[str, object]
"""A line of a table, by heading; None is shown as "-"."""

_NAMES = frozenset({"run", "tasks", "task", "metric", "profile"})  # may be cut
_LEFT_OUT = ("ended (local)", "completed (local)", "submitted (local)", "weights", "profile")
_LEAST = 10  # cells of a name that is cut, at least
_WHOLE = 2.0**53  # below, a float has all digits before its point
_GAP = 2  # between columns, as rich pads them


def terminal_width() -> int | None:
    """Return the number of cells in a line of stdout; None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def on_one_line(name: str) -> str:
    r"""Return a name with control characters escaped: evaluators' names may have `\n` or tabs."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def write_number(value: float, digits: int, *, sign: str = "") -> str:
    """Return a number with so many digits, or all before its point: 95940, not 9.594e+04.

    With "+" as `sign`, positive numbers have a sign too.
    """
    text = f"{value:{sign}.{digits}g}"
    return f"{value:{sign}.0f}" if "e+" in text and abs(value) < _WHOLE else text


def lay_out_table(
    rows: Sequence[Row], *, numbers: frozenset[str], width: int | None = None
) -> list[str]:
    """Return the lines of a table, the headings first.

    Args:
        rows: with the same headings; at least one.
        numbers: the headings of right-aligned columns.
        width: of the terminal, cells; None: unlimited. A narrow table has fewer columns and cut
            names, but whole ids, states and numbers, so lines may still be wider.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = {name: [name, *(_cell(row[name]) for row in rows)] for name in rows[0]}
    widths = {name: max(map(cell_len, cells)) for name, cells in columns.items()}
    if width is None:
        width = _total(widths.values())
    least = {name: min(room, _LEAST) if name in _NAMES else room for name, room in widths.items()}
    for name in _LEFT_OUT:
        if _total(least.values()) > width:
            least.pop(name, None)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name in least:  # rich narrows the widest column that may wrap
        table.add_column(justify="right" if name in numbers else "left", no_wrap=name not in _NAMES)
    # One row of whole columns: rich takes a millisecond for a row of ten cells, and there are
    # thousands of results.
    texts = ("\n".join(columns[name]) for name in least)
    table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in texts))
    console = Console()
    options = console.options.update(width=max(width, _total(least.values())))
    laid_out = "".join(segment.text for segment in console.render(table, options))
    return [line.rstrip() for line in laid_out.removesuffix("\n").split("\n")]


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


def _total(widths: Collection[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)
