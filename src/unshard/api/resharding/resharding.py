"""`reshard`: write a checkpoint for another number of ranks, and verify it."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Unpack

from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.api.resharding.beside import add_beside, carried_with_dcp, carried_with_ranks, open_ema
from unshard.api.resharding.dcp import saved_again, saved_anew
from unshard.api.resharding.placing import placed, placed_again, unplaced
from unshard.api.resharding.ranks import SourceFiles, files_for, files_of_ranks, is_fsdp1
from unshard.api.resharding.target import ReshardTarget, format_of, keeps_keys, wanted_format
from unshard.api.resharding.training import Training, made_anew, read_training
from unshard.api.resharding.writing import Writing
from unshard.api.sources import Sources, inflated
from unshard.console import listener_or_default
from unshard.containers.file_states import noting
from unshard.engines.crew import Crew, engine_for
from unshard.errors import NotMergeableError, OutputError, UsageError
from unshard.keywords import ReshardKeywords
from unshard.plan.identity import digest_of
from unshard.plan.planner import make_plan
from unshard.plan.resharding import lay_out_directories, lay_out_ranks
from unshard.progress import Chosen, Listener, Stage, warn
from unshard.read.format import ReshardFormat
from unshard.read.open import Checkpoint, open_latest
from unshard.read.optimizer.reader import find_kept, find_optimizer
from unshard.read.wrapper_names import REMOVED
from unshard.stores.remote_path import RemotePath
from unshard.tensors.catalog import Catalog
from unshard.write.sealing import seal
from unshard.write.stage import WorkDigests
from unshard.write.staging.stage import Staging
from unshard.write.staging.targets import refuse_sources
from unshard.write.verification.output import without_checksums


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """The result of a reshard.

    Attributes:
        output: the directory.
        source: the directory of the source's weights.
        world_size: number of ranks of the output.
        format: format of the output: "verl", "lmms", "dcp" or "accelerate".
        mesh, mesh_names: device mesh of the tensors in rank files; empty for DCP.
        torch: the version of torch whose pickles were written.
        files: size of each file with tensors, bytes, by its path.
        others: the paths of all other files.
        tensors, optimizer_tensors: number of tensors of the model and of the optimizer.
        bytes_written: size of all files with tensors.
        seconds: duration.
        notes: messages for the user.
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

    The output has model, optimizer, scheduler and random state; for a model of the hub, only the
    model. Tensors stay the same bit for bit, and are cut along the same dimension as before, or
    along the first. The output appears by one rename, complete and verified, or not at all.

    Args:
        checkpoint: as for `merge`.
        output: the directory to make, in the new checkpoint that of the weights (verl's `actor`).
        world_size: the number of ranks.
        to: the format to write: "verl" or "lmms", the rank files of verl and lmms-engine; "dcp",
            one directory for `dcp.load` with `{"model": …, "optimizer": …}`; "accelerate", for
            its `load_state`. Default: the format of the checkpoint; DCP then keeps its names.
        mesh: sizes of the device mesh, only for rank files; the last dimension shards, the others
            replicate. Default: one dimension of `world_size`.
        mesh_names: names of its dimensions; default: those of the checkpoint's mesh.
        device: device type of the ranks, which torch compares with that of the model's mesh:
            "cuda", "cpu", "npu" and the like; default: that of the checkpoint's mesh, or "cuda".
        torch: the version of torch that will read the output: 2.4, 2.6, 2.8, 2.10 or 2.13.
        listener: as for `merge`.

    Keyword Args:
        role: as for `merge`; an output has one role.
        step: the step of a run.
        verify: "light" (the output is read again, and has the tensors of the checkpoint), "full"
            (also checksums, replicas, and every byte), or "off".
        workers: number of threads; default: the number of cores, at most 8.
        memory: bound on all buffers together, bytes or "64MB".

    Raises:
        UnshardError: see `unshard.errors`; no partial output is left.
    """
    started = time.monotonic()
    chosen = MergeOptions(**options)
    goal = given_output(output)
    if isinstance(goal, RemotePath):
        raise UsageError(
            f"{goal}: a reshard cannot write to an object store",
            hint="give a directory, and copy it into the store when it is complete",
        )
    with listener_or_default(listener) as heard:
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
                source = _with_optimizer(source, kind, world_size, chosen, stack)
                shape = (world_size, mesh, mesh_names, device, torch)
                target = ReshardTarget.of(source, kind, *shape)
                writing = _lay_out(source, target, goal, stack)
            add_beside(writing)
            for path in writing.others.copied.values():
                source.states.add(path)
            notes = _write(writing, goal, chosen, heard)
    return _report(writing, goal, notes, round(time.monotonic() - started, 3))


def _with_optimizer(
    source: Checkpoint,
    kind: ReshardFormat,
    world_size: int,
    options: MergeOptions,
    stack: ExitStack,
) -> Checkpoint:
    """Return a checkpoint with its optimizer's state, placed for the format."""
    keeps = keeps_keys(source, kind)
    find = find_kept if keeps else find_optimizer
    # DCP items that stay in DCP are copied, even if they cannot be interpreted.
    with suppress(*[NotMergeableError] if kind.is_dcp and kind is format_of(source) else []):
        source = replace(source, optimizer=find(source, options.reading))
    return placed_again(source, world_size) if keeps else placed(inflated(source, stack))


def _write(writing: Writing, output: Path, options: MergeOptions, listener: Listener) -> list[str]:
    """Write the output and commit it; return notes."""
    source, layout, others = writing.source, writing.resharded.layout, writing.others
    plan = make_plan(layout)
    refuse_sources(output, source.catalog.weight_files)
    if output.is_symlink() or output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise OutputError(f"{output}: exists already", hint="give another output")
    stage = Staging(
        output,
        plan.bytes_written + others.size(source.states) * 2,
        sources=[source.location.step_dir, *source.location.roots],
        names=[file.filename for file in layout.files],
    )
    notes = [*others.notes, *_reader_notes(source, writing.target.format)]
    sources = Sources((*writing.ema, source))
    notes += without_checksums(sources.catalogs, options.verify)
    with engine_for(None, options.resources, listener) as engine, stage:
        digests = WorkDigests("", digest_of(plan))  # a reshard is never resumed
        zips = writing.resharded.zips
        with sources.steady():
            stage.write(plan, engine, digests, seal=lambda path, number: seal(path, zips[number]))
            stage.add(dict(others.files(stage.scratch)))
        with sources.steady():
            if options.verify != "off":
                verify_reshard(writing, stage.readable(), options, engine)
        listener(Stage("committing"))
        notes += stage.commit()
    return warn(listener, notes)


def _reader_notes(source: Checkpoint, kind: ReshardFormat) -> Sequence[str]:
    """Return the notes of the readers that apply to the output, too."""
    stays = kind is format_of(source)
    if stays and kind.is_dcp:  # all items are written under their own names
        return ()
    notes = [note for note in source.catalog.notes if not (stays and note.startswith(REMOVED))]
    return [*notes, *(() if source.optimizer is None else source.optimizer.notes)]


def _lay_out(source: Checkpoint, target: ReshardTarget, output: Path, stack: ExitStack) -> Writing:
    """Lay out all files."""
    world, stays = target.world_size, target.format is format_of(source)
    training = Training() if stays else read_training(source)
    if target.format.is_dcp:
        if stays:
            directories, others = saved_again(source, stack), carried_with_dcp(source, world)
        else:
            directories = saved_anew(source, target, training.scheduler)
            others = made_anew(source, training, target)
        path = PurePosixPath(output.absolute())
        resharded, metadata = lay_out_directories(directories, world, target.version, path)
        others.data |= metadata
        return Writing(source, target, resharded, others)
    model, ema = source, tuple[Checkpoint, ...]()
    if stays:
        files, ema = SourceFiles.of(source), open_ema(source)
        others = carried_with_ranks(source, files, world)
        model = unplaced(source) if world == 1 and is_fsdp1(source) else source
    else:
        files = files_for(target.format, source)
        others = made_anew(source, training, target)
    ranks = [*files_of_ranks(model, target, files, names_kept=stays)]
    for averaged in ema:
        own = replace(files, model=min(averaged.catalog.weight_files), optimizer=None)
        ranks += files_of_ranks(placed_again(averaged, world), target, own, names_kept=True)
    return Writing(source, target, lay_out_ranks(ranks, target.version), others, ema)


def _report(writing: Writing, output: Path, notes: Sequence[str], seconds: float) -> ReshardReport:
    source, target, files = writing.source, writing.target, writing.resharded.layout.files
    mesh, is_dcp = target.meshes[0], target.format.is_dcp
    return ReshardReport(
        output=str(output),
        source=str(source.location.weights_dir),
        world_size=target.world_size,
        format=target.format.value,
        mesh=() if is_dcp else mesh.shape,
        mesh_names=() if is_dcp else mesh.dim_names or (),
        torch=target.torch,
        files={file.filename: file.size for file in files},
        others=writing.others.names,
        tensors=len(source.catalog.tensors),
        optimizer_tensors=sum(len(catalog.tensors) for catalog in source.catalogs[1:]),
        bytes_written=sum(file.size for file in files),
        seconds=seconds,
        notes=tuple(notes),
    )


def verify_reshard(writing: Writing, directory: Path, options: MergeOptions, engine: Crew) -> None:
    """Read the output again from disk, and compare it with the source."""
    source, layout, is_full = writing.source, writing.resharded.layout, options.verify == "full"
    engine.listener(
        Stage("verifying", sum(file.data_bytes for file in layout.files) if is_full else 0)
    )
    weights = (directory / layout.files[0].filename).parent
    output = open_latest(weights, options.choice._replace(step=None, role=None), options.reading)
    _compare(source.catalog, output.catalog, directory)
    catalogs = list(source.catalogs)
    if source.optimizer is not None:
        numbers = {} if writing.target.format.is_dcp else source.optimizer.numbers
        if keeps_keys(source, writing.target.format):
            optimizer = find_kept(output, options.reading)
        else:  # the order of the groups may not identify parameters with new numbers
            optimizer = find_optimizer(output, options.reading, numbers)
        if optimizer is None or optimizer.numbers != numbers:
            raise OutputError(f"{directory}: the optimizer's state is not what was planned")
        _compare(source.optimizer.catalog, optimizer.catalog, directory)
        catalogs.append(optimizer.catalog)
    for ours, theirs in zip(writing.ema, open_ema(output), strict=True):
        _compare(ours.catalog, theirs.catalog, directory)
        catalogs += [ours.catalog, theirs.catalog]
    if is_full:
        catalogs.append(output.catalog)
        engine.verify(make_plan(layout), catalogs, directory)


def _compare(ours: Catalog, theirs: Catalog, directory: Path) -> None:
    forms = [
        {name: (entry.dtype, entry.shape) for name, entry in catalog.tensors.items()}
        for catalog in (ours, theirs)
    ]
    if forms[0] != forms[1]:
        raise OutputError(f"{directory}: its tensors are not those of the source")
