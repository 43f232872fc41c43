"""`unshard diff`, `checksums`, `delta` and `apply`, and the output of `diff`."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from math import prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unshard.cli.options import (
    OUTPUT,
    CheckpointArgument,
    Json,
    Quiet,
    flag,
    keywords_of,
    option,
    taking,
)
from unshard.cli.parser.parameters import argument
from unshard.cli.reports import fields_of, list_some, make_finite, print_report, write_shape
from unshard.cli.running import DIFFERENT, front_of
from unshard.console import counted, human_size, listening
from unshard.errors import UsageError
from unshard.keywords import ChecksumKeywords, DeltaKeywords, DiffKeywords

if TYPE_CHECKING:
    from unshard.api import Comparison
    from unshard.write.verification.comparison import TensorComparison

    Tensors = Sequence[TensorComparison]

_Sums = dict[str, Any]

_MOST_CHANGED = 10
_MODEL = "A checkpoint, a run (for its highest complete step), or a merged model."
_LAYER = re.compile(r"(.*?\.\d+)\..*|(.*)\..*")


@taking(ChecksumKeywords, but=("max_shard_size",))
def checksums(
    checkpoint: CheckpointArgument,
    *,
    as_json: Annotated[
        bool, flag("--json", 'Print {"checksums": {name: SHA-256}}, as vLLM\'s checker does.')
    ] = False,
    **given: object,
) -> None:
    """Print the SHA-256 of each tensor that merge would write.

    Each line has a checksum and a name, like the output of sha256sum. Nothing is merged or written.
    `unshard verify --checksums` reads the lines or the JSON.
    """
    from unshard import api

    with listening(quiet=False, front=front_of(checksums, locals())) as listener:
        digests = api.checksums(
            checkpoint, listener=listener, **keywords_of(ChecksumKeywords, given)
        )
    if as_json:
        print(json.dumps({"checksums": digests}))
    else:
        print("\n".join(f"{digest}  {name}" for name, digest in digests.items()))


@taking(DiffKeywords)
def diff(
    before: Annotated[Path, argument("BEFORE", _MODEL)],
    after: Annotated[Path, argument("AFTER", _MODEL)],
    *,
    layers: Annotated[bool, flag("--layers", "Sum up the changes by layer.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Show what changed between two checkpoints, models or steps.

    Values are compared bit by bit, under the names that merge writes, without merging. Exits 0 if
    the models are equal, 1 if they differ.
    """
    from unshard import api

    with listening(quiet=quiet, front=front_of(diff, locals())) as listener:
        comparison = api.diff(before, after, listener=listener, **keywords_of(DiffKeywords, given))
    total = _sum(comparison.tensors)
    if as_json:
        fields = {"equal": comparison.equal, **total, **asdict(comparison)}
        if layers:
            fields["layers"] = {name: _sum(tensors) for name, tensors in _layers(comparison)}
        print(json.dumps(make_finite(fields)))
    elif not quiet:
        _print_difference(comparison, total, layers=layers)
    if not comparison.equal:
        raise SystemExit(DIFFERENT)


