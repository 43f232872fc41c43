"""Items of `.distcp` files: wherever they are, each is the tensor that torch loads from there."""

import random
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.serialization import config

import unshard
from dcp_tables import Window, read_items
from properties import examples
from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.reader import unpickled
from unshard.containers.torch_files.zip import TorchZip, read_torch_zip
from unshard.errors import (
    CorruptError,
    IncompleteError,
    NotMergeableError,
    UnsafeError,
    UnshardError,
)
from unshard.read.dcp import items as dcp_items
from unshard.read.dcp.items import StoredItem

_Pread = Callable[[int, int], bytes]
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)


def item(value: object) -> bytes:
    stream = BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write(path: Path, items: Sequence[bytes], gaps: Sequence[int] = ()) -> list[Window]:
    """Write items one after another, with gaps before them; return where they are."""
    windows = []
    with path.open("wb") as file:
        for number, data in enumerate(items):
            file.write(b"\xff" * (gaps[number] if gaps else 0))
            windows.append((path, file.tell(), len(data)))
            file.write(data)
    return windows


def some_tensors(count: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Tensors of many shapes, dtypes and strides; some far larger than what is read of an item."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        shape = [rng.randrange(1, 9) for _ in range(rng.randrange(4))]
        if number % 10 == 3:
            shape = [rng.randrange(500, 3000), 5]
        if number % 17 == 5:
            shape = [*shape, 0]
        value = torch.randn(shape, generator=generator).to(DTYPES[number % len(DTYPES)])
        yield value.t().contiguous().t() if value.ndim == 2 and number % 3 == 0 else value


def load(window: Window) -> torch.Tensor:
    path, offset, length = window
    with path.open("rb") as file:
        file.seek(offset)
        loaded: torch.Tensor = torch.load(BytesIO(file.read(length)))
    return loaded


def as_stored(path: Path, found: StoredItem | UnshardError) -> torch.Tensor:
    """Make the tensor out of the file's bytes, as the item says."""
    assert isinstance(found, StoredItem), found
    view = found.view
    dtype = getattr(torch, view.dtype.name)
    if 0 in view.sizes:
        return torch.empty(view.sizes, dtype=dtype)
    count = 1 + sum((n - 1) * step for n, step in zip(view.sizes, view.strides, strict=True))
    raw = path.read_bytes()[found.start : found.start + count * dtype.itemsize]
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)
    return flat.as_strided(view.sizes, view.strides)


def assert_as_torch_loads(windows: Sequence[Window]) -> None:
    for window, found in zip(windows, read_items(windows), strict=True):
        ours, theirs = as_stored(window[0], found), load(window)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.contiguous().equal(theirs.contiguous())


def test_nothing_asked_for_gives_nothing() -> None:
    assert read_items([]) == []


def test_many_items_of_many_kinds_are_what_torch_loads(tmp_path: Path) -> None:
    assert_as_torch_loads(write(tmp_path / "a", [item(one) for one in some_tensors(60)]))


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_batches_of_any_size_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    windows = write(tmp_path / "a", [item(one) for one in some_tensors(30)])
    expected = read_items(windows)
    monkeypatch.setattr(dcp_items, "_BATCH_ITEMS", batch)
    assert read_items(windows) == expected
    monkeypatch.setattr(dcp_items, "_BATCH_BYTES", 5000)
    assert read_items(windows) == expected


def test_more_items_than_a_batch_holds(tmp_path: Path) -> None:
    """5,000 items, each of 1.2 kB: more than two batches by number and by bytes."""
    kinds = [item(torch.full((2, number), number)) for number in range(1, 5)]
    windows = write(tmp_path / "a", [kinds[number % 4] for number in range(5000)])
    for number, found in enumerate(read_items(windows)):
        assert isinstance(found, StoredItem)
        assert found.view.sizes == (2, number % 4 + 1)
        assert found.start > windows[number][1]
    assert_as_torch_loads(windows[::501])


