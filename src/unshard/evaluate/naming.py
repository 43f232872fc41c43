"""What a run is called if nobody says: a name that the server accepts. Pure."""

import re
from pathlib import Path

__all__ = ["run_name"]


def run_name(folder: Path) -> str:
    """Return the name of a run's directory as a run may have it: it may become an argument."""
    if folder.parent.name == "pins" and folder.parent.parent.name == "_unshard":
        folder = folder.parents[2]
    if folder.name == "checkpoints":  # of every run, with Lightning and others
        folder = folder.parent
    clean = re.sub(r"[^\w.+=@-]+", "_", folder.name).lstrip("-._+=@")
    return clean[:100].rstrip(".") or "run"
