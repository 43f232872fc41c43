"""How the nodes of a torchrun find each other and talk: TCP, for processes that have a secret.

The first process of all listens, and announces the port and a secret that it has drawn in the
user's own state directory (where the key of `owners` is), which all nodes must share. Whoever
connects proves that it has the secret, and so does the first process; only then is a message read.
Messages are pickles: each is preceded by a code (HMAC) made with a key of the session, so that no
other process can put one between them. What is sent is not encrypted.
"""

import hmac
import json
import os
import pickle
import secrets
import signal
import socket
import threading
import time
from binascii import crc32
from collections.abc import Iterator
from contextlib import suppress
from struct import Struct

from unshard.errors import OutputError
from unshard.signals import Interrupted
from unshard.write.dirfd import read_file, whole_file
from unshard.write.staging.owners import state_folder

_NONCE = 32
_CODE = 32
_HEAD = Struct(">Q")
_HANDSHAKE_S = 10
_MEETING_S = 120
_LOOK_S = 0.1  # the state directory may be on a network file system
_DEAD_AFTER_MS = 60_000


class Link:
    """A connection between two processes that have proved that they have the same secret."""

    def __init__(self, connected: socket.socket, key: bytes, sides: tuple[bytes, bytes]) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: a node that is gone sends nothing
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_MS)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        self._socket = connected
        self._key = key
        self._own, self._other = sides
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send an object; any thread may.

        Raises:
            OSError: the other process is gone.
        """
        text = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            code = self._code(self._own, self._sent, text)
            self._sent += 1
            self._socket.sendall(_HEAD.pack(len(text)) + code)
            self._socket.sendall(text)

    def receive(self) -> object:
        """Return the next object; one thread may.

        Raises:
            EOFError: the other process has ended.
            OSError: it cannot be reached, or another process has put something between.
        """
        head = _received(self._socket, _HEAD.size + _CODE)
        text = _received(self._socket, *_HEAD.unpack(head[: _HEAD.size]))
        code = self._code(self._other, self._received, text)
        if not hmac.compare_digest(code, head[_HEAD.size :]):
            raise ConnectionAbortedError("a message is not from the other process")
        self._received += 1
        return pickle.loads(text)  # noqa: S301 (from the process that has the secret)

    def close(self) -> None:
        """End the connection; the other process notices."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _code(self, side: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, side + _HEAD.pack(number) + text, "sha256")


class Office:
    """Where the first process of several nodes waits for one process of each of the `others`.

    Raises:
        OutputError: there is no state directory for the announcement, or no port.
    """

    def __init__(self, others: int) -> None:
        self._left = others
        self._secret = secrets.token_bytes(_NONCE)
        self._until = time.monotonic() + _MEETING_S
        self._others = others
        try:
            self._socket = _listening()
            port = self._socket.getsockname()[1]
            fields = {"port": port, "secret": self._secret.hex()}
            with state_folder() as folder, whole_file(_name(), within=folder, durable=True) as file:
                file.write(json.dumps(fields).encode())
        except (OSError, RuntimeError) as error:
            raise OutputError(
                f"the nodes of torchrun cannot meet: {error}", hint=_HOW_TO_SHARE
            ) from error

    def accept(self) -> Iterator[Link]:
        """Yield the processes that connect, until there is one of each node.

        Raises:
            OutputError: one does not come.
        """
        parent = os.getppid()
        while self._left:
            self._socket.settimeout(_LOOK_S)
            try:
                connected, _ = self._socket.accept()
            except TimeoutError:
                if os.getppid() != parent:
                    raise Interrupted(signal.SIGTERM) from None
                if time.monotonic() > self._until:
                    here = f"{self._others + 1 - self._left} of {self._others + 1}"
                    raise OutputError(
                        f"only {here} nodes of this torchrun have come", hint=_HOW_TO_SHARE
                    ) from None
                continue
            link = _welcomed(connected, self._secret)
            if link is not None:
                self._left -= 1
                yield link
        self.close()

    def close(self) -> None:
        """Leave nothing behind."""
        self._socket.close()
        with suppress(OSError, RuntimeError), state_folder() as folder:
            if self._secret.hex().encode() in read_file(_name(), within=folder):
                os.unlink(_name(), dir_fd=folder)


