"""`unshard.json`: the sources, options and files of an output.

It has no times, hosts or absolute paths, so the same merge of the same files writes the same
record. Its fingerprint differs if a source file was saved again, even with the same bytes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from unshard import __version__
from unshard.containers.json_file import json_object
from unshard.errors import CheckpointError
from unshard.plan.layout import Layout
from unshard.read.format import Location
from unshard.read.hub_files import INDEX_NAMES, MODULES, PIPELINE_INDEX, RECORD_NAME
from unshard.read.open import Checkpoint
from unshard.stores.remote_path import RemotePath
from unshard.write.companions import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from unshard.write.dirfd import read_file

_WEIGHTS = re.compile(
    r"(model|(diffusion_)?pytorch_model|adapter_model|pytorch_lora_weights)(\.[\w-]+)?(-\d{5}-of-\d{5})?"
    r"\.(safetensors|bin)"
    r"|(model\.safetensors|(diffusion_)?pytorch_model\.(bin|safetensors))\.index(\.[\w-]+)?\.json"
)


def is_weight_file(name: str) -> bool:
    """Return whether a file has one of Hugging Face's names of weight or index files."""
    return _WEIGHTS.fullmatch(name) is not None


def is_loaded(name: str) -> bool:
    """Return whether transformers would load a file instead of an output, or together with it.

    transformers prefers `model.safetensors` to an index and to `pytorch_model.bin`; with an
    `adapter_config.json` it also loads the adapter. Source: `_get_resolved_checkpoint_files` and
    `AutoModel.from_pretrained` of transformers 5.23.
    """
    return is_weight_file(name) or name in (ADAPTER_CONFIG_NAME, MODULES, PIPELINE_INDEX)


def is_last(name: str) -> bool:
    """Return whether readers regard a directory with this file as a complete model."""
    return name == RECORD_NAME or name.rpartition("/")[2] in ("config.json", ADAPTER_CONFIG_NAME)


class OutputRecord(NamedTuple):
    """The files that a record lists.

    Attributes:
        sizes: bytes of every file, by its path; in an older record, only weight files.
        state: names of the files of scheduler and random state.
        is_older: the version that wrote it did not list companions.
    """

    sizes: Mapping[str, int]
    state: tuple[str, ...]
    is_older: bool

    def lists(self, path: str, size: int) -> bool:
        """Return whether unshard wrote this file, of this size."""
        if path == RECORD_NAME:
            return True
        if self.is_older and (path in INDEX_NAMES or not is_weight_file(path)):
            return path != ADAPTER_CONFIG_NAME or ADAPTER_NAME in self.sizes
        return self.sizes.get(path) == size


def read_record(directory: int) -> OutputRecord | None:
    """Return the record in an open directory; None if unshard wrote none there."""
    try:
        return parse_record(read_file(RECORD_NAME, within=directory))
    except OSError:
        return None


def parse_record(record: bytes) -> OutputRecord | None:
    """Return the parsed record; None if unshard did not write it."""
    try:
        fields = json.loads(record)
        version, output = fields["unshard"], fields["output"]
        companions, state = output.get("companions"), output.get("training_state", [])
        sizes = {**output["files"], **(companions or {})}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(version, str) or not isinstance(state, list):
        return None
    valid = {path: size for path, size in sizes.items() if isinstance(size, int)}
    names = tuple(name for name in state if isinstance(name, str))
    return OutputRecord(valid, names, companions is None)


def add_companions(record: bytes, sizes: Mapping[str, int]) -> bytes:
    """Return a record that also lists the files that are not weights, with sizes in bytes."""
    fields = json.loads(record)
    fields["output"]["companions"] = dict(sizes)
    return _bytes(fields)


def add_checksums(record: bytes, checksums: Mapping[str, str]) -> bytes:
    """Return a record that also has the SHA-256 of each tensor, like the answers of engines."""
    return _bytes({**json.loads(record), "checksums": dict(checksums)})


def listed_weights(record: bytes) -> list[str]:
    """Return the names of the files of weights that a record lists."""
    return list(json.loads(record)["output"]["files"])


