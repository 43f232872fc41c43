"""Files of torch.save, whatever their age: the zip, the legacy format, and what is refused."""

import io
import os
import pickle
import random
import struct
import tarfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import unshard
from ranks import Tensors, assert_same, bits, merged
from unshard import CorruptError, IncompleteError, NotMergeableError, UnsafeError, UnshardError
from unshard.containers.pickles.machine import MalformedPickleError
from unshard.containers.pickles.records import Value
from unshard.containers.pickles.unpickle import TruncatedPickleError, unpickle, unpickle_first
from unshard.containers.torch_files.reader import TorchFile, read_torch_file
from unshard.read.torch_save.values import items_of

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

MAGIC = 0x1950A86A20F9469CFC6C
UNLOADABLE = ("float8", "uint16")  # torch.load fails: it asks an untyped storage for its dtype
MACHINE = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}


def odd_tensors() -> dict[str, torch.Tensor]:
    """One tensor of every storage that torch has, and of every odd shape."""
    torch.manual_seed(0)
    floats = torch.randn(6, 5)
    return {
        "float32": floats,
        "float64": torch.randn(3, dtype=torch.float64),
        "bfloat16": torch.randn(5).bfloat16(),
        "float16": torch.randn(2, 2).half(),
        "float8": torch.randn(7).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "int64": torch.tensor([2**40, -1]),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "bool": torch.tensor([True, False, True]),
        "complex64": torch.tensor([1 + 2j]),
        "scalar": torch.tensor(0.25),
        "empty": torch.empty(0, 4),
        "view": floats.clone()[2:4, 1:3],
        "transposed": floats.t(),
    }


def save_legacy(value: object, path: Path, protocol: int = 2) -> Path:
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    return path


def stored(file: TorchFile, tensors: Tensors) -> dict[str, bytes]:
    """Return the bytes of every storage that a file holds, by the name of the first tensor."""
    items = items_of(file.value)
    assert items is not None
    data = file.path.read_bytes()
    found = {}
    for name in tensors:
        key = persistent_key(items[name])
        record = file.storages[key]
        found[name] = data[record.offset : record.offset + record.size]
    return found


def persistent_key(value: Value) -> str:
    """Return the storage key of a pickled plain tensor."""
    from unshard.read.torch_save.values import read_view

    return read_view(value).key


# --- the legacy format, as torch writes it -------------------------------------------------------


def test_storages_of_a_legacy_file_are_where_torch_wrote_them(tmp_path: Path) -> None:
    tensors = {name: one for name, one in odd_tensors().items() if one.is_contiguous()}
    file = read_torch_file(save_legacy(tensors, tmp_path / "old.pt"))
    assert stored(file, tensors) == {name: bits(tensor) for name, tensor in tensors.items()}
    assert {record.crc for record in file.storages.values()} == {0}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_legacy_file_is_merged_to_what_torch_loads(tmp_path: Path, protocol: int) -> None:
    path = save_legacy(odd_tensors(), tmp_path / "old.bin", protocol)
    unshard.merge(path, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), odd_tensors())
    loadable = {name: one for name, one in odd_tensors().items() if name not in UNLOADABLE}
    save_legacy(loadable, path, protocol)
    assert_same(loadable, torch.load(path, weights_only=False))
    unshard.merge(path, tmp_path / "loadable", config="none")
    assert_same(merged(tmp_path / "loadable"), loadable)


def test_a_legacy_file_of_a_model_is_read(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    path = save_legacy({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "m.ckpt")
    unshard.merge(path, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), model.state_dict())


def test_a_pickle_longer_than_the_first_read_is_read_to_its_end(tmp_path: Path) -> None:
    base = torch.arange(40_000)
    tensors = {f"layers.{n}.{'x' * 100}": base[n : n + 2] for n in range(6000)}
    path = save_legacy(tensors, tmp_path / "long.pt")
    file = read_torch_file(path)
    items = items_of(file.value)
    assert items is not None
    assert list(items) == list(tensors)
    (record,) = file.storages.values()
    assert path.read_bytes()[record.offset : record.offset + record.size] == bits(base)
    assert record.offset > 1 << 20


def test_the_weights_of_a_legacy_file_are_not_read(tmp_path: Path) -> None:
    path = save_legacy({"a": torch.zeros(3)}, tmp_path / "sparse.pt")
    size = 1 << 40
    data = bytearray(legacy({"a": storage_tensor("1", size)}, ["1"]))
    path.write_bytes(data + struct.pack("<q", size))
    os.truncate(path, len(data) + 8 + 4 * size)
    (record,) = read_torch_file(path).storages.values()
    assert (record.offset, record.size) == (len(data) + 8, 4 * size)


def test_a_window_of_a_larger_file_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4)}
    for legacy_format in (True, False):
        buffer = io.BytesIO()
        torch.save(tensors, buffer, _use_new_zipfile_serialization=not legacy_format)
        inner = buffer.getvalue()
        path = tmp_path / "window"
        path.write_bytes(b"before" + inner + b"after")
        file = read_torch_file(path, offset=6, length=len(inner))
        assert stored(file, tensors) == {"a": bits(tensors["a"])}


