"""From the output's tensors to a finished directory: one function for each step of `merging`."""

import hashlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unshard import __version__
from unshard.api.converting import ADAPTER_FOLDER, Conversion, convert
from unshard.api.options import MergeOptions
from unshard.api.sources import Sources
from unshard.containers.open_files import OpenFiles
from unshard.convert.outputs import Converted, main_dtype
from unshard.convert.recipes import Quantized, shape_of, take
from unshard.engines.crew import Crew
from unshard.fronts import Text
from unshard.keywords import SHARD_SIZE
from unshard.plan.identity import digest_of
from unshard.plan.layout import ONE_FILE, lay_out, lay_out_apart, size_in_bytes
from unshard.plan.operations import Plan
from unshard.plan.planner import make_plan
from unshard.plan.work import make_pair
from unshard.progress import Listener, ignore, warn
from unshard.progress import Stage as Progress
from unshard.read.beside.companions import Companions
from unshard.read.hub_files import MODULES, RECORD_NAME
from unshard.read.model_config import NO_LIBRARY, SENTENCES, Library, ModelConfig
from unshard.read.open import Checkpoint
from unshard.showing import counted, is_notebook, is_terminal
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
from unshard.write.report import Report, peak_memory
from unshard.write.stage import Work
from unshard.write.verification.output import verify_light, without_checksums

_log = logging.getLogger(__name__)

_OF_TRAINING = re.compile(r"\.lora_A\.|^0\.(auto_)?model\.")  # names that no library loads
_COMPANION_ALLOWANCE = 64 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Everything that is known before the first byte is written.

    Attributes:
        sources: what is merged.
        tensors: the output's.
        plan: how their files are made.
        config: config.json of the output, if it gets one.
        warnings: what a user should know.
        files: small files to write next to the weights, by their paths.
        names_checked: by what the names were checked: "config", "base" or "none".
        fingerprint: as `fingerprint_of` returns it, if it was asked for already.
    """

    sources: Sources
    tensors: Sequence[Converted]
    plan: Plan
    config: ModelConfig | None
    warnings: tuple[str, ...]
    files: Mapping[str, bytes]
    names_checked: str = "none"
    fingerprint: str = ""

    @property
    def checkpoint(self) -> Checkpoint:
        """What is merged; of several, the last."""
        return self.sources.last

    @property
    def library(self) -> Library:
        """The library that loads the output."""
        if self.config is not None:
            found = self.config.library
            found = SENTENCES if MODULES in self.checkpoint.companions.files else found
            loads = found.loads and not any(_OF_TRAINING.search(one.name) for one in self.tensors)
            return found._replace(loads=loads)
        adapters = {ADAPTER_CONFIG_NAME: "peft", PIPELINE_ADAPTER: "diffusers"}
        names = adapters.keys() & {*_weight_files(self), *self.files}
        return Library(adapters[names.pop()]) if names else NO_LIBRARY


def plan_output(
    sources: Sources, made: Conversion, options: MergeOptions, like: Mapping[str, str] | None = None
) -> Prepared:
    """Lay out the output's files, as `like` if no size is given, and plan how they are made."""
    read = (*sources.notes, *without_checksums(sources.catalogs, options.verify))
    if options.lora == "adapter":  # a directory that PEFT loads, without companions
        alone = replace(sources, checkpoints=(replace(sources.last, companions=Companions()),))
        name, metadata = made.adapter
        plan = make_plan(lay_out(made.tensors, ONE_FILE, pattern=name, metadata=metadata))
        by, files = made.names_checked, made.files
        return Prepared(alone, made.tensors, plan, None, (*read, *made.notes), files, by)
    base, size = sources.last.base, options.max_shard_size
    like = like if size is None else None
    # The files are those of the base model, unless a size is given.
    if base is not None and size is None:
        is_safetensors = all(one.endswith(".safetensors") for one in base.files.values())
        like = base.files if is_safetensors else None
    shard_bytes = size_in_bytes(SHARD_SIZE if size is None else str(size))
    config, written, notes = made.config, main_dtype(made.tensors), list(made.notes)
    stem = (config.library if config else NO_LIBRARY).weights
    pattern = f"{sources.last.companions.folder}{stem}{{suffix}}.safetensors"
    tensors, apart = lay_out_apart(made.tensors, sources.last.companions.folders)
    layout = lay_out(tensors, shard_bytes, like=like, pattern=pattern)
    beside = [
        lay_out(tensors, ONE_FILE, pattern=pattern, metadata=made.adapter[1])
        if pattern.startswith(ADAPTER_FOLDER)
        else lay_out(tensors, shard_bytes, pattern=pattern)
        for pattern, tensors in made.beside.items()
        if tensors
    ]
    plan = make_plan(layout.with_files_of([*apart, *beside]))
    _log_plan(made.tensors, plan)
    if config and options.dtype == "keep" and (note := kept_dtype(config, written)) is not None:
        notes.append(Text(f"{note}; to cast them: ⟦+--dtype config⟧"))
    return Prepared(
        sources,
        made.tensors,
        plan,
        config=config and config.as_written(written),
        warnings=(*read, *notes, *sources.training.warnings),
        files=made.files,
        names_checked=made.names_checked,
    )


