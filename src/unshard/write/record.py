"""`unshard.json`: what was made from what.

No times, hosts or absolute paths: the same merge writes the same record.
"""

import json
from collections.abc import Mapping, Sequence

from unshard._version import __version__
from unshard.plan.layout import Layout
from unshard.read.open import Checkpoint

__all__ = ["RECORD_NAME", "record_json"]

RECORD_NAME = "unshard.json"


def record_json(
    checkpoints: Sequence[Checkpoint],
    weights: Sequence[float],
    layout: Layout,
    options: Mapping[str, object],
    output: Mapping[str, object],
) -> bytes:
    """Return the record's bytes.

    Args:
        checkpoints: what was merged; several were averaged.
        weights: what each of them counted.
        layout: what was written.
        options: those that shape the output.
        output: what else there is to know of the output.
    """
    sources = [_source(one) for one in checkpoints]
    several = [{"weight": weight, **one} for weight, one in zip(weights, sources, strict=True)]
    record: dict[str, object] = {
        "unshard": __version__,
        **({"source": sources[0]} if len(sources) == 1 else {"average_of": several}),
        "options": dict(options),
        "output": {
            "files": {file.filename: file.size for file in layout.files},
            "tensors": len(layout.weight_map),
            "parameters": layout.total_parameters,
            "bytes": layout.total_size,
            **output,
        },
        "skipped": {
            skipped.fqn: skipped.reason for one in checkpoints for skipped in one.catalog.skipped
        },
    }
    return (json.dumps(record, indent=2) + "\n").encode()


def _source(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what the record says of a checkpoint."""
    catalog, location = checkpoint.catalog, checkpoint.location
    return {
        "name": location.step_dir.name,
        "format": catalog.format,
        "writer": catalog.writer,
        "step": catalog.step,
        "world_size": catalog.world_size,
        "role": location.role,
        "weights": location.weights,
        "files": _sizes(checkpoint),
    }


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the sizes of the checkpoint's files, by path inside its directories."""
    location = checkpoint.location
    entries = checkpoint.catalog.tensors.values()
    sizes = {}
    for path in sorted({path for entry in entries for path in entry.chunks.paths}):
        places = [p for p in (*location.roots, location.step_dir) if path.is_relative_to(p)]
        if places:  # else it is a file made meanwhile, of decompressed items
            sizes[str(path.relative_to(places[0]))] = path.stat().st_size
    return sizes
