"""The files of an output in a store that are finished, as an object next to them: for `--resume`.

The object is written again when a file of weights has been uploaded, with its size and entity tag.
A file counts as finished if the merge is the same (`Work`) and the store still has that object. A
store has no owners of files: who may write there is trusted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from unshard.containers.json_file import parsed_object
from unshard.errors import CorruptError
from unshard.stores.objects import Stored
from unshard.write.stage import Counts, Work
from unshard.write.staging.finished import notes_of

FINISHED_NAME = "_unshard-finished.json"
"""The object that names what is finished of an output that is not complete."""


@dataclass(frozen=True, slots=True)
class BucketLedger:
    """What is finished of an output.

    Attributes:
        work: what the merge does.
        files: each finished file as the store has it, by name.
        known: what became infinite in those that an earlier process finished.
        notes: why files that were finished are made again; empty if none is.
        counts: what became infinite in each finished file.
    """

    work: Work
    files: dict[str, Stored]
    known: Mapping[str, Counts]
    notes: tuple[str, ...] = ()
    counts: dict[str, Counts] = field(default_factory=dict)

    def add(self, name: str, stored: Stored, counts: Counts) -> bytes:
        """Add a finished file; return the object that records it and all others."""
        self.files[name], self.counts[name] = stored, counts
        return self.to_json()

    def to_json(self) -> bytes:
        """Return the object that records the finished files."""
        files = {
            name: {"size": one.size, "etag": one.etag, "counts": self.counts[name]}
            for name, one in self.files.items()
        }
        return (json.dumps({"work": self.work._asdict(), "files": files}) + "\n").encode()


def open_bucket_ledger(work: Work, data: bytes, found: Mapping[str, Stored]) -> BucketLedger:
    """Return what is finished, by the object that an earlier process wrote, or nothing.

    Args:
        work: what the merge does.
        data: that object; empty if there is none.
        found: what the store has.
    """
    recorded, files, counts = _parsed(data)
    if recorded != work:
        others = [] if recorded is None else [recorded]
        return BucketLedger(work, {}, {}, tuple(notes_of(others, work, 0)))
    same = {
        name: one
        for name, one in files.items()
        if one.etag and name in found and one.is_same(found[name])
    }
    kept = {name: counts[name] for name in same}
    notes = tuple(notes_of([], work, len(files) - len(same)))
    return BucketLedger(work, same, dict(kept), notes, kept)


def _parsed(data: bytes) -> tuple[Work | None, dict[str, Stored], dict[str, Counts]]:
    """Return what the object says; nothing if it is not one of ours."""
    try:
        whole = parsed_object(data, FINISHED_NAME)
        work, listed = whole["work"], whole["files"]
        if not isinstance(work, dict) or not isinstance(listed, dict):
            return None, {}, {}
        files = {name: Stored(int(one["size"]), str(one["etag"])) for name, one in listed.items()}
        counts = {
            name: Counts({int(start): int(count) for start, count in one["counts"].items()})
            for name, one in listed.items()
        }
        return Work(str(work["sources"]), str(work["plan"])), files, counts
    except (CorruptError, ValueError, KeyError, TypeError, AttributeError):
        return None, {}, {}
