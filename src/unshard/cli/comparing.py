"""`unshard diff`, `checksums`, `delta` and `apply`, and how they print what they found."""

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
from unshard.cli.running import front_of
from unshard.errors import UsageError
from unshard.keywords import ChecksumKeywords, DeltaKeywords, DiffKeywords
from unshard.showing import counted, human_size, listening

if TYPE_CHECKING:
    from unshard.api import Comparison
    from unshard.write.verification.comparison import TensorComparison

    Tensors = Sequence[TensorComparison]

_Sums = dict[str, Any]

_DIFFERENT = 1
_MOST_CHANGED = 10
_MODEL = "A checkpoint, a run (its highest complete step is taken), or a merged model."
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

    A line has a checksum and a name, as those of sha256sum. Nothing is merged or written. `unshard
    verify --checksums` reads the lines, or the JSON.
    """
    from unshard import api

    with listening(quiet=False, front=front_of(checksums, locals())) as listener:
        found = api.checksums(checkpoint, listener=listener, **keywords_of(ChecksumKeywords, given))
    if as_json:
        print(json.dumps({"checksums": found}))
    else:
        print("\n".join(f"{digest}  {name}" for name, digest in found.items()))


@taking(DiffKeywords)
def diff(
    before: Annotated[Path, argument("BEFORE", _MODEL)],
    after: Annotated[Path, argument("AFTER", _MODEL)],
    *,
    layers: Annotated[bool, flag("--layers", "Sum the changes by layer.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Show what changed between two checkpoints, models or steps.

    Values are compared bit by bit, under the names that merge writes; nothing is merged. Exit code
    0 means that nothing differs, 1 that something does.
    """
    from unshard import api

    with listening(quiet=quiet, front=front_of(diff, locals())) as listener:
        found = api.diff(before, after, listener=listener, **keywords_of(DiffKeywords, given))
    total = _sum(found.tensors)
    if as_json:
        more = {"layers": {name: _sum(some) for name, some in _layers(found)}} if layers else {}
        print(json.dumps(make_finite({"equal": found.equal, **total, **asdict(found), **more})))
    elif not quiet:
        _print_difference(found, total, layers=layers)
    if not found.equal:
        raise SystemExit(_DIFFERENT)


