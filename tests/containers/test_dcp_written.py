"""Checkpoints of DCP that are laid out are those that torch wrote; and torch reads them."""

import io
import pickletools
import tarfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from random import Random
from typing import cast
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from properties import examples
from unshard.containers.pickles.records import Record, Value
from unshard.containers.torch_files.dcp_files import DcpFile, DcpLayout, lay_out_dcp
from unshard.containers.torch_files.dcp_metadata import (
    ItemPath,
    SavedItem,
    SavedObject,
    SavedPart,
    SavePlan,
)
from unshard.containers.torch_files.dtensors import VERSIONS, Version
from unshard.containers.torch_files.reader import unpickled
from unshard.read.torch_save.values import dtype_named, ints, sizes_of, state_of
from unshard.tensors.dtypes import BY_NAME

ARCHIVE = Path(__file__).parent.parent / "data" / "dcp.tar.xz"
NEW = (2, 13)


def laid_out_again(directory: Path, version: Version) -> DcpLayout:
    """Lay out the checkpoint that torch wrote there, from its metadata and its objects."""
    path = directory / ".metadata"
    fields = state_of(unpickled(path, path.read_bytes()))
    paths = cast(dict[str, ItemPath], fields["planner_data"])
    described = cast(dict[str, Record], fields["state_dict_metadata"])
    ranks: list[list[SavedItem]] = [[] for _ in directory.glob("*.distcp")]
    for index, info in cast(dict[Record, Record], fields["storage_data"]).items():
        place, at = state_of(info), state_of(index)
        rank = int(str(place["relative_path"]).split("_")[2])
        name = str(at["fqn"])
        if "offset" in at:
            part = part_at(paths[name], state_of(described[name]), ints(at["offset"]))
            ranks[rank].append(part)
        else:
            ranks[rank].append(SavedObject(paths[name], stored(directory, place)))
    order = list(paths.values())
    meta = state_of(fields["storage_meta"])
    saved_to = meta["checkpoint_id"]
    assert isinstance(saved_to, Record)
    return lay_out_dcp(
        SavePlan(order, [sorted(items, key=lambda one: order.index(one.path)) for items in ranks]),
        version,
        checkpoint_id=PurePosixPath(*cast(tuple[str, ...], saved_to.args)),
        save_id=str(meta["save_id"]),
    )


def stored(directory: Path, place: Mapping[str, Value]) -> bytes:
    match place:
        case {"relative_path": str(file), "offset": int(offset), "length": int(length)}:
            return (directory / file).read_bytes()[offset : offset + length]
    raise AssertionError(place)


def part_at(path: ItemPath, whole: Mapping[str, Value], offsets: tuple[int, ...]) -> SavedPart:
    properties = whole["properties"]
    assert isinstance(properties, Record)
    boxes = [state_of(one) for one in cast(list[Record], whole["chunks"])]
    sizes = next(ints(box["sizes"]) for box in boxes if ints(box["offsets"]) == offsets)
    dtype = dtype_named(cast(tuple[Value, ...], properties.state)[0])
    return SavedPart(path, dtype, sizes_of(whole["size"]), offsets, sizes)


def filled(file: DcpFile, elements: Sequence[bytes]) -> bytes:
    """Return a file: what is fixed, and the elements."""
    found = bytearray(file.size)
    for at, piece in file.fixed([crc32(one) for one in elements]):
        found[at : at + len(piece)] = piece
    for (at, size), one in zip(file.storages, elements, strict=True):
        assert size == len(one)
        found[at : at + size] = one
    return bytes(found)


