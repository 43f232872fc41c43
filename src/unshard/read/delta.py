"""A delta: what changed since another version of a model, as the XOR of their bytes.

Its files have, for each tensor that changed, the XOR of all its bytes, row-major, as one zstd frame
in a tensor of uint8, and in their metadata the Adler-32 of the bytes that it becomes. Ours have
those of all others in the index, where ModelExpress and SGLang do not look.

Source: ModelExpress 0.7.0, `modelexpress_rl.train.methods.canonical_delta` and
`modelexpress_rl.inference.receiver`; SGLang's `weight_sync.local_checkpoint`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unshard.containers.json_file import JsonFields, json_object, shown
from unshard.errors import CorruptError, NotMergeableError, UsageError
from unshard.read.hub_files import INDEX_NAME, RECORD_NAME, file_names, read_header
from unshard.tensors.catalog import ByteRange

_FORM = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}
_VERSION = re.compile(r"weight_v(\d{6,18})")


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What changed in a version.

    Attributes:
        path: its directory.
        version, base_version: what it makes, and of what.
        frames: of the tensors that changed, by name.
        checksums: what tensors become, by name.
        is_ours: whether these are all tensors of the model.
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
    """Return whether a directory has a delta, and not a model."""
    return "delta_encoding" in _fields(directory, INDEX_NAME).inside("metadata").fields


def read_delta(directory: Path) -> Delta:
    """Read the index and the headers of a delta, and check them.

    Raises:
        UsageError: it is not a delta.
        NotMergeableError: it is a delta of another form.
        IncompleteError, CorruptError: files are missing or damaged.
    """
    index = _fields(directory, INDEX_NAME)
    stated, others = index.inside("metadata"), index.inside("unchanged")
    version, base_version = stated.text("version"), stated.text("base_version")
    if "delta_encoding" not in stated.fields or version is None or base_version is None:
        raise UsageError(f"{directory}: is not a delta that unshard, ModelExpress or slime makes")
    for key, form in _FORM.items():
        if (found := stated.fields.get(key)) != form:
            what = f"{index.path}: a delta of another form, which only its own engines apply"
            raise NotMergeableError(what, expected=f"{key} {form}", found=shown(found))
    files = file_names(str(index.path), index.inside("weight_map").fields)
    checksums = {name: others.text(name) or "" for name in others.fields}
    frames: dict[str, ByteRange] = {}
    for path in sorted({directory / file for file in files.values()}):
        header = read_header(path)
        for one in header.entries:
            size = one.end - one.begin
            frames[one.name] = ByteRange(path, header.data_start + one.begin, size)
            checksums[one.name] = header.metadata.get(one.name, "")
    if {name: frame.path.name for name, frame in frames.items()} != files:
        raise CorruptError(f"{directory}: the tensors of its files are not those of its index")
    is_ours = "unchanged" in index.fields
    return Delta(directory, version, base_version, frames, checksums, is_ours)


def versions_in(archive: Path) -> list[tuple[int, int, Path]]:
    """Return the complete versions of an archive: number, step of training, and directory."""
    matches = [(_VERSION.fullmatch(one.name), one) for one in archive.iterdir()]
    found = [(int(match[1]), one, _fields(one, RECORD_NAME)) for match, one in matches if match]
    steps = [(number, record.inside("source").count("step"), one) for number, one, record in found]
    return sorted((number, step, one) for number, step, one in steps if step is not None)


def fingerprint_in(version: Path) -> str | None:
    """Return that of the checkpoint which a delta makes, by its `unshard.json`."""
    return _fields(version, RECORD_NAME).inside("output").text("fingerprint")
