"""The main path: a checkpoint in, a Hugging Face directory out. Defaults live here, once."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.convert.outputs import Fields, config_dtype, convert, target_dtype
from unshard.engines.threads import MIN_BUFFER, Settings, default_workers, run_plan, verify_full
from unshard.errors import ConversionError, UsageError
from unshard.plan.layout import INDEX_NAME, Layout, index_json, lay_out, size_in_bytes
from unshard.plan.operations import Plan
from unshard.plan.planner import make_plan
from unshard.progress import Listener, Stage, Warned, ignore
from unshard.read.format import ReadOptions, Request
from unshard.read.inflate import inflate, inflated_bytes
from unshard.read.inspection import Inspection, describe
from unshard.read.open import Checkpoint, open_latest
from unshard.write.companions import load_config, output_config, write_companions
from unshard.write.record import RECORD_NAME, record_json
from unshard.write.report import Report, make_report
from unshard.write.stage import Stage as Staging
from unshard.write.stage import choose_mode
from unshard.write.verify import verify_light

__all__ = ["Inspection", "Report", "inspect", "merge"]

_COMPANION_ALLOWANCE = 64 * 1024
_ROLES = (None, "actor", "critic")
_WEIGHTS = (None, "model", "ema")
_VERIFY = ("light", "full", "off")


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the user chose of the writing."""

    dtype: str
    max_shard_size: int
    verify: str
    settings: Settings


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """Everything that is known before the first byte is written."""

    checkpoint: Checkpoint
    plan: Plan
    config: Fields | None
    warnings: tuple[str, ...]


def merge(
    checkpoint: str | Path,
    output: str | Path | None = None,
    *,
    dtype: str = "keep",
    weights: str | None = None,
    role: str | None = None,
    step: int | None = None,
    config: str | Path | None = None,
    also: Sequence[str | Path] = (),
    max_shard_size: str | int = "5GB",
    workers: int | None = None,
    memory: str | int = "64MB",
    assume_dim0: bool = False,
    ep_size: int | None = None,
    allow_globals: Sequence[str] = (),
    verify: str = "light",
    overwrite: bool = False,
    dry_run: bool = False,
    listener: Listener = ignore,
) -> Report:
    """Merge a sharded checkpoint into a Hugging Face directory.

    The output appears by one rename, whole, verified and durable, or not at all; the checkpoint is
    only read. The same checkpoint gives the same bytes, whatever `workers` and `memory` are.

    Args:
        checkpoint: a checkpoint, a directory of several (the highest complete step is taken), or
            any directory inside one.
        output: must not exist unless `overwrite`; default `merged/<step directory>[-critic][-ema]`
            beside the step directory.
        dtype: keep, config (what config.json names), bfloat16, float16 or float32. Floating point
            only; integers, booleans and 8-bit floats are never cast.
        weights: "model" (default) or "ema".
        role: "actor" or "critic"; needed only where both exist.
        step: which step of a directory that holds several.
        config: a config.json, or a directory with config, tokenizer and the like, to use instead of
            the checkpoint's own.
        also: directories with more files of the same checkpoint, saved on other nodes.
        max_shard_size: largest weight file, bytes or "5GB".
        workers: threads; default: as many as the machine has cores, at most 8.
        memory: bound on all buffers together, bytes or "64MB".
        assume_dim0: take plain tensors that differ between ranks as shards along dimension 0.
        ep_size: size of the expert parallelism, where the files do not record it (verl's VeOmni).
        allow_globals: tensor subclasses in pickles to read as the plain tensors they store.
        verify: "light" (the output is reopened: headers, names, shapes, dtypes, sizes, index),
            "full" (also checksums of the sources, replicas, and every byte read back), or "off".
        overwrite: replace the weights of an earlier output, or, where the output is the
            checkpoint's own directory, put them there; other files stay.
        dry_run: plan only, write nothing.
        listener: called with progress events.

    Raises:
        UnshardError: one of the tree in `unshard.errors`; nothing of the output is left then.
    """
    started = time.monotonic()
    choices = _choices(dtype, max_shard_size, verify, workers, memory)
    processes = choices.settings.workers
    options = _options(config, ep_size, allow_globals, processes, assume_dim0=assume_dim0)
    listener(Stage("reading"))
    request = _request(step, role, weights)
    source = open_latest(Path(checkpoint), request, options, [Path(one) for one in also])
    prepared = _prepare(source, choices.dtype, choices.max_shard_size)
    for warning in prepared.warnings:
        listener(Warned(warning))
    target = Path(output) if output is not None else source.location.default_output
    if dry_run:
        choose_mode(target, _places(source), overwrite=overwrite)
    else:
        _make(prepared, target, choices, listener, overwrite=overwrite)
    seconds = time.monotonic() - started
    return _report(prepared, target, choices.settings, seconds, dry_run=dry_run)


