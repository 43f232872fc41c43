"""From the output's tensors to a finished directory: one function for each step of `merging`."""

import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.api.converting import Conversion
from unshard.api.options import MergeOptions
from unshard.api.sources import Sources
from unshard.containers.open_files import OpenFiles
from unshard.convert.outputs import Converted, main_dtype
from unshard.convert.recipes import Quantized, shape_of, take
from unshard.engines.crew import Crew
from unshard.engines.threads import run_plan
from unshard.keywords import SHARD_SIZE
from unshard.plan.layout import OPTIMIZER_FILES, lay_out, size_in_bytes
from unshard.plan.operations import Plan
from unshard.plan.planner import make_plan
from unshard.plan.work import make_pair
from unshard.progress import Listener, Stage, Warned, ignore
from unshard.read.beside.base_name import find_base_name
from unshard.read.beside.companions import Companions
from unshard.read.hub_files import RECORD_NAME
from unshard.read.model_config import ModelConfig
from unshard.read.open import Checkpoint
from unshard.showing import counted, is_notebook, is_terminal
from unshard.stores.remote_path import path_of
from unshard.tensors.catalog import TensorEntry
from unshard.write.companions import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    OPTIMIZER_NAME,
    companion_files,
    is_state_file,
    optimizer_json,
    state_file_names,
    write_files,
    write_training_state,
)
from unshard.write.execute import are_equal
from unshard.write.hub import push
from unshard.write.record import record_json
from unshard.write.report import Report, peak_memory
from unshard.write.staging.stage import Staging
from unshard.write.staging.targets import refuse_sources
from unshard.write.verification.output import verify_light, without_checksums

_log = logging.getLogger(__name__)

_ONE_FILE = 1 << 62
_COMPANION_ALLOWANCE = 64 * 1024
ADAPTER_FOLDER = "lora_adapter"
"""Where an adapter is written that is written by itself too."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Everything that is known before the first byte is written.

    Attributes:
        sources: what is merged.
        tensors: the output's.
        plan: how their files are made.
        config: config.json of the output, if it gets one.
        warnings: what a user should know.
        files: small files to write next to the weights, by name.
        names_checked: by what the names were checked: "config", "base" or "none".
        adapter: the adapter by itself, to be written into a folder of its own.
    """

    sources: Sources
    tensors: Sequence[Converted]
    plan: Plan
    config: ModelConfig | None
    warnings: tuple[str, ...]
    files: Mapping[str, bytes]
    names_checked: str = "none"
    adapter: "Prepared | None" = None

    @property
    def checkpoint(self) -> Checkpoint:
        """What is merged; of several, the last."""
        return self.sources.last

    @property
    def loadable(self) -> bool:
        """Whether the output has the config that transformers or PEFT needs to load it."""
        return self.config is not None or ADAPTER_CONFIG_NAME in self.files


def plan_output(sources: Sources, made: Conversion, options: MergeOptions) -> Prepared:
    """Lay out the output's files, and plan how they are made."""
    read = (*sources.notes, *without_checksums(sources.catalogs, options.verify))
    if options.lora == "adapter":
        return _plan_adapter(sources, made, read)
    base, size, like = sources.last.base, options.max_shard_size, None
    # The files are those of the base model, unless a size is given.
    if base is not None and size is None:
        is_safetensors = all(one.endswith(".safetensors") for one in base.files.values())
        like = base.files if is_safetensors else None
    shard_bytes = size_in_bytes(SHARD_SIZE if size is None else str(size))
    layout = lay_out(made.tensors, shard_bytes, like=like)
    if made.optimizer:
        moments = lay_out(made.optimizer, shard_bytes, pattern=OPTIMIZER_FILES)
        layout = layout.with_optimizer(moments)
    plan = make_plan(layout)
    _log_plan(made.tensors, plan)
    config, written, notes = made.config, main_dtype(made.tensors), list(made.notes)
    if config is None:
        notes.append(without_config(sources.last, options.names))
    elif options.dtype == "keep" and (note := kept_dtype(config, written)) is not None:
        notes.append(f"{note}; to cast them: --dtype config")
    return Prepared(
        sources,
        made.tensors,
        plan,
        config=None if config is None else config.as_written(written),
        warnings=(*read, *notes, *sources.training.warnings),
        files=made.files
        if made.state is None
        else {**made.files, OPTIMIZER_NAME: optimizer_json(made.state)},
        names_checked=made.names_checked,
        adapter=None if made.adapter is None else _plan_adapter(sources, made.adapter, ()),
    )


def _plan_adapter(sources: Sources, made: Conversion, notes: tuple[str, ...]) -> Prepared:
    """Plan an adapter as a directory of its own, which PEFT loads, without companions."""
    alone = replace(sources, checkpoints=(replace(sources.last, companions=Companions()),))
    plan = make_plan(lay_out(made.tensors, _ONE_FILE, pattern=ADAPTER_NAME))
    return Prepared(alone, made.tensors, plan, None, notes, made.files)


