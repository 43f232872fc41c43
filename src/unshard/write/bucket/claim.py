"""The claim of a place in a store: an object that only one process can create, or take over.

A store has no locks that end with a process. A process that must know whether it still
holds a place reads the claim, and compares it with the one that it wrote.
"""

import json
import logging
import secrets
from datetime import UTC, datetime

from unshard._version import __version__
from unshard.errors import CorruptError, OutputError, UnshardError
from unshard.stores.objects import create
from unshard.stores.remote_path import RemotePath

CLAIM_NAME = "_unshard-partial.json"
"""The object that claims a place until the output there is complete."""

_log = logging.getLogger(__name__)


class Claim:
    """The claim of this process on a place; it says since when, and by which version.

    Args:
        target: the place.
    """

    def __init__(self, target: RemotePath) -> None:
        self._target, self._bucket = target, target.bucket
        begun = datetime.now(UTC).isoformat(timespec="seconds")
        claim = {"unshard": __version__, "begun": begun, "id": secrets.token_hex(16)}
        self._text = (json.dumps(claim) + "\n").encode()

    def make(self, *, instead_of: str | None = None) -> None:
        """Write the claim, where there is none, or instead of the one with an entity tag.

        Raises:
            OutputError: another process was faster.
            StoreError: the store cannot be reached, or does not allow it.
        """
        if create(self._bucket, self.key(CLAIM_NAME), self._text, instead_of=instead_of) is None:
            raise self.taken()

    def is_held(self) -> bool:
        """Return whether the store has this very claim.

        Raises:
            StoreError: it cannot be reached, or does not allow it.
        """
        try:
            return self.read(CLAIM_NAME) == self._text
        except (FileNotFoundError, CorruptError):
            return False

    def taken(self) -> OutputError:
        """Return the error that another process has claimed the place, and when."""
        begun = "an unknown time"
        try:
            begun = str(json.loads(self.read(CLAIM_NAME))["begun"])[:40]
        except (OSError, UnshardError, ValueError, KeyError, TypeError):
            _log.debug("%s/%s cannot be read", self._target, CLAIM_NAME)
        return OutputError(
            f"{self._target}: a merge into it began at {begun}, and is not complete",
            hint="wait for it; or, if it was killed, go on with it by ⟦--resume⟧, remove "
            "everything there, or give another output",
        )

    def key(self, name: str) -> str:
        """Return the key of an object in the place."""
        return f"{self._target.key}/{name}".lstrip("/")

    def read(self, name: str) -> bytes:
        """Return an object in the place, as it is now."""
        self._bucket.forget()
        data: bytes = (self._target / name).read_bytes()
        return data