# --- what is wrong with a file -------------------------------------------------------------------


def test_a_legacy_file_cut_anywhere_is_incomplete(tmp_path: Path) -> None:
    whole = save_legacy(odd_tensors(), tmp_path / "old.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for size in [*range(0, len(whole), 7), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(IncompleteError, match=r"cut\.pt"):
            read_torch_file(path)


def test_a_zip_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    torch.save(odd_tensors(), path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(UnshardError, match=r"cut\.pt"):
            read_torch_file(path)


def test_a_damaged_legacy_file_never_ends_in_a_traceback(tmp_path: Path) -> None:
    whole = save_legacy(odd_tensors(), tmp_path / "old.pt").read_bytes()
    path = tmp_path / "damaged.pt"
    chance = random.Random(5)
    refused = 0
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 8])):
            data[chance.randrange(len(data))] = chance.choice([0, 255, chance.randrange(256)])
        path.write_bytes(data)
        try:
            read_torch_file(path)
        except UnshardError as error:
            refused += "damaged.pt" in str(error)
    assert refused > 100


@pytest.mark.parametrize("size", [1, 9, 15, 512, 5000])
def test_zeros_are_not_a_file_of_torch(tmp_path: Path, size: int) -> None:
    path = tmp_path / "zero.pt"
    path.write_bytes(bytes(size))
    with pytest.raises(CorruptError, match=r"zero\.pt"):
        read_torch_file(path)


def test_an_empty_file_is_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "empty.pt"
    path.touch()
    with pytest.raises(IncompleteError, match="empty"):
        read_torch_file(path)


def test_what_is_not_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    for path in (tmp_path / "pipe.pt", tmp_path, tmp_path / "gone.pt"):
        with pytest.raises(CorruptError):
            read_torch_file(path)


class Pickler(pickle.Pickler):
    """Pickles `Reference`s as torch pickles storages."""

    def persistent_id(self, obj: object) -> object:
        return obj.pid if isinstance(obj, Reference) else None


class Reference:
    """Stands for a storage; `pid` is what the pickle says of it."""

    def __init__(self, pid: object) -> None:
        self.pid = pid


def storage_tensor(key: str, elements: int, *more: object) -> Reference:
    return Reference(("storage", torch.FloatStorage, key, "cpu", elements, *(more or (None,))))


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(value)
    return buffer.getvalue()


def legacy(
    value: object,
    keys: object,
    storages: bytes = b"",
    *,
    magic: object = MAGIC,
    protocol: object = 1001,
    machine: object = MACHINE,
) -> bytes:
    return b"".join(map(pickled, (magic, protocol, machine, value, keys))) + storages


ONE = struct.pack("<q", 2) + bytes(8)
A = {"a": storage_tensor("1", 2)}


def test_the_crafted_files_below_would_be_read_if_they_were_right(tmp_path: Path) -> None:
    path = tmp_path / "right.pt"
    path.write_bytes(legacy(A, ["1"], ONE))
    assert read_torch_file(path).storages["1"].size == 8