@taking(DeltaKeywords)
def delta(
    paths: Annotated[
        list[Path],
        argument(
            "BEFORE AFTER OUTPUT",
            "Two checkpoints, steps or merged models, and the directory or address to write. With "
            "--run: only OUTPUT.",
        ),
    ],
    run: Annotated[
        Path | None,
        option(
            "RUN",
            "Add the steps of a run that OUTPUT does not have: a whole model first, then a delta "
            "for each step.",
        ),
    ] = None,
    version: Annotated[
        str | None, option("ID", "Name of AFTER in the index.  [default: its step]", OUTPUT)
    ] = None,
    base_version: Annotated[
        str | None, option("ID", "Name of BEFORE in the index.  [default: its step]", OUTPUT)
    ] = None,
    *,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Write the delta between two checkpoints, for engines to apply.

    The format is the XOR delta of ModelExpress, slime, miles and SGLang.
    """
    from unshard import api

    if len(paths) != (3 if run is None else 1) or (run and (version or base_version)):
        raise UsageError(
            "wrong number of arguments",
            expected="BEFORE AFTER OUTPUT [--version ID --base-version ID], or --run RUN OUTPUT",
        )
    keywords = keywords_of(DeltaKeywords, given)
    with listening(quiet=quiet, front=front_of(delta, locals())) as listener:
        if run is None:
            before, after, output = paths
            names: dict[str, Any] = {"version": version, "base_version": base_version}
            reports = [api.delta(before, after, output, **names, listener=listener, **keywords)]
        else:
            reports = api.archive(run, *paths, listener=listener, **keywords)
    for report in reports:
        if as_json:
            print(json.dumps(fields_of(report)))
        elif not quiet:
            size = human_size(sum(report.files.values()))
            print(f"saved {size} to {report.output}, {report.seconds:.2f} s")


@taking(DeltaKeywords)
def apply(
    paths: Annotated[
        list[Path],
        argument(
            "CHECKPOINT DELTA... OUTPUT",
            "A checkpoint or merged model, the deltas in order, and the directory or address to "
            "write. With an output of delta --run: that directory and OUTPUT.",
        ),
    ],
    *,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Apply deltas to a checkpoint, and write the model.

    Files, their order and all resulting tensors are checked before anything is written.
    """
    from unshard import api

    checkpoint, *deltas = paths
    if not deltas:
        raise UsageError("the output is missing", expected="CHECKPOINT DELTA... OUTPUT")
    output, keywords = deltas.pop(), keywords_of(DeltaKeywords, given)
    with listening(quiet=quiet, front=front_of(apply, locals())) as listener:
        report = api.apply_delta(checkpoint, deltas, output, listener=listener, **keywords)
    print_report(report, as_json=as_json, quiet=quiet)


def _layers(comparison: "Comparison") -> "list[tuple[str, Tensors]]":
    """Group tensors by layer (the name up to its first number) or else by module."""
    layers: dict[str, list[TensorComparison]] = {}
    for tensor in comparison.tensors:
        match = _LAYER.fullmatch(tensor.name)
        layers.setdefault((match[1] or match[2]) if match else tensor.name, []).append(tensor)
    return [*layers.items()]


def _sum(tensors: "Tensors") -> _Sums:
    """Return the changes of all values; in incomparable tensors, all values count as changed."""
    values = [each.values for each in tensors if each.values is not None and _is_comparable(each)]
    others = sum(prod(each.shape_ours) for each in tensors if not _is_comparable(each))
    count = sum(each.elements for each in values)
    squares = sum(each.rms_diff**2 * each.elements for each in values)
    sizes = [each.delta_bytes for each in values]
    is_delta = not others and all(each.dtype_ours == each.dtype_theirs for each in tensors)
    return {
        "elements": count + others,
        "different": sum(each.different for each in values) + others,
        "max_abs_diff": max((each.max_abs_diff for each in values), default=0.0),
        "rms_diff": sqrt(squares / max(count, 1)),
        "nans": [sum(each.nans_theirs for each in values), sum(each.nans_ours for each in values)],
        "infs": [sum(each.infs_theirs for each in values), sum(each.infs_ours for each in values)],
        "delta_bytes": sum(size or 0 for size in sizes) if is_delta and None not in sizes else None,
    }


def _is_comparable(tensor: "TensorComparison") -> bool:
    return tensor.values is not None and (tensor.cast or tensor.dtype_ours == tensor.dtype_theirs)


def _print_difference(comparison: "Comparison", total: _Sums, *, layers: bool) -> None:
    changed, removed, added = comparison.different, comparison.missing, comparison.unexpected
    print(f"compared    {counted(len(comparison.tensors), 'tensor')}, bit by bit")
    print(f"equal       {len(comparison.tensors) - len(changed):,}")
    print(f"different   {len(changed):,}")
    if layers:
        for name, tensors in _layers(comparison):
            print(f"  {name}: {_write(_sum(tensors))}")
    else:
        list_some(list(map(_describe, changed)), _MOST_CHANGED)
    for title, names in (("removed", removed), ("added", added)):
        if names:
            print(f"{title:<11} {len(names):,}")
            list_some(list(names), _MOST_CHANGED)
    for title, counts in (("NaN", total["nans"]), ("infinite", total["infs"])):
        if any(counts):
            print(f"{title:<11} {counts[0]:,} before, {counts[1]:,} after")
    size = total["delta_bytes"]
    is_delta = size is not None and not (comparison.equal or removed or added)
    delta = f"; as a delta about {human_size(size)}" if is_delta else ""
    print(f"{_write_share(total)} values changed{delta}")


def _describe(tensor: "TensorComparison") -> str:
    parts = []
    if tensor.dtype_ours != tensor.dtype_theirs:
        parts.append(f"{tensor.dtype_theirs}, now {tensor.dtype_ours}")
    if tensor.values is None:
        parts.append(f"{write_shape(tensor.shape_theirs)}, now {write_shape(tensor.shape_ours)}")
    if _is_comparable(tensor):
        parts.append(_write(_sum([tensor])))
    return f"{tensor.name}: {'; '.join(parts)}"


def _write(sums: _Sums) -> str:
    by = f", by up to {sums['max_abs_diff']:.3g}, RMS {sums['rms_diff']:.3g}"
    return _write_share(sums) + (by if sums["different"] else "")


def _write_share(sums: _Sums) -> str:
    """Return the share of changed values; only exact shares are written as 0 % or 100 %."""
    count, changed = sums["elements"], sums["different"]
    percent = 100 * changed / max(count, 1)
    share = f"{percent if changed == count else min(percent, 99.9):.{2 if percent < 10 else 3}g} %"
    total = f"{count:,}"
    for size, unit in ((1e6, " M"), (1e9, " G")):
        if count >= size:
            total = f"{count / size:.3g}{unit}"
    return f"{share if changed == 0 or percent >= 0.001 else '< 0.001 %'} of {total}"
