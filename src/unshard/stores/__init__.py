"""Object stores: buckets, the paths in them, and the reading of their objects."""

from unshard.errors import ChangedError

OTHER_SCHEMES = ("http", "https", "hf")
"""The schemes of addresses that `other_stores` reads instead of obstore."""


def changed(where: str) -> ChangedError:
    """Return the error for a file or an object that changed since it was opened or listed."""
    return ChangedError(
        f"{where}: has changed while it was being read",
        hint="was the checkpoint saved again? The bytes read so far may be of two steps: start "
        "again when the checkpoint is complete",
    )


def gone(where: str) -> ChangedError:
    """Return the error for a file or an object that was removed after it was opened or listed."""
    hint = "was the checkpoint removed while it was being read?"
    return ChangedError(f"{where}: no longer exists", hint=hint)
