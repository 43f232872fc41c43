"""`unshard inspect`."""

import json
from typing import TYPE_CHECKING

from unshard import signals
from unshard.cli.options import Checkpoint, Json, keywords_of, taking
from unshard.cli.reports import fields_of
from unshard.cli.running.guard import front_of
from unshard.cli.show import counted, print_row, size
from unshard.fronts import Front, warned
from unshard.keywords import ReadKeywords

if TYPE_CHECKING:
    from unshard.api import Inspection

__all__ = ["inspect"]


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
        f"{size(found.size_bytes)}",
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
            print_row(name, text)
    for skipped in found.skipped:
        print_row("left out", f"{skipped.fqn}: {skipped.reason}")
    for note in found.notes:
        print_row("warning", warned(note, front))


def _some(names: tuple[str, ...]) -> str:
    listed = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    return f"training state: {listed}" if names else ""


def _counts(counts: dict[str, int]) -> str:
    return "; ".join(f"{name} ({counted(count, 'tensor')})" for name, count in counts.items())
