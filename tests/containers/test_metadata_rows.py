"""Rows of DCP's metadata become the columns of what the machine makes of them one by one."""

import io
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from properties import examples
from unshard.containers.pickles.machine import (
    DangerousPickleError,
    Machine,
    MalformedPickleError,
    RecalledError,
)
from unshard.containers.pickles.opcodes import OPERATIONS
from unshard.containers.pickles.records import Record
from unshard.containers.pickles.unpickle import run_all
from unshard.containers.torch_files.metadata_rows import (
    ChunkBatch,
    ItemBatch,
    row_operations,
    unpickle_metadata,
)

RANKS = 12


def metadata(
    seed: int, *, tensors: int = 25, by_rank: bool, largest: int = 1 << 40, name: str = "é.{}"
) -> Metadata:
    """Metadata of tensors of 0 to 5 dimensions, each in a chunk per rank.

    By rank, every item has strings of its own, as after ranks have sent theirs to the first one.
    """
    rng = random.Random(seed)
    described: dict[str, TensorStorageMetadata] = {}
    items: dict[tuple[int, int], tuple[MetadataIndex, _StorageInfo]] = {}
    for number in range(tensors):
        fqn, ndim = name.format(number), rng.choice([0, 1, 2, 2, 3, 4, 5])
        chunks = []
        for rank in range(RANKS):
            offsets, sizes = (
                torch.Size(rng.randrange(1 << rng.randrange(1, largest.bit_length())) for _ in at)
                for at in (range(ndim), range(ndim))
            )
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            own = "".join(fqn) if not by_rank else (fqn + " ")[:-1]
            path = f"__{rank}_0.distcp"
            index = MetadataIndex(
                own, offsets, None if rng.randrange(2) else rng.randrange(1 << 20)
            )
            place = _StorageInfo(path, rng.randrange(largest), rng.randrange(largest))
            items[(rank, number) if by_rank else (number, rank)] = index, place
        shape = torch.Size([1] * ndim)
        described[fqn] = TensorStorageMetadata(TensorProperties(), shape, chunks)
    storage = dict(one for _, one in sorted(items.items()))
    return Metadata(described, None, storage)  # type: ignore[arg-type]  # as torch calls it


class SmallBatches(pickle._Pickler):
    """Python's own pickler, with less than 1,000 entries in a batch."""

    _BATCHSIZE = 40


def pickled(value: Metadata, protocol: int = 4) -> bytes:
    file = io.BytesIO()
    SmallBatches(file, protocol).dump(value)
    return file.getvalue()


def shown(value: Any, depth: int = 12) -> object:
    """Return a value whose parts can be compared, with rows as rows, however they were read."""
    match value:
        case _ if not depth:  # it may contain itself
            return "..."
        case Record(state={"offsets": Record(args=(at,)), "sizes": Record(args=(n,))}) if (
            isinstance(value.state, dict) and len(value.state) == 2
        ):
            return ("box", at, n)
        case Record(callee, args, state, items, elements):
            return shown((callee, args, state, items or [], elements or []), depth - 1)
        case list():
            return [row for one in value for row in rows_of(one, depth)]
        case dict():
            return [row for key, one in value.items() for row in entries_of(key, one, depth)]
    is_tuple = isinstance(value, tuple)
    return tuple(shown(one, depth - 1) for one in value) if is_tuple else (type(value), value)


def rows_of(value: Any, depth: int) -> Iterator[object]:
    if isinstance(value, ChunkBatch):
        yield from (("box", tuple(at), tuple(n)) for at, n in value.values.tolist())
    else:
        yield shown(value, depth - 1)


def are_dicts_of_three(*values: object) -> bool:
    return all(isinstance(one, dict) and len(one) == 3 for one in values)


def entries_of(key: Any, value: Any, depth: int) -> Iterator[object]:
    if isinstance(key, ItemBatch):
        offsets = np.split(key.offsets, np.cumsum(key.ndim)[:-1])
        for name, box, path, span in zip(key.names, offsets, key.files, key.spans, strict=True):
            yield ("item", name, tuple(box.tolist()), path, *span.tolist())
        return
    match key, value:
        case (
            Record(state={"fqn": name, "index": _, "offset": Record(args=(at,))}),
            Record(state={"relative_path": file, "offset": start, "length": length}),
        ) if are_dicts_of_three(key.state, value.state):
            yield ("item", name, at, file, start, length)
        case _:
            yield (shown(key, depth - 1), shown(value, depth - 1))


