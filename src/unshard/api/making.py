"""The steps of `merging`, from the output's tensors to a finished directory."""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unshard import __version__
from unshard.api.converting import ADAPTER_FOLDER, Conversion, convert
from unshard.api.options import MergeOptions
from unshard.api.sources import Sources
from unshard.console import counted, is_notebook, is_terminal
from unshard.containers.open_files import OpenFiles
from unshard.convert.outputs import ConvertedTensor, main_dtype
from unshard.convert.recipes import Quantized, shape_of, take
from unshard.engines.crew import Crew
from unshard.fronts import Text
from unshard.keywords import SHARD_SIZE
from unshard.plan.identity import digest_of
from unshard.plan.layout import ONE_FILE, Layout, lay_out, lay_out_apart, size_in_bytes
from unshard.plan.operations import Plan
from unshard.plan.planner import make_plan
from unshard.plan.work import make_pair
from unshard.progress import Listener, ignore, warn
from unshard.progress import Stage as Progress
from unshard.read.beside.companions import Companions
from unshard.read.hub_files import MODULES, RECORD_NAME
from unshard.read.model_config import NO_LIBRARY, SENTENCES, Library, ModelConfig
from unshard.read.open import Checkpoint
from unshard.stores.remote_path import path_of
from unshard.tensors.catalog import TensorEntry
from unshard.write.companions import (
    ADAPTER_CONFIG_NAME,
    PIPELINE_ADAPTER,
    companion_files,
    is_state_file,
    state_file_names,
    write_training_state,
)
from unshard.write.execute import are_equal
from unshard.write.record import record_json
from unshard.write.stage import WorkDigests
from unshard.write.verification.output import verify_light, without_checksums

_log = logging.getLogger(__name__)

_OF_TRAINING = re.compile(r"\.lora_A\.|^0\.(auto_)?model\.")  # names that no library loads


@dataclass(frozen=True, slots=True, eq=False)
class PlannedMerge:
    """A merge before its first byte is written.

    Attributes:
        sources: the inputs.
        tensors: the tensors of the output.
        plan: how their files are made.
        config: config.json of the output, if it gets one.
        warnings: messages for the user.
        files: small files to write next to the weights, by their paths.
        names_checked: the reference for the names: "config", "base" or "none".
        fingerprint: the result of `fingerprint_of`, if it was computed before.
    """

    sources: Sources
    tensors: Sequence[ConvertedTensor]
    plan: Plan
    config: ModelConfig | None
    warnings: tuple[str, ...]
    files: Mapping[str, bytes]
    names_checked: str = "none"
    fingerprint: str = ""

    @property
    def checkpoint(self) -> Checkpoint:
        """The only checkpoint, or the last of several."""
        return self.sources.last

    @property
    def library(self) -> Library:
        """The library that loads the output."""
        if self.config is not None:
            library = self.config.library
            library = SENTENCES if MODULES in self.checkpoint.companions.files else library
            has_training_names = any(_OF_TRAINING.search(tensor.name) for tensor in self.tensors)
            return library._replace(loads=library.loads and not has_training_names)
        adapters = {ADAPTER_CONFIG_NAME: "peft", PIPELINE_ADAPTER: "diffusers"}
        names = adapters.keys() & {*_weight_files(self), *self.files}
        return Library(adapters[names.pop()]) if names else NO_LIBRARY


def plan_output(
    sources: Sources,
    conversion: Conversion,
    options: MergeOptions,
    like: Mapping[str, str] | None = None,
) -> PlannedMerge:
    """Lay out the output's files, and plan how they are made.

    Without `max_shard_size` the files are those of the base model, or of the weight map `like`.
    """
    if options.lora == "adapter":  # a directory that PEFT loads, without companions
        alone = replace(sources.last, companions=Companions())
        sources = replace(sources, checkpoints=(alone,))
        name, metadata = conversion.adapter
        layout = lay_out(conversion.tensors, ONE_FILE, pattern=name, metadata=metadata)
    else:
        layout = _lay_out_model(sources.last, conversion, options.max_shard_size, like)
    plan = make_plan(layout)
    _log_plan(conversion.tensors, plan)
    config, written = conversion.config, main_dtype(conversion.tensors)
    notes = [*sources.notes, *without_checksums(sources.catalogs, options.verify)]
    notes += conversion.notes
    if config and options.dtype == "keep" and (note := kept_dtype(config, written)) is not None:
        notes.append(Text(f"{note}; to cast them: ⟦+--dtype config⟧"))
    return PlannedMerge(
        sources,
        conversion.tensors,
        plan,
        config=config and config.as_written(written),
        warnings=(*notes, *sources.training.warnings),
        files=conversion.files,
        names_checked=conversion.names_checked,
    )


