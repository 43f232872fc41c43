"""Zips that contradict themselves, made of a good torch.save file."""

import io
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from zlib import crc32

__all__ = ["packed", "records_of", "zips"]

_END = b"PK\x05\x06"
_FULL = 0xFFFFFFFF

Patch = Callable[[bytearray], object]


def records_of(data: bytes) -> dict[str, bytes]:
    """Return the records of a torch.save file, without its root folder."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def packed(
    records: Mapping[str, bytes], *, root: str = "archive/", method: int = zipfile.ZIP_STORED
) -> bytes:
    """Return a zip of records."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(root + name, data)
    return file.getvalue()


def zips(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield attacks on a torch.save file, by what they are."""
    records = records_of(good)
    data = packed(records)
    yield "compressed", packed(records, method=zipfile.ZIP_DEFLATED)
    yield "compressed, LZMA", packed(records, method=zipfile.ZIP_LZMA)
    yield "without a pickle", packed({n: d for n, d in records.items() if n != "data.pkl"})
    yield "pickles in two roots", _joined(records, {"x/data.pkl": records["data.pkl"]})
    for path in ("../x", "/etc/x", "data/../../x", "data/\nx", "C:\\x", "data/" + "y" * 60_000):
        yield f"a record named {path[:12]!r}", _joined(records, {f"archive/{path}": b"x"})
    yield "a storage twice", _twice(records, "data/0")
    yield "the pickle twice", _twice(records, "data.pkl")
    yield "a big-endian file", packed(records | {"byteorder": b"big"})
    yield "TorchScript", packed(records | {"constants.pkl": b"\x80\x02)."})
    for what, patch in _patches(data).items():
        changed = bytearray(data)
        patch(changed)
        yield what, bytes(changed)
    yield "two zips, one after the other", data + packed({"data.pkl": b"N."})
    yield "only an end", data[data.rindex(_END) :]
    yield "a comment", data[:-2] + struct.pack("<H", 5) + b"hello"
    yield "a comment that looks like an end", data[:-2] + struct.pack("<H", 22) + data[-22:]


def _joined(records: Mapping[str, bytes], more: Mapping[str, bytes]) -> bytes:
    return packed({f"archive/{name}": one for name, one in records.items()} | dict(more), root="")


def _twice(records: Mapping[str, bytes], name: str) -> bytes:
    """Return a zip with two records of a name: the second is written under another, and renamed."""
    other = name[:-1] + "~"
    data = packed(dict(records) | {other: b"evil" * 4})
    return data.replace(f"archive/{other}".encode(), f"archive/{name}".encode())


def _patches(data: bytes) -> dict[str, Patch]:
    """Return changes of single fields: of both headers of data/0, and of the end."""
    name = b"archive/data/0"
    local = data.index(name) - 30
    central = data.rindex(name) - 46
    end = data.rindex(_END)
    size = struct.unpack_from("<L", data, central + 24)[0]

    def field(at: int, form: str, value: int) -> Patch:
        return lambda changed: struct.pack_into(form, changed, at, value)

    def both(*patches: Patch) -> Patch:
        return lambda changed: [patch(changed) for patch in patches]

    sizes = {
        f"directory: size {value}": both(
            field(central + 20, "<L", value), field(central + 24, "<L", value)
        )
        for value in (0, 1, size - 1, size + 1, 2**31, _FULL - 1, _FULL)
    }
    places = {
        f"directory: record at {value}": field(central + 42, "<L", value)
        for value in (0, 1, local + 1, len(data) - 1, len(data), 2**31, _FULL - 1, _FULL)
    }
    ends = {
        f"end: {what} {value}": field(end + at, form, value)
        for what, at, form in (("count", 10, "<H"), ("size", 12, "<L"), ("start", 16, "<L"))
        for value in (0, 1, 0x7FFF, 0xFFFE, 0xFFFF)
    }
    return (
        sizes
        | places
        | ends
        | {
            "flag of encryption": both(field(local + 6, "<H", 1), field(central + 8, "<H", 1)),
            "flag of a strange encoding": field(central + 8, "<H", 0xFFFF),
            "directory: a method": field(central + 10, "<H", 8),
            "directory: a wrong checksum": field(central + 16, "<L", crc32(b"evil")),
            "local: another name": field(local + 30 + 12, "<B", ord("X")),
            "local: a longer name": field(local + 26, "<H", len(name) + 1),
            "local: fields beyond the file": field(local + 28, "<H", 0xFFFF),
            "local: fields into the data": field(local + 28, "<H", 8),
            "local: not a header": field(local, "<L", 0),
            "data/1 within data/0": lambda changed: _overlap(changed, local),
        }
    )


def _overlap(changed: bytearray, local: int) -> None:
    """Let data/1 begin within data/0, with a local header of its own."""
    other = changed.rindex(b"archive/data/1") - 46
    (header,) = struct.unpack_from("<L", changed, other + 42)
    name_size, extra_size = struct.unpack_from("<HH", changed, local + 26)
    inside = local + 30 + name_size + extra_size
    changed[inside : inside + 44] = changed[header : header + 44]
    struct.pack_into("<L", changed, other + 42, inside)
