"""The steps from a plan to a finished directory, one function each; `merging` has their order."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from unshard.api.flow.preparing import Prepared
from unshard.api.options import MergeOptions
from unshard.containers.open_files import OpenFiles
from unshard.convert.outputs import Converted
from unshard.convert.recipes import shape_of, take
from unshard.engines.threads import run_plan, verify_full
from unshard.plan.layout import INDEX_NAME, index_json
from unshard.plan.operations import Plan
from unshard.plan.work import make_pair
from unshard.progress import Listener, Stage, ignore
from unshard.showing import is_notebook, is_terminal
from unshard.tensors.catalog import TensorEntry
from unshard.write.companions import (
    state_file_names,
    write_companions,
    write_training_state,
)
from unshard.write.execute import are_equal
from unshard.write.hub import push
from unshard.write.record import RECORD_NAME, record_json
from unshard.write.report import Report, count_dtypes, count_operations, peak_memory
from unshard.write.staging.stage import Staging
from unshard.write.staging.targets import refuse_sources
from unshard.write.verification.light import verify_light

__all__ = [
    "add_files",
    "compare_with_base",
    "late_notes",
    "make_report",
    "named_companions",
    "push_output",
    "stage_output",
    "verify_output",
]

_COMPANION_ALLOWANCE = 64 * 1024
_ADAPTER_FOLDER = "lora_adapter"


def stage_output(prepared: Prepared, target: Path, options: MergeOptions) -> Staging:
    """Return the stage on which the output is made apart, to take its place in one commit.

    Raises:
        OutputError: the target contains the weights that are merged; on entering: see `Staging`.
    """
    catalogs = [one.catalog for one in prepared.sources.checkpoints]
    locations = [one.location for one in prepared.sources.checkpoints]
    entries = (entry for catalog in catalogs for entry in catalog.tensors.values())
    files = {id(entry.chunks.paths): entry.chunks.paths for entry in entries}  # shared by tensors
    refuse_sources(target, {path for paths in files.values() for path in paths})
    return Staging(
        target,
        _needed_bytes(prepared),
        sources=[place for one in locations for place in (one.step_dir, *one.roots)],
        overwrite=options.overwrite,
        names=_output_names(prepared),
    )


def add_files(
    prepared: Prepared, directory: Path, options: MergeOptions, listener: Listener
) -> None:
    """Write all files but the weights: companions, index, training state, record, adapter."""
    write_companions(prepared.checkpoint.companions, prepared.config, directory)
    if len(prepared.plan.layout.files) > 1:
        (directory / INDEX_NAME).write_bytes(index_json(prepared.plan.layout))
    for name, text in prepared.files.items():
        (directory / name).write_bytes(text)
    write_training_state(prepared.sources.training, directory)
    (directory / RECORD_NAME).write_bytes(_record(prepared, options))
    if prepared.adapter is not None:
        folder = directory / _ADAPTER_FOLDER
        folder.mkdir()
        run_plan(prepared.adapter.plan, folder, options.settings, listener)
        for name, text in prepared.adapter.files.items():
            (folder / name).write_bytes(text)


def _record(prepared: Prepared, options: MergeOptions) -> bytes:
    sources, state = prepared.sources, state_file_names(prepared.sources.training)
    output = {
        "loadable": prepared.loadable,
        "names_checked": prepared.names_checked,
        **({"training_state": list(state)} if state else {}),
    }
    layout = prepared.plan.layout
    return record_json(sources.checkpoints, sources.weights, layout, options.recorded, output)


def verify_output(
    prepared: Prepared, directory: Path, options: MergeOptions, listener: Listener
) -> None:
    """Read the output again from disk, as far as `--verify` says.

    Raises:
        OutputError: it is not what was planned; with "full", or differs from the sources.
    """
    if options.verify == "off":
        return
    full = options.verify == "full"
    listener(Stage("verifying", prepared.plan.layout.total_size if full else 0))
    verify_light(directory, prepared.plan.layout)
    if prepared.adapter is not None:
        verify_light(directory / _ADAPTER_FOLDER, prepared.adapter.plan.layout)
    if full:
        catalogs = [one.catalog for one in prepared.sources.checkpoints]
        verify_full(prepared.plan, catalogs, directory, options.settings, listener)


def compare_with_base(prepared: Prepared, listener: Listener) -> tuple[int, int] | None:
    """Count what training has changed, as in `Report.changed_from_base`.

    A trained tensor differs from its base within the first tiles, so little of it is read.
    """
    base = prepared.checkpoint.base
    if base is None or not base.tensors:
        return None
    listener(Stage("comparing with the base"))
    with OpenFiles(os.O_RDONLY, limit=32) as files:
        changed = [
            _is_changed(tensor, base.tensors[tensor.name], files)
            for tensor in prepared.tensors
            if tensor.name in base.tensors
        ]
    return (sum(changed), len(changed)) if changed else None


def _is_changed(output: Converted, entry: TensorEntry, files: OpenFiles) -> bool:
    """Return whether an output tensor differs from the base's, in the base's dtype."""
    if shape_of(output.recipe) != entry.shape:
        return True
    pair = make_pair(Converted(output.name, entry.dtype, take(entry)), output)
    return pair.ours.to is not pair.theirs.to or not are_equal(pair, files)


def named_companions(prepared: Prepared, options: MergeOptions) -> tuple[str, ...]:
    """Return the companions that the user named, by --config: a file, or a directory of them."""
    if options.config is None:
        return ()
    files = prepared.checkpoint.companions.files if Path(options.config).is_dir() else ()
    return ("config.json", *files)


def late_notes(
    prepared: Prepared, changed: tuple[int, int] | None, overflows: dict[str, int]
) -> list[str]:
    """Return the warnings that are known only once the output is made."""
    base, notes = prepared.checkpoint.base, _overflow_notes(overflows, prepared.plan)
    if base is None or changed is None or changed[0]:
        return notes
    # A merge of the wrong weights often gives the base model itself.
    same = (
        f"ALL {changed[1]} TENSORS EQUAL THOSE OF {base.name}: this output is the base "
        "model. Was the right checkpoint merged, and was anything trained?"
    )
    return [same, *notes]


def _overflow_notes(overflows: dict[str, int], plan: Plan) -> list[str]:
    if not overflows:
        return []
    worst = sorted(overflows.items(), key=lambda item: -item[1])[:5]
    listed = ", ".join(f"{name} ({count})" for name, count in worst)
    tensors = (tensor for file in plan.layout.files for tensor in file.tensors)
    dtypes = sorted({one.dtype.name for one in tensors if one.name in overflows})
    what = f"{sum(overflows.values())} values of {len(overflows)} tensors are too large for "
    hint = "; bfloat16 can represent them" if dtypes == ["float16"] else ""
    return [f"{what}{', '.join(dtypes)} and became infinite: {listed}{hint}"]


def push_output(
    prepared: Prepared, target: Path, options: MergeOptions, listener: Listener
) -> str | None:
    """Upload the output if that was asked for; return the repository's URL."""
    if options.push_to_hub is None:
        return None
    listener(Stage("pushing"))
    names = [*_weight_files(prepared), *_companion_files(prepared), RECORD_NAME]
    bars = listener is not ignore and (is_terminal() or is_notebook())
    return push(target, options.push_to_hub, names, private=options.private, bars=bars)