def _lay_out_model(
    source: Checkpoint,
    conversion: Conversion,
    shard_size: str | int | None,
    like: Mapping[str, str] | None,
) -> Layout:
    """Lay out a model, its modules in folders, and its optimizer's state or separate adapter."""
    if shard_size is None and source.base is not None:
        files = source.base.files
        like = files if all(name.endswith(".safetensors") for name in files.values()) else None
    shard_bytes = size_in_bytes(SHARD_SIZE if shard_size is None else str(shard_size))
    stem = (conversion.config.library if conversion.config else NO_LIBRARY).weights
    pattern = f"{source.companions.folder}{stem}{{suffix}}.safetensors"
    tensors, beside = lay_out_apart(conversion.tensors, source.companions.folders)
    like = like if shard_size is None else None
    layout = lay_out(tensors, shard_bytes, like=like, pattern=pattern)
    beside += [
        lay_out(tensors, ONE_FILE, pattern=pattern, metadata=conversion.adapter.metadata)
        if pattern.startswith(ADAPTER_FOLDER)
        else lay_out(tensors, shard_bytes, pattern=pattern)
        for pattern, tensors in conversion.beside.items()
        if tensors
    ]
    return layout.with_files_of(beside)


def kept_dtype(config: ModelConfig, written: str | None) -> str | None:
    """Return a note if the weights have another dtype than their config names."""
    if not config.dtype or not written or config.dtype == written:
        return None
    return f"config.json names {config.dtype}, but the weights stay {written}"


def _log_plan(tensors: Sequence[ConvertedTensor], plan: Plan) -> None:
    _log.info(
        "plan: %s in %s, %s; copies: %d, tensors made in tiles: %d",
        counted(len(tensors), "tensor"),
        counted(len(plan.layout.files), "file"),
        counted(plan.layout.total_size, "byte"),
        *(len(plan.copies), len(plan.tiled)),
    )
    for tensor in tensors:
        recipe = type(tensor.recipe).__name__
        _log.debug("plan %s: %s, %s", tensor.name, tensor.dtype.name, recipe)


def decompressed(
    prepared: PlannedMerge, scratch: Callable[[], Path], options: MergeOptions, listener: Listener
) -> PlannedMerge:
    """Return the merge with its sources decompressed, converted and planned again.

    Compressed values cannot be compared or read at random. `scratch` returns a directory for the
    decompressed files.
    """
    if not prepared.sources.compressed_bytes:
        return prepared
    listener(Progress("decompressing"))
    sources = prepared.sources.decompressed(scratch())
    again = plan_output(sources, convert(sources, options), options)
    warn(listener, [note for note in again.warnings if note not in prepared.warnings])
    files = {**prepared.files, **again.files}
    return replace(again, files=files, fingerprint=fingerprint_of(prepared))


def work_of(prepared: PlannedMerge) -> WorkDigests:
    """Return the identity of a merge, by which it can be resumed.

    Call it before decompression, which changes the names of source files but is deterministic.
    """
    return WorkDigests(prepared.sources.digest(), f"{digest_of(prepared.plan)} {__version__}")


def fingerprint_of(prepared: PlannedMerge) -> str:
    """Return a digest that is equal for merges of the same files that write the same bytes.

    Like `work_of` it describes the plan before decompression, but it does not depend on the disk,
    the machine or the version.
    """
    if prepared.fingerprint:
        return prepared.fingerprint
    sources = prepared.sources
    small = tuple(sorted(_plain_files(prepared).items()))
    others = small, state_file_names(sources.training)
    planned = digest_of(prepared.plan, *others, label=sources.label)
    # `digest_of` has added labels for files of the plan that had none, so these come last.
    text = "\0".join([planned, *sources.labels]).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def small_files(prepared: PlannedMerge, scratch: Callable[[], Path]) -> dict[str, bytes | Path]:
    """Return all files but weights and record: their bytes, or a file to copy.

    `scratch` returns a directory for training state.
    """
    files = _plain_files(prepared)
    if names := state_file_names(prepared.sources.training):
        directory = scratch()
        write_training_state(prepared.sources.training, directory)
        files |= {name: directory / name for name in names}
    return files


def _plain_files(prepared: PlannedMerge) -> dict[str, bytes | Path]:
    """Return the small files that exist before anything is written."""
    files = companion_files(prepared.checkpoint.companions, prepared.config)
    return {**files, **prepared.plan.layout.indices, **prepared.files}


def make_record(prepared: PlannedMerge, options: Mapping[str, object]) -> bytes:
    """Return the output's `unshard.json`; a commit adds all other files to it."""
    sources = prepared.sources
    state = [*state_file_names(sources.training)]
    state += filter(is_state_file, (*_weight_files(prepared), *prepared.files))
    output: dict[str, object] = {
        "loadable": prepared.library.loads is True,
        "names_checked": prepared.names_checked,
        "fingerprint": fingerprint_of(prepared),
    }
    output |= {"training_state": state} if state else {}
    if (model := prepared.checkpoint.config_of) is not None:  # records contain no paths
        output["config_of"] = Path(model.name).name if "/" in model.name[:1] else model.name
    checkpoints, layout = sources.checkpoints, prepared.plan.layout
    return record_json(checkpoints, sources.weights, layout, options, output)


