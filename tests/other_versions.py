"""Rank files that other versions of torch wrote; see tests/data/README.md."""

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parent / "data" / "rank_files.tar.xz"


def unpack_rank_files(directory: Path) -> Path:
    """Unpack them into a directory: torch-X.Y/<case>/*.pt."""
    with tarfile.open(ARCHIVE) as opened:
        opened.extractall(directory, filter="data")
    return directory
