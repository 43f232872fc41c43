"""The owner of a staging directory, and whether that process is provably dead.

What a tree that was copied or downloaded contains proves nothing, so two codes that only the holder
of a private key can compute must be right before anything of a staging directory is believed: one
in its name, for the directory that holds it, and one in `owner.json`, for the staging directory
itself. Both are bound to inodes, which a copy does not share. Devices are left out: their
numbers change when a machine starts again, which is when something is left to finish.

The key is a file in the user's own state directory (`$XDG_STATE_HOME/unshard/key`, by default
`~/.local/state/unshard/key`). Without a directory that is the user's own there is no key: nothing
is sealed then, and nothing counts as sealed.

`owner.json` names host, pid and start time, for people. What proves a death is its lock: the kernel
drops the locks of a process that ends, however it ends. A free lock on this host is a dead owner;
of another host's owner nothing is known.
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
        path: of it, for messages; steps depend only on its name.
        parent: descriptor of the directory that holds it.
        fd: its own descriptor.
    """

    path: Path
    parent: int
    fd: int


def staging_name(parent: int, mtime_ns: int | None) -> str:
    """Return a new name for a staging directory in `parent`, whose mtime is to be given back."""
    drawn = secrets.token_hex(8)
    mtime = "" if mtime_ns is None else f"{_MTIME}{mtime_ns}"
    code = seal("name", drawn, mtime, os.fstat(parent).st_ino)
    return f"{STAGING_PREFIX}{drawn}{code}{mtime}"


def mtime_in(name: str) -> int | None:
    """Return the modification time that a name of `staging_name` records."""
    text = name.partition(_MTIME)[2]
    return int(text) if text.isdigit() else None


def _codes(place: StagingDirectory) -> tuple[str, str, str]:
    """Return what `staging_name` drew, the code that seals it ("" without a key), and the mtime."""
    text, mark, mtime = place.path.name.removeprefix(STAGING_PREFIX).partition(_MTIME)
    return text[:16], text[16:], mark + mtime


class Owner(NamedTuple):
    """What an owner file records for a later process.

    Attributes:
        made: the directories above the staging directory that were made for it.
        target: name of the output that is made there.
        keeps: whether it is left for a merge to the same target that goes on with it.
    """

    made: tuple[Path, ...] = ()
    target: str = ""
    keeps: bool = False


class Locked(NamedTuple):
    """What is recorded of an owner, and its open file, whose lock is ours; None if it has none."""

    owner: Owner
    file: FileIO | None = None


