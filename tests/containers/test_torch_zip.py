"""The zip of torch.save: offsets as torch sees them, and no file that makes it lose its way."""

import io
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.serialization import config

from unshard.containers.pickles.records import Persistent, Record
from unshard.containers.pickles.unpickle import unpickle
from unshard.containers.torch_files.zip import TorchZip, read_torch_zip
from unshard.errors import (
    CorruptError,
    IncompleteError,
    NotMergeableError,
    UnshardError,
)

RECORDS = {
    "data.pkl": b"\x80\x02}.",
    "byteorder": b"little",
    "data/0": b"abcd" * 10,
    "data/1": b"",
    "data/2": b"xyz",
    "version": b"3\n",
}
STORAGES = {"0": b"abcd" * 10, "1": b"", "2": b"xyz"}


def state_dict() -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes, one empty, two that share a storage."""
    first = torch.arange(10, dtype=torch.float32)
    return {
        "first": first,
        "half": torch.arange(15, dtype=torch.bfloat16).reshape(3, 5),
        "empty": torch.zeros(0, 4),
        "tied": first,
        "view": first[3:7],
        "float8": torch.ones(5).to(torch.float8_e4m3fn),
        "large": torch.arange(5000, dtype=torch.int64),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model_world_size_2_rank_0.pt"
    torch.save(state_dict(), path)
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a path that every example may overwrite."""
    return tmp_path_factory.mktemp("zips") / "model.pt"


def offsets_by_name(archive: TorchZip) -> dict[str, int]:
    """Return where every tensor's storage is, by way of the pickle."""
    found = {}
    value = unpickle(archive.pickle)
    for name, tensor in cast("Mapping[str, Record]", value).items():
        storage = cast("Persistent", tensor.args[0])
        key = cast("tuple[object, ...]", storage.pid)[2]
        found[name] = archive.storages[str(key)].offset
    return found


def offsets_of_torch(file: Path | io.BytesIO) -> dict[str, int]:
    tensors: dict[str, torch.Tensor] = torch.load(
        file,
        map_location="meta",
        weights_only=False,  # our own file; the safe way reads protocol 2 only
    )
    return {
        name: cast("int", vars(tensor.untyped_storage())["_checkpoint_offset"])
        for name, tensor in tensors.items()
    }


def make_zip(
    path: Path,
    records: Mapping[str, bytes] = RECORDS,
    *,
    root: str = "archive/",
    method: int = zipfile.ZIP_STORED,
) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in records.items():
            file.writestr(root + name, data)
    return path


def storage_bytes(archive: TorchZip) -> dict[str, bytes]:
    data = archive.path.read_bytes()
    return {
        key: data[storage.offset : storage.offset + storage.size]
        for key, storage in archive.storages.items()
    }


def without(*names: str) -> dict[str, bytes]:
    return {name: data for name, data in RECORDS.items() if name not in names}


# --- what torch writes ---------------------------------------------------------------------------


@pytest.fixture
def alignment(request: pytest.FixtureRequest) -> Iterator[int]:
    before = config.save.storage_alignment
    config.save.storage_alignment = request.param
    yield request.param
    config.save.storage_alignment = before


