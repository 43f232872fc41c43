"""Open files, as few as the process may have: a cache of descriptors that closes the oldest."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Self

from unshard.errors import CorruptError

__all__ = ["OpenFiles"]


class OpenFiles:
    """Descriptors by path, opened with `flags` when first asked for. For one thread.

    At most `limit` are open at a time, at least 1.
    """

    def __init__(self, flags: int, *, limit: int) -> None:
        self._flags = flags
        self._limit = limit
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fd(self, path: Path) -> int:
        """Return a descriptor of this file; valid until `limit` other files have been asked for.

        Raises:
            CorruptError: the file is gone, or a file to read cannot be opened.
        """
        found = self._open.get(path)
        if found is not None:
            self._open.move_to_end(path)
            return found
        if len(self._open) >= self._limit:
            os.close(self._open.popitem(last=False)[1])
        try:
            fd = self._open[path] = os.open(path, self._flags)
        except FileNotFoundError as error:
            hint = "the checkpoint was removed while it was being read"
            raise CorruptError(f"{path}: no longer exists", hint=hint) from error
        except OSError as error:
            if self._flags != os.O_RDONLY:
                raise
            raise CorruptError(f"{path}: cannot be opened: {error.strerror}") from error
        return fd

    def close(self) -> None:
        """Close all."""
        while self._open:
            os.close(self._open.popitem()[1])
