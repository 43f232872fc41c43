"""Which steps a run has, the highest first, and what of each is meant.

A step is looked into when it is needed, and a trainer may remove it meanwhile: it is then as if it
had not been there.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from unshard.errors import CheckpointError, UnknownFormatError, UsageError
from unshard.read.finding.choosing import choose
from unshard.read.finding.places import alone, is_checkpoint_file, nearby, within
from unshard.read.finding.search import search, steps_in
from unshard.read.format import Choice, Location
from unshard.read.step_names import (
    children,
    count_steps,
    family,
    step_of,
    step_of_file,
    version_of,
)

NESTED_RUNS = 1
"""How many levels of steps within steps are looked at, as verl's torchtitan engine writes them."""

_EPOCHS = re.compile(r"(?:dist_)?epoch_#")
_ARCHIVE = ".tar"  # of a step, not a checkpoint that a trainer saved
_LISTED = 12


def in_run(run: Path, choice: Choice, *, depth: int) -> Iterator[Location]:
    """Yield what the steps of a run hold; verl's torchtitan engine has steps within steps."""
    steps = steps_in(run)
    if steps and choice.step is not None:
        there = ", ".join(str(step) for step, _ in reversed(steps))
        steps = [(step, place) for step, place in steps if step == choice.step]
        if not steps:
            raise UnknownFormatError(f"{run} has no step {choice.step}", found=f"steps {there}")
    empty: list[Path] = []
    is_first = True
    for number, (_, place) in enumerate(steps, start=1):
        found = _in_step(run, place, choice, depth=depth)
        if found and is_first:
            _refuse_two_runs(run, found, steps[number - 1 :], choice, depth=depth)
            is_first = False
        elif is_first and place.exists():
            empty.append(place)
        yield from (replace(at, empty=tuple(empty)) for at in found)
    if is_first:
        yield from numbered_files(run, choice)


def _in_step(run: Path, place: Path, choice: Choice, *, depth: int) -> list[Location]:
    """Return what is meant of a step: weights, or steps in it; nothing if it is removed."""
    try:
        found = nearby(place, choice, sharded=True) or nearby(place, choice, sharded=False)
        if not found and depth:
            nested = list(in_run(place, replace(choice, step=None), depth=depth - 1))
            if nested:
                return nested
        found = found or within(place)
        if not found and (closed := search(place).closed):
            raise closed[0]  # weights may be there: the step must not be passed over
        return [choose(place, found, choice, start=run)] if found else []
    except (CheckpointError, OSError):
        if place.exists():
            raise
        return []  # a trainer has just removed it


def _refuse_two_runs(
    run: Path,
    first: list[Location],
    steps: list[tuple[int, Path]],
    choice: Choice,
    *,
    depth: int,
) -> None:
    """Refuse steps of several runs: the highest number may be another run's.

    If the names of the first show that it is a step, only steps of other names are looked into.

    Args:
        run: the directory of the steps.
        first: what the highest step with weights holds.
        steps: that step and those below it.
        choice: as for `in_run`.
        depth: as for `in_run`.
    """
    _refuse_two_names(run, [place for _, place in steps], choice)
    if all(at.step == steps[0][0] and step_of(at.step_dir.name) is not None for at in first):
        return
    held = {place: _in_step(run, place, choice, depth=depth) for _, place in steps}
    runs = [
        place
        for step, place in steps
        if any(at.step != step for at in held[place]) and steps_in(place)
    ]
    if len(runs) > 1:
        raise UsageError(
            f"{run} has the steps of {len(runs)} runs",
            hint=f"give one of them: {', '.join(map(str, runs[:_LISTED]))}",
        )
    _refuse_unsure(run, [at for found in held.values() for at in found])


def _refuse_two_names(run: Path, places: list[Path], choice: Choice) -> None:
    """Refuse sharded steps whose names differ by more than numbers."""
    kinds: dict[str, Path] = {}
    if len({family(place.name) for place in places}) > 1:
        for place in places:
            if family(place.name) not in kinds and _is_sharded_step(place, choice):
                kinds[family(place.name)] = place
    if any("epoch" not in kind for kind in kinds):  # a trainer may save at both
        kinds = {kind: place for kind, place in kinds.items() if not _EPOCHS.fullmatch(kind)}
    if len(kinds) > 1:
        raise UsageError(
            f"{run} has the steps of two runs: their names differ",
            found=", ".join(place.name for place in kinds.values()),
            hint="give the directory of the step that you want",
        )


def _refuse_unsure(run: Path, locations: list[Location]) -> None:
    """Refuse folders whose names do not show whether they are steps or runs."""
    unsure = [at for at in locations if at.step is None or step_of(at.step_dir.name) is None]
    if len(unsure) > 1 and not count_steps([at.step for at in unsure]):
        raise UsageError(
            f"{run} has {len(unsure)} folders that may be steps, or runs",
            found=", ".join(at.step_dir.name for at in unsure[:_LISTED]),
            hint="give one of them, or its ⟦--step N⟧",
        )


def _is_sharded_step(place: Path, choice: Choice) -> bool:
    found = nearby(place, choice, sharded=True) or nearby(place, choice, sharded=False)
    return any(at.step_dir == place and at.format.sharded for at in found or within(place))


def numbered_files(run: Path, choice: Choice) -> list[Location]:
    """Return the files of a run that are one step each, as MMEngine and Fabric write them."""
    found = [
        alone(child)
        for child in children(run)
        if step_of_file(child) is not None
        and child.suffix not in ("", _ARCHIVE)
        and is_checkpoint_file(child)
    ]
    kept = [at for at in found if choice.step in (None, at.step)]
    return sorted(kept, key=lambda at: (at.step or 0, version_of(at.place.name)), reverse=True)
