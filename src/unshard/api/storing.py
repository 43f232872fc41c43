"""A merge whose output is in an object store: made in memory, block by block, and uploaded."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from unshard._version import __version__
from unshard.api.converting import convert
from unshard.api.making import (
    Prepared,
    compare_with_base,
    late_notes,
    make_report,
    plan_output,
    verify_output,
    warn,
)
from unshard.api.options import MergeOptions
from unshard.api.sources import inflated
from unshard.api.unmerged.virtual import contents_of_output
from unshard.api.writing import digest_of_sources, earlier_overflows, say_what_is_known
from unshard.engines.crew import Crew, crew
from unshard.engines.files import PieceReader
from unshard.engines.threads import Overflows, named_overflows
from unshard.engines.uploads import Uploaded, upload_files
from unshard.errors import UsageError
from unshard.plan.identity import digest_of
from unshard.plan.operations import Plan
from unshard.plan.pieces import Contents
from unshard.progress import Listener, Stage
from unshard.stores.remote_path import RemotePath, look_again
from unshard.write.bucket_stage import BucketStage, is_last
from unshard.write.report import Report
from unshard.write.staging.finished import Counts, Work

_SMALL = 8 << 20


def store_output(
    prepared: Prepared,
    target: RemotePath,
    options: MergeOptions,
    listener: Listener,
    started: float,
) -> Report:
    """Make an output in a store, as `merge_with` makes one on disk; return its report.

    Nothing is written on this machine, except that compressed items are decompressed, and training
    state is written, into a temporary directory.

    Raises:
        UnshardError: nothing of the output is left then; with `resume`, what is finished.
    """
    _check(options, target)
    stage = BucketStage(target, overwrite=bool(options.overwrite), resume=options.resume)
    if options.dry_run:
        stage.check()
        return make_report(prepared, target, options, started)
    work = _work_of(prepared)
    with crew(options.engine) as engine, stage, ExitStack() as stack:
        prepared = _decompressed(prepared, options, listener, stack)
        files = contents_of_output(prepared, options, stack)
        where = prepared.checkpoint.location.weights_dir
        reader = PieceReader(where, prepared.checkpoint.states)
        stack.callback(reader.close)
        ledger = stage.open_ledger(work, files.keys())
        say_what_is_known(ledger, len(prepared.plan.layout.files), listener)
        rest = {name: one for name, one in files.items() if name not in ledger.known}
        uploaded = _upload(prepared, rest, stage, options, listener, engine)
        small = {
            name: _bytes_of(one, reader) for name, one in files.items() if _is_small(name, one)
        }
        for name, data in small.items():
            if not is_last(name):
                stage.create(name, data)
        look_again(target)
        prepared.sources.unchanged()
        verify_output(prepared, target, options, listener, engine)
        changed = compare_with_base(prepared, listener)
        prepared.sources.unchanged()
        listener(Stage("committing"))
        notes = stage.commit({name: data for name, data in small.items() if is_last(name)})
    lost = named_overflows(uploaded.overflows, prepared.plan)
    lost |= earlier_overflows(prepared.plan, ledger.known)
    notes += _not_copied(uploaded)
    notes = warn(listener, [*late_notes(prepared, changed, lost), *notes])
    report = make_report(prepared, target, options, started, notes=notes, changed=changed)
    return replace(report, bytes_copied=uploaded.copied)


def _check(options: MergeOptions, target: RemotePath) -> None:
    """Refuse the options that an output in a store cannot have."""
    if options.push_to_hub is not None:
        raise UsageError(
            f"--push-to-hub needs an output on a disk, and {target} is in an object store",
            hint="leave it out, and upload the checkpoint: unshard push CHECKPOINT REPO",
        )


def _upload(  # noqa: PLR0917 (what is made, where, and how)
    prepared: Prepared,
    files: Mapping[str, Contents],
    stage: BucketStage,
    options: MergeOptions,
    listener: Listener,
    engine: Crew,
) -> Uploaded:
    """Upload the files that are not created at once, and record each."""
    large = {name: one for name, one in files.items() if not _is_small(name, one)}
    where = prepared.checkpoint.location.weights_dir
    listener(Stage("uploading", sum(one.size for one in large.values())))
    record = partial(_record, stage, prepared.plan)
    given = (where, large, stage, options.resources, listener)
    if engine.upload is None:
        return upload_files(*given, finished=record)
    return engine.upload(prepared.plan, *given, finished=record)


def _work_of(prepared: Prepared) -> Work:
    """Return what a merge does: what is compressed is planned again, but always in the same way."""
    sources, plan = digest_of_sources(prepared.sources), digest_of(prepared.plan)
    return Work(sources, f"{plan} {__version__}")


def _record(stage: BucketStage, plan: Plan, name: str, overflows: Overflows) -> None:
    """Record a file of weights as finished; an adapter of its own is always made again."""
    for number, file in enumerate(plan.layout.files):
        if file.filename == name:
            found = overflows.items()
            stage.record(name, Counts({at: one for (of, at), one in found if of == number}))


def _not_copied(uploaded: Uploaded) -> list[str]:
    if uploaded.refused is None:
        return []
    why = uploaded.refused.subject
    return [f"the store did not copy weights itself, so they were down- and uploaded: {why}"]


def _decompressed(
    prepared: Prepared, options: MergeOptions, listener: Listener, stack: ExitStack
) -> Prepared:
    """Return the same with nothing compressed; the stack removes what that needs."""
    sources = prepared.sources
    if not sources.compressed_bytes:
        return prepared
    listener(Stage("decompressing"))
    checkpoints = tuple(inflated(one, stack) for one in sources.checkpoints)
    sources = replace(sources, checkpoints=checkpoints)
    again = plan_output(sources, convert(sources, options), options)
    warn(listener, [one for one in again.warnings if one not in prepared.warnings])
    return replace(again, files={**prepared.files, **again.files})


def _is_small(name: str, contents: Contents) -> bool:
    """Return whether a file is created at once: one that must come last is."""
    return is_last(name) or (contents.size <= _SMALL and not name.endswith(".safetensors"))


def _bytes_of(contents: Contents, reader: PieceReader) -> bytes:
    data = bytearray(contents.size)
    reader.read(contents, 0, memoryview(data))
    return bytes(data)
