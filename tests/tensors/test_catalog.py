"""Chunk tables: rows as views, rows taken, strides, and what a chunk costs."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from unshard.tensors.boxes import Box
from unshard.tensors.catalog import (
    ByteRange,
    Chunk,
    ChunkTable,
    TensorEntry,
)
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME

PATHS = (Path("a.pt"), Path("b.pt"))
MANY = 1_000_000

Column = NDArray[np.generic]


def two_chunks() -> ChunkRows:
    """A 4 x 3 tensor in two chunks of two rows, in different files."""
    rows = ChunkRows(2)
    for rank in range(2):
        rows.add(
            rank=rank + 5,
            file=rank,
            start=100 + rank,
            itemsize=4,
            offsets=(2 * rank, 0),
            sizes=(2, 3),
            strides=(3, 1),
        )
    return rows


def columns(table: ChunkTable) -> list[Column]:
    found: list[Column] = [table.offsets, table.sizes, table.file, table.start, table.length]
    return [*found, table.rank, table.compressed]


def test_a_row_is_seen_as_a_chunk() -> None:
    table = two_chunks().table(PATHS)
    source = ByteRange(Path("b.pt"), offset=101, length=24)
    assert table[1] == Chunk(Box((2, 0), (2, 3)), source, None, 6)


def test_a_chunk_is_made_of_pythons_own_integers() -> None:
    chunk = two_chunks().table(PATHS)[0]
    numbers = (*chunk.box.offsets, *chunk.box.sizes, chunk.source.offset, chunk.source.length)
    assert {type(number) for number in (*numbers, chunk.rank)} == {int}


def test_a_table_yields_all_its_rows_in_order() -> None:
    table = two_chunks().table(PATHS)
    assert len(table) == 2
    assert list(table) == [table[0], table[1]]


def test_taken_rows_keep_every_column_and_the_order_asked_for() -> None:
    rows = two_chunks()
    rows.add(rank=9, file=0, start=7, itemsize=4, offsets=(0, 0), sizes=(2, 3), strides=(1, 2))
    table = rows.table(PATHS)
    table.compressed[1] = True
    taken = table.take(np.array([2, 1], dtype=np.int64))
    assert list(taken) == [table[2], table[1]]


def test_row_major_chunks_need_no_strides() -> None:
    assert two_chunks().table(PATHS).strides is None


def test_one_chunk_of_odd_strides_makes_the_table_state_all_strides() -> None:
    rows = two_chunks()
    rows.add(rank=0, file=0, start=0, itemsize=4, offsets=(4, 0), sizes=(2, 3), strides=(1, 10))
    table = rows.table(PATHS)
    assert [chunk.strides for chunk in table] == [(3, 1), (3, 1), (1, 10)]


def test_odd_strides_reach_as_far_as_the_last_element() -> None:
    rows = ChunkRows(2)
    rows.add(rank=0, file=0, start=0, itemsize=2, offsets=(0, 0), sizes=(2, 3), strides=(1, 10))
    assert rows.table(PATHS)[0].source.length == 2 * (1 + 20 + 1)


def test_an_expanded_chunk_takes_the_bytes_of_what_is_stored() -> None:
    rows = ChunkRows(2)
    rows.add(rank=0, file=0, start=0, itemsize=2, offsets=(0, 0), sizes=(5, 3), strides=(0, 1))
    assert rows.table(PATHS)[0].source.length == 2 * 3
    assert rows.table(PATHS)[0].strides == (0, 1)


def test_an_empty_chunk_takes_no_bytes() -> None:
    rows = ChunkRows(2)
    rows.add(rank=0, file=0, start=8, itemsize=2, offsets=(3, 0), sizes=(0, 4), strides=(4, 1))
    assert rows.table(PATHS)[0].source == ByteRange(Path("a.pt"), 8, 0)


def test_a_0d_chunk_is_one_element() -> None:
    rows = ChunkRows(0)
    rows.add(rank=0, file=1, start=64, itemsize=8, offsets=(), sizes=(), strides=())
    (chunk,) = rows.table(PATHS)
    assert chunk == Chunk(Box((), ()), ByteRange(Path("b.pt"), 64, 8), None, 0)


@pytest.mark.parametrize("ndim", [0, 1, 3])
def test_a_table_may_have_no_rows(ndim: int) -> None:
    table = ChunkRows(ndim).table(PATHS)
    assert len(table) == 0
    assert table.offsets.shape == table.sizes.shape == (0, ndim)


def test_rows_can_be_added_after_a_table_was_made() -> None:
    rows = two_chunks()
    first = rows.table(PATHS)
    rows.add(rank=0, file=0, start=0, itemsize=4, offsets=(4, 0), sizes=(2, 3), strides=(3, 1))
    assert (len(first), len(rows.table(PATHS))) == (2, 3)


def test_a_tensor_knows_its_bytes() -> None:
    entry = TensorEntry("w", BY_NAME["bfloat16"], (4, 3), two_chunks().table(PATHS))
    assert entry.size_bytes == 24


@pytest.mark.slow
def test_a_million_chunks_take_less_than_200_bytes_each() -> None:
    """Both while they are gathered and as columns."""
    rows = ChunkRows(2)
    for row in range(MANY):
        rows.add(
            rank=row, file=row, start=0, itemsize=2, offsets=(row, 0), sizes=(1, 8), strides=(8, 1)
        )
    table = rows.table(PATHS)
    gathered = len(rows.rows) * rows.rows.itemsize
    assert len(table) == MANY
    assert sum(column.nbytes for column in columns(table)) + gathered < 200 * MANY


def test_columns_own_their_memory() -> None:
    """A view of the gathered rows would keep them alive next to the columns."""
    assert all(column.base is None for column in columns(two_chunks().table(PATHS)))
