"""Find a model's state dict in what a torch.save file holds: often it is under a key.

Known names are those of training frameworks; an unknown one is taken if it is the only one that
holds tensors. Nothing is guessed between several.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unshard.containers.pickles.records import Global, Record, Value
from unshard.errors import NotMergeableError
from unshard.read.torch_save.values import items_of
from unshard.read.torch_save.views import is_tensor

__all__ = ["StateDict", "find_state_dict"]

_PATHS = (("model",), ("state_dict",), ("module",), ("state", "model"))


@dataclass(frozen=True, slots=True)
class StateDict:
    """The state dict of a file.

    Attributes:
        items: tensors (and other values) by name.
        under: the keys it is under, joined by dots; empty where it is all of the file.
        skipped: why each other value of the file was left out, by name.
    """

    items: Mapping[str, Value]
    under: str
    skipped: Mapping[str, str]


def find_state_dict(path: Path, value: Value) -> StateDict:
    """Return the state dict that a file's value is or holds.

    Args:
        path: the file, for messages.
        value: what was saved in it.

    Raises:
        NotMergeableError: there are no tensors by name, or several sets of them.
    """
    top = items_of(value)
    if top is None:
        raise _no_state_dict(path, value)
    for names in _PATHS:
        items = _under(top, names)
        if items is not None and _holds_tensors(items):
            return _nested(top, names, items)
    if _holds_tensors(top):
        return StateDict(top, "", {})
    found = {
        name: items for name in top if (items := _under(top, (name,))) and _holds_tensors(items)
    }
    if len(found) == 1:
        ((name, items),) = found.items()
        return _nested(top, (name,), items)
    if found:
        raise NotMergeableError(
            f"{path}: several of its values have tensors, and none has a known name",
            expected=", ".join(".".join(names) for names in _PATHS),
            found=", ".join(sorted(found)[:12]),
            hint="save the state dict that you want in a separate file",
        )
    raise NotMergeableError(
        f"{path}: has no tensors by name",
        expected="a state dict, or one under " + ", ".join(".".join(names) for names in _PATHS),
        found=", ".join(list(top)[:12]) or "an empty dict",
    )


def _under(top: Mapping[str, Value], names: tuple[str, ...]) -> dict[str, Value] | None:
    items: Mapping[str, Value] | None = top
    for name in names:
        items = None if items is None else items_of(items.get(name))
    return None if items is None else dict(items)


def _holds_tensors(items: Mapping[str, Value]) -> bool:
    return any(is_tensor(value) for value in items.values())


def _nested(
    top: Mapping[str, Value], names: tuple[str, ...], items: Mapping[str, Value]
) -> StateDict:
    """Return a state dict that is deeper, and why each value next to it was left out."""
    under = ".".join(names)
    skipped: dict[str, str] = {}
    beside, prefix = top, ""
    for name in names:
        skipped |= {
            prefix + other: _why_left(value, under)
            for other, value in beside.items()
            if other != name
        }
        beside, prefix = items_of(beside[name]) or {}, f"{prefix}{name}."
    return StateDict(items, under, skipped)


def _why_left(value: Value, under: str) -> str:
    inner = items_of(value)
    if is_tensor(value) or (inner is not None and _holds_tensors(inner)):
        return f"tensors next to the model's, which were taken from {under}"
    return f"not the model's weights, which were taken from {under}"


def _no_state_dict(path: Path, value: Value) -> NotMergeableError:
    callee = value.callee if isinstance(value, Record) else None
    kind = str(callee) if isinstance(callee, Global) else type(value).__name__
    return NotMergeableError(
        f"{path}: not a state dict",
        expected="a dict of tensors by name",
        found=kind[:200],
        hint="if it is a pickled model: load it in its own code, and save its state_dict()",
    )