def inspect(
    checkpoint: str | Path,
    *,
    weights: str | None = None,
    role: str | None = None,
    step: int | None = None,
    also: Sequence[str | Path] = (),
    assume_dim0: bool = False,
    ep_size: int | None = None,
    allow_globals: Sequence[str] = (),
) -> Inspection:
    """Say what a checkpoint holds and what `merge` would make of it; nothing is written.

    Arguments are those of `merge`.

    Raises:
        CheckpointError: it cannot be read.
    """
    options = _options(None, ep_size, allow_globals, default_workers(), assume_dim0=assume_dim0)
    request = _request(step, role, weights)
    source = open_latest(Path(checkpoint), request, options, [Path(one) for one in also])
    named = config_dtype(load_config(source.catalog.companions))
    try:
        prepared = _prepare(source, "keep", size_in_bytes("5GB"))
    except ConversionError as error:
        refusal = f"nothing: {error.subject}"
        return describe(source, config_dtype=named, would_write=refusal, warnings=())
    layout = prepared.plan.layout
    files = f"{len(layout.files)} file{'s' if len(layout.files) > 1 else ''}"
    would_write = f"{source.location.default_output}: {files}, {layout.total_size:,} bytes"
    return describe(source, config_dtype=named, would_write=would_write, warnings=prepared.warnings)


def _prepare(source: Checkpoint, dtype: str, max_shard_size: int) -> _Prepared:
    """Convert, lay out and plan: pure steps, once config.json has been read."""
    config = load_config(source.catalog.companions)
    tensors = convert(source.catalog, target_dtype(dtype, config))
    layout = lay_out(tensors, max_shard_size)
    plan = make_plan(layout)
    written = _written_dtype(layout)
    warnings = [*source.catalog.notes]
    if config is None:
        warnings.append(
            f"no config.json was found in or beside {source.location.weights_dir}: the weights are "
            "complete, but transformers needs one to load them; give it with --config FILE|DIR"
        )
    named = config_dtype(config)
    if dtype == "keep" and named is not None and written is not None and named != written:
        warnings.append(
            f"the weights are {written} and stay so, config.json names {named}: "
            f"--dtype config casts them"
        )
    adjusted = None if config is None else output_config(config, written)
    return _Prepared(source, plan, adjusted, tuple(warnings))


def _make(
    prepared: _Prepared, target: Path, choices: _Choices, listener: Listener, *, overwrite: bool
) -> None:
    """Make the output apart, and let it take its place in one commit."""
    needed, places = _needed_bytes(prepared), _places(prepared.checkpoint)
    with Staging(target, needed, sources=places, overwrite=overwrite) as staging:
        _write(_inflated(prepared, staging, choices, listener), staging, choices, listener)


def _inflated(
    prepared: _Prepared, staging: Staging, choices: _Choices, listener: Listener
) -> _Prepared:
    """Decompress a compressed checkpoint beside its output, and plan again from there."""
    source = prepared.checkpoint
    if not inflated_bytes(source.catalog):
        return prepared
    listener(Stage("decompressing"))
    inflated = replace(source, catalog=inflate(source.catalog, staging.scratch))
    return _prepare(inflated, choices.dtype, choices.max_shard_size)


