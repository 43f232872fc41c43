"""Verify an output by reopening it as a stranger would: with safetensors' own reader."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from unshard.errors import OutputError, raise_all
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
        with safe_open(path, framework="np") as reader:
            if set(reader.keys()) != {tensor.name for tensor in file.tensors}:
                return [OutputError(f"{path}: its tensor names are not what was laid out")]
            for tensor in file.tensors:
                view = reader.get_slice(tensor.name)
                found = (view.get_dtype(), tuple(view.get_shape()))
                expected = (tensor.dtype.code, tensor.shape)
                if found != expected:
                    subject = f"{path}: tensor {tensor.name}"
                    problems.append(OutputError(subject, expected=str(expected), found=str(found)))
    except SafetensorError as error:
        return [OutputError(f"{path}: safetensors cannot open it: {error}")]
    return problems
