"""`delta`: write the change between two checkpoints for inference engines to apply."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np

from unshard.api.comparing.models import ConvertedModel, block_reader, open_models
from unshard.api.completing import make_output, make_report, stage_for
from unshard.api.making import PlannedMerge
from unshard.api.merging import check_output
from unshard.api.options import MergeOptions, accepting
from unshard.api.sources import Sources
from unshard.console import counted, listener_or_default
from unshard.containers.safetensors_file import HeaderEntry, encode_header
from unshard.containers.strided import raw_dtype
from unshard.containers.zstd import frame_of
from unshard.convert.outputs import ConvertedTensor
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
    """Write the change between two checkpoints in the format of ModelExpress and SGLang.

    Both may be in any format and layout: a delta is the XOR of the outputs of their merges. The
    report counts the tensors that changed, and compressed bytes as parameters.

    Args:
        before: the checkpoint, run or merged model that engines have.
        after: its successor, with tensors of the same names, dtypes and shapes.
        output, listener: as for `merge`.
        version: name of `after` in the index; default: its step in six digits, or "000001".
        base_version: name of `before` in the index; default: its step, or "000000".

    Keyword Args:
        options: as for `merge`; options about reading and tensors apply to both.

    Raises:
        ConversionError: names, dtypes or shapes differ, which no delta can express.
        UnshardError: as `merge` raises it; no partial output is left.
    """
    with listener_or_default(listener) as heard:
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
    """Write a delta from one path to the other, with a name for each version.

    It is also a ConversionError if the tensors before do not have the Adler-32 sums `former`.
    """
    target = check_output(output, options) or Path()
    with open_models(paths, options, listener) as models:
        old, new = models
        _refuse_other_tensors(old, new)
        refuse_inside(target, (model.checkpoint.location.place for model in models))
        refuse_sources(target, old.checkpoint.catalog.weight_files)
        new.checkpoint.states.include(old.checkpoint.states)  # all are checked before the commit
        alone = replace(new.checkpoint, companions=Companions(), base=None)
        nothing = make_plan(Layout((), {}, 0))
        prepared = PlannedMerge(Sources((alone,)), (), nothing, config=None, warnings=(), files={})
        stage, context = stage_for(target, prepared, options), (options, listener)
        change = partial(_changed, old, new, names, former, *context)
        outcome = make_output(prepared, stage, *context, change)
        # They were checked before the commit: a later change must not fail the call.
        old.checkpoint.states.states.clear()
        new.checkpoint.states.states.clear()
    return make_report(outcome, target, memory_bytes=options.resources.memory_bytes)


def _refuse_other_tensors(old: ConvertedModel, new: ConvertedModel) -> None:
    """Raise a ConversionError for tensors that no delta can express."""
    before, after = (
        {name: f"{one.dtype.name} {list(shape_of(one.recipe))}" for name, one in tensors.items()}
        for tensors in (old.tensors, new.tensors)
    )
    if names := [name for name in before | after if before.get(name) != after.get(name)]:
        raise ConversionError(
            f"{new.checkpoint.location.weights_dir}: a delta cannot express the change: "
            f"{counted(len(names), 'tensor')} differ in name, dtype or shape, as {names[0]}",
            expected=before.get(names[0], "no such tensor"),
            found=after.get(names[0], "no such tensor"),
            hint="merge it instead: engines accept a whole model as a version, too",
        )


@dataclass(slots=True)
class _Change:
    """Number of changed values of a tensor, and its Adler-32 before and after."""

    values: int = 0
    former: str = ""
    checksum: str = ""


def _changed(  # noqa: PLR0917 (`make_output` passes the last two)
    old: ConvertedModel,
    new: ConvertedModel,
    names: tuple[str | None, str | None],
    former: Mapping[str, str] | None,
    options: MergeOptions,
    listener: Listener,
    prepared: PlannedMerge,
    scratch: Path,
) -> PlannedMerge:
    """Return the output of a delta, after writing its frames to `scratch`."""
    changes = {name: _Change() for name in new.tensors}
    jobs = {
        name: (2 * size_of(tensor), partial(_frame, old.tensors[name], tensor, changes[name]))
        for name, tensor in new.tensors.items()
    }
    total = sum(size for size, _ in jobs.values())
    listener(Stage("comparing", total))
    paths = spool(
        jobs, partial(block_reader, [old, new]), scratch, options.resources, listener, streams=1
    )
    if former is not None and {name: one.former for name, one in changes.items()} != former:
        what = f"{old.checkpoint.location.weights_dir}: its values differ from the version before"
        raise ConversionError(what, hint="was it saved again, or do the options differ?")
    changed = {name: change for name, change in changes.items() if change.values}
    values = sum(change.values for change in changed.values())
    listener(Chosen(f"changed: {counted(values, 'value')} of {counted(len(changed), 'tensor')}"))
    layout = _lay_out({name: paths[name] for name in changed}, changed, options.max_shard_size)
    locations = [model.checkpoint.location for model in (old, new)]
    steps = [source_of(at.place)[1] if at.step is None else at.step for at in locations]
    numbers = (0, 1) if None in steps or steps[0] == steps[1] else steps
    base, version = (name or f"{number:06d}" for name, number in zip(names, numbers, strict=True))
    unchanged = {name: change.checksum for name, change in changes.items() if not change.values}
    files = {INDEX_NAME: index_of(base, version, layout.weight_map, unchanged)}
    own = fingerprint(stamps_of(new.checkpoint.location))
    return replace(prepared, plan=make_plan(layout), files=files, fingerprint=own)


def _frame(
    old: ConvertedTensor, new: ConvertedTensor, change: _Change, reader: PieceReader
) -> Iterator[bytes]:
    """Yield the compressed XOR of a tensor, and fill in its change."""

    def xored() -> Iterator[memoryview]:
        former, checksum, dtype = 1, 1, raw_dtype(new.dtype)
        for before, after in zip(reader.blocks(old), reader.blocks(new), strict=True):
            former, checksum = zlib.adler32(before, former), zlib.adler32(after, checksum)
            block = np.frombuffer(before, dtype)
            np.bitwise_xor(block, np.frombuffer(after, dtype), out=block)  # blocks are read once
            change.values += int(np.count_nonzero(block))
            yield block.view(np.uint8).data
        change.former, change.checksum = f"{former:08x}", f"{checksum:08x}"

    return frame_of(xored(), size_of(new))


def _lay_out(
    paths: Mapping[str, Path], changes: Mapping[str, _Change], size: str | int | None
) -> Layout:
    uint8 = BY_CODE["U8"]
    tensors = [spooled(name, uint8, (path.stat().st_size,), path) for name, path in paths.items()]
    if not tensors:
        return Layout((), {}, 0)
    layout = lay_out(tensors, size_in_bytes(str(size or SHARD_SIZE)))
    renamed, files = {}, []
    for number, file in enumerate(layout.files):
        entries = [HeaderEntry(t.name, t.dtype, t.shape, *t.data_offsets) for t in file.tensors]
        header = encode_header(entries, {t.name: changes[t.name].checksum for t in entries})
        renamed[file.filename] = _FILE.format(number, len(layout.files))
        files.append(file._replace(filename=renamed[file.filename], header=header))
    weight_map = {name: renamed[file] for name, file in layout.weight_map.items()}
    return layout._replace(files=tuple(files), weight_map=weight_map)
