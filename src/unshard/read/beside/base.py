"""The base model that a checkpoint was trained from: names, dtypes, files, config, weights.

A directory, or the id of a model on the Hugging Face hub. Of a hub model the cache is asked first;
what it lacks is downloaded: JSON, tokenizer and code always, weights only if they are needed. The
dtypes and shapes of weights that are not local are read from the headers of their files.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from unshard.errors import ConversionError, CorruptError, IncompleteError
from unshard.read.beside.companions import Companions, companions_in
from unshard.read.format import Location, ReadOptions, blaming
from unshard.read.hub_files import weight_map
from unshard.read.whole_files.reader import WHOLE_FILES
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import BY_CODE, DType

__all__ = ["Base", "read_base"]

_SMALL = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py", "tokenizer*", "vocab*"]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """What a base model says of the tensors that were trained from it.

    Attributes:
        name: as the user gave it.
        files: the file of every tensor, by name: its weight map; plain names.
        dtypes: dtypes by name, as far as known.
        shapes: shapes by name, elements, as far as known.
        companions: config, tokenizer and the like.
        tensors: where the weights are, if they are available locally.
    """

    name: str
    files: Mapping[str, str]
    dtypes: Mapping[str, DType]
    shapes: Mapping[str, tuple[int, ...]]
    companions: Companions
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)


def read_base(spec: str, *, needs_weights: bool = False) -> Base:
    """Return the base model that a path or a hub id means.

    Args:
        spec: a directory, or an id such as "Qwen/Qwen3-8B".
        needs_weights: whether its weights must be available.

    Raises:
        ConversionError: there is no such model, or the hub cannot be reached.
        CheckpointError: its files are damaged.
    """
    with blaming(Path(spec)):
        is_directory = Path(spec).is_dir()
    if is_directory:
        directory = Path(spec)
    elif _is_path(spec):
        raise ConversionError(
            f"--base {shlex.quote(spec)}: no such directory",
            expected="a directory with a Hugging Face model, or a hub id (Qwen/Qwen3-8B)",
            hint="check the path; the hub was not asked",
        )
    else:
        directory = _from_hub(spec, needs_weights=needs_weights)
    companions = companions_in(directory)
    if _holds_weights(directory) or needs_weights:
        try:
            return _with_weights(spec, directory, companions)
        except IncompleteError:
            if needs_weights or Path(spec).is_dir():
                raise  # else: what is in the cache of the hub may be a part
    return _without_weights(spec, directory, companions)


def _is_path(spec: str) -> bool:
    """Return whether a name is meant as a path: the hub is not asked for a mistyped directory."""
    parent = Path(spec).parent
    return (
        not spec
        or spec.startswith((".", "/", "~"))
        or spec.endswith("/")
        or "\\" in spec
        or spec.count("/") > 1
        or Path(spec).exists()
        or (parent != Path() and parent.is_dir())
    )


def _holds_weights(directory: Path) -> bool:
    """Return whether weights are there, not an index alone."""
    suffixes = (".safetensors", ".bin")
    named = any(path.name.endswith(suffixes) for path in directory.iterdir())
    return named and WHOLE_FILES.holds(directory)


def _with_weights(spec: str, directory: Path, companions: Companions) -> Base:
    place = Location(directory, directory, None, None, "model", WHOLE_FILES)
    tensors = WHOLE_FILES.read(place, ReadOptions()).tensors
    files = {
        name: entry.chunks.paths[entry.chunks.file[0]].name
        for name, entry in tensors.items()
        if len(entry.chunks)
    }
    dtypes = {name: entry.dtype for name, entry in tensors.items()}
    shapes = {name: entry.shape for name, entry in tensors.items()}
    return Base(spec, files, dtypes, shapes, companions, tensors)


def _checked(index: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return a weight map whose files are names inside the directory: ours are named after them."""
    for name, file in files.items():
        if not file or file != PurePosixPath(file).name:
            raise CorruptError(
                f"{index}: tensor {name}: its file is not a name in the same directory: {file!r}"
            )
    return dict(files)


def _without_weights(spec: str, directory: Path, companions: Companions) -> Base:
    """Read the names from the index, or from the headers of the files on the hub."""
    index = directory / _INDEX
    if not Path(spec).is_dir():
        found = _headers_on_hub(spec)
        if found is not None:
            files, dtypes, shapes = found
            return Base(spec, _checked(spec, files), dtypes, shapes, companions)
    if not index.is_file():
        raise ConversionError(
            f"--base {shlex.quote(spec)}: has neither weights nor {_INDEX}",
            found=str(directory),
            hint="give a directory with a whole Hugging Face model",
        )
    return Base(spec, _checked(str(index), weight_map(index)), {}, {}, companions)


def _from_hub(spec: str, *, needs_weights: bool) -> Path:
    """Return the snapshot of a hub model: from the cache if it has all that is needed."""
    from huggingface_hub import snapshot_download

    wanted = [*_SMALL, *_WEIGHTS] if needs_weights else _SMALL
    try:
        cached = Path(snapshot_download(spec, local_files_only=True))
    except (OSError, ValueError):
        cached = None
    if cached is not None and (
        _holds_weights(cached) or not (needs_weights or _is_partial(cached))
    ):
        return cached
    try:
        return Path(snapshot_download(spec, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # the hub's own errors are of these kinds
        if cached is not None and not needs_weights:
            return cached
        raise ConversionError(
            f"--base {shlex.quote(spec)}: is not a directory here, and not available from the "
            "Hugging Face hub",
            found=_first_line(error),
            hint="check the id, log in with `hf auth login`, or give a directory",
        ) from error


def _is_partial(snapshot: Path) -> bool:
    """Return whether the cache has only a part of the model: a config without a tokenizer."""
    return not any(path.name.startswith(("tokenizer", "vocab")) for path in snapshot.iterdir())


_Headers = tuple[dict[str, str], dict[str, DType], dict[str, tuple[int, ...]]]


def _headers_on_hub(spec: str) -> _Headers | None:
    """Return file, dtype and shape of every tensor, by the files' headers; None if out of reach."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        found = get_safetensors_metadata(spec)
    except (OSError, ValueError, NotASafetensorsRepoError, SafetensorsParsingError):
        return None
    dtypes: dict[str, DType] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in found.files_metadata.values():
        for name, tensor in file.tensors.items():
            dtype = BY_CODE.get(tensor.dtype)
            if dtype is not None:
                dtypes[name] = dtype
            shapes[name] = tuple(tensor.shape)
    return dict(found.weight_map), dtypes, shapes


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]