def claim(place: StagingDirectory, owner: Owner) -> FileIO:
    """Write the owner file, locked from the start; return it, which is locked until it is closed.

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
    fields["seal"] = seal_in(place, "owner", fields)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = hold(FileIO(os.open(DRAFT_NAME, flags, 0o600, dir_fd=place.fd), "r+"))
    try:
        _lock(file.fileno(), place.path.parent)
        file.write(json.dumps(fields).encode())
        os.rename(DRAFT_NAME, OWNER_NAME, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    except BaseException:
        file.close()
        raise
    return file


def _lock(draft: int, directory: Path) -> None:
    """Lock the draft of an owner file, which no other process opens, in this directory."""
    try:
        try_lock(draft)
    except OSError as error:
        raise no_locks(directory, error) from error


def no_locks(directory: Path, error: OSError) -> OutputError:
    """Return the error about a file system on which locking a file failed."""
    return OutputError(
        f"{directory}: files cannot be locked there: {error.strerror}",
        expected="a file system with locks, by which a later merge knows whether this one died",
        hint="write the output to another file system, such as a local disk, and copy it here; "
        "or mount this one with locks (Lustre: mount -o flock)",
    )


def who_makes(directory: Path, target: str) -> str:
    """Return which live process makes an output of this name in a directory; "" for none.

    What an owner file says decides only what is waited for, so it need not be sealed.
    """
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
        for name in names_in(parent):
            if not name.startswith(STAGING_PREFIX):
                continue
            with (
                suppress(OSError, ValueError, KeyError, TypeError),  # not a staging directory
                opened(name, within=parent) as place,
                closing(open_regular(OWNER_NAME, os.O_RDWR, within=place)) as file,
            ):
                fields = json.loads(os.read(file, _LONGEST))
                if fields["target"] == target and not try_lock(file):
                    return f"process {fields['pid']} on {fields['host']}"
    return ""


@contextmanager
def dead_owner(place: StagingDirectory) -> Iterator[Locked | None]:
    """Yield what a dead process recorded as the owner of a staging directory; None if it may live.

    Its lock is held for as long, so that only one process cleans up.

    Raises:
        PermissionError: nothing proves that this user made the staging directory, here.
    """
    _check_made_here(place)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = hold(FileIO(os.open(OWNER_NAME, flags, dir_fd=place.fd), "r+"))
    except FileNotFoundError:  # it died before it named itself, if nothing changes for a minute
        is_empty = set(names_in(place.fd)) <= {DRAFT_NAME}
        age = time.time() - os.fstat(place.fd).st_mtime
        yield Locked(Owner()) if is_empty and age > _ABANDONED_AFTER_S else None
        return
    with file:
        fields = _owner(place, file)
        made = fields["made"]
        known = {str(path) for path in made} if isinstance(made, list) else set()
        inner_first = tuple(path for path in place.path.resolve().parents if str(path) in known)
        target, keeps = str(fields.get("target", "")), fields.get("keeps") is True
        is_here = fields["host"] == os.uname().nodename
        is_dead = is_here and _is_free(place, file.fileno())
        yield Locked(Owner(inner_first, target, keeps), file) if is_dead else None


def _check_made_here(place: StagingDirectory) -> None:
    if os.fstat(place.fd).st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if is_open_to_others(place.fd):
        raise PermissionError(
            "others may write into it, so that nothing in it is believed; if no merge is under way,"
            " take from its output/ and aside/ what belongs into the target, and remove it"
        )
    drawn, code, mtime = _codes(place)
    if not is_sealed(code, "name", drawn, mtime, os.fstat(place.parent).st_ino):
        raise PermissionError("its name does not prove that this user made it in this directory")


def is_open_to_others(directory: int) -> bool:
    """Return whether others may write into a directory, as on file systems without permissions."""
    return bool(os.fstat(directory).st_mode & _WRITABLE)


def is_believed_later(place: StagingDirectory) -> bool:
    """Return whether a later process will believe what this user has sealed in it."""
    return bool(_codes(place)[1]) and not is_open_to_others(place.fd)


def _owner(place: StagingDirectory, file: FileIO) -> dict[str, object]:
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
        fields.pop("seal", None), "owner", fields, os.fstat(place.fd).st_ino
    ):
        raise PermissionError(f"its {OWNER_NAME} was not written by this user, for this directory")
    return fields


def _is_free(place: StagingDirectory, fd: int) -> bool:
    """Return whether the lock of an owner is free; it is ours then."""
    try:
        is_ours = try_lock(fd)
        named = os.stat(OWNER_NAME, dir_fd=place.fd, follow_symlinks=False)
    except OSError:
        return False
    # Another process that goes on with the merge puts its own owner file in the place of this one.
    return is_ours and named.st_ino == os.fstat(fd).st_ino


def seal(*facts: object) -> str:
    """Return the code of some JSON values; "" where there is no key."""
    key = _key()
    text = json.dumps(facts, sort_keys=True).encode()
    return hmac.new(key, text, "sha256").hexdigest() if key else ""


def seal_in(place: StagingDirectory, *facts: object) -> str:
    """Return the code of some JSON values that are valid in a staging directory; "" without a key.

    Raises:
        OSError: the key that sealed its name cannot be read any more, so that no later run would
            believe what is there, and it would stay for ever.
    """
    code = seal(*facts, os.fstat(place.fd).st_ino)
    if not code and _codes(place)[1]:
        raise OSError(errno.EIO, "the key of this user cannot be read any more")
    return code


def is_sealed(code: object, *facts: object) -> bool:
    """Return whether this user sealed these values with this code."""
    right = seal(*facts)
    if not right or not isinstance(code, str):
        return False
    return hmac.compare_digest(code.encode(errors="replace"), right.encode())


def _key() -> bytes:
    """Return the user's key, made if there is none yet; b"" where there is no place for one."""
    try:
        with _state_folder() as folder:
            with suppress(FileNotFoundError):
                return _read_key(folder)
            _make_key(folder)
            return _read_key(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        _log.debug("no key to seal with: %s", error)
        return b""


@contextmanager
def _state_folder() -> Iterator[int]:
    """Yield the descriptor of the folder of the key, which only this user can enter.

    Raises:
        OSError: it cannot be made, or others could write into it.
        RuntimeError: there is no home directory.
    """
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = named if named.is_absolute() else Path.home() / ".local" / "state"
    there = next(path for path in (base, *base.parents) if path.exists())
    _refuse_unless_own(there.stat(), 0)  # root must not make folders in a user's home
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
    """Make the key; of two processes that do so at once, one wins."""
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
