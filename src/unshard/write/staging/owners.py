"""The owner of a staging directory, and whether that process is provably dead.

A staging directory may come from a copy or a download, so it is trusted only if two HMACs with the
user's private key verify: one in its name, for its parent directory, and one in `owner.json`, for
the directory itself. Both cover inodes, which a copy does not share. They do not cover device
numbers, which change after a reboot, when a merge may be left to finish.

The key is a file in the user's own state directory (`$XDG_STATE_HOME/unshard/key`, by default
`~/.local/state/unshard/key`). If that directory is not the user's own, there is no key: nothing is
sealed, and no seal is valid.

`owner.json` contains host, pid and start time, for people. Its lock proves that the owner is dead:
the kernel drops the locks of a process that ends, however it ends. A free lock proves it only on
the same host.
"""

import errno
import hmac
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from unshard.errors import OutputError
from unshard.write.dirfd import (
    closing,
    hold,
    names_in,
    open_regular,
    opened,
    read_with_status,
    try_lock,
)

OWNER_NAME = "owner.json"
DRAFT_NAME = f"{OWNER_NAME}.new"
STAGING_PREFIX = "_unshard-partial-"
_MTIME = "-mtime-"
_ABANDONED_AFTER_S = 60
_OTHERS = 0o077
_WRITABLE = 0o022  # by others
_LONGEST = 1 << 20
_KEY = "key"
_KEY_BYTES = 32

_log = logging.getLogger(__name__)


class StagingDirectory(NamedTuple):
    """A staging directory, held open.

    Attributes:
        path: its path, for messages; operations use only its name.
        parent: descriptor of its parent directory.
        fd: its own descriptor.
    """

    path: Path
    parent: int
    fd: int


def staging_name(parent: int, mtime_ns: int | None) -> str:
    """Return a new name for a staging directory in `parent`, whose mtime is restored at the end."""
    nonce = secrets.token_hex(8)
    mtime = "" if mtime_ns is None else f"{_MTIME}{mtime_ns}"
    code = seal("name", nonce, mtime, os.fstat(parent).st_ino)
    return f"{STAGING_PREFIX}{nonce}{code}{mtime}"


def mtime_in(name: str) -> int | None:
    """Return the modification time in a name of `staging_name`."""
    text = name.partition(_MTIME)[2]
    return int(text) if text.isdigit() else None


def _codes(staging: StagingDirectory) -> tuple[str, str, str]:
    """Return nonce, seal ("" without a key) and mtime of a name of `staging_name`."""
    text, mark, mtime = staging.path.name.removeprefix(STAGING_PREFIX).partition(_MTIME)
    return text[:16], text[16:], mark + mtime


class Owner(NamedTuple):
    """The content of an owner file for a later process.

    Attributes:
        made: the directories above the staging directory that were created for it.
        target: name of the output.
        keeps: whether it stays for a merge to the same target that continues it.
    """

    made: tuple[Path, ...] = ()
    target: str = ""
    keeps: bool = False


class Locked(NamedTuple):
    """A recorded owner, and its open file, which this process has locked; None if there is none."""

    owner: Owner
    file: FileIO | None = None


def claim(staging: StagingDirectory, owner: Owner) -> FileIO:
    """Write the owner file, locked from the start; return it: closing it releases the lock.

    Raises:
        OutputError: the file system has no locks.
        OSError: it cannot be written or sealed.
    """
    fields: dict[str, object] = {
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "started": time.time(),
        "made": [str(path.resolve()) for path in owner.made],
        "target": owner.target,
        "keeps": owner.keeps,
    }
    fields["seal"] = seal_in(staging, "owner", fields)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = hold(FileIO(os.open(DRAFT_NAME, flags, 0o600, dir_fd=staging.fd), "r+"))
    try:
        try:
            try_lock(file.fileno())
        except OSError as error:
            raise no_locks(staging.path.parent, error) from error
        file.write(json.dumps(fields).encode())
        os.rename(DRAFT_NAME, OWNER_NAME, src_dir_fd=staging.fd, dst_dir_fd=staging.fd)
    except BaseException:
        file.close()
        raise
    return file


def no_locks(directory: Path, error: OSError) -> OutputError:
    """Return the error about a file system on which locking a file failed."""
    return OutputError(
        f"{directory}: files cannot be locked there: {error.strerror}",
        expected="a file system with locks, so that a later merge can tell whether this one died",
        hint="write the output to another file system, such as a local disk, and copy it here; "
        "or mount this one with locks (Lustre: mount -o flock)",
    )


def who_makes(directory: Path, target: str) -> str:
    """Return the live process that makes an output of this name in a directory; "" for none.

    The owner file need not be sealed, because it only decides what to wait for.
    """
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
        for name in names_in(parent):
            if not name.startswith(STAGING_PREFIX):
                continue
            with (
                suppress(OSError, ValueError, KeyError, TypeError),  # not a staging directory
                opened(name, within=parent) as staging,
                closing(open_regular(OWNER_NAME, os.O_RDWR, within=staging)) as file,
            ):
                fields = json.loads(os.read(file, _LONGEST))
                if fields["target"] == target and not try_lock(file):
                    return f"process {fields['pid']} on {fields['host']}"
    return ""


