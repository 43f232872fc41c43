"""Chooses between the sets of weights and the steps that a search found.

Steps are inspected on demand. A trainer may remove a step meanwhile, which then counts as absent.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unshard.console import human_size
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

DEFAULT_ROLES = ("actor", "policy", "model", "trainer")
"""The default roles in order of preference, if there are several sets and none was chosen."""

_EPOCHS = re.compile(r"(?:dist_)?epoch_#")
_LISTED = 12
_WHERE = {
    "ema": "a folder ema, or pytorch_ema_model_fsdp_0",
    "module": "a DeepSpeed ZeRO checkpoint, the only format with weights in two dtypes",
}


def sets_near(
    tree: Tree, place: Path, choice: Choice, *, sharded: bool | None = None
) -> list[Location]:
    """Return the sets in a place and its known folders; those of a role, at any depth.

    If `sharded` is None, whole sets are returned only if none is sharded.
    """
    sets = sets_at(tree, place, sharded=sharded is not False)
    if not sets and sharded is None:
        sets = sets_at(tree, place, sharded=False)
    has_role = choice.role is None or any(at.is_called(choice.role) for at in sets)
    has_weights = choice.weights is None or any(at.weights == choice.weights for at in sets)
    if not sets or (has_role and has_weights):
        return sets
    known_folders = {at.weights_dir for at in sets}
    return sets + [at for at in sets_within(tree, place) if at.weights_dir not in known_folders]


def choose(
    tree: Tree, place: Path, candidates: list[Location], choice: Choice, *, start: Path
) -> Location:
    """Return the chosen set of weights; if every role was asked for, the first with the others.

    Args:
        tree: the files.
        place: where the candidates were searched for, for errors.
        candidates: sets of weights.
        choice: the user's.
        start: the path that the user passed; `place` is a step of it, or above it.
    """
    is_run = start in place.parents
    if choice.step is not None and not is_run and candidates[0].step != choice.step:
        step = "not known" if candidates[0].step is None else candidates[0].step
        raise UsageError(
            f"{place} is step {step}, but ⟦--step {choice.step}⟧ was asked for",
            hint="pass the directory of all steps, or leave ⟦--step⟧ out",
        )
    sets = _of_weights(place, candidates, choice, start)
    if choice.role == EVERY_ROLE and (every := _each(sets)):
        return replace(every[0], others=tuple(every[1:]))
    location = _of_role(tree, place, sets, choice.role, start)
    if not tree.inside(location.weights_dir):
        raise IncompleteError(
            f"{location.weights_dir} is empty: this run saved no {location.weights} weights at "
            "this step"
        )
    return location


def _of_weights(place: Path, sets: list[Location], choice: Choice, start: Path) -> list[Location]:
    """Return the sets of model or EMA weights; EMA weights only if they are asked for."""
    chosen = [at for at in sets if at.weights == (choice.weights or "model")]
    if choice.weights == "module":  # DeepSpeed has them in the same place as the others
        chosen = [replace(at, weights="module") for at in sets if "module" in at.format.weights]
    if chosen:
        return chosen
    pointed_at = [at for at in sets if start.is_relative_to(at.weights_dir)]
    if choice.weights is None and pointed_at:
        return pointed_at
    names = ", ".join(at.weights_dir.name for at in sets)
    if choice.weights is None:
        raise UsageError(
            f"{place} has only EMA weights, an average of the trained weights",
            found=names,
            hint="if you want them: ⟦+--weights ema⟧",
        )
    expected = _WHERE.get(choice.weights, "")
    raise UnknownFormatError(
        f"{place} has no {choice.weights} weights", expected=expected, found=names
    )


def _of_role(
    tree: Tree, place: Path, sets: list[Location], role: Role | None, start: Path
) -> Location:
    """Return the weights of a role; a critic only if it is asked for."""
    candidates = [at for at in sets if role in (None, EVERY_ROLE) or at.is_called(role)]
    if not candidates:
        raise UnknownFormatError(f"{place} has no {role}", found=_listed(tree, place, sets))
    if len(candidates) > 1 and role is None:
        by_default = ([at for at in candidates if at.is_called(name)] for name in DEFAULT_ROLES)
        candidates = next(filter(None, by_default), candidates)
    if len(candidates) > 1:
        names = [_label(place, at, candidates) for at in candidates]
        is_clear = all(sum(at.is_called(name) for at in candidates) == 1 for name in names)
        can_choose = is_clear and len(candidates) <= _LISTED
        role = f"choose with ⟦+--role {'|'.join(names)}⟧, or " if can_choose else ""
        paths = ", ".join(str(at.weights_dir) for at in candidates[:_LISTED])
        raise UsageError(
            f"{place} has {len(candidates)} sets of weights, and none of them is the default",
            found=_listed(tree, place, candidates),
            hint=f"{role}pass one of them: {paths}",
        )
    at = candidates[0]
    is_pointed_at = start.is_relative_to(at.weights_dir) or role_in(start.parts[::-1]) == at.role
    if at.role not in (None, "actor") and role is None and not is_pointed_at:
        raise UsageError(
            f"{place} has only a {at.role}, which is not the model that was trained",
            hint=f"if you want the {at.role}: ⟦+--role '{at.role}'⟧",
        )
    return at


def _label(place: Path, at: Location, sets: list[Location]) -> str:
    """Return a label of one of these sets: its role, or the first folder of its own, if any."""
    is_place = place in (at.weights_dir, at.file)
    inner = (place.name,) if is_place else at.weights_dir.relative_to(place).parts
    shared = {part for other in sets if other != at for part in other.weights_dir.parts}
    return at.role or next((part for part in inner if part not in shared), inner[0])


def _each(sets: list[Location]) -> list[Location]:
    """Return all sets, those without a role by their folders; none if two have the same label."""
    every = [each for at in sets for each in (at, *at.others)]
    if len(every) == 1:
        return every
    by_label = {_label(at.step_dir, at, every): at for at in every}
    roles = [
        replace(at, role=name if at.is_called(name) else None) for name, at in by_label.items()
    ]
    return roles if len(roles) == len(every) else []


def _listed(tree: Tree, place: Path, sets: list[Location]) -> str:
    shown = []
    for at in sets[:_LISTED]:
        files = filter(tree.is_file, [*tree.inside(at.place).values(), at.place])
        shown.append(f"{_label(place, at, sets)} ({human_size(sum(map(tree.size, files)))})")
    more = f" and {len(sets) - _LISTED} more" if len(sets) > _LISTED else ""
    return ", ".join(shown) + more


class RunDirectory(NamedTuple):
    """A directory of steps."""

    tree: Tree
    place: Path
    choice: Choice
    has_runs: bool = True  # whether its steps may contain steps: verl's torchtitan engine

    def steps(self) -> Iterator[Location]:
        """Yield the chosen weights of each step, the highest first, or files that are steps."""
        steps, wanted = steps_in(self.tree, self.place), self.choice.step
        if steps and wanted is not None:
            numbers = ", ".join(str(step) for step, _ in reversed(steps))
            steps = [(step, place) for step, place in steps if step == wanted]
            if not steps:
                raise UnknownFormatError(
                    f"{self.place} has no step {wanted}", found=f"steps {numbers}"
                )
        empty: list[Path] = []
        is_first = True
        for number, (_, place) in enumerate(steps):
            sets = self.weights_of(place)
            if sets and is_first:
                _refuse_two_runs(self, sets, steps[number:])
                is_first = False
            elif is_first and self.tree.exists(place):
                empty.append(place)
            yield from (replace(at, empty=tuple(empty)) for at in sets)
        if is_first:
            yield from numbered_files(self.tree, self.place, wanted)

    def weights_of(self, step: Path) -> list[Location]:
        """Return the chosen weights of a step, or steps in it; nothing if it is removed."""
        tree, choice = self.tree, self.choice
        try:
            sets = sets_near(tree, step, choice)
            if not sets and self.has_runs:
                inner = RunDirectory(tree, step, choice._replace(step=None), has_runs=False)
                if nested := list(inner.steps()):
                    return nested
            sets = sets or sets_within(tree, step)
            if not sets and (closed := search(tree, step).closed):
                raise closed[0]  # it may hold weights: the step must not be passed over
            return [choose(tree, step, sets, choice, start=self.place)] if sets else []
        except (CheckpointError, OSError):
            if tree.exists(step):
                raise
            return []  # a trainer has just removed it


def _refuse_two_runs(
    run: RunDirectory, first: list[Location], steps: list[tuple[int, Path]]
) -> None:
    """Refuse steps of several runs: the highest number may be another run's.

    `first` are the weights of the first of the steps. If its name is surely that of a step, only
    steps of other names are inspected.
    """
    if len({family(place.name) for _, place in steps}) > 1:
        _refuse_two_names(run, [place for _, place in steps])
    if all(at.step == steps[0][0] and is_sure(at.step_dir.name) for at in first):
        return
    by_place = {place: run.weights_of(place) for _, place in steps}
    runs = [
        place
        for step, place in steps
        if any(at.step != step for at in by_place[place]) and steps_in(run.tree, place)
    ]
    if len(runs) > 1:
        raise UsageError(
            f"{run.place} has the steps of {len(runs)} runs",
            hint=f"pass one of them: {', '.join(map(str, runs[:_LISTED]))}",
        )
    every = [at for sets in by_place.values() for at in sets]
    unsure = [at for at in every if at.step is None or not is_sure(at.step_dir.name)]
    if len(unsure) > 1 and not count_steps([at.step for at in unsure]):
        raise UsageError(
            f"{run.place} has {len(unsure)} folders that may be steps, or runs",
            found=", ".join(at.step_dir.name for at in unsure[:_LISTED]),
            hint="pass one of them, or its ⟦+--step N⟧",
        )


def _refuse_two_names(run: RunDirectory, places: list[Path]) -> None:
    """Refuse sharded steps whose names differ by more than numbers."""
    kinds: dict[str, Path] = {}
    for place in places:
        kind = family(place.name)
        if kind in kinds:
            continue
        sets = sets_near(run.tree, place, run.choice) or sets_within(run.tree, place)
        if any(at.step_dir == place and at.format.sharded for at in sets):
            kinds[kind] = place
    if any("epoch" not in kind for kind in kinds):  # a trainer may save at both
        kinds = {kind: place for kind, place in kinds.items() if not _EPOCHS.fullmatch(kind)}
    if len(kinds) > 1:
        raise UsageError(
            f"{run.place} has the steps of two runs: their names differ",
            found=", ".join(place.name for place in kinds.values()),
            hint="pass the directory of the step that you want",
        )
