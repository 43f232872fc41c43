"""`delta`: what changed between two checkpoints, as inference engines apply it to their weights."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np

from unshard.api.comparing.models import Model, block_reader, open_models
from unshard.api.completing import make_output, stage_for
from unshard.api.making import Prepared, make_report
from unshard.api.merging import check_output
from unshard.api.options import MergeOptions, accepting
from unshard.api.sources import Sources
from unshard.containers.safetensors_file import HeaderEntry, encode_header
from unshard.containers.strided import raw_dtype
from unshard.containers.zstd import frame_of
from unshard.convert.outputs import Converted
from unshard.convert.recipes import shape_of
from unshard.engines.files import PieceReader
from unshard.engines.spooling import size_of, spool, spooled
from unshard.errors import ConversionError
from unshard.keywords import SHARD_SIZE, DeltaKeywords
from unshard.plan.layout import Layout, lay_out, size_in_bytes
from unshard.plan.planner import make_plan
from unshard.progress import Chosen, Listener, Stage
from unshard.read.beside.companions import Companions
from unshard.read.delta import index_of, source_of
from unshard.read.finding.versions import fingerprint, stamps_of
from unshard.read.hub_files import INDEX_NAME
from unshard.showing import counted, hearing
from unshard.tensors.dtypes import BY_CODE
from unshard.write.report import Report
from unshard.write.staging.targets import refuse_inside, refuse_sources

_FILE = "model-{:05d}-of-{:05d}.safetensors"


@accepting(DeltaKeywords)
def delta(
    before: str | Path,
    after: str | Path,
    output: str | Path,
    *,
    version: str | None = None,
    base_version: str | None = None,
    listener: Listener | None = None,
    **options: Unpack[DeltaKeywords],
) -> Report:
    """Write what changed between two checkpoints, in the format of ModelExpress and SGLang.

    Both may be in any format and layout: it is the XOR of what their merges would write. The report
    counts the tensors that changed, and compressed bytes as parameters.

    Args:
        before: the checkpoint, run or merged model that engines have.
        after: the one that they are to have; its tensors have the same names, dtypes and shapes.
        output, listener: as for `merge`.
        version: what the index calls `after`; default: its step in six digits, or "000001".
        base_version: what it calls `before`; default: its step, or "000000".

    Keyword Args:
        options: as for `merge`; those about reading and tensors apply to both.

    Raises:
        ConversionError: more than values differ, which no delta can express.
        UnshardError: as `merge` raises it; nothing of the output is left then.
    """
    with hearing(listener) as heard:
        names = base_version, version
        return write_delta((before, after), output, MergeOptions(**options), heard, names)


def write_delta(  # noqa: PLR0917 (as `_write` of an archive)
    paths: tuple[str | Path, str | Path],
    output: str | Path,
    options: MergeOptions,
    listener: Listener,
    names: tuple[str | None, str | None],
    former: Mapping[str, str] | None = None,
) -> Report:
    """Write a delta as `delta` does: from one path to the other, with a name for each version.

    A ConversionError also if the tensors before have other Adler-32 than the `former`.
    """
    target = check_output(output, options) or Path()
    with open_models(paths, options, listener) as models:
        old, new = models
        _refuse_other_tensors(old, new)
        refuse_inside(target, (one.checkpoint.location.place for one in models))
        refuse_sources(target, old.checkpoint.catalog.weight_files)
        new.checkpoint.states.include(old.checkpoint.states)  # all are checked before the commit
        alone = replace(new.checkpoint, companions=Companions(), base=None)
        nothing = make_plan(Layout((), {}, 0))
        prepared = Prepared(Sources((alone,)), (), nothing, config=None, warnings=(), files={})
        stage, context = stage_for(target, prepared, options), (options, listener)
        change = partial(_changed, old, new, names, former, *context)
        made = make_output(prepared, stage, *context, change)
        old.checkpoint.states.states.clear()  # they were checked before the commit, which stays
        new.checkpoint.states.states.clear()
    memory = options.resources.memory_bytes
    return make_report(made.prepared, target, memory_bytes=memory, notes=made.notes)


def _refuse_other_tensors(old: Model, new: Model) -> None:
    """Raise a ConversionError for tensors that no delta can express."""
    before, after = (
        {n: f"{one.dtype.name} {list(shape_of(one.recipe))}" for n, one in each.tensors.items()}
        for each in (old, new)
    )
    if names := [name for name in before | after if before.get(name) != after.get(name)]:
        raise ConversionError(
            f"{new.checkpoint.location.weights_dir}: no delta leads here: "
            f"{counted(len(names), 'tensor')} differ in more than values, as {names[0]}",
            expected=before.get(names[0], "no such tensor"),
            found=after.get(names[0], "no such tensor"),
            hint="merge it instead: a whole model is a version, too",
        )


@dataclass(slots=True)
class _Change:
    """How many values of a tensor changed, and the Adler-32 of what it was and is now."""

    values: int = 0
    former: str = ""
    checksum: str = ""


def _changed(  # noqa: PLR0917 (the last two are what `make_output` gives)
    old: Model,
    new: Model,
    names: tuple[str | None, str | None],
    former: Mapping[str, str] | None,
    options: MergeOptions,
    listener: Listener,
    prepared: Prepared,
    scratch: Path,
) -> Prepared:
    """Return the output of a delta, whose frames are then in `scratch`."""
    found = {name: _Change() for name in new.tensors}
    jobs = {
        name: (2 * size_of(one), partial(_frame, old.tensors[name], one, found[name]))
        for name, one in new.tensors.items()
    }
    total = sum(size for size, _ in jobs.values())
    listener(Stage("comparing", total))
    paths = spool(
        jobs, partial(block_reader, [old, new]), scratch, options.resources, listener, streams=1
    )
    if former is not None and {name: one.former for name, one in found.items()} != former:
        what = f"{old.checkpoint.location.weights_dir}: has other values than the version before"
        raise ConversionError(what, hint="was it saved again, or are there other options now?")
    changed = {name: one for name, one in found.items() if one.values}
    values = sum(one.values for one in changed.values())
    listener(Chosen(f"changed: {counted(values, 'value')} of {counted(len(changed), 'tensor')}"))
    layout = _lay_out({name: paths[name] for name in changed}, changed, options.max_shard_size)
    places = [one.checkpoint.location for one in (old, new)]
    steps = [source_of(at.place)[1] if at.step is None else at.step for at in places]
    known = (0, 1) if None in steps or steps[0] == steps[1] else steps
    base, version = (name or f"{step:06d}" for name, step in zip(names, known, strict=True))
    unchanged = {name: one.checksum for name, one in found.items() if not one.values}
    files = {INDEX_NAME: index_of(base, version, layout.weight_map, unchanged)}
    own = fingerprint(stamps_of(new.checkpoint.location))
    return replace(prepared, plan=make_plan(layout), files=files, fingerprint=own)


def _frame(old: Converted, new: Converted, change: _Change, reader: PieceReader) -> Iterator[bytes]:
    """Yield the frame of a change, and note in it what else is found."""

    def xored() -> Iterator[memoryview]:
        former, checksum, dtype = 1, 1, raw_dtype(new.dtype)
        for before, after in zip(reader.blocks(old), reader.blocks(new), strict=True):
            former, checksum = zlib.adler32(before, former), zlib.adler32(after, checksum)
            block = np.frombuffer(before, dtype)
            np.bitwise_xor(block, np.frombuffer(after, dtype), out=block)  # which are read once
            change.values += int(np.count_nonzero(block))
            yield block.view(np.uint8).data
        change.former, change.checksum = f"{former:08x}", f"{checksum:08x}"

    return frame_of(xored(), size_of(new))


def _lay_out(
    paths: Mapping[str, Path], changes: Mapping[str, _Change], size: str | int | None
) -> Layout:
    uint8 = BY_CODE["U8"]
    tensors = [spooled(name, uint8, (one.stat().st_size,), one) for name, one in paths.items()]
    if not tensors:
        return Layout((), {}, 0)
    layout = lay_out(tensors, size_in_bytes(str(size or SHARD_SIZE)))
    renamed, files = {}, []
    for number, file in enumerate(layout.files):
        entries = [HeaderEntry(t.name, t.dtype, t.shape, *t.data_offsets) for t in file.tensors]
        header = encode_header(entries, {one.name: changes[one.name].checksum for one in entries})
        renamed[file.filename] = _FILE.format(number, len(layout.files))
        files.append(file._replace(filename=renamed[file.filename], header=header))
    weight_map = {name: renamed[file] for name, file in layout.weight_map.items()}
    return layout._replace(files=tuple(files), weight_map=weight_map)