def _write(prepared: _Prepared, staging: Staging, choices: _Choices, listener: Listener) -> None:
    """Make the output in its staging directory, verify it as a stranger would, and commit it."""
    plan, directory = prepared.plan, staging.directory
    listener(Stage("writing", plan.layout.total_size))
    run_plan(plan, directory, choices.settings, listener)
    write_companions(prepared.checkpoint.catalog.companions, prepared.config, directory)
    if len(plan.layout.files) > 1:
        (directory / INDEX_NAME).write_bytes(index_json(plan.layout))
    record = record_json(prepared.checkpoint, plan.layout, choices.dtype)
    (directory / RECORD_NAME).write_bytes(record)
    if choices.verify != "off":
        full = choices.verify == "full"
        listener(Stage("verifying", plan.layout.total_size if full else 0))
        verify_light(directory, plan.layout)
    if choices.verify == "full":
        catalog = prepared.checkpoint.catalog
        verify_full(plan, catalog, directory, choices.settings, listener)
    listener(Stage("committing"))
    staging.commit()


def _report(
    prepared: _Prepared, target: Path, settings: Settings, seconds: float, *, dry_run: bool
) -> Report:
    config = ("config.json",) if prepared.config is not None else ()
    return make_report(
        prepared.checkpoint,
        prepared.plan,
        target,
        companions=(*config, *prepared.checkpoint.catalog.companions.files),
        warnings=prepared.warnings,
        memory_bytes=settings.memory_bytes,
        seconds=seconds,
        dry_run=dry_run,
    )


def _needed_bytes(prepared: _Prepared) -> int:
    """Return about what the output will take on disk."""
    companions = prepared.checkpoint.catalog.companions.files.values()
    extra = sum(path.stat().st_size for path in companions)
    inflated = inflated_bytes(prepared.checkpoint.catalog)
    return prepared.plan.bytes_written + inflated + extra + _COMPANION_ALLOWANCE


def _places(source: Checkpoint) -> tuple[Path, ...]:
    return source.location.step_dir, *source.location.roots


def _written_dtype(layout: Layout) -> str | None:
    """Return the dtype of most of the floating point bytes; None if there are none."""
    sizes: Counter[str] = Counter()
    for file in layout.files:
        for tensor in file.tensors:
            if tensor.dtype.castable:
                sizes[tensor.dtype.name] += tensor.data_offsets[1] - tensor.data_offsets[0]
    return sizes.most_common(1)[0][0] if sizes else None


def _choices(
    dtype: str, max_shard_size: str | int, verify: str, workers: int | None, memory: str | int
) -> _Choices:
    settings = _settings(workers, memory)
    if verify not in _VERIFY:
        raise UsageError(f"--verify {verify}: unknown", expected=", ".join(_VERIFY))
    return _Choices(dtype, size_in_bytes(str(max_shard_size)), verify, settings)


def _options(
    config: str | Path | None,
    ep_size: int | None,
    allow_globals: Sequence[str],
    processes: int,
    *,
    assume_dim0: bool,
) -> ReadOptions:
    if ep_size is not None and ep_size < 2:
        raise UsageError(f"--ep-size {ep_size}: at least 2 is needed")
    path = None if config is None else Path(config)
    return ReadOptions(path, assume_dim0, ep_size, frozenset(allow_globals), processes)


def _settings(workers: int | None, memory: str | int) -> Settings:
    memory_bytes = size_in_bytes(str(memory))
    if memory_bytes < MIN_BUFFER:
        raise UsageError(f"--memory {memory}: too little", expected=f"at least {MIN_BUFFER} bytes")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: at least 1 is needed")
    return Settings(workers or default_workers(), memory_bytes)


def _request(step: int | None, role: str | None, weights: str | None) -> Request:
    if role not in _ROLES:
        raise UsageError(f"--role {role}: unknown", expected="actor or critic")
    if weights not in _WEIGHTS:
        raise UsageError(f"--weights {weights}: unknown", expected="model or ema")
    return Request(step, role, weights)
