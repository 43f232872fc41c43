"""What a model has answered in an attempt that was interrupted, for the next attempt at its job.

lm-eval (0.4.13, `use_cache`) writes each answer into an SQLite database as it comes, one for each
process, and knows it by the texts of the request alone. So the databases are in a directory of the
job, whose weights never change, and below a name that stands for all else that answers depend on.
"""

import hashlib
import json
import shutil
from pathlib import Path

from unshard.evaluate.server.evaluators.work import Work

_NAME = "answers"
_MOST_BYTES = 1 << 30


def place_of_answers(work: Work) -> str:
    """Return where an attempt caches answers: the beginning of the paths of its databases.

    Answers of another configuration are removed, and so are those that have become too many.
    """
    profile = work.profile.model_dump(mode="json")
    parts = [profile, work.request.key, work.gpus]  # each process has a part of the requests
    own = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    place = work.directory.parent / _NAME
    size = sum(path.stat().st_size for path in place.glob("*/*"))
    for other in place.glob("*"):
        if other.name != own or size > _MOST_BYTES:
            shutil.rmtree(other)
    return str(place / own / _NAME)


def forget_answers(job: Path) -> None:
    """Remove the answers that are cached in the directory of a job."""
    shutil.rmtree(job / _NAME, ignore_errors=True)
