"""How the processes of a torchrun on one node find each other and talk, without torch.

The first process listens on a Unix socket in a directory that only this user can enter, named
after the environment variables that torchrun gives to all of them. Messages are pickles, so both
sides ask the kernel for the user of the other before they read a byte, and refuse another user.
"""

import os
import pickle
import signal
import socket
import stat
import time
from binascii import crc32
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from select import select
from struct import Struct

from unshard.errors import OutputError
from unshard.signals import Interrupted

_NAME = "socket"
_TMP = "/tmp"  # noqa: S108 (what is there is checked)
_LONGEST = 100  # bytes of a socket's path: 107 on Linux, 103 on macOS
_LOOK_S = 0.01  # between looks for a process that is still starting
_CREDENTIALS = Struct("3i")  # pid, uid, gid


class Connection:
    """A connection to another process of this user, which sends and receives objects."""

    def __init__(self, connected: socket.socket) -> None:
        self._peer = 0
        if hasattr(socket, "SO_PEERCRED"):  # else not Linux: the directory alone keeps others out
            peer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            self._peer, uid, _ = _CREDENTIALS.unpack(peer)
            if uid != os.geteuid():
                connected.close()
                raise OutputError(f"a process of another user (uid {uid}) answers for torchrun's")
        connected.settimeout(None)
        self._socket = connected
        self._file = connected.makefile("rb")

    def send(self, message: object) -> None:
        """Send an object.

        Raises:
            OSError: the other process is gone.
        """
        self._socket.sendall(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> object:
        """Return the next object.

        Raises:
            EOFError, OSError: the other process is gone.
        """
        return pickle.load(self._file)  # noqa: S301 (from this user, by the kernel's word)

    def wait_for_death(self) -> None:
        """Wait until the other process, whose connection has ended, is gone.

        Only then are its locks free. On systems without `pidfd_open` this returns at once.
        """
        if self._peer and hasattr(os, "pidfd_open"):
            with suppress(OSError):  # it is gone
                fd = os.pidfd_open(self._peer)
                select([fd], [], [])
                os.close(fd)


class MeetingPlace:
    """The socket on which the first process waits for the `others`.

    Raises:
        OutputError: the place is not ours alone, or cannot be made.
    """

    def __init__(self, others: int) -> None:
        self._directory = _meeting_place()
        self._path = self._directory / _NAME
        self._left = others
        try:
            with suppress(FileExistsError):
                self._directory.mkdir(0o700)
            _check_private(self._directory)
            self._path.unlink(missing_ok=True)  # of a process that was killed
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(str(self._path))
        except OSError as error:
            raise OutputError(
                f"{self._path}: the processes of torchrun cannot meet there: "
                f"{error.strerror or error}",
                hint="set TMPDIR to a directory of yours",
            ) from error
        self._socket.listen(others)

    def accept(self, *, wait: bool) -> Iterator[Connection]:
        """Yield the processes that have connected; with `wait` also those that will."""
        parent = os.getppid()
        while self._left:
            self._socket.settimeout(_LOOK_S if wait else 0)
            try:
                connected, _ = self._socket.accept()
            except (TimeoutError, BlockingIOError):
                if not wait:
                    return
                if os.getppid() != parent:
                    raise Interrupted(signal.SIGTERM) from None
                continue
            self._left -= 1
            if not self._left:
                self.close()
            yield Connection(connected)

    def close(self) -> None:
        """Leave nothing behind."""
        self._socket.close()
        remove_meeting_place(self._directory)


def connect() -> Connection:
    """Return the connection to the first process, as soon as it listens.

    Raises:
        OutputError: the socket or its directory belongs to another user.
        Interrupted: torchrun is gone.
    """
    directory, parent = _meeting_place(), os.getppid()
    while True:
        with suppress(FileNotFoundError):
            _check_private(directory)
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.connect(str(directory / _NAME))
            return Connection(connected)
        except (FileNotFoundError, ConnectionRefusedError):  # not yet there
            connected.close()
        if os.getppid() != parent:
            raise Interrupted(signal.SIGTERM)
        time.sleep(_LOOK_S)


def remove_meeting_place(directory: Path | None = None) -> None:
    """Remove the socket, also that of a first process that was killed."""
    place = directory or _meeting_place()
    with suppress(OSError):
        (place / _NAME).unlink()
    with suppress(OSError):
        place.rmdir()


def _meeting_place() -> Path:
    """Return the directory in which all processes of this torchrun, and no others, meet."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    shared = "\0".join([socket.gethostname(), *(os.environ.get(name, "") for name in names)])
    name = f"unshard-{os.geteuid()}-{os.getppid()}-{crc32(shared.encode()):08x}"
    place = Path(os.environ.get("TMPDIR") or _TMP, name)
    return place if len(bytes(place / _NAME)) <= _LONGEST else Path(_TMP, name)


def _check_private(directory: Path) -> None:
    """Refuse a directory that another user could have made or can write to."""
    status = directory.lstat()
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not ours or status.st_mode & 0o077:
        raise OutputError(
            f"{directory}: is not a directory of this user alone",
            hint="remove it, or set TMPDIR to a directory of yours",
        )
