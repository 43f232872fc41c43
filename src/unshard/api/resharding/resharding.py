"""`reshard`: the flow from a checkpoint to the files of another number of ranks."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Unpack

from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.api.resharding.beside import add_beside, carried_with_dcp, carried_with_ranks, open_ema
from unshard.api.resharding.checking import check_output
from unshard.api.resharding.dcp import saved_again, saved_anew
from unshard.api.resharding.formats import format_of, keeps_keys, wanted_format
from unshard.api.resharding.placing import placed, placed_again, unplaced
from unshard.api.resharding.ranks import SourceFiles, files_for, files_of_ranks, is_fsdp1
from unshard.api.resharding.target import Target
from unshard.api.resharding.training import Training, made_anew, read_training
from unshard.api.resharding.writing import Writing
from unshard.api.sources import Sources, inflated
from unshard.containers.file_states import noting
from unshard.engines.crew import engine_for
from unshard.errors import NotMergeableError, OutputError, UsageError
from unshard.keywords import ReshardKeywords
from unshard.plan.dcp_resharding import lay_out_directories
from unshard.plan.identity import digest_of
from unshard.plan.planner import make_plan
from unshard.plan.resharding import lay_out_ranks
from unshard.progress import Chosen, Listener, Stage, warn
from unshard.read.format import ReshardFormat
from unshard.read.open import Checkpoint, open_latest
from unshard.read.optimizer.reader import find_kept, find_optimizer
from unshard.read.wrapper_names import REMOVED
from unshard.showing import hearing
from unshard.stores.remote_path import RemotePath
from unshard.write.sealing import seal
from unshard.write.stage import WorkDigests
from unshard.write.staging.stage import Staging
from unshard.write.staging.targets import refuse_sources
from unshard.write.verification.output import without_checksums


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What a reshard has made.

    Attributes:
        output: the directory.
        source: the directory of the source's weights.
        world_size: of the output.
        format: of the output: "verl", "lmms", "dcp" or "accelerate".
        mesh, mesh_names: of the tensors in files of ranks; empty for DCP.
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
    format: str
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
    to: str | None = None,
    mesh: Sequence[int] | None = None,
    mesh_names: Sequence[str] | None = None,
    device: str | None = None,
    torch: str = "2.13",
    listener: Listener | None = None,
    **options: Unpack[ReshardKeywords],
) -> ReshardReport:
    """Write a checkpoint for another number of ranks, or in another format, to resume from it.

    Model, optimizer, scheduler and random state are written, of a model of the hub the model alone.
    Tensors stay bit for bit the same, and are cut along the dimension along which they were cut, or
    else the first. The output appears by one rename, complete and verified, or not at all.

    Args:
        checkpoint: as for `merge`.
        output: the directory to make, in place of the one that has the weights (verl's `actor`).
        world_size: the number of ranks to write for.
        to: the format to write: "verl" or "lmms", the files of ranks of verl and lmms-engine;
            "dcp", one directory for `dcp.load` with `{"model": …, "optimizer": …}`; "accelerate",
            what its `load_state` loads. Default: the one the checkpoint is in, where the names in
            DCP stay as they are.
        mesh: sizes of the device mesh; the last dimension shards, the others replicate. Default:
            one dimension of `world_size`. Only for files of ranks.
        mesh_names: names of its dimensions; default: those of the checkpoint's mesh.
        device: the type of the ranks' devices, which torch compares with that of the model's mesh:
            "cuda", "cpu", "npu" and the like; default: that of the checkpoint's mesh, or "cuda".
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
    goal = given_output(output)
    if isinstance(goal, RemotePath):
        raise UsageError(
            f"{goal}: a reshard is written to a disk, and this is in an object store",
            hint="give a directory, and copy it into the store when it is complete",
        )
    with hearing(listener) as heard:
        heard(Stage("reading"))
        path = given_path(checkpoint, "the checkpoint")
        source = open_latest(path, chosen.choice, chosen.reading)
        heard(Chosen(f"resharding {source.title}"))
        kind = wanted_format(source, to)
        if kind.is_dcp and (mesh, mesh_names, device) != (None, None, None):
            what = "--mesh, --mesh-names and --device exclude DCP, which is loaded on any mesh"
            raise UsageError(what, hint="leave them out")
        with ExitStack() as stack:
            with noting(source.states):
                source = _prepared(source, kind, world_size, chosen, stack)
                target = Target.of(source, world_size, mesh, mesh_names, device, torch)
                writing = _writing(source, target, kind, goal, stack)
            add_beside(source, writing)
            for path in writing.others.copied.values():
                source.states.add(path)
            notes = _write(source, writing, kind, goal, chosen, heard)
    seconds = round(time.monotonic() - started, 3)
    return _report(source, target, kind, goal, writing, notes, seconds)


def _prepared(
    source: Checkpoint,
    kind: ReshardFormat,
    world_size: int,
    options: MergeOptions,
    stack: ExitStack,
) -> Checkpoint:
    """Return a checkpoint with its optimizer's state, placed as the format needs it."""
    keeps = keeps_keys(source, kind)
    find = find_kept if keeps else find_optimizer
    # What DCP has is written again without knowing what it is.
    with suppress(*[NotMergeableError] if kind.is_dcp and kind is format_of(source) else []):
        source = replace(source, optimizer=find(source, options.reading))
    return placed_again(source, world_size) if keeps else placed(inflated(source, stack))


def _write(  # noqa: PLR0917 (what is read, and what is made of it)
    source: Checkpoint,
    writing: Writing,
    kind: ReshardFormat,
    output: Path,
    options: MergeOptions,
    listener: Listener,
) -> list[str]:
    """Write the output and commit it; return notes."""
    made, others, locations = writing.made, writing.others, source.location
    plan = make_plan(made.layout)
    refuse_sources(output, source.catalog.weight_files)
    if output.is_symlink() or output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise OutputError(f"{output}: exists already", hint="give another output")
    stage = Staging(
        output,
        plan.bytes_written + others.size(source.states) * 2,
        sources=[locations.step_dir, *locations.roots],
        names=[file.filename for file in made.layout.files],
    )
    notes = [*others.notes, *_notes_of(source, kind)]
    sources = Sources((*writing.ema, source))
    notes += without_checksums(sources.catalogs, options.verify)
    with engine_for(None, options.resources, listener) as engine, stage:
        work = WorkDigests("", digest_of(plan))  # nobody goes on with it
        with sources.steady():
            stage.write(plan, engine, work, seal=lambda path, number: seal(path, made.zips[number]))
            stage.add(dict(others.files(stage.scratch)))
        with sources.steady():
            if options.verify != "off":
                check_output(source, writing, kind, stage.readable(), options, engine)
        listener(Stage("committing"))
        notes += stage.commit()
    return warn(listener, notes)


def _notes_of(source: Checkpoint, kind: ReshardFormat) -> Sequence[str]:
    """Return what the readers noted of model and optimizer, as far as it is true of the output."""
    stays = kind is format_of(source)
    if stays and kind.is_dcp:  # everything is written under its own name
        return ()
    notes = [one for one in source.catalog.notes if not (stays and one.startswith(REMOVED))]
    return [*notes, *(() if source.optimizer is None else source.optimizer.notes)]


def _writing(
    source: Checkpoint, target: Target, kind: ReshardFormat, output: Path, stack: ExitStack
) -> Writing:
    """Lay out all files: what the source has, again or as another format has it."""
    world, stays = len(target.meshes), kind is format_of(source)
    training = Training() if stays else read_training(source)
    if kind.is_dcp:
        if stays:
            directories, others = saved_again(source, stack), carried_with_dcp(source, world)
        else:
            directories = saved_anew(source, kind, training.scheduler, target.version)
            others = made_anew(source, training, kind, target)
        place = PurePosixPath(output.absolute())
        made, metadata = lay_out_directories(directories, world, target.version, place)
        others.data |= metadata
        return Writing(made, others)
    ema: tuple[Checkpoint, ...] = ()
    if stays:
        files, ema = SourceFiles.of(source), open_ema(source)
        others = carried_with_ranks(source, files, world)
        source = unplaced(source) if world == 1 and is_fsdp1(source) else source
    else:
        files, others = files_for(kind, source), made_anew(source, training, kind, target)
    ranks = [*files_of_ranks(source, target, files, names_kept=stays)]
    for one in ema:
        own = replace(files, model=min(one.catalog.weight_files), optimizer=None)
        ranks += files_of_ranks(placed_again(one, world), target, own, names_kept=True)
    return Writing(lay_out_ranks(ranks, target.version), others, ema)


def _report(  # noqa: PLR0917 (all that was made)
    source: Checkpoint,
    target: Target,
    kind: ReshardFormat,
    output: Path,
    writing: Writing,
    notes: Sequence[str],
    seconds: float,
) -> ReshardReport:
    mesh, made = target.meshes[0], writing.made
    return ReshardReport(
        output=str(output),
        source=str(source.location.weights_dir),
        world_size=len(target.meshes),
        format=kind.value,
        mesh=() if kind.is_dcp else mesh.shape,
        mesh_names=() if kind.is_dcp else mesh.dim_names or (),
        torch=target.torch,
        files={file.filename: file.size for file in made.layout.files},
        others=writing.others.names,
        tensors=len(source.catalog.tensors),
        optimizer_tensors=sum(len(one.tensors) for one in source.catalogs[1:]),
        bytes_written=sum(file.size for file in made.layout.files),
        seconds=seconds,
        notes=tuple(notes),
    )
