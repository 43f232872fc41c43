"""Open the checkpoints of an average: several, or steps of a run, with what each counts."""

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import cos, isfinite, pi, sqrt
from pathlib import Path

from unshard.api.options import MergeOptions, given_path
from unshard.api.sources import Sources, read_checkpoint
from unshard.errors import IncompleteError, UsageError, raise_all
from unshard.progress import Chosen, Listener, Stage
from unshard.read.finding.discover import all_steps, step_folders
from unshard.read.format import Location
from unshard.read.open import Checkpoint, passing_over

_CANCELS = 1e-6  # of the sum of sizes: what is left is the error of rounding
_FAR = 1e12
_DECAYS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + cos(pi * done)) / 2,
    "1-sqrt": lambda done: 1 - sqrt(done),
}
"""The learning rate of a decay, as a part of the one before it, when a part of it is done."""


def open_sources(
    checkpoints: Sequence[str | Path] | str | Path,
    options: MergeOptions,
    listener: Listener,
    *,
    coefficients: Sequence[float] | None = None,
    ema_decay: float | None = None,
    schedule: str | None = None,
    last: int | None = None,
    every: int | None = None,
    pass_over: bool = True,
) -> Sources:
    """Open the checkpoints of an average.

    Args:
        checkpoints, coefficients, ema_decay, schedule, last, every: as for `average`.
        options: those of `merge_with`.
        listener: is told which are averaged.
        pass_over: whether steps of a run that are not complete are left out, with a warning, or
            are an error.
    """
    opening = time.monotonic()
    paths = [checkpoints] if isinstance(checkpoints, str | Path) else list(checkpoints)
    _check(options, (coefficients, ema_decay, schedule), (last, every), are_several=len(paths) > 1)
    places = [given_path(path, "a checkpoint") for path in paths]
    if not paths:
        raise UsageError("no checkpoint to average")
    listener(Stage("reading"))
    if len(paths) == 1:
        found = _open_steps(places[0], options, (last, every or 1), pass_over=pass_over)
    else:
        found = [read_checkpoint(place, options) for place in places]
    weights = _choose_weights(coefficients, ema_decay, schedule, len(found))
    titles = ", ".join(one.title for one in found)
    listener(Chosen(f"averaging {len(found)} checkpoints: {titles}"))
    return Sources(tuple(found), weights, opening=opening)


def _check(
    options: MergeOptions,
    weighing: tuple[object, ...],
    counts: tuple[int | None, int | None],
    *,
    are_several: bool,
) -> None:
    if options.optimizer:
        raise UsageError("⟦--optimizer⟧: an average of checkpoints has no optimizer")
    if options.lora not in (None, "fuse", "ignore") or options.step is not None:
        raise UsageError(
            "an average of several steps is one whole model: ⟦--lora⟧ and ⟦--step⟧ do not apply"
        )
    ways = ("⟦--coefficients⟧", "⟦--ema-decay⟧", "⟦--schedule⟧")
    chosen = [way for way, value in zip(ways, weighing, strict=True) if value is not None]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other: each weighs the checkpoints")
    for name, count in zip(("last", "every"), counts, strict=True):
        if count is not None and count < 1:
            raise UsageError(f"⟦--{name} {count}⟧: at least 1 is needed")
    if are_several and counts != (None, None):
        raise UsageError(
            "⟦--last⟧ and ⟦--every⟧ choose steps of one run, and several checkpoints were given",
            hint="give the run alone",
        )


