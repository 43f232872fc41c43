"""`reshard`: the files of ranks, for another number of ranks."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Unpack

from unshard.api.making import warn
from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.containers.torch_files.dtensors import VERSIONS, Version
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.writer import write_torch_file
from unshard.engines.threads import run_plan, verify_full
from unshard.errors import NotMergeableError, OutputError, UsageError
from unshard.keywords import ReshardKeywords
from unshard.plan.planner import make_plan
from unshard.plan.resharding import (
    RankFile,
    RankTensors,
    Resharded,
    lay_out_ranks,
    meshes_of,
    optimizer_value,
)
from unshard.progress import Chosen, Listener, Stage
from unshard.read.open import Checkpoint, open_latest
from unshard.read.optimizer.rank_files import find_files
from unshard.read.optimizer.reader import find_optimizer
from unshard.read.optimizer.state import split_name
from unshard.read.rank_files.reader import RANK_FILES
from unshard.read.training_state.plain_values import plain_values
from unshard.read.training_state.reader import find_state_files
from unshard.showing import hearing
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.tensors.placements import DeviceMesh
from unshard.write.sealing import seal
from unshard.write.staging.stage import Staging
from unshard.write.staging.targets import refuse_sources

__all__ = ["ReshardReport", "reshard"]

_NUMBERS = re.compile(r"world_size_\d+_rank_\d+")
_FSDP_CONFIG = "fsdp_config.json"


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What a reshard has made.

    Attributes:
        output: the directory.
        source: the directory of the source's weights.
        world_size, mesh, mesh_names: of the output.
        torch: the version of torch whose pickles were written.
        files: size of each file with tensors, bytes, by its path.
        others: the paths of all other files.
        tensors, optimizer_tensors: how many there are of the model and of the optimizer.
        bytes_written: of all files with tensors.
        seconds: how long it took.
        notes: what a user should know.
    """

    output: str
    source: str
    world_size: int
    mesh: tuple[int, ...]
    mesh_names: tuple[str, ...]
    torch: str
    files: Mapping[str, int]
    others: tuple[str, ...]
    tensors: int
    optimizer_tensors: int
    bytes_written: int
    seconds: float
    notes: tuple[str, ...]


@accepting(ReshardKeywords)
def reshard(
    checkpoint: str | Path,
    output: str | Path,
    *,
    world_size: int,
    mesh: Sequence[int] | None = None,
    mesh_names: Sequence[str] | None = None,
    torch: str = "2.13",
    listener: Listener | None = None,
    **options: Unpack[ReshardKeywords],
) -> ReshardReport:
    """Write a checkpoint of rank files (verl, lmms-engine) for another number of ranks.

    Model, optimizer, scheduler and random state are written in the format they came in, under the
    same names, so the trainer resumes from the output. Tensors stay bit for bit the same, and are
    cut along the dimension along which they were cut. The output appears by one rename, complete
    and verified, or not at all.

    Args:
        checkpoint: as for `merge`.
        output: the directory to make, in place of the one that has the weights (verl's `actor`).
        world_size: the number of ranks to write for.
        mesh: sizes of the device mesh; the last dimension shards, the others replicate. Default:
            one dimension of `world_size`.
        mesh_names: names of its dimensions; default: those of the checkpoint's mesh.
        torch: the version of torch that is to read it: 2.4, 2.6, 2.8, 2.10 or 2.13.
        listener: as for `merge`.

    Keyword Args:
        role: as for `merge`; an output has one role.
        step: which step of a directory with several.
        verify: "light" (the output is read again, and has the tensors of the checkpoint), "full"
            (also checksums, replicas, and every byte), or "off".
        workers: threads; default: as many as the machine has cores, at most 8.
        memory: bound on all buffers together, bytes or "64MB".

    Raises:
        UnshardError: one of the tree in `unshard.errors`; nothing of the output is left then.
    """
    started = time.monotonic()
    chosen = MergeOptions(**options)
    with hearing(listener) as heard:
        source = _read(given_path(checkpoint, "the checkpoint"), chosen, heard)
        target = _Target.of(source, world_size, mesh, mesh_names, torch)
        report = _write(source, target, given_output(output), chosen, heard)
    return replace(report, seconds=round(time.monotonic() - started, 3))


@dataclass(frozen=True, slots=True)
class _Target:
    """What to write for: the mesh as each rank sees it, and the version of torch."""

    meshes: Sequence[DeviceMesh]
    torch: str

    @property
    def version(self) -> Version:
        return VERSIONS[self.torch]

    @classmethod
    def of(
        cls,
        source: Checkpoint,
        world_size: int,
        mesh: Sequence[int] | None,
        mesh_names: Sequence[str] | None,
        torch: str,
    ) -> "_Target":
        """Return the target that the options mean.

        Raises:
            UsageError: they do not fit.
        """
        if torch not in VERSIONS:
            raise UsageError(f"--torch {torch}: unknown", expected=", ".join(VERSIONS))
        shape = (world_size,) if mesh is None else tuple(mesh)
        if world_size < 1 or min(shape, default=0) < 1 or prod(shape) != world_size:
            sizes = "x".join(map(str, shape))
            raise UsageError(f"--mesh {sizes} has not --world-size {world_size} ranks")
        known = _mesh_of(source)
        names = tuple(mesh_names or known.dim_names or ("fsdp",))
        if mesh_names is None:
            names = names[-len(shape) :]
        if len(names) != len(shape):
            what = f"--mesh-names {','.join(names)}: {len(names)} names for {len(shape)} dimensions"
            raise UsageError(what, hint="give one name per dimension of --mesh: --mesh-names A,B")
        return cls(meshes_of(shape, names, known.device_type or "cuda"), torch)


