"""The files of all nodes of a Ray cluster as one store: node:///path is that path on every node.

The listing of a folder unites the nodes' listings. A file on several nodes must be the same on all.
A process reads files on its own node itself, and others from their nodes, in a few pieces at a
time.
"""

import errno
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any

from unshard.console import counted, listed
from unshard.errors import CorruptError, StoreError
from unshard.stores.nodes.files import Copy, NodeFile, read_here
from unshard.stores.nodes.readers import PIECE, LostError, begin, call, host, pieces
from unshard.stores.other_stores import FileRange
from unshard.stores.pool import away_from_signals

_SHOWN = 5


class PreconditionError(Exception):
    """A file has changed; obstore's error has the same name."""


class NodeStore:
    """The nodes' files below a directory such as /local. Thread-safe.

    Args:
        url: node:///local.
        user_keys: the keys that a user passed; nothing outside of them is read.
    """

    def __init__(self, url: str, user_keys: AbstractSet[str]) -> None:
        self._url, self._user_keys = url, user_keys
        self._lock = threading.Lock()
        self._roots: dict[str, Sequence[str]] = {}  # Ray's ids of nodes, by key

    def list_with_delimiter(self, key: str) -> dict[str, list[Any]]:
        """Return the nodes' `objects` and `common_prefixes` directly below a key.

        Raises:
            StoreError: a node is lost, or cannot read the directory.
            CorruptError: a name is a file on one node and a directory on another.
            UsageError: there is no cluster, or unshard cannot be used there.
        """
        return away_from_signals(partial(self._list, key))

    def get(self, key: str, copies: Sequence[Copy], start: int, end: int) -> FileRange:
        """Return a range of a listed file."""
        return FileRange(_blocks(self._path(key), copies, start, end))

    def check(self, key: str, copies: Sequence[Copy]) -> None:
        """Check that the copies of a file are equal.

        Copies with equal inode, size and time are one file on a shared file system. Otherwise each
        node computes a digest of its file.

        Raises:
            CorruptError: they differ.
            StoreError: as for `list_with_delimiter`.
        """
        distinct = tuple({copy.stamp: copy for copy in copies}.values())
        contents = [counted(copy.size, "byte") for copy in distinct]
        if len(distinct) > 1 and len(set(contents)) == 1:
            contents = away_from_signals(partial(_digests, self._path(key), distinct))
        if len(set(contents)) > 1:
            pairs = zip(contents, distinct, strict=True)
            raise CorruptError(
                f"{self._url}/{key}: nodes have different files of this name",
                found=", ".join(f"{content} on {host(copy.node)}" for content, copy in pairs),
                hint="remove the files that do not belong to the checkpoint",
            )

    def _list(self, key: str) -> dict[str, list[Any]]:
        path, start = self._path(key), f"{key}/" if key else ""
        with self._lock:
            self._begin()
            roots = dict(self._roots)
        root = next((root for root in roots if _is_in(key, root)), None)
        if root is None:  # only folders that lead to the user's keys are visible
            names = {own[len(start) :].partition("/")[0] for own in roots if _is_in(own, key)}
            return {"objects": [], "common_prefixes": [start + name for name in sorted(names)]}
        arguments = (self._path(root), path)
        by_name: dict[str, dict[str, NodeFile | None]] = {}
        for node, files in _call("listing", path, [(node, arguments) for node in roots[root]]):
            for child, file in files.items():
                by_name.setdefault(child, {})[node] = file
        return _united(self._path(root), path, start, by_name)

    def _begin(self) -> None:
        """Add the user's keys that exist on any node to the roots."""
        for key in sorted(self._user_keys, key=len):
            if any(_is_in(key, root) for root in self._roots):
                continue
            root, kinds = key, begin(self._path(key))
            if "file" in kinds.values():  # other nodes may have the other files of its folder
                root = key.rpartition("/")[0]
                kinds = begin(self._path(root))
            if kinds:
                self._roots[root] = sorted(kinds)

    def _path(self, key: str) -> str:
        return f"{self._url.removeprefix('node://')}/{key}".rstrip("/")


