"""Make the output of a plan, wait for another process that makes it, or reuse it.

With `reuse` the first process that gets its turn makes the output.
"""

import shlex
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from unshard.api.making import (
    PlannedMerge,
    companion_names,
    compare_with_base,
    decompressed,
    fingerprint_of,
    late_notes,
    make_record,
    named_companions,
    output_names,
    small_files,
    verify_output,
    work_of,
)
from unshard.api.options import MergeOptions
from unshard.engines.crew import engine_for
from unshard.engines.threads import Resources
from unshard.errors import OutputError, UsageError
from unshard.fronts import Text
from unshard.progress import Chosen, Listener, warn
from unshard.progress import Stage as Progress
from unshard.stores.remote_path import RemotePath
from unshard.write.companions import state_file_names
from unshard.write.record import add_checksums, describe_made, has_sizes, is_made_by
from unshard.write.report import Report, peak_memory
from unshard.write.stage import BusyError, OutputStage, named_overflows, scratch_directory
from unshard.write.staging.stage import Staging
from unshard.write.staging.targets import refuse_sources

_COMPANION_ALLOWANCE = 64 * 1024
_PAUSE_S = 0.1


class Outcome(NamedTuple):
    """The outcome of a merge: a finished output.

    Attributes:
        prepared: the merge that made it.
        notes, changed, copied: as in a report; only the process that made the output knows them.
        reused: whether the output existed already, or another process made it.
    """

    prepared: PlannedMerge
    notes: tuple[str, ...] = ()
    changed: tuple[int, int] | None = None
    copied: int = 0
    reused: bool = False


def stage_for(target: Path, prepared: PlannedMerge, options: MergeOptions) -> OutputStage:
    """Return the stage for an output on a disk or in a store.

    Raises:
        OutputError: the weights of the sources would be lost.
        UsageError: an option excludes an output in a store.
    """
    sources, checkpoint = prepared.sources, prepared.checkpoint
    names, resume = output_names(prepared), options.resume or options.reuse
    if isinstance(target, RemotePath):
        if (repo := options.push_to_hub) is not None:
            where = shlex.quote(str(checkpoint.location.place))
            raise UsageError(
                f"⟦--push-to-hub⟧ needs an output on a disk, and {target} is in an object store",
                hint=f"leave it out, and upload the checkpoint: unshard push {where} {repo}",
            )
        from unshard.write.bucket.stage import BucketStage

        overwrite = bool(options.overwrite)
        return BucketStage(target, overwrite=overwrite, names=names, resume=resume)
    weights = set[Path]().union(*(catalog.weight_files for catalog in sources.catalogs))
    refuse_sources(target, weights)
    needed = prepared.plan.bytes_written + sources.compressed_bytes + _COMPANION_ALLOWANCE
    needed += 3 * sources.training.size  # the first rank's is written twice, and all is copied
    needed += sum(checkpoint.states[path].size for path in checkpoint.companions.files.values())
    locations = [source.location for source in sources.checkpoints]
    return Staging(
        target,
        needed,
        sources=[folder for at in locations for folder in (at.step_dir, *at.roots)],
        overwrite=options.overwrite,
        names=names,
        resume=resume,
    )


def make_output(
    prepared: PlannedMerge,
    stage: OutputStage,
    options: MergeOptions,
    listener: Listener,
    change: Callable[[PlannedMerge, Path], PlannedMerge] | None = None,
) -> Outcome:
    """Make an output on its stage.

    `change` is called after decompression, with a directory for temporary files. It returns another
    merge, or raises to end this one.
    """
    work = work_of(prepared)
    with engine_for(options.engine, options.resources, listener) as engine, stage:
        with prepared.sources.steady():
            prepared = decompressed(prepared, lambda: stage.scratch, options, listener)
            prepared = change(prepared, stage.scratch) if change else prepared
            written = stage.write(prepared.plan, engine, work)
            stage.add(small_files(prepared, lambda: stage.scratch))
        with prepared.sources.steady():
            verify_output(prepared, stage.readable(), options.verify, engine)
            changed = compare_with_base(prepared, listener)
            record = make_record(prepared, options.recorded)
            if options.checksums:
                sums = _digest_output(prepared, stage.readable(), options.resources, listener)
                record = add_checksums(record, sums)
            listener(Progress("committing"))
        committed = stage.commit(record, replaced=named_companions(prepared, options.config))
    overflows = named_overflows(written.overflows, prepared.plan)
    late = late_notes(prepared, changed, overflows, written.refused)
    notes = warn(listener, [*late, *committed])
    return Outcome(prepared, tuple(notes), changed, written.copied)


