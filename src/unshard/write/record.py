"""`unshard.json`: what was made from what.

No times, hosts or absolute paths: the same merge writes the same record.
"""

import json

from unshard._version import __version__
from unshard.plan.layout import Layout
from unshard.read.open import Checkpoint

__all__ = ["RECORD_NAME", "record_json"]

RECORD_NAME = "unshard.json"


def record_json(checkpoint: Checkpoint, layout: Layout, dtype: str) -> bytes:
    """Return the record's bytes."""
    catalog, location = checkpoint.catalog, checkpoint.location
    paths = next(iter(catalog.tensors.values())).chunks.paths
    record = {
        "unshard": __version__,
        "source": {
            "name": location.step_dir.name,
            "format": catalog.format,
            "writer": catalog.writer,
            "step": catalog.step,
            "world_size": catalog.world_size,
            "role": location.role,
            "weights": location.weights,
            "files": {path.name: path.stat().st_size for path in paths},
        },
        "options": {"dtype": dtype},
        "output": {
            "files": {file.filename: file.size for file in layout.files},
            "tensors": len(layout.weight_map),
            "parameters": layout.total_parameters,
            "bytes": layout.total_size,
        },
        "skipped": {skipped.fqn: skipped.reason for skipped in catalog.skipped},
    }
    return (json.dumps(record, indent=2) + "\n").encode()
