"""A delta: the changes since another version of a model, as the XOR of their bytes.

Its files have, for each tensor that changed, the XOR of all its bytes, row-major, as one zstd frame
in a tensor of uint8, and in their metadata the Adler-32 of the resulting bytes. Ours also have the
checksums of all other tensors, in the index, where ModelExpress and SGLang do not look.

Source: ModelExpress 0.7.0, `modelexpress_rl.train.methods.canonical_delta` and
`modelexpress_rl.inference.receiver`; SGLang's `weight_sync.local_checkpoint`.
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from unshard.containers.json_file import JsonFields, json_object, shown
from unshard.errors import CorruptError, NotMergeableError, UsageError
from unshard.read.hub_files import INDEX_NAME, RECORD_NAME, file_names, read_header
from unshard.tensors.catalog import ByteRange

_FORM = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}
_BLOCK = 1 << 20
_VERSION = re.compile(r"weight_v(\d{6,18})")


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A delta between two versions.

    Attributes:
        path: its directory.
        version, base_version: the versions after and before.
        frames: of the tensors that changed, by name.
        checksums: of tensors after the change, by name.
        is_ours: whether the checksums are those of all tensors of the model.
    """

    path: Path
    version: str
    base_version: str
    frames: Mapping[str, ByteRange]
    checksums: Mapping[str, str]
    is_ours: bool


def index_of(
    base_version: str, version: str, files: Mapping[str, str], unchanged: Mapping[str, str]
) -> bytes:
    """Return the index of a delta: the files of changed tensors, the checksums of the others."""
    metadata = {"version": version, "base_version": base_version, **_FORM}
    index = {"metadata": metadata, "unchanged": dict(unchanged), "weight_map": dict(files)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _fields(directory: Path, name: str) -> JsonFields:
    path = directory / name
    return JsonFields(path, json_object(path) if path.is_file() else {})


def is_delta(directory: Path) -> bool:
    """Return whether a directory contains a delta, not a model."""
    return "delta_encoding" in _fields(directory, INDEX_NAME).inside("metadata").fields


def read_delta(directory: Path) -> Delta:
    """Read the index and the headers of a delta, and check them.

    Raises:
        UsageError: it is not a delta.
        NotMergeableError: it is a delta of another form.
        IncompleteError, CorruptError: files are missing or damaged.
    """
    directory = directory.parent if directory.name == INDEX_NAME else directory
    index = _fields(directory, INDEX_NAME)
    metadata, others = index.inside("metadata"), index.inside("unchanged")
    version, base_version = metadata.text("version"), metadata.text("base_version")
    if "delta_encoding" not in metadata.fields or not version or base_version is None:
        problem = "is not a delta of unshard, ModelExpress or slime"
        problem = problem if directory.exists() else "no such file or directory"
        raise UsageError(f"{directory}: {problem}")
    for key, form in _FORM.items():
        if (found := metadata.fields.get(key)) != form:
            raise NotMergeableError(
                f"{index.path}: a delta of another form, which only its own engines apply",
                expected=f"{key} {form}",
                found=shown(found),
            )
    files = file_names(str(index.path), index.inside("weight_map").fields)
    if any(isinstance(value, float) and not isfinite(value) for value in metadata.fields.values()):
        raise CorruptError(f"{index.path}: a number of its metadata is not finite")
    checksums = {name: others.text(name) or "" for name in others.fields}
    frames: dict[str, ByteRange] = {}
    for path in sorted({directory / file for file in files.values()}):
        header = read_header(path)
        for entry in header.entries:
            if entry.dtype.name != "uint8" or entry.name in frames:
                problem = "is there twice" if entry.name in frames else "is not a frame of uint8"
                raise CorruptError(f"{path}: tensor {entry.name}: {problem}")
            size = entry.end - entry.begin
            frames[entry.name] = ByteRange(path, header.data_start + entry.begin, size)
            checksums[entry.name] = header.metadata.get(entry.name, "")
    if {name: frame.path.name for name, frame in frames.items()} != files:
        raise CorruptError(f"{directory}: its files have other tensors than its index")
    is_ours = "unchanged" in index.fields
    return Delta(directory, version, base_version, frames, checksums, is_ours)


def versions_in(archive: Path) -> list[tuple[int, int, Path]]:
    """Return the complete versions of an archive: number, step of training, and directory."""
    matches = [(_VERSION.fullmatch(path.name), path) for path in archive.iterdir()]
    versions = [(int(match[1]), source_of(path)[1], path) for match, path in matches if match]
    return sorted((number, step, path) for number, step, path in versions if step is not None)


def source_of(version: Path) -> tuple[str | None, int | None]:
    """Return name and step of the source of an output, from its record; None if unknown."""
    source = _fields(version, RECORD_NAME).inside("source")
    return source.text("name"), source.count("step")


def checksums_in(version: Path) -> Mapping[str, str]:
    """Return the Adler-32 of all tensors of a version; a whole model is read for it."""
    if is_delta(version):
        return read_delta(version).checksums
    headers = [read_header(path) for path in version.iterdir() if path.suffix == ".safetensors"]
    return {
        entry.name: _checksum(header.path, header.data_start + entry.begin, entry.end - entry.begin)
        for header in headers
        for entry in header.entries
    }


def _checksum(path: Path, offset: int, size: int) -> str:
    checksum = 1
    with path.open("rb") as file:
        file.seek(offset)
        for remaining in range(size, 0, -_BLOCK):
            checksum = zlib.adler32(file.read(min(remaining, _BLOCK)), checksum)
    return f"{checksum:08x}"
