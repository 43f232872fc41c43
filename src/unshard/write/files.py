"""Durable steps on files and directories: flush, exchange, link, and which names are weights."""

import ctypes
import errno
import os
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

__all__ = ["carry_over", "exchange", "is_weight_file", "set_mtime", "sync", "sync_tree"]

_WEIGHTS = re.compile(
    r"(model|pytorch_model|adapter_model)(\.[\w-]+)?(-\d{5}-of-\d{5})?\.(safetensors|bin)"
    r"|(model\.safetensors|pytorch_model\.bin)\.index(\.[\w-]+)?\.json"
)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RENAME_SWAP = 2
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


def is_weight_file(name: str) -> bool:
    """Tell whether a file is a weight or index file by the names Hugging Face gives them."""
    return _WEIGHTS.fullmatch(name) is not None


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


def set_mtime(path: Path, mtime_ns: int) -> None:
    """Set the modification time of a file or directory."""
    os.utime(path, ns=(path.stat().st_atime_ns, mtime_ns))


def exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one atomic step; return False where the system cannot.

    Sources: renameat2(2) with RENAME_EXCHANGE on Linux, renamex_np(2) with RENAME_SWAP on macOS.
    """
    paths = os.fsencode(first), os.fsencode(second)
    library = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            result = library.renamex_np(*paths, _RENAME_SWAP)
        else:
            result = library.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
    except AttributeError:
        return False
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def carry_over(old: Path, new: Path, *, leave: Collection[str] = ()) -> None:
    """Give `new` everything of `old` that it lacks, but for weight files and `leave` at the top.

    Files are hard-linked, or copied where that is impossible; `old` stays as it is.
    """
    for source in sorted(old.iterdir()):
        if not is_weight_file(source.name) and source.name not in leave:
            _carry(source, new / source.name)


def _carry(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        target.mkdir(exist_ok=True)
        shutil.copymode(source, target)
        for child in sorted(source.iterdir()):
            _carry(child, target / child.name)
    elif not (target.exists() or target.is_symlink()):
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)
