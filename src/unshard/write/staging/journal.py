"""The journal of a commit: what remains to be done once everything is durable.

It is in the staging directory, complete or absent. A later process believes it only if this user
sealed it for that very directory.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

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
    """What remains to be done. All paths are relative to the target.

    Attributes:
        mode: REPLACE or IN_PLACE.
        target: name of the target, in the directory that holds the staging directory.
        old: inode of the target.
        new: inode of the output, which becomes the target (REPLACE).
        goes: files of the target that the output replaces or makes obsolete, as they were found.
        carried: the other files, as they were when the output got them (REPLACE).
        place: files to move into the target, in this order (IN_PLACE).
        mtime_ns: modification time to give back to the target (IN_PLACE).
    """

    mode: Mode
    target: str
    old: int
    new: int = 0
    goes: Mapping[str, Identity] = field(default_factory=dict)
    carried: Mapping[str, Identity] = field(default_factory=dict)
    place: tuple[str, ...] = ()
    mtime_ns: int = 0


def write_journal(place: StagingDirectory, journal: Journal) -> None:
    """Write a journal, durably.

    Raises:
        OSError: it cannot be written or sealed.
    """
    fields = asdict(journal) | {"mode": journal.mode.value}
    code = seal_in(place, "journal", fields)
    with whole_file(JOURNAL_NAME, within=place.fd, durable=True) as stream:
        stream.write(json.dumps({"journal": fields, "seal": code}).encode())
    os.fsync(place.fd)


def read_journal(place: StagingDirectory) -> Journal | None:
    """Return the journal of an interrupted commit; None if it had not begun.

    Raises:
        PermissionError: this user did not write it for this staging directory.
        OSError: it cannot be read.
    """
    try:
        text = read_file(JOURNAL_NAME, within=place.fd)
    except FileNotFoundError:
        return None
    try:
        whole = json.loads(text)
        fields, code = whole["journal"], whole["seal"]
        if not is_sealed(code, "journal", fields, os.fstat(place.fd).st_ino):
            raise PermissionError(f"its {JOURNAL_NAME} was not written by this user, for it")
        return _parsed(fields)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PermissionError(f"its {JOURNAL_NAME} is not one that unshard writes") from error


def _parsed(fields: dict[str, object]) -> Journal:
    """Return the journal that its JSON describes; every path is checked."""
    goes, carried = (_identities(fields[name]) for name in ("goes", "carried"))
    place = fields["place"]
    paths = tuple(str(path) for path in place) if isinstance(place, list) else ()
    (target,) = check_path(str(fields["target"]))
    for path in (*paths, *goes, *carried):
        check_path(path)
    old, new, mtime_ns = (int(str(fields[name])) for name in ("old", "new", "mtime_ns"))
    return Journal(Mode(fields["mode"]), target, old, new, goes, carried, paths, mtime_ns)


def _identities(found: object) -> dict[str, Identity]:
    if not isinstance(found, dict):
        raise TypeError("not an object")
    return {str(path): (int(one[0]), int(one[1]), int(one[2])) for path, one in found.items()}
