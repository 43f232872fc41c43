"""The files of all nodes of a Ray cluster as one store: node:///path is that path on every node.

A folder has what the nodes have in it together. A file that several nodes have must be the same on
all. A process reads what it sees itself; all else comes from the nodes, in pieces, few at a time.
"""

import errno
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any

from unshard.errors import CorruptError, StoreError
from unshard.showing import counted, listed
from unshard.stores.at_once import away_from_signals
from unshard.stores.nodes.files import Copy, NodeFile, read_here
from unshard.stores.nodes.readers import (
    PIECE,
    LostError,
    ask,
    ask_all,
    begin,
    host,
    pieces,
)
from unshard.stores.other_stores import Answer

_SHOWN = 5


class PreconditionError(Exception):
    """A file is not the one that was asked for; obstore's error has this name, too."""


class NodeStore:
    """What the nodes have below a directory such as /local; for several threads.

    Args:
        url: node:///local.
        given: the keys that a user named; nothing outside of them is read.
    """

    def __init__(self, url: str, given: AbstractSet[str]) -> None:
        self._url, self._given = url, given
        self._lock = threading.Lock()
        self._roots: dict[str, Sequence[str]] = {}  # Ray's ids of nodes, by key

    def list_with_delimiter(self, key: str) -> dict[str, list[Any]]:
        """Return what the nodes have directly below a key: `objects` and `common_prefixes`.

        Raises:
            StoreError: a node is lost, or may not read it.
            CorruptError: a name is that of a file and of a directory.
            UsageError: there is no cluster, or unshard cannot be used there.
        """
        return away_from_signals(partial(self._list, key))

    def get(self, key: str, copies: Sequence[Copy], start: int, end: int) -> Answer:
        """Return a range of a file that was listed."""
        return Answer(_blocks(self._path(key), copies, start, end))

    def check(self, key: str, copies: Sequence[Copy]) -> None:
        """Check that all nodes that have a file of this name have the same one.

        If inode, size and time are equal, it is one file on a file system that they share. Else
        each node reads its own, for a digest.

        Raises:
            CorruptError: they do not.
            StoreError: as for `list_with_delimiter`.
        """
        distinct = tuple({copy.stamp: copy for copy in copies}.values())
        what = [counted(copy.size, "byte") for copy in distinct]
        if len(distinct) > 1 and len(set(what)) == 1:
            what = away_from_signals(partial(_digests, self._path(key), distinct))
        if len(set(what)) > 1:
            found = zip(what, distinct, strict=True)
            raise CorruptError(
                f"{self._url}/{key}: nodes have different files of this name",
                found=", ".join(f"{one} on {host(copy.node)}" for one, copy in found),
                hint="remove those that do not belong to the checkpoint",
            )

    def _list(self, key: str) -> dict[str, list[Any]]:
        path, start = self._path(key), f"{key}/" if key else ""
        with self._lock:
            self._begin()
            roots = dict(self._roots)
        root = next((root for root in roots if _is_in(key, root)), None)
        if root is None:  # of all that is outside there is only the way to what was given
            ways = {one[len(start) :].partition("/")[0] for one in roots if _is_in(one, key)}
            return {"objects": [], "common_prefixes": [start + way for way in sorted(ways)]}
        question = partial(_ask_listing, self._path(root), path)
        try:
            answers = ask_all((node, question) for node in roots[root])
        except LostError as error:
            raise StoreError(f"node://{path}: node {host(str(error))} is lost") from error
        except OSError as error:
            raise StoreError(f"node://{path}: {error.strerror}") from error
        found: dict[str, dict[str, NodeFile | None]] = {}
        for node, answer in answers:
            for child, file in answer.items():
                found.setdefault(child, {})[node] = file
        return _united(self._path(root), path, start, found)

    def _begin(self) -> None:
        """Take what was given as roots, if any node has it."""
        for given in sorted(self._given, key=len):
            if any(_is_in(given, root) for root in self._roots):
                continue
            root, kinds = given, begin(self._path(given))
            if "file" in kinds.values():  # others belong to it, which other nodes may have alone
                root = given.rpartition("/")[0]
                kinds = begin(self._path(root))
            if kinds:
                self._roots[root] = sorted(kinds)

    def _path(self, key: str) -> str:
        return f"{self._url.removeprefix('node://')}/{key}".rstrip("/")


