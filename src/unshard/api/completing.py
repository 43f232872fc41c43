"""From a plan to an output that is there: made now, or by another process, or found.

With `reuse` an output is made once, by whichever process is the first to have its turn.
"""

import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from unshard.api.making import (
    Prepared,
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
from unshard.write.record import add_checksums, describe_made, has_sizes, is_made_by
from unshard.write.stage import BusyError, Stage, named_overflows, scratch_directory
from unshard.write.staging.stage import Staging
from unshard.write.staging.targets import refuse_sources

_COMPANION_ALLOWANCE = 64 * 1024
_PAUSE_S = 0.1


class Made(NamedTuple):
    """An output that is there.

    Attributes:
        prepared: what is in it.
        notes, changed, copied: as of a report; what only the process that made it knows.
        reused: whether it was there already, or another process made it.
    """

    prepared: Prepared
    notes: tuple[str, ...] = ()
    changed: tuple[int, int] | None = None
    copied: int = 0
    reused: bool = False


def stage_for(target: Path, prepared: Prepared, options: MergeOptions) -> Stage:
    """Return the stage on which the output is made: that of a disk, or of a store.

    Raises:
        OutputError: the weights that are merged would be lost.
        UsageError: an option excludes an output in a store.
    """
    sources, training = prepared.sources, prepared.sources.training
    names, resume = output_names(prepared), options.resume or options.reuse
    if isinstance(target, RemotePath):
        if (repo := options.push_to_hub) is not None:
            where = shlex.quote(str(sources.last.location.place))
            raise UsageError(
                f"⟦--push-to-hub⟧ needs an output on a disk, and {target} is in an object store",
                hint=f"leave it out, and upload the checkpoint: unshard push {where} {repo}",
            )
        from unshard.write.bucket.stage import BucketStage

        overwrite = bool(options.overwrite)
        return BucketStage(target, overwrite=overwrite, names=names, resume=resume)
    refuse_sources(target, set[Path]().union(*(one.weight_files for one in sources.catalogs)))
    needed = prepared.plan.bytes_written + sources.compressed_bytes + _COMPANION_ALLOWANCE
    needed += 3 * training.size  # of the first rank it is written twice, and all of it is copied
    checkpoint = prepared.checkpoint
    needed += sum(checkpoint.states[one].size for one in checkpoint.companions.files.values())
    locations = [one.location for one in sources.checkpoints]
    return Staging(
        target,
        needed,
        sources=[place for one in locations for place in (one.step_dir, *one.roots)],
        overwrite=options.overwrite,
        names=names,
        resume=resume,
    )


def make_output(
    prepared: Prepared,
    stage: Stage,
    options: MergeOptions,
    listener: Listener,
    change: Callable[[Prepared, Path], Prepared] | None = None,
) -> Made:
    """Make an output on its stage.

    `change` is called when nothing is compressed any more, with a directory for temporary files. It
    returns another output, or raises to end the merge.
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
    return Made(prepared, tuple(notes), changed, written.copied)


def make_once(prepared: Prepared, target: Path, options: MergeOptions, listener: Listener) -> Made:
    """Make an output, unless it is there or another process makes it meanwhile.

    Raises:
        OutputError: another output is there, or one that is damaged and may not be replaced.
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
        except OutputError:  # perhaps because the output has come into being meanwhile
            if not is_made():
                refuse_other(stage, target, prepared, options)
                raise
    try:
        return _check_made(prepared, target, options, listener)
    except OutputError as error:
        if isinstance(target, RemotePath) or not options.overwrite:
            error.hint = Text("remove it, or, if it is on a disk, replace it: ⟦+--overwrite⟧")
            raise
    stage = stage_for(target, prepared, options)
    with stage.turn(lambda: False, listener):
        try:  # whether another process has made it again meanwhile
            return _check_made(prepared, target, options, listener)
        except OutputError:
            return make_output(prepared, stage, options, listener)


def refuse_other(stage: Stage, target: Path, prepared: Prepared, options: MergeOptions) -> None:
    """Raise OutputError, which tells what is there, if the output may not be made there."""
    try:
        stage.check()
    except OutputError as error:
        if options.reuse and not error.found:
            locations = [one.location for one in prepared.sources.checkpoints]
            error.found = describe_made(target, locations, options.recorded)
        raise


def _check_made(
    prepared: Prepared, target: Path, options: MergeOptions, listener: Listener
) -> Made:
    """Verify an output that was made already, as far as `--verify` says."""
    engine_of = partial(engine_for, options.engine, options.resources, listener)
    with ExitStack() as stack, engine_of() as engine:
        sizes = {file.filename: file.size for file in prepared.plan.layout.files}
        # Of compressed tensors the plan may be another one than was carried out.
        if options.verify == "full" or not has_sizes(target, sizes):
            prepared = decompressed(prepared, lambda: scratch_directory(stack), options, listener)
        verify_output(prepared, target, options.verify, engine)
    listener(Chosen(f"using {target}, which was made from this checkpoint already"))
    return Made(prepared, reused=True)


def _digest_output(
    prepared: Prepared, directory: Path, resources: Resources, listener: Listener
) -> dict[str, str]:
    """Return the SHA-256 of each tensor of the model, sorted by name, as the output has it."""
    from unshard.engines.checksums import digest_contents
    from unshard.plan.pieces import Contents

    layout, folders = prepared.plan.layout, prepared.checkpoint.companions.folders
    own = [("", file) for file in layout.model_files]
    own += [
        (folder, file)
        for file in layout.files[len(own) :]
        for folder in folders
        if file.filename.startswith(folder)
    ]
    listener(Progress("hashing", sum(file.data_bytes for _, file in own)))
    contents = (
        (folder + one.name, [Contents.of_file(directory / file.filename, end - start, at + start)])
        for folder, file in own
        for at in [len(file.header)]
        for one in file.tensors
        for start, end in [one.data_offsets]
    )
    return dict(sorted(digest_contents(contents, directory, resources, listener).items()))