def make_once(
    prepared: PlannedMerge, target: Path, options: MergeOptions, listener: Listener
) -> Outcome:
    """Make an output, unless it exists or another process makes it meanwhile.

    Raises:
        OutputError: a different output exists, or a damaged output may not be replaced.
    """
    is_made = partial(is_made_by, target, fingerprint_of(prepared))
    while not is_made():
        stage = stage_for(target, prepared, options)
        try:
            with stage.turn(is_made, listener):
                if not is_made():
                    return make_output(prepared, stage, options, listener)
        except BusyError:
            time.sleep(_PAUSE_S)
        except OutputError:  # another process may have made the output meanwhile
            if not is_made():
                refuse_other(stage, target, prepared, options)
                raise
    try:
        return _check_made(prepared, target, options, listener)
    except OutputError as error:
        if isinstance(target, RemotePath) or not options.overwrite:
            error.hint = Text("remove it; on a disk you can replace it: ⟦+--overwrite⟧")
            raise
    stage = stage_for(target, prepared, options)
    with stage.turn(lambda: False, listener):
        try:  # another process may have made it again meanwhile
            return _check_made(prepared, target, options, listener)
        except OutputError:
            return make_output(prepared, stage, options, listener)


def refuse_other(
    stage: OutputStage, target: Path, prepared: PlannedMerge, options: MergeOptions
) -> None:
    """Raise an OutputError that describes the existing output, if it may not be replaced."""
    try:
        stage.check()
    except OutputError as error:
        if options.reuse and not error.found:
            locations = [source.location for source in prepared.sources.checkpoints]
            error.found = describe_made(target, locations, options.recorded)
        raise


def _check_made(
    prepared: PlannedMerge, target: Path, options: MergeOptions, listener: Listener
) -> Outcome:
    """Verify an existing output, at the level of `--verify`."""
    engine_of = partial(engine_for, options.engine, options.resources, listener)
    with ExitStack() as stack, engine_of() as engine:
        sizes = {file.filename: file.size for file in prepared.plan.layout.files}
        # The output of compressed tensors followed the plan that was made after decompression.
        if options.verify == "full" or not has_sizes(target, sizes):
            prepared = decompressed(prepared, lambda: scratch_directory(stack), options, listener)
        verify_output(prepared, target, options.verify, engine)
    listener(Chosen(f"using {target}, which was made from this checkpoint already"))
    return Outcome(prepared, reused=True)


def _digest_output(
    prepared: PlannedMerge, directory: Path, resources: Resources, listener: Listener
) -> dict[str, str]:
    """Return the SHA-256 of each tensor of the model in the output, sorted by name."""
    from unshard.engines.checksums import digest_contents
    from unshard.plan.pieces import Contents

    layout, folders = prepared.plan.layout, prepared.checkpoint.companions.folders
    files = [("", file) for file in layout.model_files]
    files += [
        (folder, file)
        for file in layout.files[len(files) :]
        for folder in folders
        if file.filename.startswith(folder)
    ]
    listener(Progress("hashing", sum(file.data_bytes for _, file in files)))
    contents = (
        (folder + tensor.name, [Contents.of_file(directory / file.filename, end - start, at)])
        for folder, file in files
        for tensor in file.tensors
        for start, end in [tensor.data_offsets]
        for at in [len(file.header) + start]
    )
    return dict(sorted(digest_contents(contents, directory, resources, listener).items()))


def make_report(
    outcome: Outcome,
    target: Path | None,
    *,
    memory_bytes: int,
    dry_run: bool = False,
    url: str | None = None,
) -> Report:
    """Return the report of a merge; `target` is None if nothing was written."""
    prepared = outcome.prepared
    checkpoints, layout = prepared.sources.checkpoints, prepared.plan.layout
    tensors = (tensor for file in layout.model_files for tensor in file.tensors)
    folders = prepared.checkpoint.companions.folders
    modules = [module for module in layout.beside if module.name.startswith(folders)]
    operations = Counter(type(operation).__name__ for operation in prepared.plan.tiled)
    operations += Counter(CopyRange=len(prepared.plan.copies))
    return Report(
        output="" if target is None else str(target),
        source=str(checkpoints[-1].location.weights_dir),
        sources=tuple(str(source.location.weights_dir) for source in checkpoints),
        step=checkpoints[-1].catalog.step,
        passed_over=tuple(passed for source in checkpoints for passed in source.passed_over),
        world_size=checkpoints[-1].catalog.world_size,
        files={file.filename: file.size for file in layout.files},
        companions=(*companion_names(prepared), *state_file_names(prepared.sources.training)),
        tensors=sum(len(part.weight_map) for part in (layout, *modules)),
        parameters=layout.total_parameters,
        dtypes=dict(Counter(tensor.dtype.name for tensor in tensors).most_common()),
        operations=dict(sorted(operations.items())),
        bytes_read=0 if outcome.reused else prepared.plan.bytes_read,
        bytes_written=0 if outcome.reused else prepared.plan.bytes_written,
        memory_bytes=memory_bytes,
        seconds=round(time.monotonic() - prepared.sources.opening, 3),
        peak_memory_bytes=peak_memory(),
        dry_run=dry_run,
        loadable=prepared.library.loads is True,
        library=prepared.library.name,
        names_checked=prepared.names_checked,
        changed_from_base=outcome.changed,
        url=url,
        notes=(*prepared.warnings, *outcome.notes),
        skipped=tuple(skipped for source in checkpoints for skipped in source.catalog.skipped),
        bytes_copied=outcome.copied,
        reused=outcome.reused,
    )
