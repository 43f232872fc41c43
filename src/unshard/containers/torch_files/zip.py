"""Read the zip of `torch.save`, whose records are stored uncompressed, without torch.

Reads the directory and the pickle, and computes the byte range of every storage.
Facts this module relies on (torch's `PyTorchStreamWriter`):

* all records are under one root folder whose name need not match the file's;
* sizes are correct only in the central directory, data offsets need the local header (its padding
  field is missing in the central directory), CRCs may be zero;
* the zip may be a window inside a larger file (one item of a `.distcp` file).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from pathlib import Path
from struct import unpack_from
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from unshard.containers.open_files import Pread, opened, pread_many, preader, size_of
from unshard.errors import CorruptError, IncompleteError, NotMergeableError
from unshard.tensors.boxes import Ints

LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""The first pickle of the legacy format."""
MAX_PICKLE = 256 * 1024 * 1024
"""The most bytes of a pickle. 50,000 tensors take about 20 MB, ShardedTensors more."""

_EOCD = b"PK\x05\x06"
_EOCD64 = b"PK\x06\x06"
_LOCATOR64 = b"PK\x06\x07"
_CENTRAL = b"PK\x01\x02"
_LOCAL = b"PK\x03\x04"
_LOCAL_MARK = int.from_bytes(_LOCAL, "little")
_LOCAL_SIZE = 30
_TWO_FIELDS = 24  # bytes: a zip64 field, and the start of the one that aligns the data
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
_MAX_TAIL = 22 + _FULL16
_MAX_PLACE = 1 << 61
_MAX_ENTRY = 46 + 3 * _FULL16

_ENTRY = np.dtype(
    {
        "names": "method crc stored plain extra_size header".split(),
        "formats": "<u2 <u4 <u4 <u4 <u2 <u4".split(),
        "offsets": [10, 16, 20, 24, 30, 42],
        "itemsize": 46,
    }
)
_HEADER = np.dtype(
    {
        "names": "mark name_size extra_size".split(),
        "formats": "<u4 <u2 <u2".split(),
        "offsets": [0, 26, 28],
        "itemsize": _LOCAL_SIZE,
    }
)


class StorageRecord(NamedTuple):
    """The place of a storage: `offset` in the file, `size` in bytes; its CRC-32, 0 if unknown."""

    offset: int
    size: int
    crc: int


class Storages(Mapping[str, StorageRecord]):
    """The storages of a file by key, in columns.

    Attributes:
        keys_in_order: the keys.
        offset, size, crc: columns of `StorageRecord`.
    """

    def __init__(self, keys: list[str], offset: Ints, size: Ints, crc: Ints) -> None:
        self.keys_in_order = keys
        self.offset, self.size, self.crc = offset, size, crc
        self._places: dict[str, int] = {}

    def __getitem__(self, key: str) -> StorageRecord:
        if not self._places:
            self._places = {key: place for place, key in enumerate(self.keys_in_order)}
        place = self._places[key]
        return StorageRecord(int(self.offset[place]), int(self.size[place]), int(self.crc[place]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_in_order)

    def __len__(self) -> int:
        return len(self.keys_in_order)


@dataclass(frozen=True, slots=True)
class TorchZip:
    """A torch.save file with its pickle unread.

    Attributes:
        path: the file.
        pickle: the bytes of data.pkl, checked with its CRC-32 if it has one.
        storages: byte ranges of the storages, by key.
        passed_over: begins and ends, in the window, of bytes that are read with the directory but
            affect only the CRCs of `storages`: CRCs, except the pickle's, and first values.
        root: the folder of its records: the stem of the name under which torch saved it.
    """

    path: Path
    pickle: bytes
    storages: Storages
    passed_over: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64), compare=False)
    root: str = ""


class _Entries(NamedTuple):
    """The entries of the central directory, in columns; `header` is relative to the window."""

    names: list[bytes]
    header: Ints
    size: Ints
    crc: Ints
    crc_at: Ints
    compressed: NDArray[np.bool_]

    def take(self, rows: list[int]) -> "_Entries":
        names = [self.names[row] for row in rows]
        columns = self.header[rows], self.size[rows], self.crc[rows], self.crc_at[rows]
        return _Entries(names, *columns, self.compressed[rows])