def assert_files_are_those_of(directory: Path, layout: DcpLayout) -> None:
    assert {file.name for file in layout.files} == {one.name for one in directory.glob("*.distcp")}
    for file in layout.files:
        data = (directory / file.name).read_bytes()
        assert filled(file, [data[at : at + size] for at, size in file.storages]) == data


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the checkpoints; see tests/data/README.md."""
    directory = tmp_path_factory.mktemp("dcp")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.mark.parametrize("version", ["2.4", "2.5", "2.6", "2.8", "2.9", "2.10", "2.12"])
def test_checkpoints_of_other_versions_are_rewritten_byte_for_byte(
    version: str, checkpoints: Path
) -> None:
    found = sorted((checkpoints / f"torch-{version}").rglob(".metadata"))
    assert len(found) >= 2
    for path in found:
        layout = laid_out_again(path.parent, (2, int(version.split(".")[1])))
        assert_files_are_those_of(path.parent, layout)
        if "optimizer" in path.parent.name:
            # Which equal names of the optimizer were one string depends on the trainer.
            assert spelled_out(layout.metadata) == spelled_out(path.read_bytes())
        else:
            assert layout.metadata == path.read_bytes()


def spelled_out(pickle: bytes) -> list[tuple[str, object]]:
    """Return the opcodes of a pickle, with strings in place of references to strings."""
    found: list[tuple[str, object]] = []
    memo: list[tuple[str, object]] = []
    for opcode, value, _ in pickletools.genops(pickle):
        if opcode.name == "MEMOIZE":
            memo.append(found[-1] if "UNICODE" in found[-1][0] else ("GET", len(found)))
        elif "GET" in opcode.name:
            found.append(memo[cast(int, value)])
        elif opcode.name != "FRAME":
            found.append((opcode.name, value))
    return found


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_this_torch_is_rewritten_byte_for_byte(tmp_path: Path) -> None:
    tensors = {f"layers.{number}.weight": torch.rand(number, 3) for number in range(400)}
    tensors |= {"scalar": torch.tensor(3), "norm": torch.rand(5).bfloat16()}
    saved = {"model": tensors, "step": 7, "lists": [{"lr": 0.1}, torch.rand(2)]}
    directory = tmp_path / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(saved, checkpoint_id=directory)
    layout = laid_out_again(directory, NEW)
    assert layout.metadata == (directory / ".metadata").read_bytes()
    assert_files_are_those_of(directory, layout)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5),
    st.integers(1, 3),
    st.sampled_from(list(VERSIONS.values())),
    st.randoms(use_true_random=False),
)
def test_torch_loads_what_was_laid_out(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    world: int,
    version: Version,
    random: Random,
) -> None:
    directory = tmp_path_factory.mktemp("written")
    truth = {f"t.{number}": torch.rand(shape) for number, shape in enumerate(shapes)}
    buffer = io.BytesIO()
    torch.save({"lr": 0.5}, buffer)
    ranks: list[list[SavedItem]] = [[] for _ in range(world)]
    elements: list[list[bytes]] = [[] for _ in range(world)]
    ranks[random.randrange(world)].append(SavedObject(("extra",), buffer.getvalue()))
    for name, tensor in truth.items():
        for offset, rows in cut(tensor, world):
            rank = random.randrange(world)
            offsets = (offset, *[0] * (tensor.ndim - 1)) if tensor.ndim else ()
            part = SavedPart(
                ("model", name), BY_NAME["float32"], tuple(tensor.shape), offsets, tuple(rows.shape)
            )
            ranks[rank].append(part)
            elements[rank].append(rows.numpy().tobytes())
    paths: list[ItemPath] = [("extra",), *(("model", name) for name in truth)]
    layout = lay_out_dcp(
        SavePlan(paths, ranks), version, checkpoint_id=PurePosixPath(directory), save_id="1"
    )
    for file, data in zip(layout.files, elements, strict=True):
        (directory / file.name).write_bytes(filled(file, data))
    (directory / ".metadata").write_bytes(layout.metadata)
    loaded = {name: torch.zeros_like(one) for name, one in truth.items()}
    found: dict[str, object] = {"model": loaded, "extra": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(found, checkpoint_id=directory, no_dist=True)
    assert found["extra"] == {"lr": 0.5}
    assert all(torch.equal(loaded[name], one) for name, one in truth.items())


def cut(tensor: torch.Tensor, world: int) -> list[tuple[int, torch.Tensor]]:
    """Return parts of a tensor along its first dimension, and where they start."""
    if not tensor.ndim:
        return [(0, tensor)]
    parts = tensor.chunk(world)
    starts = [sum(len(one) for one in parts[:number]) for number in range(len(parts))]
    return list(zip(starts, parts, strict=True))


def test_an_object_that_is_saved_twice_is_refused() -> None:
    twice = [[SavedObject(("step",), b"")], [SavedObject(("step",), b"")]]
    with pytest.raises(ValueError, match="step is saved twice"):
        lay_out_dcp(
            SavePlan([("step",)], twice), NEW, checkpoint_id=PurePosixPath("/x"), save_id="1"
        )
