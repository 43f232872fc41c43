"""False DCP metadata, written with torch's own classes; and items that are not what it says."""

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from damage import bomb, cycle
from oracle.writers.dcp_saving import read_metadata

__all__ = ["LIES", "put_item", "rewritten"]

EMBED = "model.embed.weight"  # 37 x 10 float32 in three chunks, of 13, 13 and 11 rows
HEAD = "model.head.weight"  # the same values
NORM = "model.block.norm.weight"

Lie = Callable[[Metadata], object]


def rewritten(original: Path, directory: Path, lie: Lie) -> Path:
    """Copy a checkpoint and change what its metadata says."""
    shutil.copytree(original, directory)
    metadata = copy.deepcopy(read_metadata(directory))
    lie(metadata)
    data = pickle.dumps(metadata, protocol=4)
    deep = b"]" * 200_000 + b"a" * 199_999
    (directory / ".metadata").write_bytes(data.replace(b"\x8c\x06<deep>", deep))
    return directory


def tensor(metadata: Metadata, name: str = EMBED) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def index(metadata: Metadata, name: str = EMBED, chunk: int = 0) -> MetadataIndex:
    found = [one for one in metadata.storage_data if one.fqn == name]
    by_offset: list[MetadataIndex] = sorted(found, key=lambda one: one.offset or ())
    return by_offset[chunk]


def info(metadata: Metadata, name: str = EMBED, chunk: int = 0) -> _StorageInfo:
    found: _StorageInfo = metadata.storage_data[index(metadata, name, chunk)]
    return found


def chunk(number: int, **values: Any) -> Lie:
    """Change a chunk of the tensor, in both places that tell where it starts."""

    def lie(metadata: Metadata) -> None:
        entry = tensor(metadata)
        entry.chunks.sort(key=lambda one: one.offsets)
        old = index(metadata, chunk=number)
        stored = metadata.storage_data.pop(old)
        for name, value in values.items():
            setattr(entry.chunks[number], name, value)
        offsets = values.get("offsets", old.offset)
        try:
            new = MetadataIndex(EMBED, offsets)
        except TypeError:
            new = old
        metadata.storage_data[new] = stored

    return lie


def stored(name: str = EMBED, number: int = 0, **values: Any) -> Lie:
    """Change where the metadata places an item of the tensor."""

    def lie(metadata: Metadata) -> None:
        for key, value in values.items():
            object.__setattr__(info(metadata, name, number), key, value)

    return lie


def described(**values: Any) -> Lie:
    """Change what the metadata says of the tensor."""

    def lie(metadata: Metadata) -> None:
        for key, value in values.items():
            object.__setattr__(tensor(metadata), key, value)

    return lie


def dtype(value: Any) -> Lie:
    return lambda metadata: setattr(tensor(metadata).properties, "dtype", value)


def same_as(name: str, number: int) -> Lie:
    """Place the first item of the tensor where another one is."""
    return lambda metadata: metadata.storage_data.update(
        {index(metadata): info(metadata, name, number)}
    )


def longer(metadata: Metadata) -> None:
    info(metadata).length += 64


def later(metadata: Metadata) -> None:
    info(metadata).offset += 64


BIG = 2**62
HUGE = 2**70
ENDLESS = 10**5000  # Python refuses to write it in decimal digits
DEEP = "<deep>"  # means lists within lists, too deep for any pickler

SIZES: dict[str, Lie] = {
    "chunk too long": chunk(0, sizes=torch.Size([14, 10])),
    "chunk too short": chunk(0, sizes=torch.Size([12, 10])),
    "chunk without rows": chunk(0, sizes=torch.Size([0, 10])),
    "chunk transposed": chunk(0, sizes=torch.Size([10, 13])),
    "chunk of other dimensions": chunk(0, sizes=torch.Size([130])),
    "chunk negative": chunk(0, sizes=(-13, -10)),
    "chunk huge": chunk(0, sizes=(HUGE, 10)),
    "chunk endless": chunk(0, sizes=(ENDLESS, 10)),
    "chunk overlaps": chunk(1, offsets=torch.Size([12, 0])),
    "chunk leaves a hole": chunk(1, offsets=torch.Size([14, 0])),
    "chunk outside": chunk(1, offsets=torch.Size([37, 0])),
    "chunk far outside": chunk(1, offsets=torch.Size([BIG, 0])),
    "chunk before": chunk(0, offsets=(-1, 0)),
    "chunk endless offset": chunk(0, offsets=(ENDLESS, 0)),
    "chunk offsets text": chunk(0, offsets="00"),
    "chunk offsets fractions": chunk(0, offsets=(0.0, 0.0)),
    "chunk missing": lambda metadata: tensor(metadata).chunks.pop(1),
    "no chunks": lambda metadata: tensor(metadata).chunks.clear(),
    "size smaller": described(size=torch.Size([36, 10])),
    "size larger": described(size=torch.Size([38, 10])),
    "size transposed": described(size=torch.Size([10, 37])),
    "size flat": described(size=torch.Size([370])),
    "size none": described(size=torch.Size([])),
    "size zero": described(size=torch.Size([0, 10])),
    "size big": described(size=torch.Size([BIG, 10])),
    "size huge": described(size=(HUGE, 10)),
    "size endless": described(size=(ENDLESS, 10)),
    "size negative": described(size=(-37, 10)),
    "size text": described(size="37, 10"),
    "size nested": described(size=((37,), (10,))),
    "size true": described(size=(True, 10)),
    "size missing": lambda metadata: tensor(metadata).__dict__.pop("size"),
    "chunks missing": lambda metadata: tensor(metadata).__dict__.pop("chunks"),
    "chunks no list": described(chunks=7),
    "dtype same width": dtype(torch.int32),
    "dtype wider": dtype(torch.float64),
    "dtype narrower": dtype(torch.bfloat16),
    "dtype quantized": dtype(torch.qint8),
    "dtype text": dtype("torch.float32"),
    "dtype none": dtype(None),
    "properties missing": described(properties=None),
}

