"""Parts of an upload: they make up the file, and none is too short or too long for a store."""

from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unshard.plan import pieces
from unshard.plan.operations import COPY_ROW
from unshard.plan.pieces import Contents, StoredRun, UploadPart, parts_of

LEAST, LONGEST = 50, 200
THERE, HERE = Path("there"), Path("here")

Lengths = list[tuple[int, Path]]


def contents_of(header: bytes, runs: Lengths) -> Contents:
    """Return a file of a header and of runs that begin at byte 1000, 2000, ... of their sources."""
    rows, at = [], len(header)
    for number, (length, source) in enumerate(runs, 1):
        rows.append((0, at, [THERE, HERE].index(source), 1000 * number, length, 1, length))
        at += length
    return Contents(at, header, np.array(rows, COPY_ROW), [THERE, HERE], ())


def made(contents: Contents, made_bytes: int) -> list[UploadPart]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_LONGEST", LONGEST)
        return list(parts_of(contents, least=LEAST, made_bytes=made_bytes, can_copy=THERE.__eq__))


lengths = st.lists(st.tuples(st.integers(1, 600), st.sampled_from([THERE, HERE])), max_size=12)


@given(st.integers(1, 120), lengths, st.integers(2 * LEAST, 4 * LEAST))
@example(30, [(LEAST - 30 + LEAST, THERE)], 2 * LEAST)
@example(30, [(LEAST - 30 + LEAST - 1, THERE)], 2 * LEAST)
def test_parts_make_up_the_file_and_have_lengths_that_stores_take(
    header: int, runs: Lengths, made_bytes: int
) -> None:
    contents = contents_of(bytes(header), runs)
    found = made(contents, made_bytes)
    assert [found[0].start, found[-1].end] == [0, contents.size]
    assert all(one.end == after.start for one, after in pairwise(found))
    assert all(one.size >= LEAST for one in found[:-1])
    for one in found:
        if one.copied is None:
            assert one.size <= max(header, made_bytes)
        else:
            assert LEAST <= one.size == one.copied.length <= LONGEST
            assert one.copied.source == THERE
            piece, skip = contents.find(one.start)
            run = cast("StoredRun", piece)
            assert (run.source, run.start + skip) == (THERE, one.copied.start)
            assert skip + one.size <= run.length


@given(lengths)
def test_of_every_long_run_at_most_its_beginning_is_made_here(runs: Lengths) -> None:
    found = made(contents_of(b"header", runs), 2 * LEAST)
    copied = sum(one.size for one in found if one.copied)
    long = [length for length, source in runs if source == THERE and length >= 2 * LEAST]
    assert copied >= sum(length - LEAST for length in long)


def test_a_run_that_fills_a_part_whole_leaves_the_next_ones_to_the_store() -> None:
    """As the pieces of the first matrix after a norm: 16 KiB, then eight times 8 MiB."""
    found = made(contents_of(b"", [(1, HERE), *[(2 * LEAST - 5, THERE)] * 8]), 2 * LEAST)
    assert [one.copied is None for one in found] == [True, *[False] * 7]


def test_what_cannot_be_copied_is_cut_into_parts_that_are_made() -> None:
    found = made(contents_of(b"", [(6 * LEAST + 7, HERE)]), 2 * LEAST)
    assert [one.size for one in found] == [2 * LEAST, 2 * LEAST, 2 * LEAST, 7]
    assert not any(one.copied for one in found)
