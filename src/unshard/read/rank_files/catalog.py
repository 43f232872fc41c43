"""What the files of ranks have together: one catalog."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from unshard.read.format import Location, ReadOptions
from unshard.read.rank_files.buffers import settle
from unshard.read.rank_files.copies import resolve_experts, resolve_plain
from unshard.read.torch_save.gathering import Gathering
from unshard.tensors.catalog import ByteRange, Catalog, TensorEntry

Trained = Callable[[Location, int, Mapping[str, TensorEntry]], Collection[str]]


def catalog_of(  # noqa: PLR0913, PLR0917 (what was read, and where)
    gathered: Gathering,
    files: Mapping[int, Path],
    world: int,
    location: Location,
    options: ReadOptions,
    trained: Trained | None = None,
) -> Catalog:
    """Return what the files of ranks have together; `files` are by rank, as they were read.

    `trained` returns which of some plain tensors are parameters; without it none is a buffer.

    Raises:
        NotMergeableError: a tensor cannot be read, or its kind cannot be found out.
    """
    paths = tuple(files.values())
    tensors = gathered.entries(paths)
    known = None if trained is None else partial(trained, location, world)
    plain = resolve_plain(tensors, gathered.plain, known, options)
    decided = () if options.selects else plain.value.items()
    summary = f"{location.weights_dir}: the rank files cannot be merged"
    buffers = settle(decided, (), gathered.problems, summary)
    missing = tuple(rank for rank in range(world) if rank not in files)
    ranks = ", ".join(map(str, missing))
    note = f"the file of rank {ranks} is missing; replicas have what it contained"
    experts = resolve_experts({**tensors, **plain.value}, location, options)
    return Catalog(
        writer="unknown",
        world_size=world,
        tensors=experts.value,
        skipped=tuple(gathered.skipped.values()),
        archives=tuple(
            ByteRange(path, 0, path.stat().st_size)
            for path in paths
            if path.suffix != ".safetensors"
        ),
        missing=tuple(
            location.weights_dir / re.sub(r"\d+(?=\.\w+$)", str(rank), paths[0].name)
            for rank in missing
        ),
        missing_ranks=missing,
        notes=(*((note,) if missing else ()), *buffers, *plain.notes, *experts.notes),
    )
