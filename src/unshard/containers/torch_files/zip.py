"""The container of `torch.save`: a zip of stored (uncompressed) records, read without torch.

Only the directory and the pickle are read here; of every storage the byte range is worked out.
Facts this module relies on (torch's `PyTorchStreamWriter`):

* all records are under one root folder whose name need not match the file's;
* sizes are right only in the central directory, data offsets follow only from the local header
  (its padding field is missing in the central directory), CRCs may be zero;
* the zip may be a window inside a larger file (one item of a `.distcp` file).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from struct import unpack_from
from zlib import crc32

from unshard.errors import CorruptError, IncompleteError, NotMergeableError

__all__ = ["LEGACY_MAGIC", "MAX_PICKLE", "StorageRecord", "TorchZip", "read_torch_zip"]

LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""The first pickle of the format before this one."""
MAX_PICKLE = 256 * 1024 * 1024
"""Of 50,000 tensors some 20 MB, of ShardedTensors more."""

_EOCD = b"PK\x05\x06"
_EOCD64 = b"PK\x06\x06"
_LOCATOR64 = b"PK\x06\x07"
_CENTRAL = b"PK\x01\x02"
_LOCAL = b"PK\x03\x04"
_LOCAL_SIZE = 30
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
_MAX_TAIL = 22 + _FULL16
_MAX_ENTRY = 46 + 3 * _FULL16

_Pread = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """The place of a storage: `offset` in the file, `size` in bytes; its CRC-32, 0 if unknown."""

    offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class TorchZip:
    """A torch.save file, opened as far as its pickle.

    Attributes:
        path: the file.
        pickle: the bytes of data.pkl; they fit its CRC-32, if it has one.
        storages: byte ranges of the storages, by key.
    """

    path: Path
    pickle: bytes
    storages: Mapping[str, StorageRecord]


@dataclass(frozen=True, slots=True)
class _ZipEntry:
    """An entry of the central directory; `header` is relative to the window."""

    name: str
    raw_name: bytes
    header: int
    size: int
    crc: int
    is_compressed: bool