@pytest.mark.parametrize("gap", [0, 1, 5000, 40_000])
def test_items_may_be_apart(tmp_path: Path, gap: int) -> None:
    items = [item(one) for one in some_tensors(12)]
    gaps = [gap * (number % 3) for number in range(12)]
    assert_as_torch_loads(write(tmp_path / "a", items, gaps))


def test_the_order_asked_for_is_the_order_of_the_answers(tmp_path: Path) -> None:
    windows = write(tmp_path / "a", [item(one) for one in some_tensors(40)])
    random.Random(1).shuffle(windows)
    assert_as_torch_loads(windows)


def test_several_files_may_be_mixed(tmp_path: Path) -> None:
    windows = [
        window
        for number in range(5)
        for window in write(
            tmp_path / f"__{number}_0.distcp", [item(one) for one in some_tensors(8, number)]
        )
    ]
    random.Random(2).shuffle(windows)
    assert_as_torch_loads(windows)


@pytest.mark.parametrize("elements", [0, 1, 500, 511, 512, 513, 1000, 1024, 1 << 20])
def test_the_middle_of_an_item_does_not_matter(tmp_path: Path, elements: int) -> None:
    """Sizes about those of the parts at the two ends that are read."""
    tensors = [torch.arange(elements), torch.tensor(3), torch.arange(elements) * 2]
    assert_as_torch_loads(write(tmp_path / "a", [item(one) for one in tensors]))


@pytest.mark.parametrize("alignment", [1, 64, 4096, 16384])
def test_storages_may_be_aligned_to_pages(tmp_path: Path, alignment: int) -> None:
    before = config.save.storage_alignment
    config.save.storage_alignment = alignment
    try:
        windows = write(tmp_path / "a", [item(one) for one in some_tensors(20)])
    finally:
        config.save.storage_alignment = before
    assert_as_torch_loads(windows)
    starts = [one.start for one in read_items(windows) if isinstance(one, StoredItem)]
    relative = [at - window[1] for at, window in zip(starts, windows, strict=True)]
    full = [at for at, w in zip(relative, windows, strict=True) if load(w).numel()]
    assert full
    assert all(at % alignment == 0 for at in full)


def test_a_storage_offset_is_counted(tmp_path: Path) -> None:
    base = torch.arange(20, dtype=torch.float32)
    assert_as_torch_loads(write(tmp_path / "a", [item(base[7:11]), item(base.view(4, 5)[1:, 2:])]))


def test_an_item_asked_for_twice_is_given_twice(tmp_path: Path) -> None:
    (window,) = write(tmp_path / "a", [item(torch.arange(3))])
    first, second = read_items([window, window])
    assert first == second
    assert isinstance(first, StoredItem)


@settings(max_examples=examples(1000))
@given(
    sizes=st.lists(st.integers(0, 6000), min_size=1, max_size=6),
    gaps=st.lists(st.integers(0, 20_000), min_size=6, max_size=6),
    batch=st.integers(1, 4),
)
def test_any_sizes_and_gaps(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], gaps: list[int], batch: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    windows = write(path, [item(torch.arange(size)) for size in sizes], gaps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_items, "_BATCH_ITEMS", batch)
        assert_as_torch_loads(windows)


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("raise SystemExit",))


def test_a_bad_item_is_reported_in_its_place_and_harms_no_other(tmp_path: Path) -> None:
    good = [item(one) for one in some_tensors(6)]
    items = [good[0], item(Bomb()), good[1], item({"a": 1}), good[2], b"\x00" * 900, good[3]]
    windows = write(tmp_path / "a", items)
    found = read_items(windows)
    assert isinstance(found[1], UnsafeError)
    assert isinstance(found[3], CorruptError)
    assert isinstance(found[5], CorruptError | IncompleteError)
    assert_as_torch_loads(windows[::2])


@pytest.mark.parametrize("change", [-1, -22, -100])
def test_a_window_that_ends_early_is_an_error(tmp_path: Path, change: int) -> None:
    first, second = write(tmp_path / "a", [item(torch.arange(9)), item(torch.arange(700))])
    wrong = (first[0], first[1], first[2] + change)
    found = read_items([wrong, second])
    assert isinstance(found[0], CorruptError | IncompleteError)
    assert isinstance(found[1], StoredItem)


