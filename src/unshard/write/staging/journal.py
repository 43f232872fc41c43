"""The journal of a commit: the remaining steps after everything is durable.

It is in the staging directory, complete or absent. A later process follows it only if this user
sealed it for that directory.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from unshard.write.dirfd import Identity, check_path, read_file, whole_file
from unshard.write.staging.owners import StagingDirectory, is_sealed, seal_in

JOURNAL_NAME = "journal.json"
OUTPUT = "output"
ASIDE = "aside"


class Mode(Enum):
    """How an output takes its place."""

    NEW = "new"
    REPLACE = "replace"
    IN_PLACE = "in place"
    HERE = "here"


@dataclass(frozen=True, slots=True)
class Journal:
    """The remaining steps of a commit. All paths are relative to the target.

    Attributes:
        mode: REPLACE or IN_PLACE.
        target: name of the target, in the parent of the staging directory.
        old: inode of the target.
        new: inode of the output, which becomes the target (REPLACE).
        goes: files of the target that the output replaces or makes obsolete, with their identity.
        carried: the other files, which were copied into the output (REPLACE), with theirs.
        place: files to move into the target, in this order (IN_PLACE).
        mtime_ns: modification time to restore on the target (IN_PLACE).
    """

    mode: Mode
    target: str
    old: int
    new: int = 0
    goes: Mapping[str, Identity] = field(default_factory=dict)
    carried: Mapping[str, Identity] = field(default_factory=dict)
    place: tuple[str, ...] = ()
    mtime_ns: int = 0


def write_journal(staging: StagingDirectory, journal: Journal) -> None:
    """Write a journal, durably.

    Raises:
        OSError: it cannot be written or sealed.
    """
    fields = asdict(journal) | {"mode": journal.mode.value}
    code = seal_in(staging, "journal", fields)
    with whole_file(JOURNAL_NAME, within=staging.fd, durable=True) as stream:
        stream.write(json.dumps({"journal": fields, "seal": code}).encode())
    os.fsync(staging.fd)


def read_journal(staging: StagingDirectory) -> Journal | None:
    """Return the journal of an interrupted commit; None if it had not begun.

    Raises:
        PermissionError: this user did not write it for this staging directory.
        OSError: it cannot be read.
    """
    try:
        text = read_file(JOURNAL_NAME, within=staging.fd)
    except FileNotFoundError:
        return None
    try:
        record = json.loads(text)
        fields, code = record["journal"], record["seal"]
        if not is_sealed(code, "journal", fields, os.fstat(staging.fd).st_ino):
            raise PermissionError(f"its {JOURNAL_NAME} was not written by this user, for it")
        return _parsed(fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PermissionError(f"its {JOURNAL_NAME} is not valid") from error


def _parsed(fields: dict[str, Any]) -> Journal:
    """Return the journal of its JSON fields, with every path checked."""
    goes, carried = (
        {path: (int(inode), int(size), int(ns)) for path, (inode, size, ns) in fields[name].items()}
        for name in ("goes", "carried")
    )
    paths = tuple(fields["place"])
    (target,) = check_path(fields["target"])
    for path in (*paths, *goes, *carried):
        check_path(path)
    old, new, mtime_ns = (int(fields[name]) for name in ("old", "new", "mtime_ns"))
    return Journal(Mode(fields["mode"]), target, old, new, goes, carried, paths, mtime_ns)
