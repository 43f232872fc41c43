"""Proof that this user wrote something: a code that only the holder of a private key can compute.

The key is a file in the user's own state directory (`$XDG_STATE_HOME/unshard/key`, by default
`~/.local/state/unshard/key`). A tree that was unpacked, downloaded or copied can hold any file with
any name and mode, but not a valid code. Without a directory that is the user's own there is no key:
nothing is sealed then, and nothing counts as sealed.
"""

import hmac
import json
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from unshard.write.staging.beneath import read_with_status

__all__ = ["is_sealed", "seal"]

_KEY = "key"
_KEY_BYTES = 32
_OTHERS = 0o077

_log = logging.getLogger(__name__)


def seal(*facts: object) -> str:
    """Return the code of some JSON values; "" where there is no key."""
    key = _key()
    return _code(key, facts) if key else ""


def is_sealed(code: object, *facts: object) -> bool:
    """Return whether this user sealed these values with this code."""
    key = _key()
    if not key or not isinstance(code, str):
        return False
    return hmac.compare_digest(code.encode(errors="replace"), _code(key, facts).encode())


def _code(key: bytes, facts: tuple[object, ...]) -> str:
    return hmac.new(key, json.dumps(facts, sort_keys=True).encode(), "sha256").hexdigest()


def _key() -> bytes:
    """Return the user's key, made if there is none yet; b"" where there is no place for one."""
    try:
        folder = _own_folder()
        try:
            with suppress(FileNotFoundError):
                return _read(folder)
            _make(folder)
            return _read(folder)
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        _log.debug("no key to seal with: %s", error)
        return b""


def _own_folder() -> int:
    """Open the folder of the key.

    Raises:
        OSError: it cannot be made, or others could write into it.
    """
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = named if named.is_absolute() else Path.home() / ".local" / "state"
    there = next(path for path in (base, *base.parents) if path.exists())
    _refuse_unless_own(there.stat(), 0)  # root must not make folders in a user's home
    base.mkdir(parents=True, exist_ok=True)
    (base / "unshard").mkdir(mode=0o700, exist_ok=True)
    folder = os.open(base / "unshard", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _refuse_unless_own(os.fstat(folder), _OTHERS)
    except BaseException:
        os.close(folder)
        raise
    return folder


def _refuse_unless_own(status: os.stat_result, forbidden: int) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & forbidden:
        raise PermissionError("the folder of the key is not this user's alone")


def _read(folder: int) -> bytes:
    key, status = read_with_status(_KEY, within=folder)
    _refuse_unless_own(status, _OTHERS)
    if len(key) != _KEY_BYTES:
        raise PermissionError("the key is damaged")
    return key


def _make(folder: int) -> None:
    """Make the key; of two processes that do so at once, one wins."""
    draft = f".{_KEY}-{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        try:
            os.write(fd, secrets.token_bytes(_KEY_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        with suppress(FileExistsError):
            os.link(draft, _KEY, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.unlink(draft, dir_fd=folder)
