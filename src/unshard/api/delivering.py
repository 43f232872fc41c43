"""From a plan to a report: the output is made, or under `--dry-run` only described."""

import time
from dataclasses import replace
from pathlib import Path

from unshard.api.making import (
    Noticed,
    check_target,
    companion_files,
    make,
    output_names,
    places,
    weight_files,
)
from unshard.api.options import MergeOptions
from unshard.api.preparing import Prepared
from unshard.engines.threads import RunPlan
from unshard.progress import Listener, Stage, Warned, ignore
from unshard.showing import is_notebook, is_terminal
from unshard.write.hub import push
from unshard.write.record import RECORD_NAME
from unshard.write.report import Report, dtypes, operations, peak_memory
from unshard.write.targets import choose_mode
from unshard.write.training_state import state_file_names

__all__ = ["deliver"]


def deliver(
    prepared: Prepared,
    target: Path,
    options: MergeOptions,
    listener: Listener,
    *,
    engine: RunPlan,
    started: float,
) -> Report:
    """Make the output, push it if asked for, and report.

    Args:
        prepared: what to make.
        target: where.
        options: how.
        listener: called with progress events, and with every warning.
        engine: who makes the files.
        started: `time.monotonic()` when the whole began.

    Raises:
        UnshardError: it cannot be made; nothing of it is left then.
    """
    for warning in prepared.warnings:
        listener(Warned(warning))
    noticed = Noticed()
    if options.dry_run:
        check_target(prepared, target)
        names = output_names(prepared)
        choose_mode(target, places(prepared), overwrite=options.overwrite, names=names)
    else:
        noticed = make(prepared, target, options, listener, engine)
    for warning in noticed.warnings:
        listener(Warned(warning))
    url = _pushed(prepared, target, options, listener)
    report = _report(prepared, target, options, noticed, time.monotonic() - started)
    return replace(report, url=url)


def _report(
    prepared: Prepared, target: Path, options: MergeOptions, noticed: Noticed, seconds: float
) -> Report:
    """Return the report of a merge, or of an average of several checkpoints."""
    checkpoints = prepared.sources
    catalog, plan = checkpoints[-1].catalog, prepared.plan
    return Report(
        output=str(target),
        source=str(checkpoints[-1].location.weights_dir),
        sources=tuple(str(one.location.weights_dir) for one in checkpoints),
        step=catalog.step,
        passed_over=tuple(passed for one in checkpoints for passed in one.passed_over),
        world_size=catalog.world_size,
        files={file.filename: file.size for file in plan.layout.files},
        companions=(*companion_files(prepared), *state_file_names(prepared.training)),
        tensors=len(plan.layout.weight_map),
        parameters=plan.layout.total_parameters,
        dtypes=dtypes(plan.layout),
        operations=operations(plan),
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        memory_bytes=options.settings.memory_bytes,
        seconds=round(seconds, 3),
        peak_memory_bytes=peak_memory(),
        dry_run=options.dry_run,
        loadable=prepared.loadable,
        names_checked=prepared.names_checked,
        changed_from_base=noticed.changed,
        url=None,
        notes=(*prepared.warnings, *noticed.warnings),
        skipped=tuple(skipped for one in checkpoints for skipped in one.catalog.skipped),
    )


def _pushed(
    prepared: Prepared, target: Path, options: MergeOptions, listener: Listener
) -> str | None:
    """Upload the output if that was asked for; return the repository's URL."""
    if options.push_to_hub is None or options.dry_run:
        return None
    listener(Stage("pushing"))
    names = [*weight_files(prepared), *companion_files(prepared), RECORD_NAME]
    bars = listener is not ignore and (is_terminal() or is_notebook())
    return push(target, options.push_to_hub, names, private=options.private, bars=bars)
