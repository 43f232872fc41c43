"""Durable steps on files and directories: flush, exchange; and which names are weights."""

import ctypes
import errno
import os
import re
import sys
from pathlib import Path

from unshard.write.staging.beneath import whole_file

__all__ = ["exchange", "is_weight_file", "sync", "sync_tree", "write_whole"]

_WEIGHTS = re.compile(
    r"(model|pytorch_model|adapter_model)(\.[\w-]+)?(-\d{5}-of-\d{5})?\.(safetensors|bin)"
    r"|(model\.safetensors|pytorch_model\.bin)\.index(\.[\w-]+)?\.json"
)
_RENAME_EXCHANGE = 2
_RENAME_SWAP = 2
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


def is_weight_file(name: str) -> bool:
    """Return whether a file is a weight or index file by the names Hugging Face gives them."""
    return _WEIGHTS.fullmatch(name) is not None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file durably in one step: readers find all of it, or what was there before.

    Raises:
        OSError: it cannot be written.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with whole_file(path.name, within=folder, durable=True) as file:
            file.write(data)
    finally:
        os.close(folder)


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path) -> None:
    """Flush every file and directory below `root`, and `root`."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            if not (Path(folder) / name).is_symlink():
                sync(Path(folder) / name)
        sync(Path(folder))


def exchange(first: int, first_name: str, second: int, second_name: str) -> bool:
    """Swap two directories in one atomic step; return False where the system cannot.

    Each is named by the descriptor of the directory that holds it, and its name there.
    Sources: renameat2(2) with RENAME_EXCHANGE on Linux, renameatx_np(2) with RENAME_SWAP on macOS.
    """
    paths = first, os.fsencode(first_name), second, os.fsencode(second_name)
    library = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            result = library.renameatx_np(*paths, _RENAME_SWAP)
        else:
            result = library.renameat2(*paths, _RENAME_EXCHANGE)
    except AttributeError:
        return False
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), first_name, None, second_name)
