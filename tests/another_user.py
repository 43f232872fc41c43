"""Be another user where root runs the tests, because root reads everything."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["another_user", "open_directory"]


@contextmanager
def another_user() -> Iterator[None]:
    """Be another user than root inside the block; other users stay themselves."""
    own = os.geteuid()
    try:
        if own == 0:
            os.seteuid(12345)
        yield
    finally:
        os.seteuid(own)


@contextmanager
def open_directory() -> Iterator[Path]:
    """Make a directory that other users may enter; pytest's own are closed to them."""
    with TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place).resolve()