def record_json(
    checkpoints: Sequence[Checkpoint],
    weights: Sequence[float],
    layout: Layout,
    options: Mapping[str, object],
    output: Mapping[str, object],
) -> bytes:
    """Return the record's bytes; `output` has more fields about the output."""
    sources = [_source(checkpoint) for checkpoint in checkpoints]
    terms = [{"weight": weight, **fields} for weight, fields in zip(weights, sources, strict=True)]
    record: dict[str, object] = {
        "unshard": __version__,
        **({"source": sources[0]} if len(sources) == 1 else {"average_of": terms}),
        "options": dict(options),
        "output": {
            "files": {file.filename: file.size for file in layout.files},
            "tensors": len(layout.weight_map),
            "parameters": layout.total_parameters,
            "bytes": layout.total_size,
            **output,
        },
        "skipped": {
            skipped.fqn: skipped.reason
            for checkpoint in checkpoints
            for skipped in checkpoint.catalog.skipped
        },
    }
    return _bytes(record)


def _bytes(record: Mapping[str, object]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()


def is_made_by(output: Path, fingerprint: str) -> bool:
    """Return whether an output is complete, has no other weights, and has this fingerprint."""
    if isinstance(output, RemotePath):
        output.bucket.forget()
    match _record_in(output):
        case {
            "output": {"fingerprint": recorded, "files": dict(files), "companions": dict(others)}
        }:
            sizes = {**files, **others}
            # In place, a checkpoint's own config of an adapter stays, and is not listed.
            names = {*sizes, *([ADAPTER_CONFIG_NAME] if ADAPTER_NAME in sizes else [])}
            if recorded == fingerprint and has_sizes(output, sizes):
                present = (path.name for path in output.iterdir())
                return names.issuperset(name for name in present if is_loaded(name))
    return False


def has_sizes(output: Path, sizes: Mapping[str, int]) -> bool:
    """Return whether all these files are in an output, with these sizes in bytes."""
    try:
        return all((output / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False


def describe_made(
    output: Path, locations: Sequence[Location], options: Mapping[str, object]
) -> str:
    """Describe the sources of an output that `is_made_by` refuses; "" without a record."""
    match _record_in(output):
        case {"source": dict(source), "options": dict(recorded)}:
            sources = [source]
        case {"average_of": list(terms), "options": dict(recorded)}:
            sources = [source for source in terms if isinstance(source, dict)]
        case _:
            return ""
    wanted = list(map(_names_of, locations))
    if [{key: source.get(key) for key in wanted[0]} for source in sources] != wanted:
        names = (f"{source.get('name')} ({source.get('role') or 'model'})" for source in sources)
        return f"an output made from {', '.join(names)}"
    if recorded != json.loads(json.dumps(dict(options))):
        return f"an output made with other options: {json.dumps(recorded)}"
    return (
        "an output that is incomplete, has other weights next to it, was made with other options, "
        "or before the checkpoint, its config or tokenizer was saved again"
    )


def _record_in(output: Path) -> Mapping[str, object]:
    try:
        return json_object(output / RECORD_NAME)
    except CheckpointError:
        return {}


def _names_of(location: Location) -> dict[str, object]:
    return {
        "name": location.step_dir.name,
        "step": location.step,
        "role": location.role,
        "weights": location.weights,
    }


def _source(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the record's fields about a checkpoint."""
    catalog, location = checkpoint.catalog, checkpoint.location
    passed = checkpoint.passed_over
    sizes = {}
    entries = (entry for table in checkpoint.catalogs for entry in table.tensors.values())
    for path in sorted({path for entry in entries for path in entry.chunks.paths}):
        roots = [p for p in (*location.roots, location.step_dir) if path.is_relative_to(p)]
        if roots and path in checkpoint.states:  # otherwise a temporary file, decompressed
            sizes[str(path.relative_to(roots[0]))] = checkpoint.states[path].size
    return {
        **_names_of(location),
        **({"passed_over": [step._asdict() for step in passed]} if passed else {}),
        "format": catalog.format,
        "writer": catalog.writer,
        "world_size": catalog.world_size,
        "files": sizes,
    }
