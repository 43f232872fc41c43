"""Lay out a file of `torch.save` before its data exist: every byte but the storages.

The zip equals that of torch's `PyTorchStreamWriter` on Linux, byte for byte. The checksums of the
storages are in their data descriptors, in the central directory and in `.data/serialization_id`, so
these are written again once the data is written.

Sources: torch's `caffe2/serialize/inline_container.cc`, miniz, files of torch 2.4 to 2.15.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import pack
from zlib import crc32

from unshard.containers.torch_files.dtensors import Version
from unshard.containers.torch_files.record_names import combined_hash, hash_of_names

_ALIGNMENT = 64
_FULL64, _FULL32, _FULL16 = (1 << 64) - 1, (1 << 32) - 1, (1 << 16) - 1
_UTF8, _DESCRIBED = 0x0800, 0x0008  # flags: names are UTF-8; sizes and checksum follow the data
_ID_DIGITS = 20
_ID_NAME = ".data/serialization_id"
_WITH_ALIGNMENT = (2, 7)
_BY_NUMBER = (2, 7)  # earlier versions sorted storages by their numbers as text


@dataclass(frozen=True, slots=True)
class _ZipEntry:
    """A file of the zip: `content` is None for a storage, `data` is the offset of its bytes."""

    name: bytes
    content: bytes | None
    size: int
    start: int

    @property
    def is_large(self) -> bool:
        return self.size >= _FULL32

    @property
    def data(self) -> int:
        before = self.start + 30 + len(self.name) + (20 if self.is_large else 0) + 4
        return before + -before % _ALIGNMENT

    @property
    def end(self) -> int:
        """The offset after its data descriptor, which an empty file does not have."""
        return self.data + self.size + len(self.descriptor(0))

    @property
    def flags(self) -> int:
        return _UTF8 | (_DESCRIBED if self.size else 0)

    def local_header(self) -> bytes:
        sizes = pack("<2H2Q", 1, 16, 0, 0) if self.is_large else b""
        field = self.data - self.start - 30 - len(self.name) - len(sizes) - 4
        extra = sizes + pack("<2sH", b"FB", field) + b"Z" * field
        stated = _FULL32 if self.is_large else 0
        numbers = (0, self.flags, 0, 0, 0, 0, stated, stated, len(self.name), len(extra))
        return pack("<4s5H3L2H", b"PK\3\4", *numbers) + self.name + extra

    def descriptor(self, crc: int) -> bytes:
        if not self.size:
            return b""
        return pack("<4sL2Q" if self.is_large else "<4s3L", b"PK\7\x08", crc, *[self.size] * 2)

    def directory_entry(self, crc: int) -> bytes:
        large = [self.size] * 2 if self.is_large else []
        large += [self.start] if self.start >= _FULL32 else []
        extra = pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        size, start = min(self.size, _FULL32), min(self.start, _FULL32)
        numbers = (0, 0, self.flags, 0, 0, 0, crc, size, size, len(self.name), len(extra), *[0] * 5)
        return pack("<4s6H3L5H2L", b"PK\1\2", *numbers[:-1], start) + self.name + extra


@dataclass(frozen=True, slots=True)
class ZipLayout:
    """The layout of a zip.

    Attributes:
        records: the files of the zip, in order.
        order: the numbers of the storages, in the same order.
        storages: offset and size of the data of each storage, bytes, by number.
        size: size of the zip, bytes.
    """

    records: tuple[_ZipEntry, ...]
    order: tuple[int, ...]
    storages: tuple[tuple[int, int], ...]
    size: int

    def fixed(self, crcs: Sequence[int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of all parts but the storages, in the order of the file.

        Args:
            crcs: CRC-32 of each storage, by number; None before the data is written.
        """
        storage_crcs = iter([0 if crcs is None else crcs[number] for number in self.order])
        directory, written = bytearray(), list[int]()
        for record in self.records:
            content = record.content
            if record.name.endswith(_ID_NAME.encode()):
                content = _id_of(self.records, written)
            crc = next(storage_crcs) if content is None else crc32(content)
            written += [crc] if record.size else []
            yield record.start, record.local_header() + (content or b"")
            yield record.data + record.size, record.descriptor(crc)
            directory += record.directory_entry(crc)
        at = self.records[-1].end
        yield at, bytes(directory) + _end(len(self.records), at, len(directory))


def _id_of(records: Sequence[_ZipEntry], crcs: Sequence[int]) -> bytes:
    """Return the hashes of the names, without the folder, and of the checksums."""
    names = tuple(record.name.decode().partition("/")[2] for record in records[:-1])
    numbers = hash_of_names(names), combined_hash(crcs)
    return "".join(f"{number:0{_ID_DIGITS}}" for number in numbers).encode()


def _end(count: int, at: int, size: int) -> bytes:
    """Return the end records for a central directory of `size` bytes at offset `at`."""
    end64 = pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, size, at)
    locator = pack("<4sLQL", b"PK\6\7", 0, at + size, 1)
    few, near = min(count, _FULL16), min(at, _FULL32)
    end = pack("<4s4H2LH", b"PK\5\6", 0, 0, few, few, min(size, _FULL32), near, 0)
    return end64 + locator + end


def lay_out_zip(root: str, pickle: bytes, sizes: Sequence[int], version: Version) -> ZipLayout:
    """Lay out a file with storages of these sizes, in bytes, for a version of torch.

    `root` is the folder of all records; torch uses the file's name without its suffix.
    """
    alignment = str(_ALIGNMENT).encode()
    named: list[tuple[str, bytes | None, int]] = [("data.pkl", pickle, len(pickle))]
    if version >= _WITH_ALIGNMENT:
        named += [(".format_version", b"1", 1), (".storage_alignment", alignment, 2)]
    named.append(("byteorder", b"little", 6))
    keys = range(len(sizes)) if version >= _BY_NUMBER else sorted(range(len(sizes)), key=str)
    named += [(f"data/{key}", None, sizes[key]) for key in keys]
    named += [("version", b"3\n", 2), (_ID_NAME, b"0" * 2 * _ID_DIGITS, 2 * _ID_DIGITS)]
    records: list[_ZipEntry] = []
    for name, content, size in named:
        start = records[-1].end if records else 0
        records.append(_ZipEntry(f"{root}/{name}".encode(), content, size, start))
    spans = [(record.data, record.size) for record in records if record.content is None]
    storages = tuple(span for _, span in sorted(zip(keys, spans, strict=True)))
    at = records[-1].end
    directory = sum(len(record.directory_entry(0)) for record in records)
    size = at + directory + len(_end(len(records), at, directory))
    return ZipLayout(tuple(records), tuple(keys), storages, size)