@pytest.mark.parametrize("length", [0, 1, 21, 22])
def test_a_window_too_short_for_a_zip_is_an_error(tmp_path: Path, length: int) -> None:
    ((path, _, _),) = write(tmp_path / "a", [item(torch.arange(9))])
    (found,) = read_items([(path, 0, length)])
    assert isinstance(found, CorruptError | IncompleteError)


def test_a_window_beyond_the_file_is_an_error(tmp_path: Path) -> None:
    ((path, _, length),) = write(tmp_path / "a", [item(torch.arange(9))])
    (found,) = read_items([(path, length + 50, length)])
    assert isinstance(found, CorruptError | IncompleteError)


def test_equal_pickles_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = write(tmp_path / "a", [item(torch.full((3,), float(n))) for n in range(50)])
    calls: list[bytes] = []

    def counted(path: Path, data: bytes) -> Value:
        calls.append(data)
        return unpickled(path, data)

    monkeypatch.setattr(dcp_items, "_THREADS", 1)
    monkeypatch.setattr(dcp_items, "unpickled", counted)
    assert_as_torch_loads(windows)
    assert len(calls) == 1


def test_items_that_differ_in_values_only_are_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = write(tmp_path / "a", [item(torch.full((3,), float(n))) for n in range(50)])
    opened: list[int] = []

    def counted(path: Path, *, offset: int, length: int, pread: _Pread) -> TorchZip:
        opened.append(offset)
        return read_torch_zip(path, offset=offset, length=length, pread=pread)

    monkeypatch.setattr(dcp_items, "_THREADS", 1)
    monkeypatch.setattr(dcp_items, "read_torch_zip", counted)
    assert_as_torch_loads(windows)
    assert opened == [0]


@given(data=st.data(), size=st.integers(0, 40))
def test_a_damaged_item_after_a_good_one_is_what_it_is_alone(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    damaged = bytearray(item(torch.arange(size)))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255) | st.just(damaged[at] ^ 1))
    good, bad = write(path, [item(torch.arange(size)), bytes(damaged)])
    (_, after), (alone,) = read_items([good, bad]), read_items([bad])
    if isinstance(alone, UnshardError):
        assert isinstance(after, UnshardError)
        assert str(after) == str(alone)
    else:
        assert after == alone


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("under", ["model", "optim"])
@pytest.mark.parametrize("before", [{}, {"step": 7}])  # objects keep the form of torch.save
def test_items_in_the_form_of_safetensors_are_refused_as_such(
    tmp_path: Path, count: int, under: str, before: dict[str, object]
) -> None:
    """Several are at byte 0 of one file, which is not damage."""
    tensors = {under: {f"layers.{number}.weight": torch.ones(2, 2) for number in range(count)}}
    saved = {**before, **tensors}
    form = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    save(saved, storage_writer=form, no_dist=True)
    with pytest.raises(
        NotMergeableError, match=r"__0_0\.distcp: .* serialized as safetensors"
    ) as error:
        unshard.inspect(tmp_path)
    assert "serialization_format" in error.value.hint


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("moment", ["exp_avg", "momentum_buffer"])
@pytest.mark.parametrize("folder", ["optimizer_0", "optimizer"])
def test_an_optimizer_in_the_form_of_safetensors_is_refused_as_such(
    tmp_path: Path, folder: str, moment: str
) -> None:
    model = "pytorch_model_fsdp_0" if folder.endswith("0") else "model"
    weight = torch.ones(2, 2)
    save({"model": {"a.weight": weight}}, checkpoint_id=tmp_path / model, no_dist=True)
    state = {"state": {"a.weight": {moment: weight}}, "param_groups": [{"params": ["a.weight"]}]}
    form = FileSystemWriter(tmp_path / folder, serialization_format=SerializationFormat.SAFETENSORS)
    save({"optimizer": state}, storage_writer=form, no_dist=True)
    found = unshard.inspect(tmp_path).optimizer
    assert found is not None
    assert "serialized as safetensors" in (found.problem or "")
