"""Finds the files of whole weights in a Hugging Face directory.

An index decides if there is one. Without it, numbered files must be complete, and safetensors come
before torch.save files, as transformers reads them.

Sources: the file name constants of transformers and diffusers, accelerate's
`pytorch_model_fsdp.bin`.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unshard.console import counted
from unshard.containers.json_file import JsonFields, json_object
from unshard.errors import CorruptError, DeltaError, IncompleteError, NotMergeableError
from unshard.read.format import Location, shortened
from unshard.read.hub_files import natural_order, weight_map
from unshard.read.safetensors_shards.names import is_shard_name

_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.(safetensors|bin)")
_INDEX = re.compile(r"(.+)\.(safetensors|bin)\.index\.json")
_KINDS = (
    *(("model", "safetensors"), ("pytorch_model", "bin")),
    *(("diffusion_pytorch_model", "safetensors"), ("diffusion_pytorch_model", "bin")),
)
_ACCELERATE = "pytorch_model_fsdp.bin"
DELTA = "delta_manifest.json"
"""The list of the files of a delta (lmms-engine)."""
_ACCELERATE_MODEL = re.compile(r"pytorch_model_fsdp(_\d+)?\.bin")
_SINGLE = frozenset({*(f"{stem}.{suffix}" for stem, suffix in _KINDS), _ACCELERATE})


@dataclass(frozen=True, slots=True)
class WholeSet:
    """The files of the model.

    Attributes:
        files: in the order of their names, numbers as numbers.
        index: the path of their index, and its content: tensor name -> file name; None without one.
        notes: for the user, about files that were left out.
    """

    files: tuple[Path, ...]
    index: tuple[Path, Mapping[str, str]] | None = None
    notes: tuple[str, ...] = ()


def is_whole_file(name: str) -> bool:
    """Return whether a file of this name has whole weights, or a part of a set of them."""
    return name in _SINGLE or is_part_of_set(name) or bool(_ACCELERATE_MODEL.fullmatch(name))


def is_part_of_set(name: str) -> bool:
    """Return whether a file's name is that of a part of a set, or of its index."""
    return name == DELTA or bool(_numbered_name(name) or _INDEX.fullmatch(name))


def choose_files(location: Location) -> WholeSet:
    """Return the files of the model.

    Raises:
        IncompleteError: files of the set are missing; or a DeltaError.
        NotMergeableError: there are several sets.
        CorruptError: the index is malformed.
    """
    directory, file = location.weights_dir, location.file
    if (manifest := directory / DELTA).is_file():
        raise _delta(directory, json_object(manifest))
    if file is not None:
        return _set_of(file) if is_part_of_set(file.name) else WholeSet((file,))
    for stem, suffix in _KINDS:
        whole = _of_kind(directory, stem, suffix)
        if whole is not None:
            return whole
    models = [p for p in sorted(directory.iterdir()) if _ACCELERATE_MODEL.fullmatch(p.name)]
    if len(models) > 1:
        raise NotMergeableError(
            f"{directory}: has the weights of {len(models)} models",
            found=", ".join(path.name for path in models),
            hint="pass the file of the model that you want",
        )
    if models:
        return WholeSet((models[0],))
    return _only_numbered(directory)


def _of_kind(directory: Path, stem: str, suffix: str) -> WholeSet | None:
    """Return the weights with the usual names: by their index, in one file, or numbered."""
    index, single = directory / f"{stem}.{suffix}.index.json", directory / f"{stem}.{suffix}"
    if index.is_file():
        whole = _by_index(index)
        if single.is_file() and single not in whole.files:
            raise NotMergeableError(
                f"{directory}: has two sets of weights; it is unclear which are meant",
                found=f"{single.name}, and {len(whole.files)} other files in {index.name}",
                hint=f"move one of them elsewhere, or pass {single.name} itself",
            )
        return whole
    if single.is_file():
        return WholeSet((single,))
    return _by_number(directory, stem, suffix)


def _set_of(file: Path) -> WholeSet:
    """Return the set of a numbered file, or of an index."""
    if _INDEX.fullmatch(file.name):
        return _by_index(file)
    match = _numbered_name(file.name)
    stem, suffix = (match[1], match[4]) if match else (file.stem, file.suffix)
    index = file.with_name(f"{stem.removesuffix('.' + suffix)}.{suffix}.index.json")
    if index.is_file() and file in (whole := _by_index(index)).files:
        return whole
    return _by_number(file.parent, stem, suffix) or WholeSet((file,))


