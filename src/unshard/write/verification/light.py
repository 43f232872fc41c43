"""Verify an output by reopening it: its headers, by the rules of the format.

Files are not mapped, so a limit on address space (`ulimit -v`) may be lower than their size.
"""

import json
from pathlib import Path

from unshard.containers.safetensors_file import read_safetensors
from unshard.errors import CheckpointError, OutputError, raise_all
from unshard.plan.layout import INDEX_NAME, Layout, OutputFile

__all__ = ["verify_light"]


def verify_light(directory: Path, layout: Layout) -> None:
    """Check that files, headers, names, dtypes, shapes, sizes and index are what was laid out.

    Raises:
        OutputError: lists every difference.
    """
    problems = [problem for file in layout.files for problem in _check_file(directory, file)]
    if len(layout.files) > 1:
        index = json.loads((directory / INDEX_NAME).read_bytes())
        if index["weight_map"] != dict(layout.weight_map):
            problems.append(OutputError(f"{INDEX_NAME}: its weight map is not what was laid out"))
    raise_all(OutputError, f"{directory}: the output is not what was planned", problems)


def _check_file(directory: Path, file: OutputFile) -> list[OutputError]:
    path = directory / file.filename
    size = path.stat().st_size
    if size != file.size:
        return [OutputError(f"{path}", expected=f"{file.size} bytes", found=f"{size}")]
    problems = []
    with path.open("rb") as opened:
        if opened.read(len(file.header)) != file.header:
            problems.append(OutputError(f"{path}: its header is not what was laid out"))
    try:
        entries = {entry.name: entry for entry in read_safetensors(path).entries}
    except CheckpointError as error:
        return [OutputError(f"{path}: is not a valid safetensors file: {error.subject}")]
    if entries.keys() != {tensor.name for tensor in file.tensors}:
        return [OutputError(f"{path}: its tensor names are not what was laid out")]
    for tensor in file.tensors:
        entry = entries[tensor.name]
        found = (entry.dtype.code, entry.shape)
        expected = (tensor.dtype.code, tensor.shape)
        if found != expected:
            subject = f"{path}: tensor {tensor.name}"
            problems.append(OutputError(subject, expected=str(expected), found=str(found)))
    return problems
