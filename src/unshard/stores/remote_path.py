"""Paths of objects in stores, for every function that takes a `Path`.

Their parts are those of /s3:/bucket/folder/name, and their text is s3://bucket/folder/name, under
which the operating system has no file. They request only listings of folders, which are cached.
"""

import io
import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from unshard.errors import UsageError
from unshard.stores import OTHER_SCHEMES
from unshard.stores.remote_file import RemoteFile

if TYPE_CHECKING:
    from unshard.stores.buckets import Bucket, ObjectEntry
    from unshard.stores.nodes.files import Copy

_READ = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "node", *OTHER_SCHEMES)
_NOT_READ = ("sftp", "ftp", "smb", "webdav", "hdfs")
_READ_BUFFER = 1 << 20


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether this is an address, such as s3://bucket/key.

    A `Path` made from an address counts, too: pathlib shortens it to s3:/bucket/key.
    """
    scheme, colon, _ = str(path).partition(":/")
    return bool(colon) and scheme in (*_READ, *_NOT_READ)


def path_of(given: str | os.PathLike[str]) -> Path:
    """Return a user's path as a `Path`, or as a `RemotePath` for s3://bucket/folder and the like.

    The bucket's listings are dropped, because the user may have changed the bucket.

    Raises:
        UsageError: an address has no bucket, contains credentials, or has an unsupported scheme.
    """
    if isinstance(given, RemotePath):
        path = RemotePath(*given.parts)
    elif is_url(given):
        path = RemotePath.of_url(str(given))
    else:
        return Path(given)
    path.bucket.forget(path.key)
    return path


def as_given(argument: object) -> str:
    """Return an argument as the user wrote it: pathlib shortens `s3://` to `s3:/`."""
    if not isinstance(argument, str | Path) or not is_url(argument):
        return str(argument)
    try:
        return str(RemotePath.of_url(str(argument)))
    except UsageError:
        return "ADDRESS"  # it may contain credentials


def look_again(path: Path) -> None:
    """Drop the listings of the bucket that a path is in, if it is in a bucket."""
    if isinstance(path, RemotePath):
        path.bucket.forget()


def why_unlisted(path: Path) -> str:
    """Return a hint for a folder of a web server; "" for any other path."""
    if not isinstance(path, RemotePath) or path.parts[1] not in ("http:", "https:"):
        return ""
    files = "model.safetensors, its index or a rank's model_world_size_W_rank_R.pt"
    folders = "a Hugging Face model, or of a DCP, Megatron or DeepSpeed checkpoint"
    return f"a web server cannot list folders: pass {files}, or the exact folder of {folders}"


class RemotePath(type(Path())):  # type: ignore[misc]  # the class of this system's paths
    """The path of an object, or of the folder of all objects whose keys start with it.

    node:///path is that path on every node of a Ray cluster.

    A path is absolute, and nothing is a link; relative paths are plain `Path`s. Once it was opened,
    it stands for the object of that moment, and cannot read another object in its place.
    """

    __slots__ = ("_first",)

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Return the path of an address; repeated slashes count as one.

        Raises:
            UsageError: it has no bucket, contains credentials, or has an unsupported scheme.
        """
        scheme, _, rest = url.partition(":/")
        if scheme in _NOT_READ:
            raise UsageError(
                f"{scheme}://…: unsupported scheme",
                expected="a path, s3://, gs://, az://, http://, https:// or hf://",
                hint="copy the checkpoint to a disk or into a bucket, or mount its file system "
                "(sshfs, rclone mount, hadoop-fuse-dfs), and pass the path",
            )
        rest = rest.lstrip("/")
        bucket = rest.partition("/")[0]
        if "?" in url or ("@" in bucket and (scheme[:4] != "abfs" or ":" in bucket)):
            raise UsageError(
                f"{scheme}://…: addresses with a query or with credentials are not accepted",
                hint="set credentials in the environment, such as AWS_ACCESS_KEY_ID",
            )
        if not bucket and scheme == "node":
            raise UsageError("node:///: has no directory", expected="node:///folder")
        if not bucket:
            raise UsageError(f"{url}: has no bucket", expected=f"{scheme}://bucket/folder")
        return cls(f"/{scheme}:", bucket, rest.partition("/")[2].lstrip("/"))

    def __str__(self) -> str:
        """Return the address."""
        if not self._is_inside:
            return f"{self.parts[1]}//" if len(self.parts) > 1 else "/"
        return f"{self._bucket_url}{'/'.join(('', *self.parts[3:]))}"

    def __repr__(self) -> str:
        """Return class and address."""
        return f"RemotePath({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path with the object that it opened, so that others open the same object."""
        return self._as_opened, (self.parts, getattr(self, "_first", None))

    @classmethod
    def _as_opened(cls, parts: tuple[str, ...], first: "ObjectEntry | None") -> Self:
        path = cls(*parts)
        if first is not None:
            path._first = first
        return path

    def __fspath__(self) -> str:
        """Return the address: the operating system finds no file of that name."""
        return str(self)

    @property
    def _is_inside(self) -> bool:
        """Whether it has a bucket; paths above buckets do not exist."""
        return len(self.parts) > 2

    @property
    def bucket(self) -> "Bucket":
        """Its bucket; for a path on nodes, the first directory."""
        from unshard.stores.buckets import bucket_at

        return bucket_at(self._bucket_url)

    @property
    def _bucket_url(self) -> str:
        scheme, name = self.parts[1:3]
        return f"{scheme}///{name}" if self.is_on_nodes else f"{scheme}//{name}"

    @property
    def is_on_nodes(self) -> bool:
        """Whether it is on the disks of the nodes of a Ray cluster."""
        return "node:" in self.parts[1:2]

    @property
    def copies(self) -> "tuple[Copy, ...]":
        """Its copies on nodes, if it was opened."""
        first: ObjectEntry | None = getattr(self, "_first", None)
        return () if first is None else first.copies

    @property
    def key(self) -> str:
        """The key of the object, without slashes at its ends; "" for the bucket itself."""
        return "/".join(self.parts[3:])

    def relative_to(self, *other: str | os.PathLike[str], **keywords: bool) -> Path:
        """Return the rest of the path as a plain `Path`."""
        return Path(*super().relative_to(*other, **keywords).parts)

    def is_dir(self, **_: bool) -> bool:
        """Return whether objects are below it."""
        return self._is_inside and self.bucket.is_folder(self.key)

    def is_file(self, **_: bool) -> bool:
        """Return whether it is an object."""
        return self._entry() is not None

    def exists(self, **_: bool) -> bool:
        """Return whether it is an object or a folder of objects."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def samefile(self, other_path: str | os.PathLike[str]) -> bool:
        """Return whether both are the same object."""
        return self == other_path

    def resolve(self, strict: bool = False) -> Self:  # noqa: ARG002, FBT001, FBT002 (as of a Path)
        """Return the path itself: nothing is a link."""
        return self

    def stat(self, **_: bool) -> os.stat_result:
        """Return size and time of an object; replacing the object changes `st_ino`.

        Raises:
            FileNotFoundError: there is neither an object nor a folder.
        """
        entry = self._entry()
        if entry is None and not self.is_dir():
            raise self._missing()
        if entry is not None:
            return entry.status
        return os.stat_result((stat.S_IFDIR | 0o555, 0, 0, 1, *[0] * 6))

    def lstat(self) -> os.stat_result:
        """Return what `stat` returns."""
        return self.stat()

    def iterdir(self) -> Iterator[Self]:
        """Yield the objects and folders in a folder.

        Raises:
            FileNotFoundError: there is no such folder; NotADirectoryError: it is an object.
        """
        children = self._children()
        if not children and self.is_file():
            raise NotADirectoryError(20, "Not a directory", str(self))
        if not children:
            raise self._missing()
        yield from children

    def glob(self, pattern: str, **_: bool) -> Iterator[Self]:
        """Yield the paths that match a relative pattern, which may have ** for any depth."""
        first, _slash, rest = pattern.partition("/")
        if first == "**":
            yield from self.rglob(rest or "*")
            return
        for child in self._children():
            if fnmatchcase(child.name, first) and not rest:
                yield child
            elif fnmatchcase(child.name, first) and child.is_dir():
                yield from child.glob(rest)

    def rglob(self, pattern: str, **_: bool) -> Iterator[Self]:
        """Yield the paths that match a relative pattern at any depth."""
        yield from self.glob(pattern)
        for child in self._children():
            if child.is_dir():
                yield from child.rglob(pattern)

    def open(
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[bytes] | IO[str]:
        """Open an object for reading, as bytes or as text.

        Raises:
            FileNotFoundError: there is no such object; PermissionError: `mode` is to write.
        """
        if set(mode) - set("rbt"):
            raise PermissionError(1, "objects are read-only", str(self))
        raw = _ObjectStream(self.opened())
        buffered = io.BufferedReader(raw, max(buffering, _READ_BUFFER))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    def read_bytes(self) -> bytes:
        """Return all bytes of an object."""
        file = self.opened()
        return file.pread(file.size, 0)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Return an object as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def opened(self) -> RemoteFile:
        """Return the object, open for reading.

        Raises:
            FileNotFoundError: there is none.
        """
        entry: ObjectEntry | None = getattr(self, "_first", None)
        if entry is None and self._is_inside:
            entry = self._first = self.bucket.entry_to_read(self.key)
        if entry is None:
            raise self._missing()
        return RemoteFile(self.bucket, self.key, entry)

    def _entry(self) -> "ObjectEntry | None":
        return self.bucket.entry(self.key) if self._is_inside else None

    def _children(self) -> list[Self]:
        return [self / name for name in self.bucket.children(self.key)] if self._is_inside else []

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError(2, "No such object", str(self))


class _ObjectStream(io.RawIOBase):
    """An object as a raw stream, for a buffered reader."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek({offset}, {whence}): the position is negative")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: "memoryview", /) -> int:  # type: ignore[override]
        with memoryview(buffer).cast("B") as out:
            count = self._file.read_into(self._at, out)
        self._at += count
        return count