def on_one_node(found: Iterable[tuple[str, Sequence[Copy]]]) -> Mapping[str, Sequence[str]]:
    """Return the files that only one node has, by Ray's id of the node."""
    alone: dict[str, list[str]] = {}
    for path, copies in found:
        nodes = {copy.node for copy in copies}
        if len(nodes) == 1:
            alone.setdefault(nodes.pop(), []).append(path)
    return alone


class LostNodeError(StoreError):
    """A node is lost which alone has some files.

    Attributes:
        node: Ray's id of it.
    """

    node = ""

    def __reduce__(self) -> tuple[object, ...]:
        """Travel between processes, as all errors do, with the node."""
        return (type(self), (self.subject,), {"hint": self.hint, "node": self.node})


def lost_node(node: str, name: str, files: Sequence[str]) -> LostNodeError:
    """Return the error that a node is lost; `name` is how messages call it."""
    error = LostNodeError(
        f"node {name} is lost, and no other node has {listed(sorted(files), _SHOWN)}",
        hint="repeat the command when the node is there again",
    )
    error.node = node
    return error


def _is_in(key: str, folder: str) -> bool:
    return not folder or key == folder or key.startswith(f"{folder}/")


def _united(
    root: str, path: str, start: str, found: Mapping[str, Mapping[str, NodeFile | None]]
) -> dict[str, list[Any]]:
    """Return one listing of what nodes have, by name and node."""
    objects, folders = [], []
    for child, by_node in found.items():
        files = {node: one for node, one in by_node.items() if one is not None}
        if not files:
            folders.append(start + child)
        elif len(files) == len(by_node):
            objects.append(_listed(root, start + child, files))
        else:
            kinds = {node: "file" if node in files else "directory" for node in by_node}
            raise CorruptError(
                f"node://{path}/{child}: is not the same on all nodes",
                found=", ".join(f"a {kind} on {host(node)}" for node, kind in kinds.items()),
            )
    return {"objects": objects, "common_prefixes": folders}


def _listed(root: str, key: str, files: Mapping[str, NodeFile]) -> dict[str, Any]:
    """Return a file as obstore lists an object; which nodes have it does not change its ETag."""
    modified = max(one.modified for one in files.values())
    return {
        "path": key,
        "size": max(one.size for one in files.values()),
        "e_tag": " ".join(sorted({one.stamp for one in files.values()})),
        "last_modified": datetime.fromtimestamp(modified / 1e9, UTC),
        "copies": tuple(
            Copy(node, root, one.size, one.stamp) for node, one in sorted(files.items())
        ),
    }


def _blocks(path: str, copies: Sequence[Copy], start: int, end: int) -> Iterator[bytes]:
    stamps = {copy.stamp for copy in copies}
    for at in range(start, end, PIECE):
        length = min(PIECE, end - at)
        data = read_here(path, stamps, at, length)
        if data is not None:
            yield data
            continue
        with pieces():
            yield _read(path, copies, at, length)


def _read(path: str, copies: Sequence[Copy], start: int, length: int) -> bytes:
    """Return bytes from one of the nodes that have a file: another one for other bytes."""
    first = (start // PIECE) % len(copies)
    lost: LostError | None = None
    for copy in chain(copies[first:], copies[:first]):
        try:
            data: bytes = ask(copy.node, partial(_ask_bytes, copy, path, start, length))
        except LostError as error:
            lost = error
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise PreconditionError from error
            what = f"node://{path}: {error.strerror} (on node {host(copy.node)})"
            raise StoreError(what) from error
        else:
            return data
    node = str(lost)
    raise lost_node(node, host(node), [f"node://{path}"]) from lost


def _digests(path: str, copies: Sequence[Copy]) -> list[str]:
    try:
        answers = ask_all((copy.node, partial(_ask_digest, copy, path)) for copy in copies)
    except LostError as error:
        raise StoreError(f"node://{path}: node {host(str(error))} is lost") from error
    except OSError as error:
        raise StoreError(f"node://{path}: {error.strerror}") from error
    return [f"digest {digest[:16]}" for _, digest in answers]


def _ask_listing(root: str, path: str, actor: Any) -> Any:
    return actor.listing.remote(root, path)


def _ask_bytes(copy: Copy, path: str, start: int, length: int, actor: Any) -> Any:
    return actor.read.remote(copy.root, path, copy.stamp, start, length)


def _ask_digest(copy: Copy, path: str, actor: Any) -> Any:
    return actor.digest.remote(copy.root, path, copy.stamp)