PATHS: dict[str, Lie] = {
    f"path {path[:12]!r}": stored(relative_path=path)
    for path in (
        "../x",
        "/etc/passwd",
        "a/../../x",
        "..",
        ".",
        "",
        "/",
        "\0",
        "__0_0.distcp\0",
        "x" * 300,
        "x/" * 3000,
        "x" * 100_000,
        "gone.distcp",
        "__0_0.distcp/x",
        "new\nline",
        "\udcff",
        ".metadata",
    )
}

ITEMS: dict[str, Lie] = {
    "length zero": stored(length=0),
    "length negative": stored(length=-1),
    "length one": stored(length=1),
    "length big": stored(length=BIG),
    "length huge": stored(length=HUGE),
    "length endless": stored(length=ENDLESS),
    "length text": stored(length="12"),
    "offset negative": stored(offset=-1),
    "offset big": stored(offset=BIG),
    "offset huge": stored(offset=HUGE),
    "offset endless": stored(offset=ENDLESS),
    "offset into the item": later,
    "length into the next item": longer,
    "offset none": stored(offset=None),
    "another tensor, other shape": same_as(NORM, 0),
    "another tensor, same shape": same_as(HEAD, 1),
    "another chunk, same shape": same_as(EMBED, 1),
    "item missing": lambda metadata: metadata.storage_data.pop(index(metadata)),
    "no items": lambda metadata: metadata.storage_data.clear(),
    "item is no item": lambda metadata: metadata.storage_data.update({index(metadata): None}),
    "items no dict": lambda metadata: setattr(metadata, "storage_data", [1]),
    "items missing": lambda metadata: metadata.__dict__.pop("storage_data"),
    "unknown transform": stored(transform_descriptors=["stream.rot13/1"]),
    "two transforms": stored(transform_descriptors=["stream.zstd/1", "stream.zstd/1"]),
    "zstd that is none": stored(transform_descriptors=["stream.zstd/1"]),
    "transform number": stored(transform_descriptors=7),
    "transform deep": stored(transform_descriptors=[DEEP]),
    "transform bomb": stored(transform_descriptors=bomb()),
    "transform cycle": stored(transform_descriptors=cycle()),
}


def path(name: str, value: Any) -> Lie:
    """Change the place that the metadata gives a tensor in the saved dict."""
    return lambda metadata: metadata.planner_data.update({name: value})


def described_as(name: Any, value: Any) -> Lie:
    return lambda metadata: metadata.state_dict_metadata.update({name: value})


PLANS: dict[str, Lie] = {
    "two names on one path": path(NORM, ("model", "embed.weight")),
    "two names on one path, equal values": path(HEAD, ("model", "embed.weight")),
    "path of another name": path(NORM, ("model", "block.norm.wight")),
    "path of another container": path(NORM, ("optimizer", "block.norm.weight")),
    "path empty": path(NORM, ()),
    "path of its container": path(NORM, ("model",)),
    "path of empty names": path(NORM, ("model", "")),
    "path of numbers": path(NORM, (1, 2)),
    "path deep": path(NORM, ("model", DEEP)),
    "path bomb": path(NORM, ("model", bomb(28))),
    "path cycle": path(NORM, ("model", cycle())),
    "path endless": path(NORM, ("model", ENDLESS)),
    "path surrogate": path(NORM, ("model", "\udcff")),
    "path text": path(NORM, "model.block.norm.weight"),
    "plan of numbers": lambda metadata: setattr(metadata, "planner_data", {1: 2}),
    "plan is a number": lambda metadata: setattr(metadata, "planner_data", 7),
    "plan is missing": lambda metadata: metadata.__dict__.pop("planner_data"),
    "no tensors": lambda metadata: metadata.state_dict_metadata.clear(),
    "tensors missing": lambda metadata: metadata.__dict__.pop("state_dict_metadata"),
    "tensor by number": described_as(7, 7),
    "tensor is a number": described_as("x", 7),
    "tensor is itself": described_as("x", cycle()),
    "tensor without items": lambda metadata: metadata.state_dict_metadata.update(
        {"model.more": copy.deepcopy(tensor(metadata))}
    ),
    "tensor without rows": lambda metadata: metadata.state_dict_metadata.update(
        {"model.more": TensorStorageMetadata(tensor(metadata).properties, torch.Size([3]), [])}
    ),
}
LIES = SIZES | PATHS | ITEMS | PLANS


def put_item(directory: Path, data: bytes, name: str = "model.embed.weight") -> None:
    """Let an item of a DCP checkpoint be these bytes."""
    metadata = read_metadata(directory)
    place = info(metadata, name)
    path = directory / place.relative_path
    place.offset, place.length = path.stat().st_size, len(data)
    path.write_bytes(path.read_bytes() + data)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