def _delta(directory: Path, fields: Mapping[str, object]) -> DeltaError:
    from unshard.read.delta import source_of

    subject = f"{directory}: a delta, not a model: it changes version {fields.get('base_version')}"
    if (step := source_of(directory)[1]) is not None and directory.name.startswith("weight_v"):
        at = shlex.quote(str(directory.parent))
        return DeltaError(subject, hint=f"make it with unshard apply {at} OUTPUT, ⟦--step {step}⟧")
    whole = "pass a whole version, or the checkpoint that the engine has updated"
    return DeltaError(subject, hint=f"{whole}, or make a model with unshard apply")


def _by_index(index: Path) -> WholeSet:
    whole = json_object(index)
    metadata = JsonFields(index, whole).inside("metadata").fields
    if "delta_encoding" in metadata:  # slime, miles; read by SGLang's `pull_weights`
        raise _delta(index.parent, metadata)
    files = weight_map(index, whole)
    names = sorted(set(files.values()), key=natural_order)
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise IncompleteError(
            f"{index}: missing: {len(absent)} of its {counted(len(names), 'file')}",
            expected=shortened(absent, 16),
            hint="the download or the copy was interrupted; fetch the missing files",
        )
    return WholeSet(tuple(index.parent / name for name in names), (index, files))


def _by_number(directory: Path, stem: str, suffix: str) -> WholeSet | None:
    """Return the numbered files with this stem; of several counts, the only complete set."""
    sets = _numbered(directory).get((stem, suffix), {})
    if not sets:
        return None
    whole = {
        count: files for count, files in sets.items() if files.keys() == set(range(1, count + 1))
    }
    if len(sets) > 1 and len(whole) != 1:
        raise NotMergeableError(
            f"{directory}: numbered files of several sets; it is unclear which are meant",
            expected=f"one complete set, or {stem}.{suffix}.index.json",
            found="; ".join(f"{len(files)} of {count}" for count, files in sorted(sets.items())),
            hint="move the stale files elsewhere",
        )
    count, files = next(iter((whole or sets).items()))
    if not whole:
        absent = [number for number in range(1, count + 1) if number not in files]
        if not absent:
            raise CorruptError(
                f"{directory}: shard numbers exceed the total {count} in the file names"
            )
        raise IncompleteError(
            f"{directory}: {len(absent)} of {count} numbered files are missing",
            expected=", ".join(f"{stem}-{n:05d}-of-{count:05d}.{suffix}" for n in absent[:16]),
            found=", ".join(sorted(path.name for path in files.values())[:16]),
            hint="the download or the copy was interrupted; fetch the missing files",
        )
    others = (f"left out {len(sets[n])} stale files of a set of {n}" for n in sets if n != count)
    return WholeSet(
        tuple(path for _, path in sorted(files.items())),
        notes=tuple(f"{directory}: {other}" for other in others),
    )


def _only_numbered(directory: Path) -> WholeSet:
    """Return the numbered files with an unusual stem (a variant), if there is one stem only."""
    kinds = _numbered(directory)
    indices = [path for path in directory.iterdir() if _INDEX.fullmatch(path.name)]
    if len(indices) == 1:
        return _by_index(indices[0])
    if len(kinds) == 1 and not indices:
        ((stem, suffix),) = kinds
        if whole := _by_number(directory, stem, suffix):
            return whole
    raise NotMergeableError(
        f"{directory}: no weights have a usual name, and several have an unusual name",
        expected=", ".join(sorted(_SINGLE)),
        found=", ".join([f"{stem}-….{suffix}" for stem, suffix in kinds]) or "none",
        hint="pass one file of the right set",
    )


def _numbered(directory: Path) -> dict[tuple[str, str], dict[int, dict[int, Path]]]:
    """Return all numbered files: (stem, suffix) -> count -> number -> path."""
    kinds: dict[tuple[str, str], dict[int, dict[int, Path]]] = {}
    for path in sorted(directory.iterdir()):
        if match := _numbered_name(path.name):
            sets = kinds.setdefault((match[1], match[4]), {})
            sets.setdefault(int(match[3]), {})[int(match[2])] = path
    return kinds


def _numbered_name(name: str) -> re.Match[str] | None:
    """Return the parts of a numbered file's name; shards of single ranks are another format."""
    return None if is_shard_name(name) else _NUMBERED.fullmatch(name)
