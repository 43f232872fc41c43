"""Finds files of weights that are missing, or not written completely yet."""

import re
from collections.abc import Iterable
from pathlib import Path

from unshard.containers.safetensors_file import read_safetensors
from unshard.errors import CorruptError, UnshardError
from unshard.read.hub_files import INDEX_NAMES, weight_map
from unshard.stores.remote_path import RemotePath

_SHARD = re.compile(r"(.+)-\d+-of-(\d+)\.safetensors")
_END_OF_ZIP = b"PK\x05\x06"
_END_SIZE = 22  # without the comment, whose length is its last two bytes (APPNOTE.TXT 4.3.16)
_MOST_COMMENT = 65535
_ZIPS = frozenset({".pt", ".bin", ".pth", ".ckpt"})


def why_folder_unfinished(folder: Path) -> str | None:
    """Return a message about a file of weights that a folder lacks, or that is not finished."""
    paths = list(folder.iterdir())
    zips = (path for path in paths if path.suffix in _ZIPS and path.is_file())
    return why_unfinished(zips) or _why_shards(folder, {path.name for path in paths})


def _why_shards(folder: Path, names: set[str]) -> str | None:
    """Return a message about a safetensors file that is missing or shorter than its header."""
    expected = {
        f"{match[1]}-{number:0{len(match[2])}}-of-{match[2]}.safetensors"
        for match in map(_SHARD.fullmatch, names)
        if match is not None
        for number in range(1, int(match[2]) + 1)
    }
    for index in names.intersection(INDEX_NAMES):
        try:
            expected |= set(weight_map(folder / index).values())
        except CorruptError:
            return f"{index} is not finished"
    if missing := sorted(expected - names):
        return f"{missing[0]} is missing"
    for path in folder.glob("*.safetensors"):
        try:
            read_safetensors(path)
        except UnshardError:
            return f"{path.name} is not finished"
    return None


def why_unfinished(files: Iterable[Path]) -> str | None:
    """Return a message about an empty file or a zip without its end.

    torch's legacy files are not zips.
    """
    for path in files:
        if isinstance(path, RemotePath):
            continue  # an object exists only when it is whole
        with path.open("rb") as stream:
            head = stream.read(4)
            stream.seek(max(0, path.stat().st_size - _END_SIZE - _MOST_COMMENT))
            tail = stream.read()
        at = tail.rfind(_END_OF_ZIP)
        comment = int.from_bytes(tail[at + _END_SIZE - 2 : at + _END_SIZE], "little")
        has_end = at >= 0 and len(tail) >= at + _END_SIZE + comment
        if not head.strip(b"\0") or (head[:2] == b"PK" and not has_end):
            return f"{path.name} is not finished"
    return None
