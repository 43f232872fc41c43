"""Run unshard without flushing to disk, to compare it with tools that never flush."""

import os

from unshard.__main__ import main


def _nothing(fd: object) -> None:
    pass


os.fsync = os.fdatasync = _nothing
main()