def read_torch_zip(
    path: Path, *, offset: int = 0, length: int | None = None, pread: _Pread | None = None
) -> TorchZip:
    """Read the directory and the pickle of a torch.save file, or of a window inside one.

    A `length` of None is all that follows `offset`. With a `pread`, which works as `os.pread`, the
    file is not opened here, and `length` must be given.

    Raises:
        IncompleteError: the file is empty or truncated.
        CorruptError: it contradicts the zip format, or is not one that torch.save writes.
        NotMergeableError: legacy (before torch 1.6) or big-endian files.
    """
    if pread is not None and length is not None:
        return _Reader(path, pread, offset, length).read()
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size - offset if length is None else length
        return _Reader(path, partial(os.pread, fd), offset, size).read()
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    pread: _Pread
    offset: int
    size: int

    def read(self) -> TorchZip:
        records = list(self.directory())
        root = self.root(records)
        storages: dict[str, StorageRecord] = {}
        spans: list[tuple[int, int]] = []
        pickle = b""
        for record in records:
            name = record.name.removeprefix(root)
            if name == "data.pkl":
                if record.size > MAX_PICKLE:
                    raise self.corrupt(f"its pickle takes {record.size} bytes")
                pickle = self.bytes_at(self.data_start(record), record.size)
                if record.crc not in (0, crc32(pickle)):
                    raise self.corrupt("its pickle does not fit its checksum (CRC-32)")
            elif name == "byteorder":
                self.check_byteorder(self.bytes_at(self.data_start(record), record.size))
            elif name.startswith("data/"):
                start = self.offset + self.data_start(record)
                key = name.removeprefix("data/")
                if key in storages:
                    raise self.corrupt(f"it has two records named {name}")
                storages[key] = StorageRecord(start, record.size, record.crc)
                spans.append((record.header + self.offset, start + record.size))
        for (_, end), (start, _) in pairwise(sorted(spans)):
            if start < end:
                raise self.corrupt(f"two of its records overlap at byte {start}")
        return TorchZip(self.path, pickle, storages)

    def bytes_at(self, start: int, count: int) -> bytes:
        if start < 0 or count < 0 or start + count > self.size:
            raise self.corrupt(
                f"bytes {start} to {start + count} are outside its {self.size} bytes"
            )
        data = self.pread(count, self.offset + start)
        if len(data) != count:
            raise IncompleteError(f"{self.path}: cannot read {count} bytes at {start}: truncated")
        return data

    def directory(self) -> Iterator[_ZipEntry]:
        """Yield the central directory; sizes and offsets are checked against the window."""
        start, size, count = self.find_directory()
        if size > count * _MAX_ENTRY:
            raise self.corrupt(f"its directory of {count} entries takes {size} bytes")
        data = self.bytes_at(start, size)
        at = 0
        for _ in range(count):
            if data[at : at + 4] != _CENTRAL or at + 46 > len(data):
                raise self.corrupt(f"its directory breaks off at byte {start + at}")
            method, crc, stored, plain, name_size, extra_size, comment_size = unpack_from(
                "<H4xLLLHHH", data, at + 10
            )
            header = unpack_from("<L", data, at + 42)[0]
            raw_name = data[at + 46 : at + 46 + name_size]
            extra = data[at + 46 + name_size : at + 46 + name_size + extra_size]
            at += 46 + name_size + extra_size + comment_size
            plain, stored, header = self.widen(extra, plain, stored, header)
            name = raw_name.decode("utf-8", "replace")
            yield _ZipEntry(name, raw_name, header, plain, crc, method != 0 or plain != stored)
        if at != len(data):
            raise self.corrupt(f"its directory has more than the {count} entries it counts")

    def widen(self, extra: bytes, plain: int, stored: int, header: int) -> tuple[int, int, int]:
        """Take 64-bit values from the zip64 field, for those that do not fit 32 bits."""
        values = [plain, stored, header]
        if _FULL32 not in values:
            return plain, stored, header
        at = 0
        while at + 4 <= len(extra):
            tag, size = unpack_from("<HH", extra, at)
            if tag == 1:
                wanted = [i for i, value in enumerate(values) if value == _FULL32]
                if size < 8 * len(wanted) or at + 4 + size > len(extra):
                    break
                for n, i in enumerate(wanted):
                    values[i] = unpack_from("<Q", extra, at + 4 + 8 * n)[0]
                return values[0], values[1], values[2]
            at += 4 + size
        raise self.corrupt("its directory does not have the zip64 sizes that it refers to")

    def find_directory(self) -> tuple[int, int, int]:
        """Return (start, size, number of entries) of the central directory."""
        if self.size == 0:
            raise IncompleteError(f"{self.path}: the file is empty", hint=_INTERRUPTED)
        tail_size = min(self.size, _MAX_TAIL)
        tail = self.bytes_at(self.size - tail_size, tail_size)
        at = tail.rfind(_EOCD)
        if at < 0 or at + 22 > len(tail):
            raise self.not_a_zip()
        count, size, start = unpack_from("<HLL", tail, at + 10)
        end = self.size - tail_size + at
        if _FULL32 in (size, start) or count == _FULL16:
            locator = self.bytes_at(end - 20, 20)
            if locator[:4] != _LOCATOR64:
                raise self.corrupt("its zip64 locator is missing")
            record = self.bytes_at(unpack_from("<Q", locator, 8)[0], 56)
            if record[:4] != _EOCD64:
                raise self.corrupt("its zip64 directory record is missing")
            count, size, start = unpack_from("<QQQ", record, 32)
        if start + size > end:
            raise self.corrupt(f"its directory [{start}, {start + size}) overlaps its end at {end}")
        return start, size, count

    def data_start(self, record: _ZipEntry) -> int:
        """Return where a record's data starts: only its local header knows."""
        if record.is_compressed:
            what = f"record {record.name} is compressed; torch.save never compresses"
            raise self.corrupt(what)
        named = _LOCAL_SIZE + len(record.raw_name)
        header = self.bytes_at(record.header, named + 4)
        if header[:4] != _LOCAL:
            raise self.corrupt(f"record {record.name} has no local header at {record.header}")
        name_size, extra_size = unpack_from("<HH", header, 26)
        if header[_LOCAL_SIZE:named] != record.raw_name or name_size != len(record.raw_name):
            raise self.corrupt(f"record {record.name} has another name in its local header")
        start = record.header + named + extra_size
        if start + record.size > self.size:
            raise self.corrupt(f"record {record.name} reaches beyond the end of the file")
        # The fields of a local header must fill it: a wrong size would shift the data.
        if extra_size and unpack_from("<H", header, named + 2)[0] + 4 != extra_size:
            extra = self.bytes_at(record.header + named, extra_size)
            at = 0
            while at + 4 <= extra_size:
                at += 4 + int(unpack_from("<H", extra, at + 2)[0])
            if at != extra_size:
                what = f"record {record.name} has a local header of contradictory sizes"
                raise self.corrupt(what)
        return int(start)

    def root(self, records: list[_ZipEntry]) -> str:
        """Return the folder that all records are in, with its slash."""
        if any(record.name.endswith("/constants.pkl") for record in records):
            raise NotMergeableError(
                f"{self.path}: a TorchScript archive, not a state dict",
                hint="save its state dict: torch.save(torch.jit.load(FILE).state_dict(), OUTPUT)",
            )
        roots = [r.name.removesuffix("data.pkl") for r in records if r.name.endswith("/data.pkl")]
        if len(roots) == 1:
            return roots[0]
        raise self.corrupt(f"it has {len(roots)} records named data.pkl; torch.save writes one")

    def check_byteorder(self, order: bytes) -> None:
        if order.strip() != b"little":
            raise NotMergeableError(
                f"{self.path}: written on a machine with another byte order",
                expected="little",
                found=order.decode("ascii", "replace"),
                hint="load and save it again on such a machine",
            )

    def not_a_zip(self) -> Exception:
        head = self.bytes_at(0, min(self.size, len(LEGACY_MAGIC)))
        if head == LEGACY_MAGIC:
            return NotMergeableError(
                f"{self.path}: the legacy format of torch.save (before torch 1.6)",
                hint="load it with torch and save it again",
            )
        if head[:4] == _LOCAL:
            return IncompleteError(
                f"{self.path}: truncated: its zip directory is missing", hint=_INTERRUPTED
            )
        return self.corrupt("it is not a file that torch.save writes")

    def corrupt(self, what: str) -> CorruptError:
        return CorruptError(f"{self.path}: corrupt: {what}")


_INTERRUPTED = (
    "the save was interrupted, or is still under way; take another checkpoint or copy it again"
)
