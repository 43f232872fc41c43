"""Which of the sets of weights and the steps that are there are meant: candidates, and a choice.

A step is looked into when it is needed, and a trainer may remove it meanwhile: it is then as if it
had not been there.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unshard.errors import CheckpointError, IncompleteError, UnknownFormatError, UsageError
from unshard.read.finding.candidates import (
    numbered_files,
    search,
    sets_at,
    sets_within,
    steps_in,
)
from unshard.read.format import EVERY_ROLE, Choice, Location, Role, role_in
from unshard.read.step_names import count_steps, family, is_sure
from unshard.read.tree import Tree
from unshard.showing import human_size

DEFAULT_ROLES = ("actor", "policy", "model", "trainer")
"""The roles that are taken, the first first, where several sets are there and none was chosen."""

_EPOCHS = re.compile(r"(?:dist_)?epoch_#")
_LISTED = 12
_WHERE = {
    "ema": "a folder ema, or pytorch_ema_model_fsdp_0",
    "module": "a DeepSpeed ZeRO checkpoint, which alone has the weights in two dtypes",
}


def sets_near(
    tree: Tree, place: Path, choice: Choice, *, sharded: bool | None = None
) -> list[Location]:
    """Return the sets of weights of a place in it and its known folders; of a role, in all.

    If `sharded` is None, those are whole only if none is sharded.
    """
    found = sets_at(tree, place, sharded=sharded is not False)
    if not found and sharded is None:
        found = sets_at(tree, place, sharded=False)
    has_role = choice.role is None or any(at.is_called(choice.role) for at in found)
    has_weights = choice.weights is None or any(at.weights == choice.weights for at in found)
    if not found or (has_role and has_weights):
        return found
    known = {at.weights_dir for at in found}
    return found + [at for at in sets_within(tree, place) if at.weights_dir not in known]


def choose(
    tree: Tree, place: Path, found: list[Location], choice: Choice, *, start: Path
) -> Location:
    """Return the one set of weights that is meant; of every role, the first, with the others.

    Args:
        tree: what is there.
        place: where they were looked for, for errors.
        found: the candidates.
        choice: what the user asked for.
        start: the path that the user gave; `place` is a step of it, or above it.
    """
    is_run = start in place.parents
    if choice.step is not None and not is_run and found[0].step != choice.step:
        step = "not known" if found[0].step is None else found[0].step
        raise UsageError(
            f"{place} is step {step}, but ⟦--step {choice.step}⟧ was asked for",
            hint="give the directory that has all steps, or leave ⟦--step⟧ out",
        )
    kept = _of_weights(place, found, choice, start)
    if choice.role == EVERY_ROLE and (every := _each(kept)):
        return replace(every[0], others=tuple(every[1:]))
    location = _of_role(tree, place, kept, choice.role, start)
    if not tree.inside(location.weights_dir):
        raise IncompleteError(
            f"{location.weights_dir} is empty: this run saved no {location.weights} weights at "
            "this step"
        )
    return location


def _of_weights(place: Path, found: list[Location], choice: Choice, start: Path) -> list[Location]:
    """Return the sets of model or EMA weights; EMA weights only if they are named."""
    kept = [at for at in found if at.weights == (choice.weights or "model")]
    if choice.weights == "module":  # DeepSpeed has them in the same place as the others
        kept = [replace(at, weights="module") for at in found if "module" in at.format.weights]
    if kept:
        return kept
    pointed_at = [at for at in found if start.is_relative_to(at.weights_dir)]
    if choice.weights is None and pointed_at:
        return pointed_at
    names = ", ".join(at.weights_dir.name for at in found)
    if choice.weights is None:
        raise UsageError(
            f"{place} has only EMA weights, an average of those that were trained",
            found=names,
            hint="if you want them: ⟦+--weights ema⟧",
        )
    expected = _WHERE.get(choice.weights, "")
    raise UnknownFormatError(
        f"{place} has no {choice.weights} weights", expected=expected, found=names
    )


def _of_role(
    tree: Tree, place: Path, found: list[Location], role: Role | None, start: Path
) -> Location:
    """Return the weights of a role; a critic is never taken unless it is named."""
    kept = [at for at in found if role in (None, EVERY_ROLE) or at.is_called(role)]
    if not kept:
        raise UnknownFormatError(f"{place} has no {role}", found=_listed(tree, place, found))
    if len(kept) > 1 and role is None:
        known = ([at for at in kept if at.is_called(name)] for name in DEFAULT_ROLES)
        kept = next((sets for sets in known if sets), kept)
    if len(kept) > 1:
        names = [_called(place, at, kept) for at in kept]
        is_clear = all(sum(at.is_called(name) for at in kept) == 1 for name in names)
        can_choose = is_clear and len(kept) <= _LISTED
        role = f"choose with ⟦+--role {'|'.join(names)}⟧, or " if can_choose else ""
        one = f"give one of them: {', '.join(str(at.weights_dir) for at in kept[:_LISTED])}"
        raise UsageError(
            f"{place} has {len(kept)} sets of weights, and none of them is the default",
            found=_listed(tree, place, kept),
            hint=f"{role}{one}",
        )
    only, at = kept[0].role, kept[0]
    is_meant = start.is_relative_to(at.weights_dir) or role_in(start.parts[::-1]) == only
    if only not in (None, "actor") and role is None and not is_meant:
        raise UsageError(
            f"{place} has only a {only}, which is not the model that was trained",
            hint=f"if you want the {only}: ⟦+--role '{only}'⟧",
        )
    return at


def _called(place: Path, at: Location, found: list[Location]) -> str:
    """Return what to call one of these sets: its role, or the first folder of its own, if any."""
    is_place = place in (at.weights_dir, at.file)
    inner = (place.name,) if is_place else at.weights_dir.relative_to(place).parts
    shared = {part for one in found if one != at for part in one.weights_dir.parts}
    return at.role or next((part for part in inner if part not in shared), inner[0])


def _each(found: list[Location]) -> list[Location]:
    """Return all sets, those without a role by their folders; none if two are called the same."""
    every = [one for at in found for one in (at, *at.others)]
    if len(every) == 1:
        return every
    named = {_called(at.step_dir, at, every): at for at in every}
    roles = [replace(at, role=name if at.is_called(name) else None) for name, at in named.items()]
    return roles if len(roles) == len(every) else []


def _listed(tree: Tree, place: Path, found: list[Location]) -> str:
    shown = []
    for at in found[:_LISTED]:
        files = filter(tree.is_file, [*tree.inside(at.place).values(), at.place])
        shown.append(f"{_called(place, at, found)} ({human_size(sum(map(tree.size, files)))})")
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(shown) + more


class Run(NamedTuple):
    """A directory of steps."""

    tree: Tree
    place: Path
    choice: Choice
    has_runs: bool = True  # whether there may be steps in its steps: verl's torchtitan engine

    def steps(self) -> Iterator[Location]:
        """Yield what is meant of each step, the highest first, or files that are a step each."""
        steps, wanted = steps_in(self.tree, self.place), self.choice.step
        if steps and wanted is not None:
            there = ", ".join(str(step) for step, _ in reversed(steps))
            steps = [(step, place) for step, place in steps if step == wanted]
            if not steps:
                raise UnknownFormatError(
                    f"{self.place} has no step {wanted}", found=f"steps {there}"
                )
        empty: list[Path] = []
        is_first = True
        for number, (_, place) in enumerate(steps):
            found = self.held(place)
            if found and is_first:
                _refuse_two_runs(self, found, steps[number:])
                is_first = False
            elif is_first and self.tree.exists(place):
                empty.append(place)
            yield from (replace(at, empty=tuple(empty)) for at in found)
        if is_first:
            yield from numbered_files(self.tree, self.place, wanted)

    def held(self, step: Path) -> list[Location]:
        """Return what is meant of a step: weights, or steps in it; nothing if it is removed."""
        tree, choice = self.tree, self.choice
        try:
            found = sets_near(tree, step, choice)
            if not found and self.has_runs:
                inner = Run(tree, step, choice._replace(step=None), has_runs=False)
                if nested := list(inner.steps()):
                    return nested
            found = found or sets_within(tree, step)
            if not found and (closed := search(tree, step).closed):
                raise closed[0]  # weights may be there: the step must not be passed over
            return [choose(tree, step, found, choice, start=self.place)] if found else []
        except (CheckpointError, OSError):
            if tree.exists(step):
                raise
            return []  # a trainer has just removed it


def _refuse_two_runs(run: Run, first: list[Location], steps: list[tuple[int, Path]]) -> None:
    """Refuse steps of several runs: the highest number may be another run's.

    If the names of the first show that it is a step, only steps of other names are looked into.

    Args:
        run: the directory of the steps.
        first: what the highest step with weights holds.
        steps: that step and those below it.
    """
    if len({family(place.name) for _, place in steps}) > 1:
        _refuse_two_names(run, [place for _, place in steps])
    if all(at.step == steps[0][0] and is_sure(at.step_dir.name) for at in first):
        return
    held = {place: run.held(place) for _, place in steps}
    runs = [
        place
        for step, place in steps
        if any(at.step != step for at in held[place]) and steps_in(run.tree, place)
    ]
    if len(runs) > 1:
        raise UsageError(
            f"{run.place} has the steps of {len(runs)} runs",
            hint=f"give one of them: {', '.join(map(str, runs[:_LISTED]))}",
        )
    every = [at for found in held.values() for at in found]
    unsure = [at for at in every if at.step is None or not is_sure(at.step_dir.name)]
    if len(unsure) > 1 and not count_steps([at.step for at in unsure]):
        raise UsageError(
            f"{run.place} has {len(unsure)} folders that may be steps, or runs",
            found=", ".join(at.step_dir.name for at in unsure[:_LISTED]),
            hint="give one of them, or its ⟦+--step N⟧",
        )


def _refuse_two_names(run: Run, places: list[Path]) -> None:
    """Refuse sharded steps whose names differ by more than numbers."""
    kinds: dict[str, Path] = {}
    for place in places:
        kind = family(place.name)
        if kind in kinds:
            continue
        found = sets_near(run.tree, place, run.choice) or sets_within(run.tree, place)
        if any(at.step_dir == place and at.format.sharded for at in found):
            kinds[kind] = place
    if any("epoch" not in kind for kind in kinds):  # a trainer may save at both
        kinds = {kind: place for kind, place in kinds.items() if not _EPOCHS.fullmatch(kind)}
    if len(kinds) > 1:
        raise UsageError(
            f"{run.place} has the steps of two runs: their names differ",
            found=", ".join(place.name for place in kinds.values()),
            hint="give the directory of the step that you want",
        )