def on_one_node(files: Iterable[tuple[str, Sequence[Copy]]]) -> Mapping[str, Sequence[str]]:
    """Return the files without copies on a second node, by Ray's id of their node."""
    paths: dict[str, list[str]] = {}
    for path, copies in files:
        nodes = {copy.node for copy in copies}
        if len(nodes) == 1:
            paths.setdefault(nodes.pop(), []).append(path)
    return paths


class LostNodeError(StoreError):
    """A node is lost, with files that no other node has.

    Attributes:
        node: Ray's id of the node.
    """

    node = ""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with the node."""
        return (type(self), (self.subject,), {"hint": self.hint, "node": self.node})


def lost_node(node: str, name: str, files: Sequence[str]) -> LostNodeError:
    """Return the error for a lost node, whose name for messages is `name`."""
    error = LostNodeError(
        f"node {name} is lost, and no other node has {listed(sorted(files), _SHOWN)}",
        hint="repeat the command when the node is available again",
    )
    error.node = node
    return error


def _is_in(key: str, folder: str) -> bool:
    return not folder or key == folder or key.startswith(f"{folder}/")


def _united(
    root: str, path: str, start: str, by_name: Mapping[str, Mapping[str, NodeFile | None]]
) -> dict[str, list[Any]]:
    """Unite the nodes' files, by name and node, into one listing."""
    objects, folders = [], []
    for child, by_node in by_name.items():
        files = {node: file for node, file in by_node.items() if file is not None}
        if not files:
            folders.append(start + child)
        elif len(files) == len(by_node):
            objects.append(_listed(root, start + child, files))
        else:
            kinds = {node: "file" if node in files else "directory" for node in by_node}
            raise CorruptError(
                f"node://{path}/{child}: is not of the same kind on all nodes",
                found=", ".join(f"a {kind} on {host(node)}" for node, kind in kinds.items()),
            )
    return {"objects": objects, "common_prefixes": folders}


def _listed(root: str, key: str, files: Mapping[str, NodeFile]) -> dict[str, Any]:
    """Return a file in the form of obstore's listings; its nodes do not affect its ETag."""
    modified = max(file.modified for file in files.values())
    return {
        "path": key,
        "size": max(file.size for file in files.values()),
        "e_tag": " ".join(sorted({file.stamp for file in files.values()})),
        "last_modified": datetime.fromtimestamp(modified / 1e9, UTC),
        "copies": tuple(
            Copy(node, root, file.size, file.stamp) for node, file in sorted(files.items())
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
    """Return bytes from a node that has a file; different pieces come from different nodes."""
    first = (start // PIECE) % len(copies)
    lost: LostError | None = None
    for copy in chain(copies[first:], copies[:first]):
        arguments = (copy.root, path, copy.stamp, start, length)
        try:
            ((_, data),) = call("read", [(copy.node, arguments)])
        except LostError as error:
            lost = error
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise PreconditionError from error
            raise StoreError(
                f"node://{path}: {error.strerror} (on node {host(copy.node)})"
            ) from error
        else:
            return bytes(data)
    node = str(lost)
    raise lost_node(node, host(node), [f"node://{path}"]) from lost


def _digests(path: str, copies: Sequence[Copy]) -> list[str]:
    arguments = [(copy.node, (copy.root, path, copy.stamp)) for copy in copies]
    return [f"digest {digest[:16]}" for _, digest in _call("digest", path, arguments)]


def _call(
    method: str, path: str, arguments: Sequence[tuple[str, tuple[Any, ...]]]
) -> list[tuple[str, Any]]:
    """Call actors as `call` does, with a StoreError in place of its errors."""
    try:
        return call(method, arguments)
    except LostError as error:
        raise StoreError(f"node://{path}: node {host(str(error))} is lost") from error
    except OSError as error:
        raise StoreError(f"node://{path}: {error.strerror}") from error
