"""Choose one of the sets of weights that a step has."""

from dataclasses import replace
from pathlib import Path

from unshard.errors import IncompleteError, UnknownFormatError, UsageError
from unshard.read.format import Choice, Location, Role, role_in
from unshard.read.step_names import children
from unshard.read.zero.reader import ZERO
from unshard.showing import human_size

DEFAULT_ROLES = ("actor", "policy", "model", "trainer")
"""The roles that are taken, the first first, where several sets are there and none was chosen."""


_LISTED = 12
_WHERE = {
    "ema": "a folder ema, or pytorch_ema_model_fsdp_0",
    "module": f"a {ZERO} checkpoint, which alone has the weights in two dtypes",
}


def choose(place: Path, found: list[Location], choice: Choice, *, start: Path) -> Location:
    """Return the one set of weights that is meant.

    Args:
        place: where they were looked for, for errors.
        found: what is there.
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
    location = _of_role(place, _of_weights(place, found, choice, start), choice.role, start)
    if not children(location.weights_dir):
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
            hint="if you want them: ⟦--weights ema⟧",
        )
    expected = _WHERE.get(choice.weights, "")
    raise UnknownFormatError(
        f"{place} has no {choice.weights} weights", expected=expected, found=names
    )


def _of_role(place: Path, found: list[Location], role: Role | None, start: Path) -> Location:
    """Return the weights of a role; a critic is never taken unless it is named."""
    kept = [at for at in found if role is None or at.is_called(role)]
    if not kept:
        raise UnknownFormatError(f"{place} has no {role}", found=_listed(place, found))
    if len(kept) > 1 and role is None:
        known = ([at for at in kept if at.is_called(name)] for name in DEFAULT_ROLES)
        kept = next((sets for sets in known if sets), kept)
    if len(kept) > 1:
        names = [_called(place, at, kept) for at in kept]
        is_clear = all(sum(at.is_called(name) for at in kept) == 1 for name in names)
        can_choose = is_clear and len(kept) <= _LISTED
        role = f"choose with ⟦--role '{'|'.join(names)}'⟧, or " if can_choose else ""
        one = f"give one of them: {', '.join(str(at.weights_dir) for at in kept[:_LISTED])}"
        raise UsageError(
            f"{place} has {len(kept)} sets of weights, and none of them is the default",
            found=_listed(place, kept),
            hint=f"{role}{one}",
        )
    only, at = kept[0].role, kept[0]
    is_meant = start.is_relative_to(at.weights_dir) or role_in(start.parts[::-1]) == only
    if only not in (None, "actor") and role is None and not is_meant:
        raise UsageError(
            f"{place} has only a {only}, which is not the model that was trained",
            hint=f"if you want the {only}: ⟦--role '{only}'⟧",
        )
    return kept[0]


def _called(place: Path, at: Location, found: list[Location]) -> str:
    """Return what to call one of these sets: its role, or the first folder of its own, if any."""
    inner = at.weights_dir.relative_to(place).parts if at.weights_dir != place else (place.name,)
    shared = {part for one in found if one != at for part in one.weights_dir.parts}
    return at.role or next((part for part in inner if part not in shared), inner[0])


def _listed(place: Path, found: list[Location]) -> str:
    shown = (
        f"{_called(place, at, found)} ({human_size(_size(at.place))})" for at in found[:_LISTED]
    )
    return ", ".join(shown) + (f" and {len(found) - _LISTED} more" if len(found) > _LISTED else "")


def _size(place: Path) -> int:
    files = [one for one in [*children(place), place] if one.is_file()]
    return sum(one.stat().st_size for one in files)