_HOW_TO_SHARE = (
    "all nodes need one state directory: a home directory that they share, or set XDG_STATE_HOME "
    "on each to a directory of yours that they share"
)


def connect_to_office() -> Link:
    """Return the connection to the first process of all nodes, as soon as it listens.

    Raises:
        OutputError: it does not announce itself where this process looks.
        Interrupted: torchrun is gone.
    """
    parent, until = os.getppid(), time.monotonic() + _MEETING_S
    while time.monotonic() < until:
        with suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
            with state_folder() as folder:  # which only this user can enter
                fields = json.loads(read_file(_name(), within=folder))
            secret = bytes.fromhex(fields["secret"])
            address = os.environ["MASTER_ADDR"], int(fields["port"])
            link = _introduced(socket.create_connection(address, _HANDSHAKE_S), secret)
            if link is not None:  # else it is the announcement of one that was killed
                return link
        if os.getppid() != parent:
            raise Interrupted(signal.SIGTERM)
        time.sleep(_LOOK_S)
    where = f"{socket.gethostname()} finds no announcement of the first node"
    raise OutputError(f"the nodes of torchrun cannot meet: {where}", hint=_HOW_TO_SHARE)


def _welcomed(connected: socket.socket, secret: bytes) -> Link | None:
    """Let a process that has connected prove itself, and prove this one; None if it cannot."""
    ours = secrets.token_bytes(_NONCE)
    try:
        connected.settimeout(_HANDSHAKE_S)
        connected.sendall(ours)
        answer = _received(connected, _NONCE + _CODE)
        theirs, code = answer[:_NONCE], answer[_NONCE:]
        if hmac.compare_digest(code, hmac.digest(secret, b"node" + ours + theirs, "sha256")):
            connected.sendall(hmac.digest(secret, b"first" + theirs + ours, "sha256"))
            key = hmac.digest(secret, b"session" + ours + theirs, "sha256")
            return Link(connected, key, (b"first", b"node"))
    except (OSError, EOFError):
        pass
    connected.close()
    return None


def _introduced(connected: socket.socket, secret: bytes) -> Link | None:
    """Prove this process to the first one, and let it prove itself; None if it cannot."""
    ours = secrets.token_bytes(_NONCE)
    try:
        connected.settimeout(_HANDSHAKE_S)
        theirs = _received(connected, _NONCE)
        connected.sendall(ours + hmac.digest(secret, b"node" + theirs + ours, "sha256"))
        code = _received(connected, _CODE)
        if hmac.compare_digest(code, hmac.digest(secret, b"first" + ours + theirs, "sha256")):
            key = hmac.digest(secret, b"session" + theirs + ours, "sha256")
            return Link(connected, key, (b"node", b"first"))
    except (OSError, EOFError):
        pass
    connected.close()
    return None


def _received(connected: socket.socket, count: int) -> bytes:
    found = bytearray(count)
    view = memoryview(found)
    while view:
        size = connected.recv_into(view)
        if not size:
            raise EOFError("the other process has ended")
        view = view[size:]
    return bytes(found)


def _listening() -> socket.socket:
    """Return a socket that listens where the other nodes look for this one."""
    named = os.environ["MASTER_ADDR"]
    for host in (named, ""):  # the name may be that of a router or a proxy of this node
        with suppress(OSError):
            return socket.create_server((host, 0))
    return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)


def _name() -> str:
    """Return the name of the announcement, the same for all nodes of this torchrun."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    shared = "\0".join(os.environ.get(name, "") for name in names)
    return f"torchrun-{os.environ['MASTER_PORT']}-{crc32(shared.encode()):08x}"
