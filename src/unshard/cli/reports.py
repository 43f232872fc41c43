"""Printed reports of merges, inspections and comparisons, as text and as JSON."""

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING

from unshard.cli.running import say
from unshard.console import counted, human_size, listed, plain
from unshard.fronts import Front, additions, reword_warning

if TYPE_CHECKING:
    from unshard.api import Comparison, Inspection, Report, ReshardReport
    from unshard.api.inspecting import OptimizerInfo
    from unshard.api.merging import StepResult
    from unshard.write.verification.comparison import ByConfig, Loading, TensorComparison

_RATED = 100_000_000  # bytes; the rate of less would only measure the start
_SHOWN = 20
_TITLE = 13  # characters of the first column of the table of `inspect`


def print_report(report: "Report", *, as_json: bool, quiet: bool) -> None:
    """Print a report, as text or as a JSON object."""
    if as_json:
        print(json.dumps(fields_of(report)))
        return
    if quiet:
        return
    if report.reused:
        verb = "would use" if report.dry_run else "used"
        print(f"{verb} {report.output}, which was made from {', '.join(report.sources)} already")
        if report.url is not None:
            print(f"pushed to {report.url}")
    else:
        _print_plan(report) if report.dry_run else _print_merge(report)
    # The restrictions of the output come last, where users see them.
    if report.names_checked == "none":
        print("names not checked: neither a base model nor a config determines them")
    if not report.loadable:
        if report.library in ("transformers", "diffusers", "sentence_transformers"):
            print("weights only: the names are those of training")
        elif report.library:
            print(f"weights only: not tested with {report.library}")
        elif "config.json" in report.companions:
            print("weights only: the library of config.json is unknown")
        else:
            print("weights only: not loadable by transformers without a config.json")


def print_reshard(report: "ReshardReport", *, as_json: bool, quiet: bool) -> None:
    """Print the report of a reshard, as text or as a JSON object."""
    if as_json:
        print(json.dumps(fields_of(report)))
    elif not quiet:
        mesh = f" ({write_shape(report.mesh)})" if report.mesh else ""
        tensors = counted(report.tensors, "tensor")
        state = ""
        if report.optimizer_tensors:
            state = f" and {report.optimizer_tensors:,} of the optimizer"
        print(f"resharded {tensors}{state} for {counted(report.world_size, 'rank')}{mesh}")
        size, files = human_size(report.bytes_written), counted(len(report.files), "file")
        where = f"{report.format}, torch {report.torch}"
        print(f"wrote {size} in {files} for {where}, {report.seconds:.2f} s")
        if report.others:
            print(f"with {', '.join(report.others[:5])}")
        print(f"saved to {report.output}")


def fields_of(report: "Report | Inspection | ReshardReport") -> dict[str, object]:
    """Return the fields for JSON, where warnings have the options of the command line."""
    fields: dict[str, object] = asdict(report)
    return {("warnings" if key == "notes" else key): value for key, value in fields.items()}


def print_steps(steps: "list[StepResult]", *, as_json: bool, quiet: bool) -> None:
    """Print the result of every step of a run, as text or as a JSON list."""
    if as_json:
        print(json.dumps([_step_fields(step) for step in steps]))
        return
    reports = [step.report for step in steps if step.report is not None]
    for report in reports:
        print_report(report, as_json=False, quiet=quiet)
    for step in steps:
        _print_outcome(step, quiet=quiet)
    if quiet:
        return
    used, failed = sum(one.reused for one in reports), sum(step.has_failed for step in steps)
    noun = "steps" if steps[0].role is None else "models"
    others = (f", {count} {how}" for count, how in ((used, "used"), (failed, "failed")) if count)
    print(f"{len(reports) - used} of {len(steps)} {noun} merged" + "".join(others))


def print_step(step: "StepResult", *, as_json: bool, quiet: bool) -> None:
    """Print the result of a step, as text or as a JSON object on a line."""
    if as_json:
        print(json.dumps(_step_fields(step)))
    else:
        if step.report is not None:
            print_report(step.report, as_json=False, quiet=quiet)
        _print_outcome(step, quiet=quiet)
    sys.stdout.flush()


def _print_outcome(step: "StepResult", *, quiet: bool) -> None:
    """Print why a step was not merged; if `quiet`, only failures."""
    if step.error is not None and quiet and step.has_failed:
        say(f"error: {step.title}: {step.error}")
    elif step.error is not None and not quiet:
        why = "failed" if step.has_failed else "passed over"
        print(f"{step.title}: {why}: " + step.error.subject)
    elif step.report is None and not quiet:
        print(f"{step.title}: {step.output} was made before, and is finished now")


def _step_fields(step: "StepResult") -> dict[str, object]:
    if step.report is not None:
        failed = {} if step.error is None else {"failed": step.error.text}
        return fields_of(step.report) | failed
    fields: dict[str, object] = {"step": step.step, "source": step.source, "output": step.output}
    fields |= {} if step.role is None else {"role": step.role}
    if step.error is None:
        return fields | {"reused": True}
    return fields | {"failed" if step.has_failed else "passed_over": step.error.text}


