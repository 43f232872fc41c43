"""`archive`: write the steps of a run as a whole model and deltas; `apply_delta`: apply them.

The result of `apply_delta` is the same as that of a merge of the last step.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np

from unshard.api.comparing.deltas import write_delta
from unshard.api.comparing.models import ConvertedModel, block_reader
from unshard.api.converting import convert
from unshard.api.making import PlannedMerge, fingerprint_of, plan_output
from unshard.api.merging import check_output, merge_checkpoint, merge_with
from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.api.sources import Sources, open_source
from unshard.console import listener_or_default
from unshard.containers.file_states import noting
from unshard.containers.zstd import frame_reader
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import shape_of
from unshard.engines.files import PieceReader
from unshard.engines.spooling import size_of, spool, spooled
from unshard.errors import ConversionError, CorruptError, IncompleteError, UsageError
from unshard.keywords import DeltaKeywords
from unshard.progress import Listener, Stage, Warned
from unshard.read.delta import Delta, checksums_in, is_delta, read_delta, source_of, versions_in
from unshard.read.finding.discover import all_steps
from unshard.read.format import Location
from unshard.write.record import is_weight_file
from unshard.write.report import Report
from unshard.write.staging.targets import check_space, refuse_inside

MOST_DELTAS = 32
"""Bound on deltas that are applied together: each takes 2 MiB of memory per thread."""


@accepting(DeltaKeywords)
def apply_delta(
    checkpoint: str | Path,
    deltas: Sequence[str | Path],
    output: str | Path,
    *,
    listener: Listener | None = None,
    **options: Unpack[DeltaKeywords],
) -> Report:
    """Apply deltas to a checkpoint, and write the same weights as a merge of the last version.

    Files, their order, and the checksum of every tensor are verified before the output is begun.
    The small files (config, tokenizer) are those of the checkpoint.

    Args:
        checkpoint: a checkpoint, run or merged model; without deltas, an output of `archive`.
        deltas: directories of deltas, in the order of their versions.
        output, listener: as for `merge`.

    Keyword Args:
        step: the step of the run, or of the archive.
        options: as for `merge`; they must be those of the deltas.

    Raises:
        CorruptError: a delta is damaged, or belongs to another checkpoint.
        UsageError: the directories are not deltas, or not in order.
        UnshardError: as `merge` raises it. No partial output is left.
    """
    with listener_or_default(listener) as heard:
        chosen = MergeOptions(**options, extra_state=False)
        start = given_path(checkpoint, "the checkpoint")
        paths = [given_path(path, "a delta") for path in deltas]
        target, base = check_output(output, chosen) or Path(), None
        refuse_inside(target, paths or [start])
        if not paths:
            start, *paths = _versions_to(start, chosen.step)
            chosen, base = replace(chosen, step=None), start.name.removeprefix("weight_v")
        sources = open_source(start, chosen, heard)
        with noting(sources.last.states):
            chain = [read_delta(path) for path in paths]
        _check_order([(base, start), *((link.version, link.path) for link in chain)], chain)
        change = partial(_changed, chain, chosen, heard, source_of([start, *paths][-1]))
        return merge_with(sources, target, chosen, heard, change=change)


def _check_order(versions: Sequence[tuple[str | None, Path]], chain: Sequence[Delta]) -> None:
    """Refuse a delta that does not apply to the version before it; an unknown version is None."""
    if len(chain) > MOST_DELTAS:
        what = f"{len(chain)} deltas: at most {MOST_DELTAS} are applied at once"
        hint = f"apply the first {MOST_DELTAS}, then the others to that output"
        raise UsageError(what, hint=hint)
    for (before, path), delta in zip(versions, chain, strict=False):
        if before not in (None, delta.base_version):
            raise UsageError(
                f"{delta.path}: applies to version {delta.base_version}, not to version {before} "
                f"in {path}",
                hint="give all deltas from the checkpoint on, in the order of their versions",
            )


def _versions_to(archive: Path, step: int | None) -> list[Path]:
    """Return the last whole version of an archive up to a step, and the deltas from it."""
    chains, chain, gap, due = dict[int, tuple[list[Path], int]](), list[Path](), 0, 0
    for number, at, path in versions_in(archive) if archive.is_dir() else ():
        if not is_delta(path):
            chain = [path]
        elif chain and number == due:
            chain = [*chain, path]
        else:
            chain, gap = [], gap if number == due else number - 1
        chains[at], due = (chain, gap), number + 1
    chain, gap = chains.get(max(chains, default=0) if step is None else step, ([], -1))
    if not chain:
        of = f" of step {step}" * (step is not None)
        is_gap = f"its version{of} cannot be made, as weight_v{gap:06d} is missing"
        raise UsageError(
            f"{archive}: {f'has no version{of}' if gap < 0 else is_gap}",
            expected="the archive of a run, or a checkpoint and its deltas",
            found=", ".join(str(at) for at, (links, _) in chains.items() if links),
        )
    return chain


def _changed(  # noqa: PLR0917 (`make_output` passes the last two)
    chain: Sequence[Delta],
    options: MergeOptions,
    listener: Listener,
    source: tuple[str | None, int | None],
    prepared: PlannedMerge,
    scratch: Path,
) -> PlannedMerge:
    """Return the merge of a version, after writing its changed tensors to `scratch`."""
    sources = _renamed(prepared.sources, *source)
    if not chain:
        return replace(prepared, sources=sources)
    last, tensors = chain[-1], {tensor.name: tensor for tensor in prepared.tensors}
    named = {name for delta in chain for name in delta.checksums}
    unpaired = (named - tensors.keys()) | (tensors.keys() - named if last.is_ours else set())
    if unpaired:
        what = f"{last.path}: belongs to another checkpoint: {min(unpaired)} is not in both"
        raise UsageError(what, hint=_hint(last))
    jobs = {
        name: (size_of(tensor), partial(_blocks, chain, tensor))
        for name, tensor in tensors.items()
        if name in named
    }
    total = sum(size for size, _ in jobs.values())
    check_space(scratch, total + prepared.plan.bytes_written)
    listener(Stage("applying", total))
    models = [ConvertedModel(source, {}) for source in prepared.sources.checkpoints]
    make_reader, resources = partial(block_reader, models), options.resources
    paths = spool(jobs, make_reader, scratch, resources, listener, streams=len(chain))
    changed = {name for delta in chain for name in delta.frames}
    output = [
        spooled(name, one.dtype, shape_of(one.recipe), paths[name]) if name in changed else one
        for name, one in tensors.items()
    ]
    converted = replace(convert(prepared.sources, options), tensors=output)
    fingerprint = f"{fingerprint_of(prepared)} {last.version}"  # it differs from that of the base
    tables = ((name, one.chunks) for name, one in prepared.checkpoint.catalog.tensors.items())
    files = {name: table.paths[table.file[0]].name for name, table in tables if len(table)}
    is_merged = all(
        is_weight_file(file) and file.endswith(".safetensors") for file in files.values()
    )
    # A merged model keeps its files, because its tensors may not be in the order of training.
    plan = plan_output(prepared.sources, converted, options, files if is_merged else None)
    return replace(plan, sources=sources, fingerprint=fingerprint)


def _renamed(sources: Sources, name: str | None, step: int | None) -> Sources:
    """Return sources with the step directory and step from which the version was made."""
    if name is None:
        return sources
    last, at = sources.last, sources.last.location
    at = replace(at, step_dir=at.step_dir.parent / Path(name).name, step=step)
    last = replace(last, location=at, catalog=replace(last.catalog, step=step))
    return replace(sources, checkpoints=(last,))


def _blocks(
    chain: Sequence[Delta], tensor: ConvertedTensor, reader: PieceReader
) -> Iterator[memoryview]:
    """Yield the blocks of a tensor if a delta changes it; check it in any case."""
    name, blocks, changed = tensor.name, reader.blocks(tensor), False
    with ExitStack() as stack:
        for delta in chain:
            frame, read = delta.frames.get(name), None
            if frame is not None:
                changed = True
                file = stack.enter_context(frame.path.open("rb"))
                file.seek(frame.offset)
                read = frame_reader(f"{frame.path}: tensor {name}", file, frame.length)
            if read is not None or (delta is chain[-1] and name in delta.checksums):
                blocks = _applied(blocks, read, delta, name)
        for block in blocks:
            if changed:
                yield block


def _applied(
    blocks: Iterator[memoryview], read: Callable[[int], bytes] | None, delta: Delta, name: str
) -> Iterator[memoryview]:
    """Yield blocks, changed in place; after the last, check the checksum of the result."""
    checksum, is_whole = 1, True
    for block in blocks:
        if read is not None:
            array = np.frombuffer(block, np.uint8)
            change = np.frombuffer(read(len(block)), np.uint8)
            array[: len(change)] ^= change
            is_whole &= len(change) == len(array)
        checksum = zlib.adler32(block, checksum)
        yield block
    is_whole &= read is None or not read(1)
    if not is_whole or f"{checksum:08x}" != delta.checksums[name]:
        raise CorruptError(
            f"{delta.path}: tensor {name}: is damaged, or the checkpoint is not version "
            f"{delta.base_version}",
            expected=f"Adler-32 {delta.checksums[name]} of version {delta.version}",
            found=f"{checksum:08x}" if is_whole else "a frame of another size",
            hint=_hint(delta),
        )


def _hint(delta: Delta) -> str:
    return f"apply it to version {delta.base_version}, with the options of the delta"


@accepting(DeltaKeywords)
def archive(
    run: str | Path,
    output: str | Path,
    *,
    listener: Listener | None = None,
    **options: Unpack[DeltaKeywords],
) -> list[Report]:
    """Write the steps of a run that an archive does not have yet; each appears only when complete.

    The versions are `weight_v000000` and so on, as SGLang pulls them: a whole model, then deltas
    from step to step. A version is whole again after 32 deltas; if the step before it is gone, or
    its values changed since, as with other options; or if names, dtypes or shapes changed.
    `apply_delta` makes any version.

    Args:
        run: a directory of steps.
        output: the archive, which may exist; only steps above its last one are added.
        listener: as for `merge`; incomplete steps are passed over with a warning.

    Keyword Args:
        options: as for `delta`, except `step` and `overwrite`.

    Raises:
        UnshardError: as `merge` raises it. Complete versions stay.
    """
    reports = list[Report]()
    with listener_or_default(listener) as heard:
        chosen, target = MergeOptions(**options, extra_state=False), given_output(output)
        steps = _steps_of(given_path(run, "the run"), target, chosen)
        versions = versions_in(target) if target.is_dir() else []
        for at in steps:
            number, last, _ = versions[-1] if versions else (-1, -1, target)
            if at.step is None or at.step <= last:
                continue
            path = target / f"weight_v{number + 1:06d}"
            base = _base_of(versions, steps)
            names = f"{number:06d}", f"{number + 1:06d}"
            try:
                reports.append(_write(at, base, path, chosen, heard, names))
            except IncompleteError as error:
                heard(Warned(f"step {at.step} is passed over: " + error.text))
            else:
                versions.append((number + 1, at.step, path))
    return reports


def _steps_of(run: Path, output: Path, options: MergeOptions) -> Sequence[Location]:
    refuse_inside(output, [run])
    if options.step is not None or options.overwrite:
        why = "⟦--step⟧: all steps are archived" if options.step is not None else ""
        raise UsageError(why or "⟦--overwrite⟧: versions of an archive are not replaced")
    steps = all_steps(run, options.choice)
    if all(at.step is None for at in steps):
        raise UsageError(f"{run}: is not a run: it has no steps", hint="give a directory of steps")
    return steps


def _base_of(
    versions: Sequence[tuple[int, int, Path]], steps: Sequence[Location]
) -> tuple[Path, Path] | None:
    """Return the step of the last version, and that version, if a delta may follow it."""
    paths = [path for _, _, path in reversed(versions)]
    deltas = next((count for count, path in enumerate(paths) if not is_delta(path)), MOST_DELTAS)
    at = next((step for step in steps if versions and step.step == versions[-1][1]), None)
    if at is None or deltas >= MOST_DELTAS:
        return None
    has_gap = versions[-1][0] - versions[-1 - deltas][0] != deltas
    return None if has_gap else (at.path, paths[0])


def _write(  # noqa: PLR0917 (source, base, target, and their settings)
    at: Location,
    base: tuple[Path, Path] | None,
    target: Path,
    options: MergeOptions,
    listener: Listener,
    names: tuple[str, str],
) -> Report:
    """Write a version: a delta if there is a base and a delta can express the change."""
    if base is not None:
        try:
            former, pair = checksums_in(base[1]), (base[0], at.path)
            return write_delta(pair, target, options, listener, names, former)
        except ConversionError as error:  # if the delta is not the cause, the merge raises it again
            listener(Warned(f"step {at.step} is archived as a whole model: " + error.text))
    return merge_checkpoint(at.path, target, options, listener)