def make_report(
    prepared: Prepared,
    target: Path,
    options: MergeOptions,
    started: float,
    *,
    notes: Sequence[str] = (),
    changed: tuple[int, int] | None = None,
    url: str | None = None,
) -> Report:
    """Return the report of a merge that began at `started`, by `time.monotonic()`."""
    checkpoints, plan = prepared.sources.checkpoints, prepared.plan
    training = prepared.sources.training
    return Report(
        output=str(target),
        source=str(checkpoints[-1].location.weights_dir),
        sources=tuple(str(one.location.weights_dir) for one in checkpoints),
        step=checkpoints[-1].catalog.step,
        passed_over=tuple(passed for one in checkpoints for passed in one.passed_over),
        world_size=checkpoints[-1].catalog.world_size,
        files={file.filename: file.size for file in plan.layout.files},
        companions=(*_companion_files(prepared), *state_file_names(training)),
        tensors=len(plan.layout.weight_map),
        parameters=plan.layout.total_parameters,
        dtypes=count_dtypes(plan.layout),
        operations=count_operations(plan),
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        memory_bytes=options.settings.memory_bytes,
        seconds=round(time.monotonic() - started, 3),
        peak_memory_bytes=peak_memory(),
        dry_run=options.dry_run,
        loadable=prepared.loadable,
        names_checked=prepared.names_checked,
        changed_from_base=changed,
        url=url,
        notes=(*prepared.warnings, *notes),
        skipped=tuple(skipped for one in checkpoints for skipped in one.catalog.skipped),
    )


def _needed_bytes(prepared: Prepared) -> int:
    """Return about what the output will take on disk."""
    companions = prepared.checkpoint.companions.files.values()
    extra = sum(path.stat().st_size for path in companions)
    extra += prepared.adapter.plan.bytes_written if prepared.adapter is not None else 0
    extra += 2 * prepared.sources.training.size  # of the first rank it is written twice
    extra += prepared.sources.compressed_bytes
    return prepared.plan.bytes_written + extra + _COMPANION_ALLOWANCE


def _companion_files(prepared: Prepared) -> tuple[str, ...]:
    """Return the names of the other files that belong to the model."""
    config = ("config.json",) if prepared.config is not None else ()
    return (*config, *prepared.checkpoint.companions.files, *prepared.files)


def _output_names(prepared: Prepared) -> tuple[str, ...]:
    """Return the paths, inside the output, of all its files but the record."""
    state = state_file_names(prepared.sources.training)
    return (*_weight_files(prepared), *_companion_files(prepared), *state)


def _weight_files(prepared: Prepared) -> list[str]:
    """Return the paths, inside the output, of all files of weights, with their index."""
    files = [file.filename for file in prepared.plan.layout.files]
    if len(files) > 1:
        files.append(INDEX_NAME)
    if prepared.adapter is not None:
        names = [file.filename for file in prepared.adapter.plan.layout.files]
        files += [f"{_ADAPTER_FOLDER}/{name}" for name in (*names, *prepared.adapter.files)]
    return files