def _print_merge(report: "Report") -> None:
    rate = ""
    if report.bytes_written >= _RATED:
        rate = f" ({human_size(report.bytes_written / max(report.seconds, 1e-3))}/s)"
    verb = "wrote" if report.output else "uploaded"
    if len(report.sources) > 1:
        print(f"averaged {len(report.sources)} checkpoints: {', '.join(report.sources)}")
    tensors, ranks = counted(report.tensors, "tensor"), counted(report.world_size, "rank")
    print(f"merged {tensors} of {ranks}: {_list_dtypes(report)}")
    print(
        f"{verb} {human_size(report.bytes_written)} in {counted(len(report.files), 'file')}, "
        f"{report.seconds:.2f} s{rate}, peak memory {human_size(report.peak_memory_bytes)}"
    )
    if report.bytes_copied:
        print(f"the store copied {human_size(report.bytes_copied)} of it itself")
    if report.changed_from_base is not None:
        changed, compared = report.changed_from_base
        print(f"{changed:,} of {counted(compared, 'tensor')} changed from the base model")
    if report.companions:
        print(f"with {', '.join(report.companions)}")
    for skipped in report.skipped:
        print(f"left out {skipped.fqn}: {skipped.reason}")
    if report.output:
        print(f"saved to {report.output}")
    if report.url is not None:
        print(f"pushed to {report.url}")


def _print_plan(report: "Report") -> None:
    from unshard.read.hub_files import RECORD_NAME

    print(f"plan: {', '.join(report.sources)} -> {report.output} (nothing was written)")
    for name, length in report.files.items():
        print(f"  {name}  {counted(length, 'byte')}")
    for name in (*report.companions, RECORD_NAME):
        print(f"  {name}")
    operations = ", ".join(f"{count} {kind}" for kind, count in report.operations.items())
    parameters = counted(report.parameters, "parameter")
    print(f"tensors:    {report.tensors} ({_list_dtypes(report)}), {parameters}")
    print(f"operations: {operations or 'none'}")
    print(f"reads:      {counted(report.bytes_read, 'byte')}")
    print(f"writes:     {counted(report.bytes_written, 'byte')}")
    print(f"buffers:    {human_size(report.memory_bytes)}; the process stays below 128 MB")


def _list_dtypes(report: "Report") -> str:
    return ", ".join(f"{count} {name}" for name, count in report.dtypes.items())


def print_inspection(inspection: "Inspection", front: Front) -> None:
    """Print the description of a checkpoint as a table."""
    which = ", ".join(filter(None, (inspection.role, inspection.weights)))
    state = inspection.training_state
    rows = {
        "checkpoint": f"{inspection.path} ({which} weights)",
        "format": f"{inspection.format}, written by {inspection.writer}",
        "step": "unknown" if inspection.step is None else str(inspection.step),
        "world size": str(inspection.world_size),
        "meshes": _list_counts(inspection.meshes),
        "placements": _list_counts(inspection.placements),
        "dtypes": _list_counts(inspection.dtypes),
        "parameters": f"{inspection.parameters:,} in {counted(len(inspection.tensors), 'tensor')}, "
        f"{human_size(inspection.size_bytes)}",
        "config": f"dtype {inspection.config_dtype}" if inspection.config_dtype else "",
        "latest": "; ".join(
            f"{name} names {'no step' if step is None else f'step {step}'}"
            for name, step in inspection.latest.items()
        ),
        "EMA": "present (--weights ema)"
        if inspection.has_ema and inspection.weights != "ema"
        else "",
        "LoRA": counted(inspection.lora_tensors, "tensor") if inspection.lora_tensors else "",
        "tied": "; ".join(" = ".join(tied) for tied in inspection.shared),
        "companions": ", ".join(inspection.companions) or "none",
        "not weights": f"training state: {listed(state, 2)}" if state else "",
        "optimizer": ""
        if inspection.optimizer is None
        else _describe_optimizer(inspection.optimizer),
        "compressed": "yes: merge decompresses it first" if inspection.compressed else "",
        "missing": ", ".join(inspection.missing),
        "merge writes": inspection.would_write,
    }
    for name, text in rows.items():
        if text:
            _print_row(name, text)
    for skipped in inspection.skipped:
        _print_row("left out", f"{skipped.fqn}: {skipped.reason}")
    for note in inspection.notes:
        _print_row("warning", reword_warning(note, front))
    if added := [one for note in inspection.notes for one in additions(note)]:
        _print_row("use", front.line(added))