def outcome(data: bytes, *, rows: bool) -> tuple[object, ...]:
    """Return what a pickle is, and what the machine has charged and remembered; or its error."""
    machine = Machine(data)
    try:
        value = run_all(machine, row_operations() if rows else OPERATIONS, inline=True)
    except RecalledError:
        return outcome(data, rows=False)
    except (MalformedPickleError, DangerousPickleError) as error:
        return type(error), str(error)
    return shown(value), machine.spent, len(machine.memo), machine.pos


def assert_alike(data: bytes) -> None:
    ours, machines = outcome(data, rows=True), outcome(data, rows=False)
    assert ours[1:] == machines[1:]
    is_same = ours == machines
    assert is_same  # what it is takes pytest too long to explain


def are_all_rows(data: bytes) -> bool:
    """Return whether most of it was read as rows."""
    state = unpickle_metadata(data).state  # type: ignore[attr-defined]  # it is a record
    tensors = [one.state["chunks"] for one in state["state_dict_metadata"].values()]
    boxes = sum(isinstance(chunk, ChunkBatch) for chunks in tensors for chunk in chunks)
    return boxes > len(tensors) / 2 and any(
        isinstance(key, ItemBatch) for key in state["storage_data"]
    )


@given(seed=st.integers(0, 1 << 30), protocol=st.sampled_from([4, 5]), by_rank=st.booleans())
@settings(max_examples=examples(60))
def test_rows_are_what_the_machine_makes(seed: int, protocol: int, *, by_rank: bool) -> None:
    data = pickled(metadata(seed, by_rank=by_rank), protocol)
    assert_alike(data)
    assert are_all_rows(data)


def test_frames_begin_inside_of_rows() -> None:
    data = pickle.dumps(metadata(7, tensors=250, by_rank=True), 4)
    assert data.count(b"\x95") > 3
    assert_alike(data)
    state = unpickle_metadata(data).state  # type: ignore[attr-defined]  # it is a record
    assert (
        sum(isinstance(key, ItemBatch) for key in state["storage_data"]) == 250 * RANKS // 1000 - 1
    )


BASES = [pickled(metadata(seed, tensors=12, by_rank=seed % 2 > 0)) for seed in range(4)]


@given(data=st.data(), base=st.sampled_from(BASES))
@settings(max_examples=examples(400))
def test_damaged_pickles_end_alike(data: st.DataObject, base: bytes) -> None:
    changed = bytearray(base)
    opcodes = b"(eubtNKMJRhj\x8c\x8a\x94\x85\x86\x87\x95\x81)]}0120as"
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        what = data.draw(st.sampled_from(["replace", "insert", "delete", "repeat"]))
        byte = data.draw(st.sampled_from(opcodes) | st.integers(0, 255))
        if what == "replace":
            changed[at] = byte
        elif what == "insert":
            changed.insert(at, byte)
        else:
            part = changed[at : at + data.draw(st.integers(1, 400))]
            changed[at : at + len(part)] = b"" if what == "delete" else part * 2
    assert_alike(bytes(changed))


def test_what_was_not_made_may_be_recalled() -> None:
    """torch's pickles do not recall chunks; one that does is read by the machine alone."""
    value = metadata(3, by_rank=False)
    chunks = next(reversed(value.state_dict_metadata.values())).chunks  # type: ignore[union-attr]
    value.storage_meta = chunks[0]  # type: ignore[assignment]
    data = pickled(value)
    with pytest.raises(RecalledError):
        run_all(Machine(data), row_operations(), inline=True)
    assert shown(unpickle_metadata(data)) == outcome(data, rows=False)[0]


@pytest.mark.parametrize("name", ["long" * 70 + "{}", "\x14\u0394\u0114.{}"])
def test_names_that_are_not_matched_are_the_machines(name: str) -> None:
    """Longer than a byte counts, or with the byte of MEMOIZE (0x94) in their UTF-8."""
    data = pickled(metadata(1, by_rank=True, name=name))
    assert_alike(data)