def kept_dtype(config: ModelConfig, written: str | None) -> str | None:
    """Return a note if the weights have another dtype than their config names."""
    if not config.dtype or not written or config.dtype == written:
        return None
    return f"the weights are {written} and are kept so, but config.json names {config.dtype}"


def without_config(checkpoint: Checkpoint, names: str = "hub") -> str:
    """Return the warning for a checkpoint that has no config; a base has the names of the hub."""
    named = find_base_name(checkpoint.location)
    give = "--config FILE|DIR" + (" or --base MODEL" if names == "hub" else "")
    if named is not None and names == "hub":
        give = f"--base {shlex.quote(named.name)}, which {named.file.name} names"
    return (
        f"no config.json was found in or next to {checkpoint.location.weights_dir}: the "
        f"weights are complete, but transformers needs one to load them; give it with {give}"
    )


def _log_plan(tensors: Sequence[Converted], plan: Plan) -> None:
    _log.info(
        "plan: %s in %s, %s; copies: %d, tensors made in tiles: %d",
        counted(len(tensors), "tensor"),
        counted(len(plan.layout.files), "file"),
        counted(plan.layout.total_size, "byte"),
        *(len(plan.copies), len(plan.tiled)),
    )
    for one in tensors:
        _log.debug("plan %s: %s, %s", one.name, one.dtype.name, type(one.recipe).__name__)


def stage_output(prepared: Prepared, target: Path, options: MergeOptions) -> Staging:
    """Return the stage on which the output is made apart, to take its place in one commit."""
    sources, adapter = prepared.sources, prepared.adapter
    entries = (entry for catalog in sources.catalogs for entry in catalog.tensors.values())
    files = {id(entry.chunks.paths): entry.chunks.paths for entry in entries}  # shared by tensors
    refuse_sources(target, {path for paths in files.values() for path in paths})
    needed = prepared.plan.bytes_written + sources.compressed_bytes + _COMPANION_ALLOWANCE
    needed += 0 if adapter is None else adapter.plan.bytes_written
    needed += 2 * sources.training.size  # of the first rank it is written twice
    needed += sum(one.stat().st_size for one in prepared.checkpoint.companions.files.values())
    names = (*_weight_files(prepared), *_companion_files(prepared))
    locations = [one.location for one in sources.checkpoints]
    return Staging(
        target,
        needed,
        sources=[place for one in locations for place in (one.step_dir, *one.roots)],
        overwrite=options.overwrite,
        names=(*names, *state_file_names(sources.training)),
        resume=options.resume,
    )


def add_files(
    prepared: Prepared, directory: Path, options: MergeOptions, listener: Listener
) -> None:
    """Write all files but the weights: companions, index, training state, record, adapter."""
    write_files(small_files(prepared) | {RECORD_NAME: make_record(prepared, options)}, directory)
    write_training_state(prepared.sources.training, directory)
    if prepared.adapter is not None:
        run_plan(prepared.adapter.plan, directory / ADAPTER_FOLDER, options.resources, listener)


def small_files(prepared: Prepared) -> dict[str, bytes | Path]:
    """Return all files but weights, training state and record: the bytes, or a file to copy."""
    files = companion_files(prepared.checkpoint.companions, prepared.config)
    files |= prepared.plan.layout.indices
    files |= prepared.files
    if prepared.adapter is not None:
        added = prepared.adapter.files.items()
        files |= {f"{ADAPTER_FOLDER}/{name}": text for name, text in added}
    return files


def make_record(prepared: Prepared, options: MergeOptions) -> bytes:
    """Return the output's `unshard.json`; a commit adds what is not weights to it."""
    sources = prepared.sources
    state = [*state_file_names(sources.training)]
    state += filter(is_state_file, (*_weight_files(prepared), *prepared.files))
    output: dict[str, object] = {
        "loadable": prepared.loadable,
        "names_checked": prepared.names_checked,
    }
    output |= {"training_state": state} if state else {}
    checkpoints, layout = sources.checkpoints, prepared.plan.layout
    return record_json(checkpoints, sources.weights, layout, options.recorded, output)


def verify_output(
    prepared: Prepared, directory: Path, options: MergeOptions, listener: Listener, engine: Crew
) -> None:
    """Read the output again, as far as `--verify` says."""
    if options.verify == "off":
        return
    full = options.verify == "full"
    listener(Stage("verifying", prepared.plan.layout.total_size if full else 0))
    verify_light(directory, prepared.plan.layout)
    if prepared.adapter is not None:
        verify_light(directory / ADAPTER_FOLDER, prepared.adapter.plan.layout)
    if full:
        given = (prepared.plan, prepared.sources.catalogs, directory, options.resources, listener)
        with prepared.sources.blamed():
            engine.verify_full(*given)


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
    if isinstance(output.recipe, Quantized):  # what was quantised is compared
        output = Converted(output.name, entry.dtype, output.recipe.values)
    pair = make_pair(Converted(output.name, entry.dtype, take(entry)), output)
    return pair.ours.to is not pair.theirs.to or not are_equal(pair, files)


