"""Reader for FSDP rank files: one torch.save file per rank.

`model_world_size_W_rank_R.pt` of verl and lmms-engine, where the name has the world size; and
`pytorch_model_fsdp[_I]_rankR.bin` of accelerate, where only the tensors have it. I is the number of
the model. They hold DTensors (FSDP2; FSDP1 on a device mesh), ShardedTensors (FSDP1 without one),
or plain tensors.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unshard.console import counted
from unshard.containers.json_file import JsonFields, json_object
from unshard.errors import CorruptError, IncompleteError, NotMergeableError, UsageError
from unshard.read.format import Format, Location, ReadOptions, ReshardFormat, files_in, shortened
from unshard.read.rank_files.copies import catalog_of
from unshard.read.torch_save.gathering import Gathering
from unshard.read.torch_save.template_reader import read_rank_files
from unshard.read.tree import Tree
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.with_notes import WithNotes

if TYPE_CHECKING:
    from unshard.read.optimizer_state import SavedState

_NAMED = re.compile(r"model_world_size_(?P<world>\d+)_rank_(?P<rank>\d+)\.pt")
_UNNAMED = re.compile(r"pytorch_model_fsdp(?:_(?P<model>\d+))?_rank(?P<rank>\d+)\.bin")
_RANK_FILE = re.compile(r".*world_size_(\d+)_rank_(\d+)\.\w+")
_COSMOS_RL = re.compile(r"model_rank_(?P<rank>\d+)\.pth")
_COSMOS_CONFIG = "cosmos_config"
_SIBLINGS = re.compile(
    r"(?:optim|optimizer|extra_state|data|dataloader_state)_(?:world_size_)?.*\.pt"
    r"|optimizer_\d+_rank.*"
)
_TRAINING_STATE = ("optim_world_size_*", "extra_state_world_size_*", "optimizer_*_rank*.bin")
_LMMS_STATE = ("optimizer/*.pt", "extra_state/*.pt", "dataloader_state/*.pt")


class _FileSet(NamedTuple):
    """The files of one save.

    Attributes:
        label: its difference from other sets: "world size 4", "model 0".
        files: rank -> path, ascending.
        world_size: from the names; None if they do not have it.
    """

    label: str
    files: dict[int, Path]
    world_size: int | None

    @property
    def is_complete(self) -> bool:
        return self.world_size is None or len(self.files) == self.world_size


def _is_rank_file(name: str) -> bool:
    patterns = (_NAMED, _UNNAMED, _COSMOS_RL)
    return any(pattern.fullmatch(name) for pattern in patterns)


def _holds(tree: Tree, directory: Path) -> bool:
    """Return whether a directory has rank files; cosmos-rl's names alone are too plain to tell."""
    inside = tree.inside(directory).items()
    return any(_is_rank_file(name) and _claims(tree, path) for name, path in inside)


def _claims(tree: Tree, path: Path) -> bool:
    if _COSMOS_RL.fullmatch(path.name):
        return tree.is_file(path.with_name(_COSMOS_CONFIG))
    return _is_rank_file(path.name) or bool(_SIBLINGS.fullmatch(path.name))


def _read(location: Location, options: ReadOptions) -> Catalog:
    chosen, notes = _choose(location)
    gathered = Gathering()
    recorded = 1
    for table in read_rank_files(list(chosen.files.items()), options.allowed_globals):
        gathered.add(table)
        recorded = max(recorded, table.world_size)
    world = chosen.world_size or max(recorded, *chosen.files, 0)
    gathered.problems += _name_problems(gathered, chosen.files)
    catalog = catalog_of(gathered, chosen.files, world, location, options, _trained)
    return replace(
        catalog,
        writer=_writer(location),
        training_state=_training_state(location),
        notes=(*notes, *catalog.notes),
    )


def ranks_in(folder: Path) -> dict[int, set[int]]:
    """Return the ranks whose files are in a folder, by world size."""
    worlds: dict[int, set[int]] = {}
    for match in (_RANK_FILE.fullmatch(path.name) for path in folder.iterdir()):
        if match is not None:
            worlds.setdefault(int(match[1]), set()).add(int(match[2]))
    return worlds


def missing_rank(folder: Path, worlds: Mapping[int, set[int]]) -> str | None:
    """Return the rank whose file a folder lacks, or the file in it that is not finished."""
    from unshard.read.unfinished import why_folder_unfinished

    for world, present in worlds.items():
        missing = sorted(set(range(world)) - present)
        if missing:
            return f"{folder.name}: rank {missing[0]} of {world} is missing"
    return why_folder_unfinished(folder)


def _reshard_format(location: Location, catalog: Catalog) -> ReshardFormat | None:
    first = next(iter(catalog.tensors.values())).chunks.paths[0]
    if not _NAMED.fullmatch(first.name):
        return None
    is_lmms = location.weights_dir.name.startswith("pytorch_model_fsdp_")
    return ReshardFormat.LMMS if is_lmms else ReshardFormat.VERL


def _read_optimizer(location: Location, world: int, options: ReadOptions) -> "SavedState | None":
    from unshard.read.rank_files.optimizer import read_optimizer

    return read_optimizer(location, world, options)


def _trained(location: Location, world: int, tensors: Mapping[str, TensorEntry]) -> Collection[str]:
    from unshard.read.rank_files.optimizer import trained_parameters

    return trained_parameters(location, world, tensors)