def kept_dtype(config: ModelConfig, written: str | None) -> str | None:
    """Return a note if the weights have another dtype than their config names."""
    if not config.dtype or not written or config.dtype == written:
        return None
    return f"the weights are {written} and are kept so, but config.json names {config.dtype}"


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


def decompressed(
    prepared: Prepared, scratch: Callable[[], Path], options: MergeOptions, listener: Listener
) -> Prepared:
    """Return the same with nothing compressed, converted and planned again.

    Only then can values be compared, and be read anywhere. `scratch` returns a directory for them.
    """
    if not prepared.sources.compressed_bytes:
        return prepared
    listener(Progress("decompressing"))
    sources = prepared.sources.decompressed(scratch())
    again = plan_output(sources, convert(sources, options), options)
    warn(listener, [one for one in again.warnings if one not in prepared.warnings])
    files = {**prepared.files, **again.files}
    return replace(again, files=files, fingerprint=fingerprint_of(prepared))


def work_of(prepared: Prepared) -> Work:
    """Return what a merge does.

    It is asked for before anything is decompressed: what that becomes is planned again, into files
    of other names, but always in the same way.
    """
    return Work(prepared.sources.digest(), f"{digest_of(prepared.plan)} {__version__}")


def fingerprint_of(prepared: Prepared) -> str:
    """Return a text that is equal for two merges of the same files if they write the same bytes.

    It is that of the plan before anything is decompressed, as with `work_of`; but not of a disk, a
    machine or a version.
    """
    if prepared.fingerprint:
        return prepared.fingerprint
    sources = prepared.sources
    small = tuple(sorted(_plain_files(prepared).items()))
    others = small, state_file_names(sources.training)
    made = digest_of(prepared.plan, *others, label=sources.label)
    # The labels come last: what of the plan had no label has one now.
    text = "\0".join([made, *sources.labels]).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def small_files(prepared: Prepared, scratch: Callable[[], Path]) -> dict[str, bytes | Path]:
    """Return all files but weights and record: the bytes, or a file to copy.

    `scratch` returns a directory, in which training state is written.
    """
    files = _plain_files(prepared)
    if names := state_file_names(prepared.sources.training):
        directory = scratch()
        write_training_state(prepared.sources.training, directory)
        files |= {name: directory / name for name in names}
    return files


def _plain_files(prepared: Prepared) -> dict[str, bytes | Path]:
    """Return the small files that are there before anything is made."""
    files = companion_files(prepared.checkpoint.companions, prepared.config)
    return {**files, **prepared.plan.layout.indices, **prepared.files}


def make_record(prepared: Prepared, options: Mapping[str, object]) -> bytes:
    """Return the output's `unshard.json`; a commit adds what is not weights to it."""
    sources = prepared.sources
    state = [*state_file_names(sources.training)]
    state += filter(is_state_file, (*_weight_files(prepared), *prepared.files))
    output: dict[str, object] = {
        "loadable": prepared.library.loads is True,
        "names_checked": prepared.names_checked,
    }
    output |= {"fingerprint": fingerprint_of(prepared)}
    output |= {"training_state": state} if state else {}
    if (model := prepared.checkpoint.config_of) is not None:  # of a path, its name alone
        output["config_of"] = Path(model.name).name if "/" in model.name[:1] else model.name
    checkpoints, layout = sources.checkpoints, prepared.plan.layout
    return record_json(checkpoints, sources.weights, layout, options, output)


def verify_output(prepared: Prepared, directory: Path, verify: str, engine: Crew) -> None:
    """Read the output again, as far as `--verify` says."""
    if verify == "off":
        return
    plan, is_full = prepared.plan, verify == "full"
    engine.listener(Progress("verifying", plan.layout.total_size if is_full else 0))
    verify_light(directory, plan.layout)
    if is_full:
        engine.verify(plan, prepared.sources.catalogs, directory)


