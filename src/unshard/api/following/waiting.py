"""A step that waits to be merged and handed on."""

from contextlib import suppress
from dataclasses import dataclass, field

from unshard.api.following.followed import Entry
from unshard.read.finding.versions import stamps_of
from unshard.read.format import Location
from unshard.stores.remote_path import RemotePath


@dataclass(slots=True)
class Waiting:
    """A step with which something is to be done.

    Attributes:
        name: of its output.
        entry: what is recorded of it.
        location: of the checkpoint; None if it is gone, and only its output is handed on.
        tries: how many times it was tried.
        not_before: when it may be tried again, by `time.monotonic`.
        handed: what was done with the output: "uploaded", "run".
    """

    name: str
    entry: Entry
    location: Location | None
    tries: int = 0
    not_before: float = 0.0
    handed: set[str] = field(default_factory=set)


def time_saved(at: Location) -> int:
    """Return when the last file of a checkpoint's weights was written, in ns; 0 in a store."""
    if isinstance(at.path, RemotePath):
        return 0
    with suppress(OSError):  # it is being removed
        return max((mtime for _, mtime in stamps_of(at).values()), default=0)
    return 0
