"""Compare two models tile by tile, in bounded memory, with threads or another engine."""

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Protocol

import numpy as np

from unshard.containers.open_files import OpenFiles
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import shape_of
from unshard.engines.threads import Resources, divide, one_by_one, work_off
from unshard.errors import UsageError
from unshard.plan.work import PAIR_BYTES, Tile, make_pair, pair_tiles
from unshard.progress import Listener, Stage
from unshard.tensors.dtypes import numpy_dtype
from unshard.write.execute import make_tile
from unshard.write.verification.comparison import Comparison, TensorComparison, Tolerances
from unshard.write.verification.measure import Measures, measure

_TilePair = tuple[str, Tile, Tile]
"""The common name of two tensors, and the same box of both."""

Pairs = Mapping[str, tuple[ConvertedTensor, ConvertedTensor]]
"""Two tensors of equal shape, ours and theirs, by name."""


class Measurer(Protocol):
    """An engine that compares."""

    @property
    def listener(self) -> Listener:
        """Receives the progress."""

    def measure(self, pairs: Pairs, tolerances: Tolerances) -> Mapping[str, Measures]:
        """Return the measures of each pair of tensors, by name."""


def size_of_pair(pair: tuple[ConvertedTensor, ConvertedTensor]) -> int:
    """Return the bytes of the first of two tensors."""
    return prod(shape_of(pair[0].recipe)) * pair[0].dtype.itemsize


def measure_pairs(
    pairs: Pairs, tolerances: Tolerances, resources: Resources, listener: Listener
) -> Mapping[str, Measures]:
    """Return the measures of each pair of tensors, by name.

    Raises:
        UsageError: a tile needs more memory.
        CorruptError: a file is gone, has changed, or ends early.
    """
    if resources.memory_bytes < PAIR_BYTES:
        raise UsageError(
            f"⟦--memory {resources.memory_bytes}⟧: too little to compare",
            expected=f"at least {PAIR_BYTES} bytes",
        )
    measured = dict.fromkeys(pairs, Measures())
    share = divide(resources)
    workers = min(share.workers, resources.memory_bytes // PAIR_BYTES)
    jobs = (  # lazy, so that the chunks of one tensor at a time are in memory
        (name, mine, other)
        for name, pair in pairs.items()
        for mine, other in pair_tiles(make_pair(*pair))
    )
    files = share.open_files
    comparer = partial(_Comparer, measured, threading.Lock(), tolerances, open_files=files)
    work_off(one_by_one(jobs), listener, workers, comparer)
    return measured


def compare(
    ours: Sequence[ConvertedTensor],
    theirs: Sequence[ConvertedTensor],
    tolerances: Tolerances,
    engine: Measurer,
) -> Comparison:
    """Compare every tensor of two models; the result does not depend on the engine.

    The engine's listener gets a stage "comparing" of our bytes.

    Raises:
        UsageError: a tile needs more memory.
        CorruptError: a file is gone, has changed, or ends early.
    """
    by_name = {tensor.name: tensor for tensor in theirs}
    both = {
        tensor.name: (tensor, by_name[tensor.name]) for tensor in ours if tensor.name in by_name
    }
    same_shape = {
        name: (mine, other)
        for name, (mine, other) in both.items()
        if shape_of(mine.recipe) == shape_of(other.recipe)
    }
    engine.listener(Stage("comparing", sum(map(size_of_pair, same_shape.values()))))
    measured = engine.measure(same_shape, tolerances)
    names = {tensor.name for tensor in ours}
    return Comparison(
        tolerances.atol,
        tolerances.rtol,
        tuple(_compared(*pair, measured.get(name)) for name, pair in both.items()),
        missing=tuple(name for name in by_name if name not in names),
        unexpected=tuple(tensor.name for tensor in ours if tensor.name not in by_name),
    )


class _Comparer:
    """Compares tiles for one thread. `lock` guards the measures of all threads, by name."""

    def __init__(
        self,
        measured: dict[str, Measures],
        lock: threading.Lock,
        tolerances: Tolerances,
        *,
        open_files: int,
    ) -> None:
        self._measured = measured
        self._lock = lock
        self._tolerances = tolerances
        self._files = OpenFiles(os.O_RDONLY, limit=open_files)
        self._memory = [np.empty(PAIR_BYTES // 4, np.uint8) for _ in range(2)]  # for each side

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def do(self, job: _TilePair) -> int:
        """Compare two tiles; return the bytes of ours."""
        name, *tiles = job
        # A tile that is not cast comes as raw bits.
        ours, theirs = (
            make_tile(tile, self._files, memory).view(numpy_dtype(tile.operation.to))
            for tile, memory in zip(tiles, self._memory, strict=True)
        )
        measures = measure(ours, theirs, self._tolerances)
        with self._lock:
            self._measured[name] += measures
        return ours.nbytes


def _compared(
    ours: ConvertedTensor, theirs: ConvertedTensor, measures: Measures | None
) -> TensorComparison:
    values = None if measures is None else measures.values()
    cast = ours.dtype is not theirs.dtype and ours.dtype.castable and theirs.dtype.castable
    same_type = cast or ours.dtype is theirs.dtype
    return TensorComparison(
        name=ours.name,
        dtype_ours=ours.dtype.name,
        dtype_theirs=theirs.dtype.name,
        shape_ours=shape_of(ours.recipe),
        shape_theirs=shape_of(theirs.recipe),
        cast=cast,
        equal=same_type and values is not None and values.different == 0,
        values=values,
    )
