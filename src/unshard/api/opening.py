"""Open the checkpoints of an average, or the steps of a run, with their coefficients."""

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import cos, isfinite, pi, sqrt
from pathlib import Path
from typing import NamedTuple

from unshard.api.options import MergeOptions, given_path
from unshard.api.sources import Sources, read_checkpoint
from unshard.console import counted
from unshard.errors import IncompleteError, UsageError, raise_all
from unshard.progress import Chosen, Listener, Stage
from unshard.read.finding.discover import all_steps, step_folders
from unshard.read.format import Location
from unshard.read.open import Checkpoint, passing_over

_CANCELS = 1e-6  # of the sum of magnitudes: a smaller sum is mostly rounding error
_FAR = 1e12
_DECAYS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + cos(pi * done)) / 2,
    "1-sqrt": lambda done: 1 - sqrt(done),
}
"""Learning rate relative to that before the decay, by the completed fraction of the decay."""


class Averaging(NamedTuple):
    """The weights of an average, and the steps of a run that it uses; `average` explains each."""

    coefficients: Sequence[float] | None = None
    ema_decay: float | None = None
    schedule: str | None = None
    last: int | None = None
    every: int | None = None


_EQUAL_WEIGHTS = Averaging()


def open_sources(
    checkpoints: Sequence[str | Path] | str | Path,
    options: MergeOptions,
    listener: Listener,
    how: Averaging = _EQUAL_WEIGHTS,
    *,
    pass_over: bool = True,
) -> Sources:
    """Open the checkpoints of an average.

    With `pass_over`, incomplete steps of a run are left out, with a warning; they are an error
    otherwise.
    """
    opening = time.monotonic()
    paths = [checkpoints] if isinstance(checkpoints, str | Path) else list(checkpoints)
    _check(options, how, several=len(paths) > 1)
    resolved = [given_path(path, "a checkpoint") for path in paths]
    if not paths:
        raise UsageError("no checkpoint to average")
    listener(Stage("reading"))
    if len(paths) == 1:
        opened = _open_steps(resolved[0], options, (how.last, how.every or 1), pass_over=pass_over)
    else:
        opened = [read_checkpoint(path, options) for path in resolved]
    weights = _choose_weights(how, len(opened))
    titles = ", ".join(checkpoint.title for checkpoint in opened)
    listener(Chosen(f"averaging {counted(len(opened), 'checkpoint')}: {titles}"))
    return Sources(tuple(opened), weights, opening=opening)


def _check(options: MergeOptions, how: Averaging, *, several: bool) -> None:
    if options.optimizer:
        raise UsageError("⟦--optimizer⟧: an average of checkpoints has no optimizer")
    if options.lora not in (None, "fuse", "ignore") or options.step is not None:
        raise UsageError(
            "an average of several steps is one whole model: ⟦--lora⟧ and ⟦--step⟧ do not apply"
        )
    ways = ("⟦--coefficients⟧", "⟦--ema-decay⟧", "⟦--schedule⟧")
    chosen = [way for way, value in zip(ways, how, strict=False) if value is not None]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} exclude each other: each weighs the checkpoints")
    for name, count in (("last", how.last), ("every", how.every)):
        if count is not None and count < 1:
            raise UsageError(f"⟦--{name} {count}⟧: at least 1 is needed")
    if several and (how.last, how.every) != (None, None):
        raise UsageError(
            "⟦--last⟧ and ⟦--every⟧ choose steps of one run, and several checkpoints were given",
            hint="give the run alone",
        )


def _open_steps(
    run: Path, options: MergeOptions, counts: tuple[int | None, int], *, pass_over: bool
) -> list[Checkpoint]:
    """Open the last N complete steps of a run, every Nth from the highest back; lowest first."""
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
                    hint="to leave out incomplete steps, with a warning: "
                    f"unshard average {shlex.quote(str(run))} OUTPUT",
                ) from error
            incomplete.append((location, error))
            continue
        if complete % every == 0:
            sources.append(source)
        complete += 1
    if last is not None and len(sources) < last:
        used = "" if every == 1 else f", of which ⟦--every {every}⟧ takes {len(sources)}"
        raise UsageError(
            f"⟦--last {last}⟧: {run} has only {counted(complete, 'complete step')}{used}"
        )
    if not sources:
        problems = [error for _, error in incomplete]
        raise_all(IncompleteError, f"{run}: no step is complete", problems)
    lowest = None if last is None else sources[-1].location.step
    empty = _empty_folders(run, steps, lowest)
    return [*sources[:0:-1], passing_over(sources[0], empty, incomplete)]


def _empty_folders(run: Path, steps: Sequence[Location], above: int | None) -> list[Path]:
    """Return the directories of steps without weights, above the step `above` if it is given."""
    numbers = {location.step for location in steps}
    folders = step_folders(run).items()
    return [path for step, path in folders if step not in numbers and step > (above or -1)]


def _choose_weights(how: Averaging, count: int) -> tuple[float, ...]:
    """Return the weights of `count` sources."""
    if how.ema_decay is not None:
        return _ema_weights(how.ema_decay, f"⟦--ema-decay {how.ema_decay}⟧", count)
    if how.schedule is not None:
        return _scheduled_weights(how.schedule, count)
    coefficients = how.coefficients
    if coefficients is None:
        return (1.0,) * count
    if len(coefficients) != count:
        raise UsageError(
            f"⟦--coefficients⟧: {len(coefficients)} numbers for {count} checkpoints",
            expected="a number for each, in order",
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
        raise UsageError(f"{option}: must be above 0 and below 1")
    # average = decay * average + (1 - decay) * model, from the first model on: the sum is 1.
    later = ((1 - decay) * decay ** (count - 1 - at) for at in range(1, count))
    return (decay ** (count - 1), *later)


def _scheduled_weights(schedule: str, count: int) -> tuple[float, ...]:
    """Return weights with which an average emulates a decay of the learning rate.

    A checkpoint is the first checkpoint plus all updates since, so an average contains update i
    times the sum of the weights of checkpoint i and all later ones. This sum must be the learning
    rate r(i) of a decay with r(0) = 1 that would reach 0 with the next checkpoint. So the weights
    are r(i) - r(i + 1), and sum to 1. Source: WSM, https://arxiv.org/abs/2507.17634; Megatron-LM's
    weighted_merge.py samples a decay at the same points.
    """
    if match := re.fullmatch(r"ema:(\d*\.\d+)", schedule):
        return _ema_weights(float(match[1]), f"⟦--schedule {schedule}⟧", count)
    if schedule == "linear":
        return (1.0,) * count  # its steps are equal, but rounding would make them differ
    if schedule not in _DECAYS:
        expected = f"linear, {', '.join(_DECAYS)} or ema:0.99"
        raise UsageError(f"⟦--schedule {schedule}⟧: unknown", expected=expected)
    rates = [_DECAYS[schedule](done / count) for done in range(count)]
    return tuple(before - after for before, after in pairwise([*rates, 0.0]))
