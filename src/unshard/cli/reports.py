"""What was made, found or compared, for people and as JSON."""

import json
import shutil
import sys
import textwrap
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING

from unshard.cli.running import say
from unshard.fronts import Front, additions, reword_warning
from unshard.showing import counted, human_size, listed, plain

if TYPE_CHECKING:
    from unshard.api import Comparison, Inspection, Report, ReshardReport
    from unshard.api.inspecting import OptimizerInfo
    from unshard.api.merging import StepResult
    from unshard.write.verification.comparison import ByConfig, Loading, TensorComparison

_RATED = 100_000_000  # bytes
_SHOWN = 20
_TITLE = 13  # characters of the first column of the table of `inspect`


def print_report(report: "Report", *, as_json: bool, quiet: bool) -> None:
    """Print a report: for people, or as a JSON object."""
    if as_json:
        print(json.dumps(fields_of(report)))
        return
    if quiet:
        return
    if report.reused:
        _print_reused(report)
    else:
        _print_plan(report) if report.dry_run else _print_merge(report)
    # Last of all, what was not checked, and what keeps the output from being a model.
    if report.names_checked == "none":
        print("names not checked: neither a base model nor the config says which tensors there are")
    if not report.loadable:
        if report.library in ("transformers", "diffusers", "sentence_transformers"):
            print("weights only: the names are those of training")
        elif report.library:
            print(f"weights only: nobody tried whether {report.library} loads them")
        elif "config.json" in report.companions:
            print("weights only: config.json does not say which library loads them")
        else:
            print("weights only: not loadable by transformers without a config.json")


def print_reshard(report: "ReshardReport", *, as_json: bool, quiet: bool) -> None:
    """Print the report of a reshard: for people, or as a JSON object."""
    if as_json:
        print(json.dumps(fields_of(report)))
    elif not quiet:
        mesh = f" ({' x '.join(map(str, report.mesh))})" if report.mesh else ""
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


def fields_of(found: "Report | Inspection | ReshardReport") -> dict[str, object]:
    """Return the fields for JSON: warnings name options as the command line has them."""
    fields: dict[str, object] = asdict(found)
    return {("warnings" if key == "notes" else key): value for key, value in fields.items()}


def print_steps(steps: "list[StepResult]", *, as_json: bool, quiet: bool) -> None:
    """Print what became of every step of a run: for people, or as a JSON list of one for each."""
    if as_json:
        print(json.dumps([_step_fields(one) for one in steps]))
        return
    reports = [one.report for one in steps if one.report is not None]
    for report in reports:
        print_report(report, as_json=False, quiet=quiet)
    for one in steps:
        _print_outcome(one, quiet=quiet)
    if quiet:
        return
    used, failed = sum(one.reused for one in reports), sum(one.has_failed for one in steps)
    what = "steps" if steps[0].role is None else "models"
    others = (f", {count} {how}" for count, how in ((used, "used"), (failed, "failed")) if count)
    print(f"{len(reports) - used} of {len(steps)} {what} merged" + "".join(others))


def print_step(one: "StepResult", *, as_json: bool, quiet: bool) -> None:
    """Print what became of one step: for people, or as a JSON object in a line of its own."""
    if as_json:
        print(json.dumps(_step_fields(one)))
    else:
        if one.report is not None:
            print_report(one.report, as_json=False, quiet=quiet)
        _print_outcome(one, quiet=quiet)
    sys.stdout.flush()


def _print_outcome(one: "StepResult", *, quiet: bool) -> None:
    """Print why a step was not merged, if it was not; of those that failed, also if `quiet`."""
    if one.error is not None and quiet and one.has_failed:
        say(f"error: {one.title}: {one.error}")
    elif one.error is not None and not quiet:
        why = "failed" if one.has_failed else "passed over"
        print(f"{one.title}: {why}: " + one.error.subject)
    elif one.report is None and not quiet:
        print(f"{one.title}: {one.output} was made before, and is handed on now")


def _step_fields(one: "StepResult") -> dict[str, object]:
    if one.report is not None:
        failed = {} if one.error is None else {"failed": one.error.text}
        return fields_of(one.report) | failed
    fields: dict[str, object] = {"step": one.step, "source": one.source, "output": one.output}
    fields |= {} if one.role is None else {"role": one.role}
    if one.error is None:
        return fields | {"reused": True}
    return fields | {"failed" if one.has_failed else "passed_over": one.error.text}