def verify_output(prepared: PlannedMerge, directory: Path, verify: str, engine: Crew) -> None:
    """Read the output again, at the level of `--verify`."""
    if verify == "off":
        return
    plan, is_full = prepared.plan, verify == "full"
    engine.listener(Progress("verifying", plan.layout.total_size if is_full else 0))
    verify_light(directory, plan.layout)
    if is_full:
        engine.verify(plan, prepared.sources.catalogs, directory)


def compare_with_base(prepared: PlannedMerge, listener: Listener) -> tuple[int, int] | None:
    """Count the tensors that training has changed, as in `Report.changed_from_base`.

    A trained tensor differs from its base in the first tiles, so little of it is read.
    """
    base = prepared.checkpoint.base
    if base is None or not base.tensors:
        return None
    listener(Progress("comparing with the base"))
    with OpenFiles(os.O_RDONLY, limit=32) as files:
        changed = [
            _is_changed(tensor, base.tensors[tensor.name], files)
            for tensor in prepared.tensors
            if tensor.name in base.tensors
        ]
    return (sum(changed), len(changed)) if changed else None


def _is_changed(output: ConvertedTensor, entry: TensorEntry, files: OpenFiles) -> bool:
    """Return whether an output tensor differs from the base's, in the base's dtype."""
    if shape_of(output.recipe) != entry.shape:
        return True
    if isinstance(output.recipe, Quantized):  # compare the values before quantisation
        output = ConvertedTensor(output.name, entry.dtype, output.recipe.values)
    pair = make_pair(ConvertedTensor(output.name, entry.dtype, take(entry)), output)
    return pair.ours.to is not pair.theirs.to or not are_equal(pair, files)


def named_companions(prepared: PlannedMerge, config: str | Path | None) -> tuple[str, ...]:
    """Return the companions that the user chose with --config, a file or a directory."""
    if config in (None, "none"):
        return ()
    files = prepared.checkpoint.companions.files if path_of(config).is_dir() else ()
    return ("config.json", *files)


def late_notes(
    prepared: PlannedMerge,
    changed: tuple[int, int] | None,
    overflows: Mapping[str, int],
    refused: str = "",
) -> list[str]:
    """Return the warnings about a finished output."""
    base = prepared.checkpoint.base
    notes: list[str] = []
    # A merge of the wrong weights often gives the base model itself.
    has_more = base is not None and any(one.name not in base.files for one in prepared.tensors)
    if base is not None and changed is not None and not changed[0] and not has_more:
        notes.append(
            f"ALL {changed[1]} TENSORS EQUAL THOSE OF {base.name}: this output is the base "
            "model. Was the right checkpoint merged, and was anything trained?"
        )
    if overflows:
        worst = sorted(overflows.items(), key=lambda item: -item[1])[:5]
        listed = ", ".join(f"{name} ({count})" for name, count in worst)
        tensors = (tensor for file in prepared.plan.layout.files for tensor in file.tensors)
        dtypes = sorted({tensor.dtype.name for tensor in tensors if tensor.name in overflows})
        values, of = counted(sum(overflows.values()), "value"), counted(len(overflows), "tensor")
        hint = "; bfloat16 can represent them" if dtypes == ["float16"] else ""
        what = f"{values} of {of} became infinite, too large for {', '.join(dtypes)}"
        notes.append(f"{what}: {listed}{hint}")
    if refused:
        what = "the store did not copy weights, so they were downloaded and uploaded"
        notes.append(f"{what}: " + refused)
    return notes


def push_output(
    prepared: PlannedMerge, target: Path, repo: str, listener: Listener, *, private: bool
) -> str:
    """Upload the output to a repository of the hub; return its URL."""
    from unshard.write.hub import push

    listener(Progress("pushing"))
    names = [*_weight_files(prepared), *companion_names(prepared), RECORD_NAME]
    bars = listener is not ignore and (is_terminal() or is_notebook())
    return push(target, repo, names, private=private, bars=bars)


def output_names(prepared: PlannedMerge) -> list[str]:
    """Return the paths of all files of the output but the record."""
    training = state_file_names(prepared.sources.training)
    return [*_weight_files(prepared), *companion_names(prepared), *training]


def companion_names(prepared: PlannedMerge) -> tuple[str, ...]:
    """Return the names of the other files that belong to the model."""
    companions = prepared.checkpoint.companions
    config = (f"{companions.folder}config.json",) if prepared.config is not None else ()
    return (*config, *companions.files, *prepared.files)


def _weight_files(prepared: PlannedMerge) -> list[str]:
    """Return the paths of weight files and their indices inside the output."""
    layout = prepared.plan.layout
    return [*(file.filename for file in layout.files), *layout.indices]