def compare_with_base(prepared: Prepared, listener: Listener) -> tuple[int, int] | None:
    """Count what training has changed, as in `Report.changed_from_base`.

    A trained tensor differs from its base within the first tiles, so little of it is read.
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


def _is_changed(output: Converted, entry: TensorEntry, files: OpenFiles) -> bool:
    """Return whether an output tensor differs from the base's, in the base's dtype."""
    if shape_of(output.recipe) != entry.shape:
        return True
    if isinstance(output.recipe, Quantized):  # what was quantised is compared
        output = Converted(output.name, entry.dtype, output.recipe.values)
    pair = make_pair(Converted(output.name, entry.dtype, take(entry)), output)
    return pair.ours.to is not pair.theirs.to or not are_equal(pair, files)


def named_companions(prepared: Prepared, config: str | Path | None) -> tuple[str, ...]:
    """Return the companions that the user named, by --config: a file, or a directory of them."""
    if config in (None, "none"):
        return ()
    files = prepared.checkpoint.companions.files if path_of(config).is_dir() else ()
    return ("config.json", *files)


def late_notes(
    prepared: Prepared,
    changed: tuple[int, int] | None,
    overflows: Mapping[str, int],
    refused: str = "",
) -> list[str]:
    """Return the warnings that are known only once the output is made."""
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
        dtypes = sorted({one.dtype.name for one in tensors if one.name in overflows})
        values, of = counted(sum(overflows.values()), "value"), counted(len(overflows), "tensor")
        hint = "; bfloat16 can represent them" if dtypes == ["float16"] else ""
        what = f"{values} of {of} became infinite, too large for {', '.join(dtypes)}"
        notes.append(f"{what}: {listed}{hint}")
    if refused:
        what = "the store did not copy weights itself, so they were down- and uploaded"
        notes.append(f"{what}: " + refused)
    return notes


def push_output(
    prepared: Prepared, target: Path, repo: str, listener: Listener, *, private: bool
) -> str:
    """Upload the output to a repository of the hub; return its URL."""
    from unshard.write.hub import push

    listener(Progress("pushing"))
    names = [*_weight_files(prepared), *_companion_files(prepared), RECORD_NAME]
    bars = listener is not ignore and (is_terminal() or is_notebook())
    return push(target, repo, names, private=private, bars=bars)


def make_report(
    prepared: Prepared,
    target: Path | None,
    *,
    memory_bytes: int,
    dry_run: bool = False,
    notes: Sequence[str] = (),
    changed: tuple[int, int] | None = None,
    copied: int = 0,
    url: str | None = None,
    reused: bool = False,
) -> Report:
    """Return the report of a merge; `target` is None if nothing was written."""
    checkpoints, plan = prepared.sources.checkpoints, prepared.plan
    dtypes = Counter(one.dtype.name for file in plan.layout.model_files for one in file.tensors)
    folders = prepared.checkpoint.companions.folders
    modules = [one for one in plan.layout.beside if one.name.startswith(folders)]
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
        tensors=sum(len(one.weight_map) for one in (plan.layout, *modules)),
        parameters=plan.layout.total_parameters,
        dtypes=dict(dtypes.most_common()),
        operations=dict(sorted(operations.items())),
        bytes_read=0 if reused else plan.bytes_read,
        bytes_written=0 if reused else plan.bytes_written,
        memory_bytes=memory_bytes,
        seconds=round(time.monotonic() - prepared.sources.opening, 3),
        peak_memory_bytes=peak_memory(),
        dry_run=dry_run,
        loadable=prepared.library.loads is True,
        library=prepared.library.name,
        names_checked=prepared.names_checked,
        changed_from_base=changed,
        url=url,
        notes=(*prepared.warnings, *notes),
        skipped=tuple(skipped for one in checkpoints for skipped in one.catalog.skipped),
        bytes_copied=copied,
        reused=reused,
    )


def output_names(prepared: Prepared) -> list[str]:
    """Return the paths that the output will have, but for the record."""
    training = state_file_names(prepared.sources.training)
    return [*_weight_files(prepared), *_companion_files(prepared), *training]


def _companion_files(prepared: Prepared) -> tuple[str, ...]:
    """Return the names of the other files that belong to the model."""
    companions = prepared.checkpoint.companions
    config = (f"{companions.folder}config.json",) if prepared.config is not None else ()
    return (*config, *companions.files, *prepared.files)


def _weight_files(prepared: Prepared) -> list[str]:
    """Return the paths, inside the output, of all files of weights, with their indices."""
    layout = prepared.plan.layout
    return [*(file.filename for file in layout.files), *layout.indices]
