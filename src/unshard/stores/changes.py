"""Errors about files and objects that are no longer those that were opened first."""

from unshard.errors import ChangedError


def changed(where: str) -> ChangedError:
    """Return the error that a file or an object is not the one that was opened or listed first."""
    return ChangedError(
        f"{where}: has changed while it was being read",
        hint="was the checkpoint saved again? What was read may be half of two steps: begin again "
        "when it is complete",
    )


def gone(where: str) -> ChangedError:
    """Return the error that a file or an object is no longer there."""
    hint = "was the checkpoint removed while it was being read?"
    return ChangedError(f"{where}: no longer exists", hint=hint)
