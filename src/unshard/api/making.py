"""From a plan to a finished directory: staged, written, verified, committed."""

from dataclasses import dataclass, replace
from pathlib import Path

from unshard.api.adapters import ADAPTER_FOLDER, AdapterPart
from unshard.api.options import MergeOptions
from unshard.api.preparing import Prepared, prepare
from unshard.engines.threads import RunPlan, run_plan, verify_full
from unshard.plan.layout import INDEX_NAME, index_json
from unshard.plan.operations import Plan
from unshard.progress import Listener, Stage
from unshard.read.dcp.inflate import inflate, inflated_bytes
from unshard.write.companions import write_companions
from unshard.write.record import RECORD_NAME, record_json
from unshard.write.stage import Stage as Staging
from unshard.write.targets import refuse_sources
from unshard.write.training_state import state_file_names, write_training_state
from unshard.write.unchanged import unchanged
from unshard.write.verify import verify_light

__all__ = [
    "Noticed",
    "check_target",
    "companion_files",
    "make",
    "output_names",
    "places",
    "weight_files",
]

_COMPANION_ALLOWANCE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Noticed:
    """What showed only while the output was made; `changed` as in `Report.changed_from_base`."""

    warnings: tuple[str, ...] = ()
    changed: tuple[int, int] | None = None


def make(
    prepared: Prepared, target: Path, options: MergeOptions, listener: Listener, engine: RunPlan
) -> Noticed:
    """Make the output apart, and let it take its place in one commit; return what was noticed."""
    check_target(prepared, target)
    needed, sources = _needed_bytes(prepared), places(prepared)
    names, overwrite = output_names(prepared), options.overwrite
    with Staging(target, needed, sources=sources, overwrite=overwrite, names=names) as staging:
        inflated = _inflated(prepared, staging, options, listener)
        return _write(inflated, staging, options, listener, engine)


def _inflated(
    prepared: Prepared, staging: Staging, options: MergeOptions, listener: Listener
) -> Prepared:
    """Decompress a compressed checkpoint beside its output, and plan again from there."""
    if not any(inflated_bytes(catalog) for catalog in prepared.catalogs):
        return prepared
    listener(Stage("decompressing"))
    sources = []
    for number, source in enumerate(prepared.sources):
        scratch = staging.scratch.with_suffix(f".{number}")
        sources.append(replace(source, catalog=inflate(source.catalog, scratch)))
    again = prepare(sources, options, prepared.weights)
    return replace(again, training=prepared.training)


def _write(
    prepared: Prepared, staging: Staging, options: MergeOptions, listener: Listener, engine: RunPlan
) -> Noticed:
    """Make the output in its staging directory, verify it as a stranger would, and commit it."""
    plan, directory = prepared.plan, staging.directory
    listener(Stage("writing", plan.layout.total_size))
    overflows = engine(plan, directory, options.settings, listener)
    write_companions(prepared.checkpoint.companions, prepared.config, directory)
    if len(plan.layout.files) > 1:
        (directory / INDEX_NAME).write_bytes(index_json(plan.layout))
    for name, text in prepared.files.items():
        (directory / name).write_bytes(text)
    write_training_state(prepared.training, directory)
    (directory / RECORD_NAME).write_bytes(_record(prepared, options))
    if prepared.adapter is not None:
        _write_adapter(prepared.adapter, directory / ADAPTER_FOLDER, options, listener)
    full = options.verify == "full"
    if options.verify != "off":
        listener(Stage("verifying", plan.layout.total_size if full else 0))
        verify_light(directory, plan.layout)
    if full:
        verify_full(plan, prepared.catalogs, directory, options.settings, listener)
    noticed = _compare_with_base(prepared, listener)
    listener(Stage("committing"))
    notes = staging.commit(replaced=_asked_for(prepared, options))
    warnings = (*noticed.warnings, *_overflow_warnings(overflows, plan), *notes)
    return replace(noticed, warnings=warnings)


def _record(prepared: Prepared, options: MergeOptions) -> bytes:
    state = state_file_names(prepared.training)
    output = {
        "loadable": prepared.loadable,
        "names_checked": prepared.names_checked,
        **({"training_state": list(state)} if state else {}),
    }
    layout = prepared.plan.layout
    return record_json(prepared.sources, prepared.weights, layout, options.recorded, output)