@taking(DeltaKeywords)
def delta(
    paths: Annotated[
        list[Path],
        argument(
            "BEFORE AFTER OUTPUT",
            "Two checkpoints, steps or merged models, and the directory or address to write; "
            "with --run OUTPUT alone.",
        ),
    ],
    run: Annotated[
        Path | None,
        option(
            "RUN",
            "Add the steps of a run that OUTPUT does not have: a whole model, and what changed "
            "from step to step.",
        ),
    ] = None,
    version: Annotated[
        str | None, option("ID", "What the index calls AFTER.  [default: its step]", OUTPUT)
    ] = None,
    base_version: Annotated[
        str | None, option("ID", "What the index calls BEFORE.  [default: its step]", OUTPUT)
    ] = None,
    *,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Write what changed between two checkpoints, for engines to apply.

    The format is the XOR delta of ModelExpress, slime, miles and SGLang.
    """
    from unshard import api

    if len(paths) != (3 if run is None else 1) or (run and (version or base_version)):
        raise UsageError(
            "the arguments do not fit",
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
    for one in reports:
        if as_json:
            print(json.dumps(fields_of(one)))
        elif not quiet:
            size = human_size(sum(one.files.values()))
            print(f"saved {size} to {one.output}, {one.seconds:.2f} s")


@taking(DeltaKeywords)
def apply(
    paths: Annotated[
        list[Path],
        argument(
            "CHECKPOINT DELTA... OUTPUT",
            "A checkpoint or merged model, the deltas in their order, and the directory or "
            "address to write. Without a delta, what delta --run wrote.",
        ),
    ],
    *,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Apply deltas to a checkpoint, and write the model.

    All is checked before that: files, order, and what every tensor becomes.
    """
    from unshard import api

    checkpoint, *deltas = paths
    if not deltas:
        raise UsageError("the output is missing", expected="CHECKPOINT DELTA... OUTPUT")
    output, keywords = deltas.pop(), keywords_of(DeltaKeywords, given)
    with listening(quiet=quiet, front=front_of(apply, locals())) as listener:
        report = api.apply_delta(checkpoint, deltas, output, listener=listener, **keywords)
    print_report(report, as_json=as_json, quiet=quiet)


def _layers(found: "Comparison") -> "list[tuple[str, Tensors]]":
    """Return the tensors by layer: a name up to its first number, or of no layer, to its module."""
    members: dict[str, list[TensorComparison]] = {}
    for one in found.tensors:
        match = _LAYER.fullmatch(one.name)
        members.setdefault((match[1] or match[2]) if match else one.name, []).append(one)
    return [*members.items()]


def _sum(tensors: "Tensors") -> _Sums:
    """Return the changes of all values; those that cannot be compared have all changed."""
    values = [one.values for one in tensors if one.values is not None and _is_comparable(one)]
    others = sum(prod(one.shape_ours) for one in tensors if not _is_comparable(one))
    count = sum(one.elements for one in values)
    squares = sum(one.rms_diff**2 * one.elements for one in values)
    sizes = [one.delta_bytes for one in values]
    is_delta = not others and all(one.dtype_ours == one.dtype_theirs for one in tensors)
    return {
        "elements": count + others,
        "different": sum(one.different for one in values) + others,
        "max_abs_diff": max((one.max_abs_diff for one in values), default=0.0),
        "rms_diff": sqrt(squares / max(count, 1)),
        "nans": [sum(one.nans_theirs for one in values), sum(one.nans_ours for one in values)],
        "infs": [sum(one.infs_theirs for one in values), sum(one.infs_ours for one in values)],
        "delta_bytes": sum(one or 0 for one in sizes) if is_delta and None not in sizes else None,
    }


def _is_comparable(one: "TensorComparison") -> bool:
    return one.values is not None and (one.cast or one.dtype_ours == one.dtype_theirs)


def _print_difference(found: "Comparison", total: _Sums, *, layers: bool) -> None:
    changed = found.different
    print(f"compared    {counted(len(found.tensors), 'tensor')}, bit by bit")
    print(f"equal       {len(found.tensors) - len(changed):,}")
    print(f"different   {len(changed):,}")
    if layers:
        print("\n".join(f"  {name}: {_write(_sum(some))}" for name, some in _layers(found)))
    else:
        list_some(list(map(_describe, changed)), _MOST_CHANGED)
    for title, names in (("removed", found.missing), ("added", found.unexpected)):
        if names:
            print(f"{title:<11} {len(names):,}")
            list_some(list(names), _MOST_CHANGED)
    for title, counts in (("NaN", total["nans"]), ("infinite", total["infs"])):
        if any(counts):
            print(f"{title:<11} {counts[0]:,} before, {counts[1]:,} after")
    size = total["delta_bytes"]
    is_delta = size is not None and not (found.equal or found.missing or found.unexpected)
    delta = f"; as a delta about {human_size(size)}" if is_delta else ""
    print(f"{_write_share(total)} values changed{delta}")


def _describe(one: "TensorComparison") -> str:
    parts = []
    if one.dtype_ours != one.dtype_theirs:
        parts.append(f"{one.dtype_theirs}, now {one.dtype_ours}")
    if one.values is None:
        parts.append(f"{write_shape(one.shape_theirs)}, now {write_shape(one.shape_ours)}")
    parts += [_write(_sum([one]))] if _is_comparable(one) else []
    return f"{one.name}: {'; '.join(parts)}"


def _write(sums: _Sums) -> str:
    by = f", by up to {sums['max_abs_diff']:.3g}, RMS {sums['rms_diff']:.3g}"
    return _write_share(sums) + (by if sums["different"] else "")


def _write_share(sums: _Sums) -> str:
    """Return how many values changed, of how many: 0 % and 100 % are exact."""
    count, changed = sums["elements"], sums["different"]
    percent = 100 * changed / max(count, 1)
    share = f"{percent if changed == count else min(percent, 99.9):.{2 if percent < 10 else 3}g} %"
    unit = next((one for one in ((1e9, " G"), (1e6, " M")) if count >= one[0]), None)
    of = f"{count / unit[0]:.3g}{unit[1]}" if unit else f"{count:,}"
    return f"{share if changed == 0 or percent >= 0.001 else '< 0.001 %'} of {of}"