@contextmanager
def dead_owner(staging: StagingDirectory) -> Iterator[Locked | None]:
    """Yield the dead owner of a staging directory; None if it may be alive.

    Its lock is held during the context, so that only one process cleans up.

    Raises:
        PermissionError: there is no proof that this user made the staging directory here.
    """
    _check_made_here(staging)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = hold(FileIO(os.open(OWNER_NAME, flags, dir_fd=staging.fd), "r+"))
    except FileNotFoundError:  # unchanged for a minute: it died before it wrote the owner file
        is_empty = set(names_in(staging.fd)) <= {DRAFT_NAME}
        age = time.time() - os.fstat(staging.fd).st_mtime
        yield Locked(Owner()) if is_empty and age > _ABANDONED_AFTER_S else None
        return
    with file:
        fields = _owner_fields(staging, file)
        made = fields["made"]
        paths = {str(path) for path in made} if isinstance(made, list) else set()
        inner_first = tuple(path for path in staging.path.resolve().parents if str(path) in paths)
        target, keeps = str(fields.get("target", "")), fields.get("keeps") is True
        is_here = fields["host"] == os.uname().nodename
        is_dead = is_here and _is_free(staging, file.fileno())
        yield Locked(Owner(inner_first, target, keeps), file) if is_dead else None


def _check_made_here(staging: StagingDirectory) -> None:
    if os.fstat(staging.fd).st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if is_open_to_others(staging.fd):
        raise PermissionError(
            "others may write into it, so its content is not trusted; if no merge is running, move "
            "its files in output/ and aside/ that belong to the target there, and remove it"
        )
    nonce, code, mtime = _codes(staging)
    if not is_sealed(code, "name", nonce, mtime, os.fstat(staging.parent).st_ino):
        raise PermissionError("its name does not prove that this user made it in this directory")


def is_open_to_others(directory: int) -> bool:
    """Return whether others may write into a directory, as on file systems without permissions."""
    return bool(os.fstat(directory).st_mode & _WRITABLE)


def is_trusted_later(staging: StagingDirectory) -> bool:
    """Return whether a later process will trust this user's seals in a staging directory."""
    return bool(_codes(staging)[1]) and not is_open_to_others(staging.fd)


def _owner_fields(staging: StagingDirectory, file: FileIO) -> dict[str, object]:
    """Return the fields of an owner file.

    Raises:
        PermissionError: this user did not write it for this staging directory.
    """
    try:
        is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        fields = json.loads(file.read(_LONGEST)) if is_regular else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not is_sealed(
        fields.pop("seal", None), "owner", fields, os.fstat(staging.fd).st_ino
    ):
        raise PermissionError(f"its {OWNER_NAME} was not written by this user, for this directory")
    return fields


def _is_free(staging: StagingDirectory, fd: int) -> bool:
    """Lock an owner file if possible; return whether this process has the lock now."""
    try:
        is_ours = try_lock(fd)
        current = os.stat(OWNER_NAME, dir_fd=staging.fd, follow_symlinks=False)
    except OSError:
        return False
    # A process that has taken over the merge has replaced this owner file by its own.
    return is_ours and current.st_ino == os.fstat(fd).st_ino


def seal(*facts: object) -> str:
    """Return the HMAC of JSON values; "" without a key."""
    key = _key()
    text = json.dumps(facts, sort_keys=True).encode()
    return hmac.new(key, text, "sha256").hexdigest() if key else ""


def seal_in(staging: StagingDirectory, *facts: object) -> str:
    """Return the HMAC of JSON values that belong to a staging directory; "" without a key.

    Raises:
        OSError: the key that sealed its name is not readable any more, so later runs would not
            trust the directory, and never remove it.
    """
    code = seal(*facts, os.fstat(staging.fd).st_ino)
    if not code and _codes(staging)[1]:
        raise OSError(errno.EIO, "the key of this user cannot be read any more")
    return code


def is_sealed(code: object, *facts: object) -> bool:
    """Return whether a code is this user's seal of these values."""
    expected = seal(*facts)
    if not expected or not isinstance(code, str):
        return False
    return hmac.compare_digest(code.encode(errors="replace"), expected.encode())


def _key() -> bytes:
    """Return the user's key, created if necessary; b"" if there is no private directory for it."""
    try:
        with _state_folder() as folder:
            with suppress(FileNotFoundError):
                return _read_key(folder)
            _make_key(folder)
            return _read_key(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        _log.debug("no key to seal with: %s", error)
        return b""


@contextmanager
def _state_folder() -> Iterator[int]:
    """Yield the descriptor of the key's folder, which only this user can enter.

    Raises:
        OSError: it cannot be created, or others could write into it.
        RuntimeError: there is no home directory.
    """
    configured = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".local" / "state"
    existing = next(path for path in (base, *base.parents) if path.exists())
    _refuse_unless_own(existing.stat(), 0)  # root must not create folders in a user's home
    base.mkdir(parents=True, exist_ok=True)
    (base / "unshard").mkdir(mode=0o700, exist_ok=True)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with closing(os.open(base / "unshard", flags)) as folder:
        _refuse_unless_own(os.fstat(folder), _OTHERS)
        yield folder


def _refuse_unless_own(status: os.stat_result, forbidden: int) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & forbidden:
        raise PermissionError("the folder of the key is not this user's alone")


def _read_key(folder: int) -> bytes:
    key, status = read_with_status(_KEY, within=folder)
    _refuse_unless_own(status, _OTHERS)
    if len(key) != _KEY_BYTES:
        raise PermissionError("the key is damaged")
    return key


def _make_key(folder: int) -> None:
    """Create the key; of two concurrent processes, one wins."""
    draft = f".{_KEY}-{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        with closing(fd):
            os.write(fd, secrets.token_bytes(_KEY_BYTES))
            os.fsync(fd)
        try:
            os.link(draft, _KEY, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            os.rename(draft, _KEY, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