RANK_FILES = Format(
    "FSDP rank files",
    _holds,
    _read,
    _claims,
    missing=lambda location: missing_rank(location.weights_dir, ranks_in(location.weights_dir)),
    optimizer=_read_optimizer,
    reshard_format=_reshard_format,
)


def _choose(location: Location) -> WithNotes[_FileSet]:
    """Return the set of files to read, with notes about the others.

    A resumed run leaves files of another world size. `fsdp_config.json` decides if it is there;
    else the only complete set.
    """
    sets = list(_sets(files_in(location.roots, _is_rank_file)))
    if not sets:
        raise IncompleteError(
            f"{location.weights_dir}: is empty: this run saved no {location.weights} weights "
            "at this step"
        )
    world = _recorded_world(location)
    name = location.file.name if location.file else None
    if world is not None:
        candidates = [own for own in sets if own.world_size == world]
    elif name is not None and len(sets) > 1 and _is_rank_file(name):
        candidates = [own for own in sets if any(p.name == name for p in own.files.values())]
    else:
        candidates = [own for own in sets if own.is_complete] if len(sets) > 1 else sets
    if world is not None and not candidates:
        raise IncompleteError(
            f"{location.weights_dir}: no rank files of the world size in fsdp_config.json",
            expected=f"model_world_size_{world}_rank_0.pt and the others",
            found=", ".join(f"files of {own.label}" for own in sets),
        )
    if len(candidates) != 1:
        raise _ambiguous(location.weights_dir, sets)
    (chosen,) = candidates
    if chosen.world_size is not None and max(chosen.files) >= chosen.world_size:
        raise CorruptError(
            f"{location.weights_dir}: rank {max(chosen.files)} of world size {chosen.world_size}"
        )
    notes = (
        f"{location.weights_dir}: left out {counted(len(own.files), 'stale rank file')} "
        f"of {own.label}"
        for own in sets
        if own is not chosen
    )
    return WithNotes(chosen, tuple(notes))


def _sets(paths: Iterable[Path]) -> Iterable[_FileSet]:
    named: dict[int, dict[int, Path]] = defaultdict(dict)
    unnamed: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in paths:
        if match := _NAMED.fullmatch(path.name):
            named[int(match["world"])][int(match["rank"])] = path
        elif match := _UNNAMED.fullmatch(path.name):
            unnamed[int(match["model"] or 0)][int(match["rank"])] = path
        elif match := _COSMOS_RL.fullmatch(path.name):
            unnamed[0][int(match["rank"])] = path
    for world, files in sorted(named.items()):
        yield _FileSet(f"world size {world}", dict(sorted(files.items())), world)
    for model, files in sorted(unnamed.items()):
        yield _FileSet(f"model {model}", dict(sorted(files.items())), None)


def _ambiguous(directory: Path, sets: list[_FileSet]) -> Exception:
    if any(own.world_size is None for own in sets):
        return UsageError(
            f"{directory}: has the files of several models",
            found=", ".join(own.label for own in sets),
            hint="pass one file of the model that you want, instead of the directory",
        )
    return NotMergeableError(
        f"{directory}: rank files of several world sizes; it is unclear which are meant",
        expected="one complete set, or fsdp_config.json",
        found="; ".join(f"{len(own.files)} of {own.world_size} ranks" for own in sets),
        hint="move the stale files elsewhere",
    )


def _recorded_world(location: Location) -> int | None:
    """Return the world size in verl's fsdp_config.json; None without the file."""
    for root in location.roots:
        path = root / "fsdp_config.json"
        if path.is_file():
            return JsonFields(path, json_object(path)).count("world_size")
    return None


def _name_problems(gathered: Gathering, files: dict[int, Path]) -> list[CorruptError]:
    """Return an error for each rank that lacks names: in this format, every rank saves all."""
    lacking: dict[int, list[str]] = {}
    contradicted = {problem.subject.split(":")[0] for problem in gathered.problems}
    for name, ranks in gathered.lacking().items():
        for rank in ranks if f"tensor {name}" not in contradicted else ():
            lacking.setdefault(rank, []).append(name)
    return [
        CorruptError(
            f"{files[rank].name}: lacks {counted(len(names), 'tensor')} that other ranks have",
            found=f"no {shortened(names)}",
        )
        for rank, names in lacking.items()
    ]


def _writer(location: Location) -> str:
    directory = location.weights_dir
    if next(directory.glob("pytorch_model_fsdp*_rank*.bin"), None):
        return "accelerate"
    if directory.name in ("pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0"):
        return "lmms-engine"
    if (directory / _COSMOS_CONFIG).is_file():
        return "cosmos-rl"
    marks = ("fsdp_config.json", "huggingface", "optim_world_size_*", "extra_state_world_size_*")
    if directory.name in {"actor", "critic"} or any(
        next(directory.glob(mark), None) for mark in marks
    ):
        return "verl"
    return "unknown"


def _training_state(location: Location) -> tuple[Path, ...]:
    patterns = [(root, pattern) for root in location.roots for pattern in _TRAINING_STATE]
    patterns += [(location.step_dir, pattern) for pattern in _LMMS_STATE]
    return tuple(sorted({p for folder, pattern in patterns for p in folder.glob(pattern)}))
