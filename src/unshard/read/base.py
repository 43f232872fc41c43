"""The base model that a checkpoint was trained from: names, dtypes, files, config, weights.

A directory, or the id of a model on the Hugging Face hub. For a hub model the cache is used first;
missing JSON, tokenizer and code files are downloaded always, weights only if they are needed. The
dtypes and shapes of weights that are not local are read from the headers of their files.
"""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.containers.file_states import FileStates, noting
from unshard.errors import CheckpointError, ConversionError, IncompleteError
from unshard.read.beside.companions import Companions, companions_in
from unshard.read.beside.pipelines import component_of, is_pipeline, others_of
from unshard.read.format import Location, ReadOptions, blaming
from unshard.read.hub_files import INDEX_NAME, INDEX_NAMES, PIPELINE_INDEX, file_names, weight_map
from unshard.read.model_config import ModelConfig
from unshard.read.tree import Tree
from unshard.read.whole_files.reader import WHOLE_FILES
from unshard.stores.remote_path import path_of
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import BY_CODE, DType

_SMALL = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py", "tokenizer*", "vocab*"]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """A base model, and its tensors.

    Attributes:
        name: as the user wrote it.
        files: the weight map: tensor -> file name.
        dtypes: dtypes by name, as far as known.
        shapes: shapes by name, elements, as far as known.
        companions: config, tokenizer and the like.
        tensors: the weights, if they are available locally.
        states: the states of its files when they were first opened.
    """

    name: str
    files: Mapping[str, str]
    dtypes: Mapping[str, DType]
    shapes: Mapping[str, tuple[int, ...]]
    companions: Companions
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    states: FileStates = field(default_factory=FileStates)

    def note_of(self, trained: ModelConfig | None) -> str:
        """Return a note about components of a pipeline that stay but may have been trained, or "".

        Raises:
            ConversionError: the checkpoint's model is of another class than the component.
        """
        own, folder = self.companions.model, self.companions.folder.rstrip("/")
        classes = [config and config.fields.get("_class_name") for config in (trained, own)]
        if trained is not None and classes[0] != classes[1]:
            raise ConversionError(
                f"{self.name}: its {folder} is a {classes[1]}, and the checkpoint a {classes[0]}",
                hint="pass the folder of its component as the base; only a transformer or unet is "
                "put into a pipeline",
            )
        folders = {name.partition("/")[0] for name in self.companions.files}
        stay = sorted(name for name in folders if name.startswith(f"{folder}_"))
        note = f"{folder} is replaced; {', '.join(stay)} of {self.name} is kept"
        return note if stay else ""


def read_base(spec: str, *, needs_weights: bool = False) -> Base:
    """Return the base model of a path or a hub id ("Qwen/Qwen3-8B").

    Raises:
        ConversionError: there is no such model, or the hub cannot be reached.
        CheckpointError: its files are damaged.
    """
    with noting(FileStates()) as states:
        return replace(_read_base(spec, states, needs_weights=needs_weights), states=states)


def _read_base(spec: str, states: FileStates, *, needs_weights: bool) -> Base:
    directory = path_of(spec)
    with blaming(directory):
        is_local = directory.is_dir()
    if not is_local and _is_path(spec):
        raise ConversionError(
            f"⟦--base {shlex.quote(spec)}⟧: no such directory",
            expected="a directory with a Hugging Face model, or a hub id (Qwen/Qwen3-8B)",
            hint="check the path; the hub was not asked",
        )
    if not is_local:
        directory = _from_hub(spec, needs_weights=needs_weights)
    if (directory / PIPELINE_INDEX).is_file() and is_pipeline(directory / PIPELINE_INDEX):
        return _in_pipeline(spec, directory, states, is_local=is_local)
    companions = companions_in(directory)
    companions.note(states)
    if _holds_weights(directory) or needs_weights:
        try:
            return _with_weights(spec, directory, companions)
        except IncompleteError:
            if needs_weights or is_local:
                raise  # else the cache of the hub may have a part of the weights
    # The names are in the headers of the files on the hub, or else in the index.
    if not is_local and (base := _from_headers(spec, companions)) is not None:
        return base
    indices = [directory / name for name in INDEX_NAMES if (directory / name).is_file()]
    if not indices:
        raise ConversionError(
            f"⟦--base {shlex.quote(spec)}⟧: has neither weights nor {INDEX_NAME}",
            found=str(directory),
            hint="pass a directory with a whole Hugging Face model",
        )
    return Base(spec, weight_map(indices[0]), {}, {}, companions)


def _in_pipeline(spec: str, directory: Path, states: FileStates, *, is_local: bool) -> Base:
    """Return the component that training changes; its companions are the rest of the pipeline."""
    if not is_local:
        raise ConversionError(
            f"⟦--base {shlex.quote(spec)}⟧: a pipeline, which is copied as a whole",
            hint="download it with hf download, and pass its directory",
        )
    component = component_of(directory)
    own = companions_in(component)
    companions = Companions(own.config_file, others_of(component), f"{component.name}/")
    own.note(states)
    companions.note(states)
    return _with_weights(spec, component, companions)


def local_base(name: str, directory: Path) -> Base:
    """Return the base model in a directory; its weights only if they are whole."""
    with noting(FileStates()) as states:
        companions = companions_in(directory)
        base = Base(name, {}, {}, {}, companions, states=states)
        if _holds_weights(directory):
            with suppress(CheckpointError):
                base = replace(_with_weights(name, directory, companions), states=states)
    return base


def _is_path(spec: str) -> bool:
    """Return whether a name looks like a path: the hub is not asked for a mistyped directory."""
    parent = Path(spec).parent
    return (
        not spec
        or spec.startswith((".", "/", "~"))
        or spec.endswith("/")
        or "\\" in spec
        or spec.count("/") > 1  # an address of a store, too
        or Path(spec).exists()
        or (parent != Path() and parent.is_dir())
    )


def _holds_weights(directory: Path) -> bool:
    """Return whether a directory has weights, not only an index."""
    suffixes = (".safetensors", ".bin")
    named = any(path.name.endswith(suffixes) for path in directory.iterdir())
    return named and WHOLE_FILES.holds(Tree(), directory)


def _with_weights(spec: str, directory: Path, companions: Companions) -> Base:
    place = Location(directory, directory, None, None, "model", WHOLE_FILES)
    tensors = WHOLE_FILES.read(place, ReadOptions(config_file=companions.config_file)).tensors
    files = {
        name: entry.chunks.paths[entry.chunks.file[0]].name
        for name, entry in tensors.items()
        if len(entry.chunks)
    }
    dtypes = {name: entry.dtype for name, entry in tensors.items()}
    shapes = {name: entry.shape for name, entry in tensors.items()}
    return Base(spec, files, dtypes, shapes, companions, tensors)


def _from_hub(spec: str, *, needs_weights: bool) -> Path:
    """Return the snapshot of a hub model: from the cache if it has all files that are needed."""
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL, *_WEIGHTS] if needs_weights else _SMALL
    try:
        cached = Path(snapshot_download(spec, local_files_only=True))
    except (OSError, ValueError):
        cached = None
    if cached is not None:
        # A cache with a config and without a tokenizer has only a part of the model.
        names = (path.name for path in cached.iterdir())
        is_partial = not any(name.startswith(("tokenizer", "vocab")) for name in names)
        if _holds_weights(cached) or not (needs_weights or is_partial):
            return cached
    try:
        return Path(snapshot_download(spec, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are of these kinds
        if cached is not None and not needs_weights:
            return cached
        raise ConversionError(
            f"⟦--base {shlex.quote(spec)}⟧: is not a directory here, and not available from the "
            "Hugging Face hub",
            found=str(error).strip().split("\n", maxsplit=1)[0],
            hint="check the id, log in with `hf auth login`, or pass a directory",
        ) from error


def _from_headers(spec: str, companions: Companions) -> Base | None:
    """Return a base model from the headers of its files on the hub; None if unavailable."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        metadata = get_safetensors_metadata(spec)
    except (OSError, ValueError, NotASafetensorsRepoError, SafetensorsParsingError):
        return None
    files = metadata.files_metadata.values()
    tensors = {name: info for file in files for name, info in file.tensors.items()}
    dtypes = {name: BY_CODE[one.dtype] for name, one in tensors.items() if one.dtype in BY_CODE}
    shapes = {name: tuple(info.shape) for name, info in tensors.items()}
    return Base(spec, file_names(spec, metadata.weight_map), dtypes, shapes, companions)