def _open_steps(
    run: Path, options: MergeOptions, counts: tuple[int | None, int], *, pass_over: bool
) -> list[Checkpoint]:
    """Open the last N, every Nth, complete steps of a run, from the highest back; lowest first."""
    last, every = counts
    steps = all_steps(run, options.choice)
    if not steps:
        raise UsageError(
            f"{run} is one checkpoint: there is nothing to average",
            hint="give several, or the directory that has the steps",
        )
    sources: list[Checkpoint] = []
    incomplete: list[tuple[Location, IncompleteError]] = []
    complete = 0
    for location in reversed(steps):
        if last is not None and len(sources) == last:
            break
        try:
            chosen = replace(options, role=location.role or options.role)
            source = read_checkpoint(location.path, chosen)
        except IncompleteError as error:
            if not pass_over:
                raise IncompleteError(
                    f"{location.step_dir} is not complete: " + error.subject,
                    hint="incomplete steps are left out, with a warning, by "
                    f"unshard average {shlex.quote(str(run))} OUTPUT",
                ) from error
            incomplete.append((location, error))
            continue
        if complete % every == 0:
            sources.append(source)
        complete += 1
    if last is not None and len(sources) < last:
        taken = "" if every == 1 else f", of which ⟦--every {every}⟧ takes {len(sources)}"
        raise UsageError(f"⟦--last {last}⟧: {run} has only {complete} complete steps{taken}")
    if not sources:
        problems = [error for _, error in incomplete]
        raise_all(IncompleteError, f"{run}: no step is complete", problems)
    lowest = None if last is None else sources[-1].location.step
    empty = _without_weights(run, steps, lowest)
    return [*sources[:0:-1], passing_over(sources[0], empty, incomplete)]


def _without_weights(run: Path, steps: Sequence[Location], above: int | None) -> list[Path]:
    """Return the directories of a run's steps that have no weights.

    Args:
        run: the directory with the steps.
        steps: all steps that have weights.
        above: only directories of higher steps are returned; None: of all steps.
    """
    found = {location.step for location in steps}
    return [
        folder
        for step, folder in step_folders(run).items()
        if step not in found and (above is None or step > above)
    ]


def _choose_weights(
    coefficients: Sequence[float] | None,
    ema_decay: float | None,
    schedule: str | None,
    count: int,
) -> tuple[float, ...]:
    """Return the weights of `count` sources."""
    if ema_decay is not None:
        return _ema_weights(ema_decay, f"⟦--ema-decay {ema_decay}⟧", count)
    if schedule is not None:
        return _scheduled_weights(schedule, count)
    if coefficients is None:
        return (1.0,) * count
    if len(coefficients) != count:
        raise UsageError(
            f"⟦--coefficients⟧: {len(coefficients)} numbers for {count} checkpoints",
            expected="one for each, in their order",
        )
    total, sizes = abs(sum(coefficients)), sum(map(abs, coefficients))
    if not all(map(isfinite, coefficients)) or total <= _CANCELS * sizes:
        raise UsageError("⟦--coefficients⟧: must be numbers whose sum is not 0")
    if not 1 / _FAR < sizes < _FAR:
        raise UsageError(
            "⟦--coefficients⟧: too small or too large for float32", expected="numbers like 1,2,3"
        )
    return tuple(map(float, coefficients))


def _ema_weights(decay: float, option: str, count: int) -> tuple[float, ...]:
    if not 0 < decay < 1:
        raise UsageError(f"{option}: must be between 0 and 1, both excluded")
    # The average starts as the first model; every later one moves it: average =
    # decay * average + (1 - decay) * model. These weights sum to 1.
    later = ((1 - decay) * decay ** (count - 1 - at) for at in range(1, count))
    return (decay ** (count - 1), *later)


def _scheduled_weights(schedule: str, count: int) -> tuple[float, ...]:
    """Return the weights by which an average emulates a decay of the learning rate.

    A checkpoint is the first one plus the updates since then, so an average has update i times the
    sum of the weights of checkpoint i and all later ones. That is to be the learning rate r(i) of
    a decay with r(0) = 1 that would reach 0 with the next checkpoint: the weights are its steps,
    r(i) - r(i + 1), and sum to 1. Source: WSM, https://arxiv.org/abs/2507.17634; Megatron-LM's
    weighted_merge.py takes the same points of a decay.
    """
    if match := re.fullmatch(r"ema:(\d*\.\d+)", schedule):
        return _ema_weights(float(match[1]), f"⟦--schedule {schedule}⟧", count)
    if schedule == "linear":
        return (1.0,) * count  # its steps are equal; rounded, they would differ
    if schedule not in _DECAYS:
        expected = f"linear, {', '.join(_DECAYS)} or ema:0.99"
        raise UsageError(f"⟦--schedule {schedule}⟧: unknown", expected=expected)
    rates = [_DECAYS[schedule](done / count) for done in range(count)]
    return tuple(before - after for before, after in pairwise([*rates, 0.0]))