def _asked_for(prepared: Prepared, options: MergeOptions) -> tuple[str, ...]:
    """Return the companions that the user named, by --config: a file, or a directory of them."""
    if options.config is None:
        return ()
    if Path(options.config).is_dir():
        return ("config.json", *prepared.checkpoint.companions.files)
    return ("config.json",)


def _write_adapter(
    part: AdapterPart, directory: Path, options: MergeOptions, listener: Listener
) -> None:
    """Write an adapter into a folder of its own."""
    directory.mkdir()
    run_plan(part.plan, directory, options.settings, listener)
    for name, text in part.files.items():
        (directory / name).write_bytes(text)
    if options.verify != "off":
        verify_light(directory, part.plan.layout)


def _compare_with_base(prepared: Prepared, listener: Listener) -> Noticed:
    """Count what training has changed: a merge of the wrong weights often gives the base itself."""
    base = prepared.checkpoint.base
    if base is None or not base.tensors:
        return Noticed()
    listener(Stage("comparing with the base"))
    compared = [tensor for tensor in prepared.tensors if tensor.name in base.tensors]
    if not compared:
        return Noticed()
    changed = len(compared) - len(unchanged(compared, base.tensors))
    if not changed:
        warning = (
            f"ALL {len(compared)} TENSORS EQUAL THOSE OF {base.name}: this output is the base "
            "model. Was the right checkpoint merged, and was anything trained?"
        )
        return Noticed((warning,), (0, len(compared)))
    return Noticed((), (changed, len(compared)))


def _overflow_warnings(overflows: dict[str, int], plan: Plan) -> list[str]:
    if not overflows:
        return []
    worst = sorted(overflows.items(), key=lambda item: -item[1])[:5]
    listed = ", ".join(f"{name} ({count})" for name, count in worst)
    tensors = (tensor for file in plan.layout.files for tensor in file.tensors)
    dtypes = sorted({one.dtype.name for one in tensors if one.name in overflows})
    what = f"{sum(overflows.values())} values of {len(overflows)} tensors are too large for "
    hint = "; bfloat16 holds them" if dtypes == ["float16"] else ""
    return [f"{what}{', '.join(dtypes)} and became infinite: {listed}{hint}"]


def _needed_bytes(prepared: Prepared) -> int:
    """Return about what the output will take on disk."""
    companions = prepared.checkpoint.companions
    extra = sum(path.stat().st_size for path in companions.files.values())
    extra += prepared.adapter.plan.bytes_written if prepared.adapter is not None else 0
    extra += 2 * prepared.training.size  # of the first rank it is written twice
    extra += sum(map(inflated_bytes, prepared.catalogs))
    return prepared.plan.bytes_written + extra + _COMPANION_ALLOWANCE


def check_target(prepared: Prepared, target: Path) -> None:
    """Refuse to replace the sources themselves.

    Raises:
        OutputError: the target holds the weights that are merged.
    """
    entries = (entry for catalog in prepared.catalogs for entry in catalog.tensors.values())
    shared = {id(entry.chunks.paths): entry.chunks.paths for entry in entries}
    refuse_sources(target, {path for paths in shared.values() for path in paths})


def places(prepared: Prepared) -> tuple[Path, ...]:
    """Return the directories that hold the checkpoints."""
    locations = [source.location for source in prepared.sources]
    return tuple(place for one in locations for place in (one.step_dir, *one.roots))


def companion_files(prepared: Prepared) -> tuple[str, ...]:
    """Return the names of the other files that belong to the model."""
    config = ("config.json",) if prepared.config is not None else ()
    return (*config, *prepared.checkpoint.companions.files, *prepared.files)


def output_names(prepared: Prepared) -> tuple[str, ...]:
    """Return the paths, inside the output, of all its files but the record."""
    state = state_file_names(prepared.training)
    return (*weight_files(prepared), *companion_files(prepared), *state)


def weight_files(prepared: Prepared) -> list[str]:
    """Return the paths, inside the output, of all files of weights, with their index."""
    files = [file.filename for file in prepared.plan.layout.files]
    if len(files) > 1:
        files.append(INDEX_NAME)
    if prepared.adapter is not None:
        names = [file.filename for file in prepared.adapter.plan.layout.files]
        files += [f"{ADAPTER_FOLDER}/{name}" for name in (*names, *prepared.adapter.files)]
    return files