def _mesh_of(source: Checkpoint) -> DeviceMesh:
    """Return the mesh of a checkpoint's tensors; one of most dimensions, if there are several."""
    found = [one.sharding.mesh for one in source.catalog.tensors.values() if one.sharding]
    if not found:
        raise NotMergeableError(
            f"{source.location.weights_dir}: its tensors are not DTensors",
            expected="rank files of FSDP2, or of FSDP1 with a device mesh",
            hint="FSDP1's ShardedTensors cannot be loaded on another number of ranks; merge the "
            "checkpoint instead",
        )
    return max(found, key=lambda mesh: len(mesh.shape))


def _read(path: Path, options: MergeOptions, listener: Listener) -> Checkpoint:
    listener(Stage("reading"))
    source = open_latest(path, options.choice, options.reading)
    first = next(iter(source.catalog.tensors.values())).chunks.paths[0]
    if source.location.format is not RANK_FILES or not _NUMBERS.search(first.name):
        raise NotMergeableError(
            f"{first}: is {source.catalog.format}",
            expected="rank files, such as model_world_size_4_rank_0.pt",
            hint="torch loads a DCP checkpoint on any number of ranks as it is",
        )
    for entry in source.catalog.tensors.values():
        if entry.sharding is None and (entry.chunks.sizes != entry.shape).any():
            raise NotMergeableError(
                f"tensor {entry.fqn}: every rank has another part of it, and no device mesh",
                expected="a DTensor, or a tensor that every rank has whole",
            )
    listener(Chosen(f"resharding {source.title}"))
    return replace(source, optimizer=find_optimizer(source, options.reading))