def named_companions(prepared: Prepared, options: MergeOptions) -> tuple[str, ...]:
    """Return the companions that the user named, by --config: a file, or a directory of them."""
    if options.config is None:
        return ()
    files = prepared.checkpoint.companions.files if path_of(options.config).is_dir() else ()
    return ("config.json", *files)


def late_notes(
    prepared: Prepared, changed: tuple[int, int] | None, overflows: dict[str, int]
) -> list[str]:
    """Return the warnings that are known only once the output is made."""
    base = prepared.checkpoint.base
    notes: list[str] = []
    # A merge of the wrong weights often gives the base model itself.
    if base is not None and changed is not None and not changed[0]:
        notes.append(
            f"ALL {changed[1]} TENSORS EQUAL THOSE OF {base.name}: this output is the base "
            "model. Was the right checkpoint merged, and was anything trained?"
        )
    if overflows:
        worst = sorted(overflows.items(), key=lambda item: -item[1])[:5]
        listed = ", ".join(f"{name} ({count})" for name, count in worst)
        tensors = (tensor for file in prepared.plan.layout.files for tensor in file.tensors)
        dtypes = sorted({one.dtype.name for one in tensors if one.name in overflows})
        what = f"{sum(overflows.values())} values of {len(overflows)} tensors are too large for "
        hint = "; bfloat16 can represent them" if dtypes == ["float16"] else ""
        notes.append(f"{what}{', '.join(dtypes)} and became infinite: {listed}{hint}")
    return notes


def warn(listener: Listener, notes: Sequence[str]) -> list[str]:
    """Give notes to the listener, and return them."""
    for note in notes:
        listener(Warned(note))
    return list(notes)


def push_output(
    prepared: Prepared, target: Path, options: MergeOptions, listener: Listener
) -> str | None:
    """Upload the output if `--push-to-hub` was given; return the repository's URL."""
    if options.push_to_hub is None:
        return None
    listener(Stage("pushing"))
    names = [*_weight_files(prepared), *_companion_files(prepared), RECORD_NAME]
    bars = listener is not ignore and (is_terminal() or is_notebook())
    return push(target, options.push_to_hub, names, private=options.private, bars=bars)


def make_report(
    prepared: Prepared,
    target: Path | None,
    options: MergeOptions,
    started: float,
    *,
    notes: Sequence[str] = (),
    changed: tuple[int, int] | None = None,
    url: str | None = None,
) -> Report:
    """Return the report of a merge that began at `started`, by `time.monotonic()`.

    `target` is None if nothing was written.
    """
    checkpoints, plan = prepared.sources.checkpoints, prepared.plan
    dtypes = Counter(one.dtype.name for file in plan.layout.model_files for one in file.tensors)
    operations = Counter(type(one).__name__ for one in plan.tiled)
    operations += Counter(CopyRange=len(plan.copies))
    return Report(
        output="" if target is None else str(target),
        source=str(checkpoints[-1].location.weights_dir),
        sources=tuple(str(one.location.weights_dir) for one in checkpoints),
        step=checkpoints[-1].catalog.step,
        passed_over=tuple(passed for one in checkpoints for passed in one.passed_over),
        world_size=checkpoints[-1].catalog.world_size,
        files={file.filename: file.size for file in plan.layout.files},
        companions=(*_companion_files(prepared), *state_file_names(prepared.sources.training)),
        tensors=len(plan.layout.weight_map),
        parameters=plan.layout.total_parameters,
        dtypes=dict(dtypes.most_common()),
        operations=dict(sorted(operations.items())),
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        memory_bytes=options.resources.memory_bytes,
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


def _companion_files(prepared: Prepared) -> tuple[str, ...]:
    """Return the names of the other files that belong to the model."""
    config = ("config.json",) if prepared.config is not None else ()
    return (*config, *prepared.checkpoint.companions.files, *prepared.files)


def _weight_files(prepared: Prepared) -> list[str]:
    """Return the paths, inside the output, of all files of weights, with their index."""
    files = [file.filename for file in prepared.plan.layout.files]
    files += prepared.plan.layout.indices
    if prepared.adapter is not None:
        names = [file.filename for file in prepared.adapter.plan.layout.files]
        files += [f"{ADAPTER_FOLDER}/{name}" for name in (*names, *prepared.adapter.files)]
    return files