def _describe_optimizer(state: "OptimizerInfo") -> str:
    if state.problem:
        return f"not readable: {state.problem}"
    groups = counted(len(state.groups), "parameter group")
    rates = listed([f"{one['lr']}" for one in state.groups if "lr" in one], _SHOWN)
    parts = [
        ", ".join(f"{name} of {counted(n, 'parameter')}" for name, n in state.tensors.items()),
        human_size(state.size_bytes),
        "" if state.step is None else f"step {plain(state.step)}",
        f"{groups} (lr {rates})" if rates else groups,
        f"names {state.names}",
    ]
    return "; ".join(filter(None, parts))


def _print_row(title: str, text: str) -> None:
    """Print a row of the table, wrapped between words on a terminal."""
    row = f"{title:<{_TITLE}} {text}"
    if sys.stdout.isatty():
        columns = max(shutil.get_terminal_size().columns, 2 * _TITLE)
        indent = " " * (_TITLE + 1)
        lines = textwrap.TextWrapper(columns, subsequent_indent=indent, break_long_words=False)
        lines.break_on_hyphens = False
        row = lines.fill(row)
    print(row)


def _list_counts(counts: dict[str, int]) -> str:
    return "; ".join(f"{name} ({counted(count, 'tensor')})" for name, count in counts.items())


def print_comparison(comparison: "Comparison", *, as_json: bool = False) -> None:
    """Print the comparison of two models, as text or as a JSON object."""
    if as_json:
        counts = {
            "equal": comparison.equal,
            "compared": len(comparison.tensors),
            "different": len(comparison.different),
        }
        print(json.dumps(make_finite(counts | asdict(comparison))))
        return
    how = "bit by bit" if comparison.atol == comparison.rtol == 0 else "within the tolerances"
    equal = len(comparison.tensors) - len(comparison.different)
    cast = [tensor for tensor in comparison.tensors if tensor.cast and tensor.equal]
    print(f"compared    {counted(len(comparison.tensors), 'tensor')}, {how}")
    print(f"equal       {equal}" + (f" ({len(cast)} after a cast to our dtype)" if cast else ""))
    print(f"different   {len(comparison.different)}")
    list_some(list(map(_describe, comparison.different)))
    for title, names in (
        ("missing", comparison.missing),
        ("unexpected", comparison.unexpected),
        ("NaN in", [tensor.name for tensor in comparison.with_nan]),
        ("all zero", [tensor.name for tensor in comparison.all_zero]),
    ):
        if names:
            print(f"{title:<11} {len(names)}")
            list_some(list(names))
    if comparison.by_config is not None:
        _print_by_config(comparison.by_config)
    if comparison.loading is not None:
        _print_loading(comparison.loading)
    print("the models are " + ("the same" if comparison.equal else "not the same"))


def _print_by_config(names: "ByConfig") -> None:
    if names.complete:
        print("names       as in the config")
        return
    print("names       not as in the config:")
    missing = [f"{name}: missing" for name in names.missing]
    list_some([*missing, *(f"{name}: unexpected" for name in names.unexpected)])


def _print_loading(loading: "Loading") -> None:
    if loading.complete:
        print(f"loads       as {loading.model_class}: every parameter is there, in its shape")
        return
    print(f"loads       as {loading.model_class}, but:")
    mismatched = (
        f"{one.name}: shape {write_shape(one.found)}, not {write_shape(one.expected)}"
        for one in loading.mismatched
    )
    missing = (f"{name}: missing" for name in loading.missing)
    unexpected = (f"{name}: unexpected" for name in loading.unexpected)
    list_some([*missing, *unexpected, *mismatched])


def list_some(lines: list[str], most: int = _SHOWN) -> None:
    for line in lines[:most]:
        print(f"  {line}")
    if len(lines) > most:
        print(f"  and {len(lines) - most} more")


def _describe(tensor: "TensorComparison") -> str:
    ours, theirs = tensor.shape_ours, tensor.shape_theirs
    if tensor.values is None and ours == theirs:
        return f"{tensor.name}: another checksum"
    if tensor.values is None:
        return f"{tensor.name}: shape {write_shape(ours)}, not {write_shape(theirs)}"
    values = tensor.values
    parts = [f"{values.different:,} of {counted(values.elements, 'element')}"]
    if not tensor.cast and tensor.dtype_ours != tensor.dtype_theirs:
        parts.insert(0, f"{tensor.dtype_ours}, not {tensor.dtype_theirs}")
    if values.different and not values.different_values:
        parts.append("in their bits only")
    else:
        parts.append(f"by up to {values.max_abs_diff:.3g} ({values.max_rel_diff:.3g} relative)")
    if values.nans_ours != values.nans_theirs:
        parts.append(f"NaN {values.nans_ours:,}, not {values.nans_theirs:,}")
    parts.append(f"norm {values.norm_ours:.6g}, not {values.norm_theirs:.6g}")
    return f"{tensor.name}: {', '.join(parts)}"


def write_shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "()"


def make_finite(value: object) -> object:
    """Replace NaN and infinity, which JSON does not have, by text."""
    if isinstance(value, dict):
        return {key: make_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [make_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