def _write(
    source: Checkpoint,
    target: _Target,
    output: Path,
    options: MergeOptions,
    listener: Listener,
) -> ReshardReport:
    files = _Files.of(source)
    made = lay_out_ranks([*_rank_files(source, target, files)], target.version)
    plan, locations = make_plan(made.layout), source.location
    entries = source.catalog.tensors.values()
    refuse_sources(output, {path for one in entries for path in one.chunks.paths})
    stage = Staging(
        output,
        plan.bytes_written + sum(one.stat().st_size for one in files.small.values()) * 2,
        sources=[locations.step_dir, *locations.roots],
        names=[file.filename for file in made.layout.files],
    )
    with stage:
        for file in made.layout.files:
            (stage.directory / file.filename).parent.mkdir(parents=True, exist_ok=True)
        listener(Stage("writing", sum(one.data_bytes for one in made.layout.files)))
        run_plan(plan, stage.directory, options.resources, listener)
        listener(Stage("sealing"))
        share = options.resources
        seal(made, stage.directory, workers=share.workers, buffer_bytes=share.memory_bytes)
        notes, others = _add_files(source, target, files, stage.directory)
        if options.verify != "off":
            _verify(source, made, stage.directory, options, listener)
        listener(Stage("committing"))
        notes += stage.commit()
    return _report(source, target, output, made, others, warn(listener, notes))


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a checkpoint, by their paths below its root.

    Attributes:
        root: the directory that has all of them.
        model, optimizer: the file of a rank; the optimizer's is None if there is none.
        extra: of each rank, the file with its scheduler and random state.
        small: all others that belong to it.
    """

    root: Path
    model: Path
    optimizer: Path | None
    extra: Mapping[int, Path]
    small: Mapping[str, Path]

    @classmethod
    def of(cls, source: Checkpoint) -> "_Files":
        location, world = source.location, source.catalog.world_size
        model = next(iter(source.catalog.tensors.values())).chunks.paths[0]
        optimizer = next(iter(find_files(location, world).values()), None)
        state = find_state_files(location, world)
        ranks = {} if state is None else state.ranks
        extra = {rank: path for rank, path in ranks.items() if _NUMBERS.search(path.name)}
        found = [model, *extra.values(), *([] if optimizer is None else [optimizer])]
        near = all(path.parent == location.weights_dir for path in found)
        root = location.weights_dir if near else location.step_dir
        own = source.companions
        config = [] if own.config is None else [own.config]
        others = [*config, *own.files.values(), root / _FSDP_CONFIG]
        small = {
            str(path.relative_to(root)): path
            for path in others
            if path.is_relative_to(root) and path.is_file()
        }
        return cls(root, model, optimizer, extra, small)

    def renamed(self, path: Path, world: int, rank: int) -> str:
        """Return the path in the output of what a rank has in place of a file."""
        name = _NUMBERS.sub(f"world_size_{world}_rank_{rank}", path.name)
        return str(path.relative_to(self.root).with_name(name))


def _report(  # noqa: PLR0917 (all that was made)
    source: Checkpoint,
    target: _Target,
    output: Path,
    made: Resharded,
    others: Sequence[str],
    notes: Sequence[str],
) -> ReshardReport:
    mesh = target.meshes[0]
    return ReshardReport(
        output=str(output),
        source=str(source.location.weights_dir),
        world_size=len(target.meshes),
        mesh=mesh.shape,
        mesh_names=mesh.dim_names or (),
        torch=target.torch,
        files={file.filename: file.size for file in made.layout.files},
        others=tuple(others),
        tensors=len(source.catalog.tensors),
        optimizer_tensors=sum(len(one.tensors) for one in source.catalogs[1:]),
        bytes_written=sum(file.size for file in made.layout.files),
        seconds=0.0,
        notes=tuple(notes),
    )


def _rank_files(source: Checkpoint, target: _Target, files: _Files) -> Iterator[RankFile]:
    """Yield the files of all ranks, those of the model first."""
    world = len(target.meshes)
    for rank, mesh in enumerate(target.meshes):
        tensors = RankTensors(target.version, mesh)
        weights = {name: tensors.make(one) for name, one in source.catalog.tensors.items()}
        yield RankFile(files.renamed(files.model, world, rank), weights, tensors)
    state = source.optimizer
    if state is None or files.optimizer is None:
        return
    if sorted(state.numbers.values()) != list(range(len(state.numbers))) or not state.numbers:
        raise NotMergeableError(
            f"{files.optimizer}: not all of its parameters have a number and a name",
            hint="reshard a checkpoint without LoRA or frozen parameters",
        )
    entries: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in state.catalog.tensors.items():
        parameter, key = split_name(name)
        entries.setdefault(parameter, {})[key] = entry
    groups = [(group.params, group.values) for group in state.groups]
    for rank, mesh in enumerate(target.meshes):
        tensors = RankTensors(target.version, mesh)
        value = optimizer_value(tensors, entries, state.values, groups, state.numbers)
        yield RankFile(files.renamed(files.optimizer, world, rank), value, tensors)


def _add_files(
    source: Checkpoint, target: _Target, files: _Files, directory: Path
) -> tuple[list[str], list[str]]:
    """Write what has no tensors of the model; return notes, and the paths of what was written."""
    world, before = len(target.meshes), source.catalog.world_size
    notes, written = [], []
    for name, path in files.small.items():
        data = path.read_bytes()
        if path.name == _FSDP_CONFIG:
            data = re.sub(rb'("world_size"\s*:\s*)\d+', rb"\g<1>%d" % world, data)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
        written.append(name)
    if files.extra and world != before:
        notes.append(
            f"the random state of {before} ranks has no equivalent on {world}: rank R gets that of "
            f"rank R modulo {before}, so random numbers will not be those of the same run on "
            f"{before} ranks"
        )
    for rank in range(world if files.extra else 0):
        file = files.extra.get(rank % before)
        if file is None:
            notes.append(f"rank {rank} gets no scheduler and random state: the file is missing")
            continue
        found = plain_values(read_torch_file(file))
        if found.notes and not rank:
            notes.append(f"{file.name}: left out {', '.join(found.notes)}")
        name = files.renamed(file, world, rank)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_torch_file(directory / name, found.value)
        written.append(name)
    skipped = [one.fqn for one in source.catalog.skipped]
    if skipped:
        notes.append(f"left out of the model: {', '.join(skipped[:5])} (not tensors)")
    return notes, written


def _verify(
    source: Checkpoint,
    made: Resharded,
    directory: Path,
    options: MergeOptions,
    listener: Listener,
) -> None:
    """Read the output again from disk, and compare it with the source."""
    full = options.verify == "full"
    listener(Stage("verifying", sum(one.data_bytes for one in made.layout.files) if full else 0))
    weights = (directory / made.layout.files[0].filename).parent
    again = open_latest(weights, replace(options.choice, step=None, role=None), options.reading)
    _compare(source.catalog, again.catalog, directory)
    catalogs = list(source.catalogs)
    if source.optimizer is not None:
        optimizer = find_optimizer(again, options.reading)
        if optimizer is None or optimizer.numbers != source.optimizer.numbers:
            raise OutputError(f"{directory}: the optimizer's state is not what was planned")
        _compare(source.optimizer.catalog, optimizer.catalog, directory)
        catalogs.append(optimizer.catalog)
    if full:
        catalogs.append(again.catalog)
        verify_full(make_plan(made.layout), catalogs, directory, options.resources, listener)


def _compare(ours: Catalog, theirs: Catalog, directory: Path) -> None:
    both = (ours.tensors, theirs.tensors)
    stated = [{name: (one.dtype, one.shape) for name, one in table.items()} for table in both]
    if stated[0] != stated[1]:
        raise OutputError(f"{directory}: its tensors are not those of the source")
