"""`reshard`: the flow from a checkpoint to the files of another number of ranks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from unshard.api.making import warn
from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.api.resharding.checking import check_output
from unshard.api.resharding.ranks import add_files, files_of_ranks
from unshard.api.resharding.source import SourceFiles, read_source
from unshard.api.resharding.target import Target
from unshard.engines.threads import Overflows, run_plan
from unshard.keywords import ReshardKeywords
from unshard.plan.operations import Plan
from unshard.plan.planner import make_plan
from unshard.plan.resharding import Resharded, lay_out_ranks
from unshard.progress import Listener, Stage
from unshard.read.open import Checkpoint
from unshard.showing import hearing
from unshard.write.sealing import seal
from unshard.write.staging.stage import Staging
from unshard.write.staging.targets import refuse_sources

__all__ = ["ReshardReport", "reshard"]


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
        source = read_source(given_path(checkpoint, "the checkpoint"), chosen, heard)
        target = Target.of(source, world_size, mesh, mesh_names, torch)
        report = _write(source, target, given_output(output), chosen, heard)
    return replace(report, seconds=round(time.monotonic() - started, 3))


def _write(
    source: Checkpoint,
    target: Target,
    output: Path,
    options: MergeOptions,
    listener: Listener,
) -> ReshardReport:
    files = SourceFiles.of(source)
    made = lay_out_ranks([*files_of_ranks(source, target, files)], target.version)
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
        _make_files(plan, made, stage.directory, options, listener)
        notes, others = add_files(source, target, files, stage.directory)
        if options.verify != "off":
            check_output(source, made, stage.directory, options, listener)
        listener(Stage("committing"))
        notes += stage.commit()
    return _report(source, target, output, made, others, warn(listener, notes))


def _make_files(
    plan: Plan, made: Resharded, directory: Path, options: MergeOptions, listener: Listener
) -> None:
    """Make the files; the worker that has finished one gives it its checksums."""
    files = made.layout.files

    def finished(number: int, _overflows: Overflows) -> None:
        seal(directory / files[number].filename, made.zips[number])

    run_plan(plan, directory, options.resources, listener, finished)
    for file, zipped in zip(files, made.zips, strict=True):
        if not file.data_bytes:  # a rank without a part of any tensor
            seal(directory / file.filename, zipped)


def _report(  # noqa: PLR0917 (all that was made)
    source: Checkpoint,
    target: Target,
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
