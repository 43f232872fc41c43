"""`unshard inspect`."""

import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from unshard import signals
from unshard.cli.options import Checkpoint, Json, keywords_of, taking
from unshard.cli.reports import fields_of
from unshard.cli.running.guard import front_of
from unshard.fronts import Front, reword_warning
from unshard.keywords import ReadKeywords
from unshard.showing import counted, human_size

if TYPE_CHECKING:
    from unshard.api import Inspection

__all__ = ["inspect"]

_TITLE = 13  # characters of the first column of the table


@taking(ReadKeywords)
def inspect(checkpoint: Checkpoint, *, as_json: Json = False, **given: object) -> None:
    """Describe a checkpoint, and what merge would write."""
    from unshard import api

    signals.raise_them()
    found = api.inspect(checkpoint, **keywords_of(ReadKeywords, given))
    if as_json:
        print(json.dumps(fields_of(found)))
    else:
        _print(found, front_of(inspect, {"checkpoint": checkpoint}))


def _print(found: "Inspection", front: Front) -> None:
    which = ", ".join(filter(None, (found.role, found.weights)))
    rows = {
        "checkpoint": f"{found.path} ({which} weights)",
        "format": f"{found.format}, written by {found.writer}",
        "step": "unknown" if found.step is None else str(found.step),
        "world size": str(found.world_size),
        "meshes": _counts(found.meshes),
        "placements": _counts(found.placements),
        "dtypes": _counts(found.dtypes),
        "parameters": f"{found.parameters:,} in {counted(len(found.tensors), 'tensor')}, "
        f"{human_size(found.size_bytes)}",
        "config": f"names {found.config_dtype}" if found.config_dtype else "",
        "EMA": "present (--weights ema)" if found.has_ema and found.weights != "ema" else "",
        "LoRA": counted(found.lora_tensors, "tensor") if found.lora_tensors else "",
        "tied": "; ".join(" = ".join(names) for names in found.shared),
        "companions": ", ".join(found.companions) or "none",
        "not weights": _some(found.training_state),
        "compressed": "yes: merge decompresses it first" if found.compressed else "",
        "missing": ", ".join(found.missing),
        "merge writes": found.would_write,
    }
    for name, text in rows.items():
        if text:
            _print_row(name, text)
    for skipped in found.skipped:
        _print_row("left out", f"{skipped.fqn}: {skipped.reason}")
    for note in found.notes:
        _print_row("warning", reword_warning(note, front))


def _print_row(title: str, text: str) -> None:
    """Print one row of the table: on a terminal broken between words, elsewhere in one line."""
    row = f"{title:<{_TITLE}} {text}"
    if sys.stdout.isatty():
        columns = max(shutil.get_terminal_size().columns, 2 * _TITLE)
        indent = " " * (_TITLE + 1)
        lines = textwrap.TextWrapper(columns, subsequent_indent=indent, break_long_words=False)
        lines.break_on_hyphens = False
        row = lines.fill(row)
    print(row)


def _some(names: tuple[str, ...]) -> str:
    listed = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    return f"training state: {listed}" if names else ""


def _counts(counts: dict[str, int]) -> str:
    return "; ".join(f"{name} ({counted(count, 'tensor')})" for name, count in counts.items())