def read_torch_zip(
    path: Path, *, offset: int = 0, length: int | None = None, pread: Pread | None = None
) -> TorchZip:
    """Read the directory and the pickle of a torch.save file, or of a window of a file.

    A `length` of None reaches to the end of the file. With a `pread`, which works like `os.pread`,
    the file is not opened here, and `length` is required.

    Raises:
        IncompleteError: the file is empty or truncated.
        CorruptError: it contradicts the zip format, or torch.save does not write such zips.
        NotMergeableError: it is in the legacy format (before torch 1.6) or big-endian.
    """
    if pread is not None and length is not None:

        def each(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
            return list(starmap(pread, ranges))

        return _ZipReader(path, pread, each, offset, length).read()
    with opened(path) as file:
        size = size_of(file) - offset if length is None else length
        return _ZipReader(path, preader(file), partial(pread_many, file), offset, size).read()


class _ZipReader(NamedTuple):
    path: Path
    pread: Pread
    pread_many: Callable[[Sequence[tuple[int, int]]], list[bytes]]
    offset: int
    size: int

    def read(self) -> TorchZip:
        entries = self.directory()
        root = self.root(entries.names)
        names = [name.removeprefix(root) for name in entries.names]
        pickle = b""
        if b"data.pkl" in names:
            pickle = self.pickle(entries.take([names.index(b"data.pkl")]))
        if b"byteorder" in names:
            order = entries.take([names.index(b"byteorder")])
            self.check_byteorder(self.bytes_at(int(self.data_starts(order)[0]), int(order.size[0])))
        rows = [row for row, name in enumerate(names) if name.startswith(b"data/")]
        records = entries.take(rows)
        start = self.data_starts(records)
        keys = [names[row][5:].decode("utf-8", "replace") for row in rows]
        if len(set(keys)) < len(keys):
            key = next(key for key, count in Counter(keys).items() if count > 1)
            raise self.corrupt(f"it has two records named data/{key}")
        order_of_bytes = np.lexsort((start, records.header))
        begins, ends = records.header[order_of_bytes], (start + records.size)[order_of_bytes]
        overlap = np.flatnonzero(begins[1:] < ends[:-1])
        if len(overlap):
            at = self.offset + int(begins[overlap[0] + 1])
            raise self.corrupt(f"two of its records overlap at byte {at}")
        storages = Storages(keys, start + self.offset, records.size, records.crc)
        local = records.header + 14
        named = np.array([_LOCAL_SIZE + len(name) for name in records.names], np.int64)
        others = entries.crc_at[[name != b"data.pkl" for name in names]]
        begin = np.concatenate([others, local, start])
        ends = np.maximum(records.header + named + _TWO_FIELDS, start)
        end = np.concatenate([others + 4, local + 4, ends])
        passed_over = np.stack([begin, end], axis=1)[end > begin]
        stem = root.rstrip(b"/").decode("utf-8", "replace")
        return TorchZip(self.path, pickle, storages, passed_over, stem)

    def pickle(self, record: _Entries) -> bytes:
        size, crc = int(record.size[0]), int(record.crc[0])
        if size > MAX_PICKLE:
            raise self.corrupt(f"its pickle takes {size} bytes")
        data = self.bytes_at(int(self.data_starts(record)[0]), size)
        if crc not in (0, crc32(data)):
            raise self.corrupt("the pickle's CRC-32 does not match")
        return data

    def bytes_at(self, start: int, count: int) -> bytes:
        if start < 0 or count < 0 or start + count > self.size:
            raise self.corrupt(
                f"bytes {start} to {start + count} are outside its {self.size} bytes"
            )
        data = self.pread(count, self.offset + start)
        if len(data) != count:
            raise IncompleteError(f"{self.path}: cannot read {count} bytes at {start}: truncated")
        return data

    def directory(self) -> _Entries:
        """Return the central directory."""
        start, size, count = self.find_directory()
        if size > count * _MAX_ENTRY:
            raise self.corrupt(f"its directory of {count} entries takes {size} bytes")
        data = self.bytes_at(start, size)
        places, names = [], []
        at = 0
        for _ in range(count):
            if data[at : at + 4] != _CENTRAL or at + 46 > size:
                raise self.corrupt(f"its directory breaks off at byte {start + at}")
            name_size, extra_size, comment_size = unpack_from("<HHH", data, at + 28)
            places.append(at)
            names.append(data[at + 46 : at + 46 + name_size])
            at += 46 + name_size + extra_size + comment_size
        if at != size:
            raise self.corrupt(f"its directory has more than the {count} entries it counts")
        bytes_ = np.frombuffer(data, np.uint8)
        rows = bytes_[np.array(places, np.int64)[:, None] + np.arange(46)].view(_ENTRY)[:, 0]
        wide = np.stack([rows["plain"], rows["stored"], rows["header"]], axis=1).astype(np.int64)
        for row in np.flatnonzero((wide == _FULL32).any(axis=1)).tolist():
            begin = places[row] + 46 + len(names[row])
            extra = data[begin : begin + int(rows["extra_size"][row])]
            wide[row] = self.widen(extra, *wide[row].tolist())
        plain, stored, header = wide.T
        compressed = (rows["method"] != 0) | (plain != stored)
        crc_at = np.array(places, np.int64) + start + 16
        return _Entries(names, header, plain, rows["crc"].astype(np.int64), crc_at, compressed)

    def widen(self, extra: bytes, plain: int, stored: int, header: int) -> tuple[int, int, int]:
        """Replace values that do not fit 32 bits by the 64-bit values of the zip64 field."""
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
                if max(values) >= _MAX_PLACE:
                    break
                return values[0], values[1], values[2]
            at += 4 + size
        raise self.corrupt("its directory does not have the zip64 sizes that it refers to")

    def find_directory(self) -> tuple[int, int, int]:
        """Return (start, size, number of entries) of the central directory."""
        if self.size == 0:
            raise IncompleteError(f"{self.path}: the file is empty", hint=_INTERRUPTED)
        for most in (22, _MAX_TAIL):  # torch writes no comment after it
            tail_size = min(self.size, most)
            tail = self.bytes_at(self.size - tail_size, tail_size)
            at = tail.rfind(_EOCD)
            if at == 0:
                break
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

    def data_starts(self, records: _Entries) -> Ints:
        """Return the starts of the records' data, from their local headers."""
        self.refuse(records, records.compressed, "is compressed; torch.save never compresses")
        named = np.array([_LOCAL_SIZE + len(name) for name in records.names], np.int64)
        outside = (records.header < 0) | (records.header + named + 4 > self.size)
        self.refuse(records, outside, "has its local header outside of the file")
        room = _TWO_FIELDS if (records.header + named + _TWO_FIELDS <= self.size).all() else 4
        headers = self.headers(records, named + room)
        data = np.frombuffer(b"".join(headers), np.uint8)
        end = np.cumsum(named + room) - room
        fields = data[(end - named)[:, None] + np.arange(_LOCAL_SIZE)].view(_HEADER)[:, 0]
        self.refuse(records, fields["mark"] != _LOCAL_MARK, "has no local header at {}")
        pairs = zip(headers, records.names, strict=True)
        renamed = np.array([head[_LOCAL_SIZE:-room] != name for head, name in pairs], np.bool_)
        renamed |= fields["name_size"] != named - _LOCAL_SIZE
        self.refuse(records, renamed, "has another name in its local header")
        extra = fields["extra_size"].astype(np.int64)
        start: Ints = records.header + named + extra
        beyond = start + records.size > self.size
        self.refuse(records, beyond, "reaches beyond the end of the file")
        # The extra fields of a local header must fill it: a wrong size would shift the data. One
        # or two fields are checked here, more fields one by one.
        one = 4 + _uint16(data, end + 2)
        two = one + 4 + _uint16(data, np.minimum(end + one + 2, end + room - 2))
        filled = (extra == 0) | (extra == one) | ((extra == two) & (one <= room - 4))
        for row in np.flatnonzero(~filled).tolist():
            self.check_extra(records, row, int(start[row] - extra[row]), int(extra[row]))
        return start

    def headers(self, records: _Entries, counts: Ints) -> list[bytes]:
        """Return the first bytes of each record's local header, `counts` bytes of each."""
        offsets = (records.header + self.offset).tolist()
        headers = self.pread_many(list(zip(counts.tolist(), offsets, strict=True)))
        if sum(map(len, headers)) != int(counts.sum()):
            raise IncompleteError(f"{self.path}: cannot read its local headers: truncated")
        return headers

    def check_extra(self, records: _Entries, row: int, begin: int, size: int) -> None:
        extra = self.bytes_at(begin, size)
        at = 0
        while at + 4 <= size:
            at += 4 + int(unpack_from("<H", extra, at + 2)[0])
        bad = np.arange(len(records.names)) == row
        self.refuse(records, bad & (at != size), "has a local header of contradictory sizes")

    def refuse(self, records: _Entries, bad: NDArray[np.bool_], problem: str) -> None:
        """Raise an error for the first bad record; {} in `problem` is its header's offset."""
        if bad.any():
            row = int(bad.argmax())
            name = records.names[row].decode("utf-8", "replace")
            raise self.corrupt(f"record {name} {problem.format(records.header[row])}")

    def root(self, names: list[bytes]) -> bytes:
        """Return the folder of all records, with its slash."""
        if any(name.endswith(b"/constants.pkl") for name in names):
            raise NotMergeableError(
                f"{self.path}: a TorchScript archive, not a state dict",
                hint="save its state dict: torch.save(torch.jit.load(FILE).state_dict(), OUTPUT)",
            )
        roots = [name.removesuffix(b"data.pkl") for name in names if name.endswith(b"/data.pkl")]
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


def _uint16(data: NDArray[np.uint8], at: Ints) -> Ints:
    return data[at].astype(np.int64) + data[at + 1].astype(np.int64) * 256


_INTERRUPTED = (
    "the save was interrupted, or is still under way; take another checkpoint or copy it again"
)
