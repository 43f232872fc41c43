"""Give the files of ranks their checksums, when all their data is there."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unshard.containers.open_files import opened
from unshard.containers.strided import crc_of
from unshard.containers.torch_files.zip_layout import ZipLayout
from unshard.plan.resharding import Resharded

__all__ = ["seal"]


def seal(made: Resharded, directory: Path, *, workers: int, buffer_bytes: int) -> None:
    """Write the CRC-32 of every storage into the files, each read once from the page cache."""
    block = max(1 << 16, buffer_bytes // workers)
    with ThreadPoolExecutor(workers) as pool:
        done = [
            pool.submit(_seal, directory / file.filename, zipped, block)
            for file, zipped in zip(made.layout.files, made.zips, strict=True)
        ]
        for one in done:
            one.result()


def _seal(path: Path, made: ZipLayout, block: int) -> None:
    with opened(path) as file:
        crcs = [crc_of(file, start, size, block=block) for start, size in made.storages]
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for at, piece in made.fixed(crcs):
            os.pwrite(fd, piece, at)
    finally:
        os.close(fd)