def _print_merge(report: "Report") -> None:
    rate = ""
    if report.bytes_written >= _RATED:  # of less, it would be the rate of the start
        rate = f" ({human_size(report.bytes_written / max(report.seconds, 1e-3))}/s)"
    done = "wrote" if report.output else "uploaded"
    if len(report.sources) > 1:
        print(f"averaged {len(report.sources)} checkpoints: {', '.join(report.sources)}")
    tensors, ranks = counted(report.tensors, "tensor"), counted(report.world_size, "rank")
    print(f"merged {tensors} of {ranks}: {_list_dtypes(report)}")
    print(
        f"{done} {human_size(report.bytes_written)} in {counted(len(report.files), 'file')}, "
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


def _print_reused(report: "Report") -> None:
    verb = "would use" if report.dry_run else "used"
    print(f"{verb} {report.output}, which was made from {', '.join(report.sources)} already")
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


def print_inspection(found: "Inspection", front: Front) -> None:
    """Print what was found about a checkpoint, for people."""
    which = ", ".join(filter(None, (found.role, found.weights)))
    state = found.training_state
    rows = {
        "checkpoint": f"{found.path} ({which} weights)",
        "format": f"{found.format}, written by {found.writer}",
        "step": "unknown" if found.step is None else str(found.step),
        "world size": str(found.world_size),
        "meshes": _list_counts(found.meshes),
        "placements": _list_counts(found.placements),
        "dtypes": _list_counts(found.dtypes),
        "parameters": f"{found.parameters:,} in {counted(len(found.tensors), 'tensor')}, "
        f"{human_size(found.size_bytes)}",
        "config": f"names {found.config_dtype}" if found.config_dtype else "",
        "latest": "; ".join(
            f"{name} names {'no step' if step is None else f'step {step}'}"
            for name, step in found.latest.items()
        ),
        "EMA": "present (--weights ema)" if found.has_ema and found.weights != "ema" else "",
        "LoRA": counted(found.lora_tensors, "tensor") if found.lora_tensors else "",
        "tied": "; ".join(" = ".join(tied) for tied in found.shared),
        "companions": ", ".join(found.companions) or "none",
        "not weights": f"training state: {listed(state, 2)}" if state else "",
        "optimizer": "" if found.optimizer is None else _describe_optimizer(found.optimizer),
        "compressed": "yes: merge decompresses it first" if found.compressed else "",
        "missing": ", ".join(found.missing),
        "merge writes": found.would_write,
    }
    for name, text in rows.items():
        if text:
            _print_row(name, text)
    for skipped in found.skipped:
        _print_row("left out", f"{skipped.fqn}: {skipped.reason}")
    for note in found.notes:
        _print_row("warning", reword_warning(note, front))
    if added := [one for note in found.notes for one in additions(note)]:
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
    """Print one row of the table: on a terminal broken between words, elsewhere in one line."""
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


def print_comparison(found: "Comparison", *, as_json: bool = False) -> None:
    """Print what comparing two models found: for people, or as a JSON object."""
    if as_json:
        counts = {
            "equal": found.equal,
            "compared": len(found.tensors),
            "different": len(found.different),
        }
        print(json.dumps(make_finite(counts | asdict(found))))
        return
    how = "bit by bit" if found.atol == found.rtol == 0 else "within the tolerances"
    equal = len(found.tensors) - len(found.different)
    cast = [one for one in found.tensors if one.cast and one.equal]
    print(f"compared    {counted(len(found.tensors), 'tensor')}, {how}")
    print(f"equal       {equal}" + (f" ({len(cast)} after a cast to our dtype)" if cast else ""))
    print(f"different   {len(found.different)}")
    list_some([_describe(one) for one in found.different])
    for title, names in (
        ("missing", found.missing),
        ("unexpected", found.unexpected),
        ("NaN in", [one.name for one in found.with_nan]),
        ("all zero", [one.name for one in found.all_zero]),
    ):
        if names:
            print(f"{title:<11} {len(names)}")
            list_some(list(names))
    if found.by_config is not None:
        _print_by_config(found.by_config)
    if found.loading is not None:
        _print_loading(found.loading)
    print("the models are " + ("the same" if found.equal else "not the same"))


def _print_by_config(names: "ByConfig") -> None:
    if names.complete:
        print("names       as the config says")
        return
    print("names       not as the config says:")
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


def _describe(one: "TensorComparison") -> str:
    if one.values is None and one.shape_ours == one.shape_theirs:
        return f"{one.name}: another checksum"
    if one.values is None:
        shapes = write_shape(one.shape_ours), write_shape(one.shape_theirs)
        return f"{one.name}: shape {', not '.join(shapes)}"
    values = one.values
    parts = [f"{values.different:,} of {counted(values.elements, 'element')}"]
    if not one.cast and one.dtype_ours != one.dtype_theirs:
        parts.insert(0, f"{one.dtype_ours}, not {one.dtype_theirs}")
    if values.different and not values.different_values:
        parts.append("in their bits only")
    else:
        parts.append(f"by up to {values.max_abs_diff:.3g} ({values.max_rel_diff:.3g} relative)")
    if values.nans_ours != values.nans_theirs:
        parts.append(f"NaN {values.nans_ours:,}, not {values.nans_theirs:,}")
    parts.append(f"norm {values.norm_ours:.6g}, not {values.norm_theirs:.6g}")
    return f"{one.name}: {', '.join(parts)}"


def write_shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes)) or "()"


def make_finite(value: object) -> object:
    """Return a value in which NaN and infinity, for which JSON has no numbers, are text."""
    if isinstance(value, dict):
        return {key: make_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [make_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