WRONG: Mapping[str, tuple[bytes, type[UnshardError], str]] = {
    "protocol": (legacy(A, ["1"], ONE, protocol=1000), CorruptError, "protocol"),
    "text as protocol": (legacy(A, ["1"], ONE, protocol="1001"), CorruptError, "protocol"),
    "no byte order": (legacy(A, ["1"], ONE, machine={}), CorruptError, "byte order"),
    "list as machine": (legacy(A, ["1"], ONE, machine=[1]), CorruptError, "byte order"),
    "big endian": (
        legacy(A, ["1"], ONE, machine={"little_endian": False}),
        NotMergeableError,
        "byte order",
    ),
    "keys no list": (legacy(A, "1", ONE), CorruptError, "is not a list"),
    "keys no text": (legacy(A, [1], ONE), CorruptError, "list of distinct strings"),
    "key twice": (legacy(A, ["1", "1"], ONE + ONE), CorruptError, "list of distinct strings"),
    "key nobody uses": (legacy(A, ["1", "2"], ONE + ONE), CorruptError, "only in its list"),
    "key not listed": (legacy(A, []), CorruptError, "only in its object"),
    "other number": (
        legacy(A, ["1"], struct.pack("<q", 1) + bytes(8)),
        CorruptError,
        "contradicts the pickle",
    ),
    "negative number": (legacy(A, ["1"], struct.pack("<q", -2) + bytes(8)), CorruptError, "contra"),
    "bytes behind": (legacy(A, ["1"], ONE + b"x"), CorruptError, "follow its storages"),
    "two sizes": (
        legacy([storage_tensor("1", 2), storage_tensor("1", 3)], ["1"], ONE),
        CorruptError,
        "two sizes",
    ),
    "a view": (
        legacy({"a": storage_tensor("1", 2, ("9", 0, 1))}, ["1"], ONE),
        NotMergeableError,
        "a view of another",
    ),
    "unknown storage": (
        legacy({"a": Reference(("storage", torch.Tensor, "1", "cpu", 2, None))}, ["1"], ONE),
        NotMergeableError,
        "unknown type",
    ),
    "odd reference": (legacy({"a": Reference(7)}, []), CorruptError, "unknown form"),
    "negative size": (legacy({"a": storage_tensor("1", -1)}, ["1"]), CorruptError, "unknown form"),
    "broken pickle": (
        b"".join(map(pickled, (MAGIC, 1001, MACHINE))) + b"\x80\x02\xff" + bytes(99),
        CorruptError,
        "not valid",
    ),
}


@pytest.mark.parametrize(("data", "error", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_a_legacy_file_says_is_checked(
    tmp_path: Path, data: bytes, error: type[UnshardError], words: str
) -> None:
    path = tmp_path / "wrong.pt"
    path.write_bytes(data)
    with pytest.raises(error, match=words) as caught:
        read_torch_file(path)
    assert "wrong.pt" in str(caught.value)


def test_references_are_found_in_whatever_holds_them(tmp_path: Path) -> None:
    cycle: list[object] = [storage_tensor("1", 2)]
    cycle.append({"self": cycle, "more": (storage_tensor("2", 2), {3: [storage_tensor("3", 2)]})})
    path = tmp_path / "nested.pt"
    path.write_bytes(legacy(cycle, ["1", "2", "3"], 3 * ONE))
    assert list(read_torch_file(path).storages) == ["1", "2", "3"]


class Attack:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("touch attacked",))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_dangerous_pickle_is_refused(tmp_path: Path, *, zipped: bool) -> None:
    path = tmp_path / "attack.pt"
    torch.save({"a": Attack()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeError, match=r"attack\.pt: its pickle refers to \w+\.system"):
        read_torch_file(path)


# --- formats of torch that are recognised --------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_the_tar_archives_of_early_torch_are_named(tmp_path: Path, form: int) -> None:
    path = tmp_path / "ancient.pt"
    with tarfile.open(path, "w", format=form) as tar:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
    with pytest.raises(NotMergeableError, match=r"ancient\.pt: a tar archive") as caught:
        read_torch_file(path)
    assert caught.value.hint


def test_torchscript_is_named(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(NotMergeableError, match=r"script\.pt: a TorchScript archive"):
        read_torch_file(path)


# --- one of several pickles ----------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_read_to_its_end_and_no_further(protocol: int) -> None:
    values = [7, {"a": [1, 2, (3, "x" * 300)]}, ["b"] * 300]
    data = b"".join(pickle.dumps(value, protocol) for value in values)
    for value in values:
        found, used = unpickle_first(data)
        assert found == value
        data = data[used:]
    assert data == b""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_cut_anywhere_is_known_to_be_cut(protocol: int) -> None:
    value = {"a": [1, 2.5, -70000, 2**70], "b": ("x" * 300, b"y", None), "c": {True, "é"}}
    data = pickle.dumps(value, protocol)
    for size in range(len(data)):
        with pytest.raises(TruncatedPickleError):
            unpickle_first(data[:size])
        with pytest.raises(MalformedPickleError):
            unpickle(data[:size])


def test_a_broken_pickle_is_not_taken_for_a_cut_one() -> None:
    for data in (b"\xff" + bytes(20), b"0" * 20, b"K\x01K\x02." + bytes(20), b"h\x09" + bytes(20)):
        with pytest.raises(MalformedPickleError) as caught:
            unpickle_first(data)
        assert not isinstance(caught.value, TruncatedPickleError)
