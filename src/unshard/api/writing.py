"""Write the weights of an output: all of them, or what an interrupted merge has left to do."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from unshard._version import __version__
from unshard.api.making import Prepared, warn
from unshard.api.options import MergeOptions
from unshard.api.sources import Sources
from unshard.engines.threads import Overflows, RunPlan, named_overflows
from unshard.plan.identity import digest_of
from unshard.plan.operations import Plan
from unshard.progress import Chosen, Listener, Stage
from unshard.signals import uninterrupted
from unshard.write.bucket_ledger import BucketLedger
from unshard.write.staging.finished import Counts, Ledger, Work
from unshard.write.staging.stage import Staging


def digest_of_sources(sources: Sources) -> str:
    """Return what changes if a file with weights is replaced or written to, also of the base."""
    tables = [catalog.tensors for catalog in sources.catalogs]
    tables += [one.base.tensors for one in sources.checkpoints if one.base is not None]
    groups = [entry.chunks.paths for table in tables for entry in table.values()]
    shared = {id(paths): paths for paths in groups}  # by the tensors of a checkpoint
    found = hashlib.blake2b(digest_size=16)
    for path in sorted({path for paths in shared.values() for path in paths}):
        status = path.stat()
        facts = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        found.update(repr(facts).encode(errors="surrogatepass"))
    return found.hexdigest()


def write_weights(
    prepared: Prepared,
    stage: Staging,
    options: MergeOptions,
    listener: Listener,
    *,
    engine: RunPlan,
    sources: str,
) -> dict[str, int]:
    """Make the files of weights that an earlier process did not finish.

    Args:
        prepared: what to make.
        stage: where; it keeps the record of the files that are finished.
        options: for the resources.
        listener: as for `merge`.
        engine: what writes the files.
        sources: what `digest_of_sources` returned before the sources were read again.

    Returns:
        How many finite values became infinite, by the name of the tensor.
    """
    plan, files = prepared.plan, prepared.plan.layout.files
    ledger = stage.open_ledger(Work(sources, f"{digest_of(plan)} {__version__}"))
    say_what_is_known(ledger, len(files), listener)
    rest = [number for number, file in enumerate(files) if file.filename not in ledger.known]
    left = plan.only(rest) if ledger.known else plan

    data = sum(files[number].data_bytes for number in rest)
    listener(Stage("writing", data))
    recorder = ThreadPoolExecutor(1)  # flushes a file while others are written
    records: list[Future[None]] = []

    def finished(number: int, overflows: Overflows) -> None:
        counts = Counts({start: count for (_, start), count in overflows.items()})
        records.append(recorder.submit(ledger.add, files[number].filename, counts))

    try:
        made = engine(left, stage.directory, options.resources, listener, finished)
        for record in records:
            record.result()
    finally:
        with uninterrupted():  # nothing may be recorded while the stage is removed
            recorder.shutdown(cancel_futures=True)
    return earlier_overflows(plan, ledger.known) | made


def say_what_is_known(ledger: Ledger | BucketLedger, files: int, listener: Listener) -> None:
    """Report how many of the files an earlier process has finished, and why not others."""
    warn(listener, ledger.notes)
    if ledger.known:
        count = f"{len(ledger.known)} of {files} files were finished by an earlier merge"
        listener(Chosen(f"resuming: {count}"))


def earlier_overflows(plan: Plan, known: Mapping[str, Counts]) -> dict[str, int]:
    """Return what became infinite in the files that were finished before."""
    numbered = enumerate(plan.layout.files)
    counts = {
        (number, start): count
        for number, file in numbered
        for start, count in known.get(file.filename, Counts()).items()
    }
    return named_overflows(Overflows(counts), plan)
