"""Start writing dirty pages to disk early, so that the final flush has little to do."""

import ctypes
import sys

_LEAST = 1024 * 1024
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of Linux: start writing dirty pages, without waiting


class Writeback:
    """Starts the writeback of recently written bytes. For one thread.

    Linux itself starts late: when 10 % of memory is dirty, or after 30 seconds.
    """

    def __init__(self) -> None:
        self._sync = _sync_file_range()
        self._file, self._begin, self._end = -1, 0, 0

    def wrote(self, file: int, fd: int, start: int, size: int) -> None:
        """Record that `size` bytes at `start` were written to `fd`, which is file `file`.

        Adjacent bytes are gathered to a megabyte or more. Scattered bytes are left to the final
        flush, because writing them one by one would be slower.
        """
        if (file, start) != (self._file, self._end):
            self._file, self._begin = file, start
        self._end = start + size
        if self._end - self._begin >= _LEAST:
            if self._sync is not None:
                # The result is ignored: the final flush reports any error.
                self._sync(fd, self._begin, self._end - self._begin, _WRITE)
            self._begin = self._end


def _sync_file_range() -> "ctypes._NamedFuncPointer | None":
    """Return sync_file_range(2), or None on other systems than Linux."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function