@pytest.mark.parametrize("alignment", [64, 4096], indirect=True)
def test_offsets_are_those_of_torch_whatever_the_alignment(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "rank.pt"
    torch.save(state_dict(), path)
    found = offsets_by_name(read_torch_zip(path))
    assert found == offsets_of_torch(path)
    assert all(offset % alignment == 0 for offset in found.values())


@pytest.mark.parametrize("name", ["noext", "a.b.pt", "x.tar.gz", "ünï 😀.pt"])
def test_a_file_saved_by_path_is_read_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    torch.save(state_dict(), path)
    archive = read_torch_zip(path)
    assert archive.path == path
    assert offsets_by_name(archive) == offsets_of_torch(path)


def test_a_renamed_file_keeps_its_root_and_is_read(saved: Path) -> None:
    renamed = saved.rename(saved.with_name("other.bin"))
    assert offsets_by_name(read_torch_zip(renamed)) == offsets_of_torch(renamed)


def test_a_file_saved_to_a_buffer_is_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(state_dict(), buffer)
    path = tmp_path / "rank.pt"
    path.write_bytes(buffer.getvalue())
    buffer.seek(0)
    assert offsets_by_name(read_torch_zip(path)) == offsets_of_torch(buffer)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_that_torch_can_use_is_read(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "rank.pt"
    torch.save(state_dict(), path, pickle_protocol=protocol)
    assert offsets_by_name(read_torch_zip(path)) == offsets_of_torch(path)


def test_storages_hold_the_bytes_of_the_tensors(saved: Path) -> None:
    archive = read_torch_zip(saved)
    data = saved.read_bytes()
    for name, offset in offsets_by_name(archive).items():
        storage = state_dict()[name].untyped_storage()
        assert data[offset : offset + storage.nbytes()] == bytes(cast("Iterable[int]", storage))
    with zipfile.ZipFile(saved) as file:
        sizes = {info.filename: (info.file_size, info.CRC) for info in file.infolist()}
    root = "model_world_size_2_rank_0/data/"
    assert {root + key: (s.size, s.crc) for key, s in archive.storages.items()} == {
        name: entry for name, entry in sizes.items() if name.startswith(root)
    }


@pytest.fixture
def _no_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


@pytest.mark.usefixtures("_no_checksums")
def test_checksums_that_torch_left_out_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "rank.pt"
    torch.save(state_dict(), path)
    archive = read_torch_zip(path)
    assert {storage.crc for storage in archive.storages.values()} == {0}
    assert offsets_by_name(archive) == offsets_of_torch(path)


@pytest.mark.parametrize("before", [1, 64, 100_001])
@pytest.mark.parametrize("after", [0, 70_000])
def test_a_window_inside_a_larger_file_is_read(saved: Path, before: int, after: int) -> None:
    data = saved.read_bytes()
    whole = saved.with_name("__0_0.distcp")
    whole.write_bytes(b"PK\x05\x06" * (before // 4) + b"-" * (before % 4) + data + b"+" * after)
    found = read_torch_zip(whole, offset=before, length=len(data))
    alone = read_torch_zip(saved)
    assert found.pickle == alone.pickle
    expected = {name: offset + before for name, offset in offsets_by_name(alone).items()}
    assert offsets_by_name(found) == expected
    if not after:
        assert read_torch_zip(whole, offset=before) == found


def test_the_legacy_format_is_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save(state_dict(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(NotMergeableError, match="legacy format") as error:
        read_torch_zip(path)
    assert "old.pt" in error.value.subject
    assert error.value.hint == "load it with torch and save it again"


def test_a_torchscript_archive_of_torch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated it
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(NotMergeableError, match=r"script\.pt: a TorchScript archive"):
        read_torch_zip(path)


# --- what other versions and writers leave -------------------------------------------------------


def test_a_plain_zip_of_stored_records_is_read(tmp_path: Path) -> None:
    archive = read_torch_zip(make_zip(tmp_path / "a.pt"))
    assert archive.pickle == RECORDS["data.pkl"]
    assert storage_bytes(archive) == STORAGES


@pytest.mark.parametrize("root", ["archive/", "a/b/", "ü/", "data/"])
def test_any_root_folder_is_found(tmp_path: Path, root: str) -> None:
    assert storage_bytes(read_torch_zip(make_zip(tmp_path / "a.pt", root=root))) == STORAGES


def test_files_of_old_torch_versions_without_byteorder_are_read(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.pt", without("byteorder"))
    assert storage_bytes(read_torch_zip(path)) == STORAGES


def test_a_comment_after_the_directory_is_passed_over(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.pt")
    with zipfile.ZipFile(path, "a") as file:
        file.comment = b"c" * 65_535
    assert storage_bytes(read_torch_zip(path)) == STORAGES


def test_local_headers_with_64_bit_sizes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as file:
        for name, data in RECORDS.items():
            with file.open("archive/" + name, "w", force_zip64=True) as record:
                record.write(data)
    assert storage_bytes(read_torch_zip(path)) == STORAGES


FULL = 0xFFFFFFFF


def zip64(*, sizes: bool, offsets: bool, end: bool, before: bytes = b"") -> bytes:
    """Return a zip with some of its numbers where a file beyond 4 GiB has them all.

    Args:
        sizes: put sizes into the zip64 field.
        offsets: put the offsets of local headers there.
        end: put the directory's place and count into the zip64 end record.
        before: an extra field that stands before the zip64 field.
    """
    body = directory = b""
    for record, data in RECORDS.items():
        name = f"archive/{record}".encode()
        wide = [len(data)] * 2 * sizes + [len(body)] * offsets
        extra = before + (struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b"")
        size, at = FULL if sizes else len(data), FULL if offsets else len(body)
        directory += struct.pack("<4s6H3L5H2L", b"PK\1\2", 45, 45, 0x808, 0, 0, 0, 0, size, size,
                                 len(name), len(extra), 0, 0, 0, 0, at) + name + extra  # fmt: skip
        local = struct.pack("<HHQQ", 1, 16, 0, 0) + b"FB\x05\x00ZZZZZ"
        body += struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0x808, 0, 0, 0, 0, 0, 0,
                            len(name), len(local)) + name + local + data  # fmt: skip
    count, size, start = len(RECORDS), len(directory), len(body)
    tail = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    tail += struct.pack("<4sLQL", b"PK\6\7", 0, start + size, 1)
    if end:
        count, size, start = 0xFFFF, FULL, FULL
    tail += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, start, 0)
    return body + directory + tail


@pytest.mark.parametrize("before", [b"", b"FB\x03\x00ZZZ"], ids=["alone", "after another field"])
@pytest.mark.parametrize("end", [True, False], ids=["wide end", "narrow end"])
@pytest.mark.parametrize("offsets", [True, False], ids=["wide offsets", "narrow offsets"])
@pytest.mark.parametrize("sizes", [True, False], ids=["wide sizes", "narrow sizes"])
def test_zip64_numbers_are_found_where_they_stand(
    tmp_path: Path, *, sizes: bool, offsets: bool, end: bool, before: bytes
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(zip64(sizes=sizes, offsets=offsets, end=end, before=before))
    assert storage_bytes(read_torch_zip(path)) == STORAGES


def test_a_window_of_a_zip64_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.distcp"
    data = zip64(sizes=True, offsets=True, end=True)
    path.write_bytes(b"-" * 99 + data + b"+" * 99)
    archive = read_torch_zip(path, offset=99, length=len(data))
    assert storage_bytes(archive) == STORAGES


# --- what is refused -----------------------------------------------------------------------------


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.pt", RECORDS | {"byteorder": b"big"})
    with pytest.raises(NotMergeableError, match=r"a\.pt.*other byte order") as error:
        read_torch_zip(path)
    assert (error.value.expected, error.value.found) == ("little", "big")


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.pt", method=zipfile.ZIP_DEFLATED)
    with pytest.raises(CorruptError, match=r"a\.pt.*archive/data\.pkl is compressed"):
        read_torch_zip(path)


def test_a_torchscript_archive_without_a_pickle_is_refused(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.pt", {"constants.pkl": b"", "code/x.py": b""})
    with pytest.raises(NotMergeableError, match="TorchScript"):
        read_torch_zip(path)


def test_a_zip_of_something_else_is_corrupt(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.docx", {"word/document.xml": b"<x/>"})
    with pytest.raises(CorruptError, match="has 0 records named data"):
        read_torch_zip(path)


def test_two_pickles_are_refused(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.pt", RECORDS | {"other/data.pkl": b"N."})
    with pytest.raises(CorruptError, match="has 2 records named data"):
        read_torch_zip(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["data.pkl", "data/0"])
def test_two_records_of_one_name_are_refused(tmp_path: Path, name: str) -> None:
    path = make_zip(tmp_path / "a.pt")
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("archive/" + name, b"other")
    with pytest.raises(CorruptError, match=name):
        read_torch_zip(path)


def test_an_empty_file_is_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "rank_3.pt"
    path.touch()
    with pytest.raises(IncompleteError, match=r"rank_3\.pt: the file is empty") as error:
        read_torch_zip(path)
    assert "interrupted" in error.value.hint


def test_a_file_cut_before_its_directory_is_incomplete(saved: Path) -> None:
    data = saved.read_bytes()
    with zipfile.ZipFile(saved) as file:
        directory = file.start_dir
    for size in [*range(4, 200), *range(200, directory, 997), directory]:
        saved.write_bytes(data[:size])
        with pytest.raises(IncompleteError, match=r"rank_0\.pt: truncated") as error:
            read_torch_zip(saved)
        assert "interrupted" in error.value.hint


def test_a_file_cut_anywhere_is_incomplete_or_corrupt_and_named(saved: Path) -> None:
    data = saved.read_bytes()
    for size in [*range(len(data) - 1500, len(data), 7), *range(len(data) - 120, len(data))]:
        saved.write_bytes(data[:size])
        with pytest.raises((IncompleteError, CorruptError), match=r"rank_0\.pt"):
            read_torch_zip(saved)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 10**6), (100, None), (10**6, None), (10**6, 100), (0, 0), (0, 21)]
)
def test_a_window_that_does_not_fit_is_refused(
    tmp_path: Path, offset: int, length: int | None
) -> None:
    path = make_zip(tmp_path / "a.pt")
    with pytest.raises((IncompleteError, CorruptError), match=r"a\.pt"):
        read_torch_zip(path, offset=offset, length=length)


def patched(path: Path, at: int, layout: str, *values: int) -> Path:
    """Overwrite some numbers of a file; a negative place counts from its end."""
    data = bytearray(path.read_bytes())
    struct.pack_into(layout, data, at % len(data), *values)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("header", [b"PK\x03\x05", b"\0\0\0\0"])
def test_a_damaged_local_header_is_corrupt(tmp_path: Path, header: bytes) -> None:
    path = patched(make_zip(tmp_path / "a.pt"), 0, "<4B", *header)
    with pytest.raises(CorruptError, match=r"a\.pt.*archive/data\.pkl has no local header at 0"):
        read_torch_zip(path)


@pytest.mark.parametrize("size", [0xFFFF, 0x7FFF])
def test_a_local_header_that_points_outside_is_corrupt(tmp_path: Path, size: int) -> None:
    path = patched(make_zip(tmp_path / "a.pt"), 28, "<H", size)
    with pytest.raises(CorruptError, match=r"archive/data\.pkl reaches beyond the end"):
        read_torch_zip(path)


@pytest.mark.parametrize("start", [0xFFFFFFFE, 5000, 1, 0])
def test_a_directory_that_is_not_where_the_end_says_is_corrupt(tmp_path: Path, start: int) -> None:
    path = patched(make_zip(tmp_path / "a.pt"), -6, "<L", start)
    with pytest.raises(CorruptError, match=r"a\.pt.*its directory"):
        read_torch_zip(path)


@pytest.mark.parametrize(
    ("field", "layout", "value"),
    [(20, "<LL", 10**6), (42, "<L", 10**6), (42, "<L", 0xFFFFFFFF), (24, "<L", 0xFFFFFFFF)],
    ids=["sizes", "header", "header in a missing field", "size in a missing field"],
)
def test_a_record_outside_the_file_is_corrupt(
    tmp_path: Path, field: int, layout: str, value: int
) -> None:
    path = make_zip(tmp_path / "a.pt")
    with zipfile.ZipFile(path) as file:
        directory = file.start_dir
    patched(path, directory + field, layout, *[value] * (len(layout) - 1))
    with pytest.raises(CorruptError, match=r"a\.pt"):
        read_torch_zip(path)


@pytest.mark.parametrize(("tag", "size"), [(1, 16), (1, 25), (1, 0xFFFF), (2, 24)])
def test_a_zip64_field_that_lacks_a_number_is_corrupt(tmp_path: Path, tag: int, size: int) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(zip64(sizes=True, offsets=True, end=True))
    field = path.read_bytes().index(struct.pack("<HH", 1, 24))
    patched(path, field, "<HH", tag, size)
    with pytest.raises(CorruptError, match="does not have the zip64 sizes"):
        read_torch_zip(path)


def test_more_entries_than_the_directory_holds_are_corrupt(tmp_path: Path) -> None:
    path = patched(make_zip(tmp_path / "a.pt"), -12, "<H", 0xFFFE)
    with pytest.raises(CorruptError, match="its directory breaks off"):
        read_torch_zip(path)


def test_a_directory_of_more_entries_than_are_counted_is_corrupt(tmp_path: Path) -> None:
    path = patched(make_zip(tmp_path / "a.pt"), -12, "<H", len(RECORDS) - 2)
    with pytest.raises(CorruptError, match="its directory"):
        read_torch_zip(path)


def test_a_zip64_end_without_its_locator_is_corrupt(tmp_path: Path) -> None:
    path = patched(make_zip(tmp_path / "a.pt"), -12, "<HLL", 0xFFFF, FULL, FULL)
    with pytest.raises(CorruptError, match="zip64 locator is missing"):
        read_torch_zip(path)


@pytest.mark.parametrize("at", [0, 10**15, 2**64 - 1])
def test_a_zip64_locator_that_points_nowhere_is_corrupt(tmp_path: Path, at: int) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(zip64(sizes=False, offsets=False, end=True))
    patched(path, -22 - 12, "<Q", at)
    with pytest.raises(CorruptError, match=r"a\.pt"):
        read_torch_zip(path)


@pytest.mark.parametrize("number", [10**15, 2**64 - 1])
@pytest.mark.parametrize("place", [32, 40, 48], ids=["count", "size", "start"])
def test_zip64_numbers_beyond_the_file_are_corrupt(tmp_path: Path, place: int, number: int) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(zip64(sizes=False, offsets=False, end=True))
    patched(path, -22 - 20 - 56 + place, "<Q", number)
    with pytest.raises(CorruptError, match=r"a\.pt"):
        read_torch_zip(path)


_CHILD = """
import resource, sys
from pathlib import Path
from unshard.containers.torch_files.zip import read_torch_zip
from unshard.errors import UnshardError
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
try:
    read_torch_zip(Path(sys.argv[1]))
except UnshardError as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit the address space")
@pytest.mark.parametrize("what", ["directory", "pickle"])
def test_a_size_that_would_fill_the_memory_is_refused(tmp_path: Path, what: str) -> None:
    """The file is sparse: 1 GiB of zeros that occupy nothing."""
    hole = 1 << 30
    name = b"a/data.pkl"
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, hole, hole,
                        len(name), 0, 0, 0, 0, 0, 0) + name  # fmt: skip
    place = (hole, 0) if what == "directory" else (len(entry), hole + len(local))
    path = tmp_path / "sparse.pt"
    with path.open("wb") as file:
        file.write(local)
        file.seek(hole + len(local))
        file.write(entry + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, *place, 0))
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path)], capture_output=True, text=True, check=False
    )
    assert child.stdout.strip() == "CorruptError", child.stderr


# --- random damage -------------------------------------------------------------------------------


@given(st.binary(max_size=300).filter(lambda data: not data.startswith(b"PK\3\4")))
def test_random_bytes_are_corrupt(scratch: Path, data: bytes) -> None:
    scratch.write_bytes(data)
    with pytest.raises(CorruptError if data else IncompleteError, match=scratch.name):
        read_torch_zip(scratch)


def reads_or_refuses(path: Path) -> None:
    """Whatever the bytes: storages within the file, or an error that names it."""
    size = path.stat().st_size
    try:
        archive = read_torch_zip(path)
    except UnshardError as error:
        assert path.name in str(error)  # noqa: PT017 (an error is allowed, not demanded)
    else:
        assert all(0 <= s.offset <= s.offset + s.size <= size for s in archive.storages.values())


edits = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6)
wide_or_not = st.sampled_from(
    [
        zip64(sizes=True, offsets=True, end=True),
        zip64(sizes=False, offsets=False, end=False),
        zip64(sizes=True, offsets=False, end=True, before=b"FB\x03\x00ZZZ"),
    ]
)


@given(data=wide_or_not, edits=edits, cut=st.none() | st.integers(0, 2000))
def test_damage_never_leads_outside_the_file_or_to_another_error(
    scratch: Path, data: bytes, edits: list[tuple[int, int]], cut: int | None
) -> None:
    damaged = bytearray(data)
    for place, byte in edits:
        damaged[place % len(damaged)] = byte
    scratch.write_bytes(damaged[:cut])
    reads_or_refuses(scratch)


@given(data=wide_or_not, place=st.integers(0, 10**6), word=st.sampled_from([0, 1, 2**31, FULL]))
def test_damaged_numbers_never_lead_outside_the_file(
    scratch: Path, data: bytes, place: int, word: int
) -> None:
    damaged = bytearray(data)
    struct.pack_into("<L", damaged, place % (len(damaged) - 4), word)
    scratch.write_bytes(damaged)
    reads_or_refuses(scratch)
