"""The record of an output's finished files in a store, as an object next to them: for `--resume`.

The object is rewritten after each upload of a weight file, with its size and entity tag. A file
counts as finished if the merge is the same (`WorkDigests`) and the store still has that object. A
store has no owners of files, so everyone with write access is trusted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unshard.containers.json_file import parsed_object
from unshard.errors import CorruptError
from unshard.stores.objects import Stored
from unshard.write.stage import Counts, WorkDigests
from unshard.write.staging.finished import notes_of

FINISHED_NAME = "_unshard-finished.json"
"""The object that lists the finished files of an incomplete output."""


@dataclass(frozen=True, slots=True)
class BucketLedger:
    """The finished files of an output.

    Attributes:
        work: the identity of the merge.
        files: size and entity tag of each finished file, by name.
        known: overflows of the files that an earlier process finished.
        notes: why finished files are written again; empty if none is.
        counts: overflows of each finished file.
    """

    work: WorkDigests
    files: dict[str, Stored]
    known: Mapping[str, Counts]
    notes: tuple[str, ...] = ()
    counts: dict[str, Counts] = field(default_factory=dict)

    def add(self, name: str, stored: Stored, counts: Counts) -> bytes:
        """Add a finished file; return the content of the object, as `to_json`."""
        self.files[name], self.counts[name] = stored, counts
        return self.to_json()

    def to_json(self) -> bytes:
        """Return the content of the object that lists the finished files."""
        files = {
            name: {"size": stored.size, "etag": stored.etag, "counts": self.counts[name]}
            for name, stored in self.files.items()
        }
        return (json.dumps({"work": self.work._asdict(), "files": files}) + "\n").encode()


def open_bucket_ledger(
    work: WorkDigests, data: bytes, objects: Mapping[str, Stored]
) -> BucketLedger:
    """Return the finished files that an earlier process recorded and that have not changed.

    Args:
        work: the identity of the merge.
        data: the content of the record; empty if there is none.
        objects: the objects in the store.
    """
    recorded, files, counts = _parsed(data)
    if recorded != work:
        others = [] if recorded is None else [recorded]
        return BucketLedger(work, {}, {}, tuple(notes_of(others, work, 0)))
    same = {
        name: stored
        for name, stored in files.items()
        if stored.etag and name in objects and stored.is_same(objects[name])
    }
    finished = {name: counts[name] for name in same}
    notes = tuple(notes_of([], work, len(files) - len(same)))
    return BucketLedger(work, same, dict(finished), notes, finished)


def _parsed(data: bytes) -> tuple[WorkDigests | None, dict[str, Stored], dict[str, Counts]]:
    """Return the content of the record; (None, {}, {}) if it is invalid."""
    try:
        fields: Any = parsed_object(data, FINISHED_NAME)
        work = WorkDigests(str(fields["work"]["sources"]), str(fields["work"]["plan"]))
        files, counts = {}, {}
        for name, row in fields["files"].items():
            files[name] = Stored(int(row["size"]), str(row["etag"]))
            counts[name] = Counts({int(at): int(count) for at, count in row["counts"].items()})
        return work, files, counts  # noqa: TRY300 (any part may be malformed)
    except (CorruptError, ValueError, KeyError, TypeError, AttributeError):
        return None, {}, {}
