"""Write tensors sequentially, as zstd frames require, into temporary files to copy them from."""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import shape_of, take
from unshard.engines.files import PieceReader
from unshard.engines.threads import Resources, one_by_one, work_off
from unshard.progress import Listener
from unshard.tensors.chunk_rows import TensorDraft
from unshard.tensors.dtypes import DType

_PER_THREAD, _PER_STREAM = 16 << 20, 2 << 20

Blocks = Callable[[PieceReader], Iterator[bytes | memoryview]]
"""Yields the blocks of a converted tensor; called by a thread, with its reader."""


def size_of(tensor: ConvertedTensor) -> int:
    """Return the bytes of a tensor."""
    return prod(shape_of(tensor.recipe)) * tensor.dtype.itemsize


def spool(  # noqa: PLR0913 (the jobs, the resources, and the directory)
    jobs: Mapping[str, tuple[int, Blocks]],
    make_reader: Callable[[], PieceReader],
    directory: Path,
    resources: Resources,
    listener: Listener,
    *,
    streams: int,
) -> Mapping[str, Path]:
    """Write the blocks of each job into a file of a directory; return the files by job name.

    A job is (bytes of progress, blocks). A thread has its own reader and takes 16 MiB of the
    memory, and 2 MiB for each of the zstd `streams` of its job.
    """
    paths = {name: directory / f"spool-{number}" for number, name in enumerate(jobs)}

    class Spooler:
        def __init__(self) -> None:
            self.reader = make_reader()

        def do(self, name: str) -> int:
            size, blocks = jobs[name]
            with paths[name].open("wb") as file:
                file.writelines(blocks(self.reader))
            return size

        def close(self) -> None:
            self.reader.close()

    each = _PER_THREAD + _PER_STREAM * streams
    threads = max(1, min(resources.workers, resources.memory_bytes // each))
    work_off(one_by_one(jobs), listener, threads, Spooler)
    return paths


def spooled(name: str, dtype: DType, shape: tuple[int, ...], path: Path) -> ConvertedTensor:
    """Return a tensor whose bytes are a whole file."""
    draft = TensorDraft(name, dtype, shape)
    draft.add(rank=0, file=0, start=0)
    return ConvertedTensor(name, dtype, take(draft.entry((path,))))
