"""Universal checkpoints, which `ds_to_universal` makes of any ZeRO checkpoint.

Each parameter has a folder, `zero/NAME`, with its float32 values in `fp32.pt`: a tensor, or a dict
with it under `param`. Of stage 3 the tensor is flat, and the model's file has its shape. The values
that the tool adds for parameters that are not trained are rounded; the model's file has the exact
ones.

Source: DeepSpeed 0.19.8, `checkpoint/ds_to_universal.py`.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path

from unshard.console import counted
from unshard.containers.torch_files.reader import read_torch_file
from unshard.errors import CorruptError, IncompleteError, raise_all
from unshard.read.format import shortened
from unshard.read.torch_save.gathering import Gathering
from unshard.read.torch_save.state_dict import tensors_of
from unshard.read.torch_save.values import is_tensor, items_of, named
from unshard.read.zero.flat import FlatCuts, FlatRun
from unshard.read.zero.states import Shapes
from unshard.tensors.catalog import TensorEntry

FILE = "fp32.pt"
"""The file of a parameter's values in its folder."""


def universal_tensors(
    folders: Mapping[str, Path],
    shapes: Shapes,
    paths: tuple[Path, ...],
    first: int,
    *,
    file: str,
) -> dict[str, TensorEntry]:
    """Return the tensors of a universal checkpoint.

    Args:
        folders: of the parameters, by name.
        shapes: from the model's file; a parameter without one keeps the shape that is stored.
        paths: all files that are read; those of the folders start at number `first`.
        first: see `paths`.
        file: the name of the file to read in each folder.

    Raises:
        IncompleteError: a parameter's file is missing.
        CorruptError: a file does not have the values of its parameter.
    """
    lost = [name for name in shapes if name not in folders]
    if lost:
        raise IncompleteError(
            f"{paths[0].parent}: no folder of {counted(len(lost), 'parameter')}: {shortened(lost)}",
            expected=f"zero/{lost[0]}/{file}",
            hint="make the universal checkpoint again: was ds_to_universal interrupted?",
        )
    gathered = Gathering()
    for number, (name, folder) in enumerate(folders.items(), start=first):
        if not (folder / file).is_file():
            raise IncompleteError(f"{folder}: {file} is missing")
        saved = read_torch_file(folder / file)
        items = items_of(saved.value)
        value = saved.value if items is None else items.get("param")
        if not is_tensor(value):
            raise CorruptError(f"{saved.path}: has no tensor", found=named(value))
        none_allowed = frozenset[str]()
        gathered.add(
            tensors_of(saved, {name: value}, rank=0, file_number=number, allowed=none_allowed)
        )
    raise_all(CorruptError, f"{paths[0].parent}: parameters cannot be read", gathered.problems)
    stored = gathered.entries(paths)
    cuts = FlatCuts(paths)
    return {name: _shaped(stored[name], shapes.get(name), cuts) for name in folders}


def _shaped(stored: TensorEntry, shape: tuple[int, ...] | None, cuts: FlatCuts) -> TensorEntry:
    """Return a stored tensor in its shape; of stage 3 it is stored flat."""
    if shape is None or stored.shape == shape:
        return stored
    is_flat = stored.shape == (prod(shape),) and stored.chunks.strides is None
    if not is_flat:
        raise CorruptError(
            f"tensor {stored.fqn}: {stored.chunks[0].source.path} has another shape",
            expected=f"{list(shape)}, or as many elements",
            found=f"{list(stored.shape)}",
        )
    file, start = int(stored.chunks.file[0]), int(stored.chunks.start[0])
    return cuts.entry(stored.fqn, stored.dtype, shape, [FlatRun(0, file, start, prod(shape))])
