"""The link to the best merged model of a run, `best/RUN/PROFILE` in the work directory.

It is relative, so that the work directory can be moved, and replaced in one step. Only a link that
leads to a merged model of this work directory is replaced or removed.
"""

import hashlib
import logging
import os
import re
import secrets
from pathlib import Path
from urllib.parse import quote

_BEST = "best"
_LONGEST = 200  # bytes of a name
_log = logging.getLogger(__name__)


def link_of(merged: Path, run: str, profile: str, weights: str) -> Path:
    """Return the link for the best model of a run, by a profile, next to the merged models."""
    name = profile if weights == "model" else f"{profile}-{weights}"
    return merged.parent / _BEST / _as_name(run) / _as_name(name)


def link_best(link: Path, merged: Path, job_id: str | None) -> None:
    """Have a link lead to the merged model of a job; remove it if there is none.

    What is not a link of ours is left, and reported in the log; so is what cannot be changed.
    """
    try:
        if not _is_free(link, merged.name):
            _log.warning("%s: not a link to a merged model: it is left as it is", link)
            return
        if job_id is None or not (merged / job_id).is_dir():
            link.unlink(missing_ok=True)
            return
        target = Path("..", "..", merged.name, job_id)
        if link.is_symlink() and link.readlink() == target:
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        draft = link.with_name(f".{secrets.token_hex(8)}")
        draft.symlink_to(target)
        try:
            draft.replace(link)
        except OSError:
            draft.unlink()
            raise
    except OSError as error:
        _log.warning("%s: cannot be changed: %s", link, error)


def _is_free(link: Path, folder: str) -> bool:
    """Return whether there is nothing, or a link to a job's directory in a folder."""
    if not link.is_symlink():
        return not os.path.lexists(link)
    ours = re.escape(f"../../{folder}/") + "[0-9a-f]+"
    return re.fullmatch(ours, str(link.readlink())) is not None


def _as_name(text: str) -> str:
    """Return a name of a file for any text; different texts have different names."""
    name = quote(text, safe=" +=,@")
    if name.startswith(".") or not name:
        name = f"%2E{name[1:]}" if name else "%"
    if len(name) > _LONGEST:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        name = f"{name[:_LONGEST]}-{digest}"
    return name
