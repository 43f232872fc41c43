"""From a path to a checked catalog: the one entrance to this room."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unshard.errors import (
    CorruptError,
    IncompleteError,
    NotMergeableError,
    UnknownFormatError,
    raise_all,
)
from unshard.read.check import check
from unshard.read.companions import find_companions
from unshard.read.discover import Location, Request, discover
from unshard.read.plain_tensors import resolve_plain
from unshard.read.rank_files import Draft, Gathering, rank_file_name, rank_files
from unshard.read.workers import read_rank_files
from unshard.tensors.catalog import Catalog, TensorEntry

__all__ = ["Checkpoint", "ReadOptions", "open_latest"]

_FORMAT = "FSDP rank files"
_TRAINING_STATE = ("optim_world_size_*", "extra_state_world_size_*")
_LMMS_STATE = ("optimizer/*.pt", "extra_state/*.pt", "dataloader_state/*.pt")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a checkpoint.

    Attributes:
        config: the user's own config, a file or a directory.
        assume_dim0: take plain tensors that differ between ranks as shards along dimension 0.
        allowed_globals: tensor subclasses to read as the plain tensors they store.
        processes: how many processes may read, where there is much to read.
    """

    config: Path | None = None
    assume_dim0: bool = False
    allowed_globals: frozenset[str] = frozenset()
    processes: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A catalog and the place it was read from."""

    location: Location
    catalog: Catalog


def open_latest(path: Path, request: Request, options: ReadOptions) -> Checkpoint:
    """Read the checkpoint that a path means: of several, the highest complete step.

    Raises:
        CheckpointError: see `discover`, and the reader of the format.
    """
    locations = discover(path, request)
    passed_over: list[IncompleteError] = []
    for location in locations:
        try:
            catalog = _read(location, options, [str(error) for error in passed_over])
        except IncompleteError as error:
            passed_over.append(error)
        else:
            return Checkpoint(location, catalog)
    raise_all(IncompleteError, f"{path}: no step is complete", passed_over)
    raise UnknownFormatError(f"{path}: no checkpoint")


def _read(location: Location, options: ReadOptions, passed_over: Sequence[str]) -> Catalog:
    directory = location.weights_dir
    world, files, notes = _choose_world(directory)
    paths = tuple(files.values())
    gathered = Gathering()
    for table in read_rank_files(
        list(files.items()), allowed=options.allowed_globals, processes=options.processes
    ):
        gathered.add(table)
    plain = [draft for draft in gathered.drafts.values() if draft.kind.sharding is None]
    resolved = resolve_plain(plain, paths, assume_dim0=options.assume_dim0)
    names = _name_problems(gathered, files)
    summary = f"{directory}: the rank files cannot be merged"
    raise_all(NotMergeableError, summary, [*gathered.problems, *names, *resolved.problems])
    missing = tuple(rank for rank in range(world) if rank not in files)
    notes += [
        *(f"passed over an incomplete step: {error}" for error in passed_over),
        *resolved.notes,
    ]
    if missing:
        notes.append(f"ranks {', '.join(map(str, missing))} are missing; replicas hold their part")
    catalog = Catalog(
        roots=(directory,),
        format=_FORMAT,
        writer=_writer(location),
        step=location.step,
        world_size=world,
        tensors={
            name: resolved.entries.get(name) or _entry(draft, paths)
            for name, draft in gathered.drafts.items()
        },
        skipped=tuple(gathered.skipped.values()),
        companions=find_companions(location, options.config),
        training_state=_training_state(location),
        missing=tuple(directory / rank_file_name(world, rank) for rank in missing),
        missing_ranks=missing,
        notes=tuple(notes),
    )
    check(catalog)
    return catalog


def _entry(draft: Draft, paths: tuple[Path, ...]) -> TensorEntry:
    return TensorEntry(
        draft.fqn, draft.kind.dtype, draft.kind.shape, draft.rows.table(paths), draft.kind.sharding
    )


def _choose_world(directory: Path) -> tuple[int, dict[int, Path], list[str]]:
    """Return the world size whose files are meant, those files, and what to say of the others.

    Files of another world size are left by a resumed run. `fsdp_config.json` decides where it is;
    else the only complete set.
    """
    found = rank_files(directory)
    stated = _stated_world(directory)
    if stated is not None and stated not in found:
        raise IncompleteError(
            f"{directory}: no rank files of the world size that fsdp_config.json states",
            expected=f"{rank_file_name(stated, 0)} and the others",
            found=", ".join(f"files of world size {world}" for world in found),
        )
    if stated is not None:
        world = stated
    elif len(found) == 1:
        world = next(iter(found))
    else:
        complete = [world for world, files in found.items() if len(files) == world]
        if len(complete) != 1:
            sets = "; ".join(f"{len(files)} of {world} ranks" for world, files in found.items())
            raise NotMergeableError(
                f"{directory}: rank files of several world sizes, and nothing says which are meant",
                expected="one complete set, or fsdp_config.json",
                found=sets,
                hint="move the stale files elsewhere",
            )
        world = complete[0]
    notes = [
        f"{directory}: left out {len(files)} stale rank files of world size {other}"
        for other, files in found.items()
        if other != world
    ]
    if any(rank >= world for rank in found[world]):
        raise CorruptError(f"{directory}: rank {max(found[world])} of world size {world}")
    return world, found[world], notes


def _stated_world(directory: Path) -> int | None:
    """Return the world size that verl's fsdp_config.json states; None without the file."""
    path = directory / "fsdp_config.json"
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptError(f"{path}: not valid JSON: {error}") from error
    world = fields.get("world_size") if isinstance(fields, dict) else None
    return world if isinstance(world, int) else None


def _name_problems(gathered: Gathering, files: dict[int, Path]) -> list[CorruptError]:
    """Every rank saves every name in this format; say which ranks lack which."""
    lacking: dict[int, list[str]] = {}
    contradicted = {str(problem).split(":")[0] for problem in gathered.problems}
    for name, draft in gathered.drafts.items():
        if len(draft.ranks) == len(files) or f"tensor {name}" in contradicted:
            continue
        have = set(draft.ranks)
        for rank in files:
            if rank not in have:
                lacking.setdefault(rank, []).append(name)
    return [
        CorruptError(
            f"{files[rank].name}: lacks {len(names)} tensors that other ranks have",
            found=f"no {', '.join(names[:5])}{' …' if len(names) > 5 else ''}",
        )
        for rank, names in lacking.items()
    ]


def _writer(location: Location) -> str:
    directory = location.weights_dir
    if directory.name in ("pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0"):
        return "lmms-engine"
    marks = ("fsdp_config.json", "huggingface", "optim_world_size_*", "extra_state_world_size_*")
    if location.role or any(next(directory.glob(mark), None) for mark in marks):
        return "verl"
    return "unknown"


def _training_state(location: Location) -> tuple[Path, ...]:
    patterns = [(location.weights_dir, pattern) for pattern in _TRAINING_STATE]
    patterns += [(location.step_dir, pattern) for pattern in _LMMS_STATE]
    return tuple(sorted({p for folder, pattern in patterns for p in folder.glob(pattern)}))
