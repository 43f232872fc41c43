"""A step that is complete and waits to be merged."""

from contextlib import suppress
from dataclasses import dataclass

from unshard.api.following.followed import Done
from unshard.read.finding.versions import stamps_of
from unshard.read.format import Location
from unshard.stores.remote_path import RemotePath


@dataclass(slots=True)
class Waiting:
    """A complete step that is to be merged.

    Attributes:
        done: what to record of it.
        tries: how many times it was tried.
        not_before: when it may be tried again, by `time.monotonic`.
    """

    location: Location
    done: Done
    tries: int = 0
    not_before: float = 0.0

    @property
    def step(self) -> int:
        """Its number; of a checkpoint without one, 0."""
        return self.done.step

    @property
    def name(self) -> str:
        """The name of its output."""
        return self.location.default_output.name


def time_saved(at: Location) -> int:
    """Return when the last file of a checkpoint's weights was written, in ns; 0 in a store."""
    if isinstance(at.path, RemotePath):
        return 0
    with suppress(OSError):  # it is being removed
        return max((mtime for _, mtime in stamps_of(at).values()), default=0)
    return 0
