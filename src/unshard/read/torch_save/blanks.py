"""Which numbers of a rank file's pickle say what about its tensors.

Follows the way that `tensors.TensorDecoder` takes through a pickle, in one whose numbers are marks
(`containers.pickles.template`). Every number that decides how a tensor is read is either in a
column here, or part of a device mesh, or must not differ between files.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from unshard.containers.pickles.records import Global, Persistent, Record, Value
from unshard.containers.pickles.template import is_mark, number_of
from unshard.read.torch_save.table import RankTable, TensorForm
from unshard.read.torch_save.tensors import DTENSORS
from unshard.read.torch_save.values import (
    TYPED,
    TensorFormError,
    ints,
    is_tensor,
    items_of,
    member,
    named,
    state_of,
    unwrap,
)
from unshard.tensors.boxes import Ints

_MAX_MESH = 100_000  # parts of a mesh, its ranks among them
_MAX_DEPTH = 50
_VIEWS = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2")


class Group(NamedTuple):
    """Tensors of equal form, on the same mesh.

    Attributes:
        form: as the rank of the template sees them.
        mesh: number of their mesh; None for plain tensors.
        tensors: their numbers.
        elements, offset: of each, which number of the pickle its storage's size and its offset are.
        sizes, strides: (tensors, dimensions), likewise.
    """

    form: TensorForm
    mesh: int | None
    tensors: Ints
    elements: Ints
    offset: Ints
    sizes: Ints
    strides: Ints


class Blanks(NamedTuple):
    """The numbers of a rank file's pickle, by what they say.

    Attributes:
        keys: of the tensors' storages, in the order of the tensors.
        groups: the tensors.
        meshes: the device meshes, with marks.
        fixed: the numbers that must not differ from those of the template.
    """

    keys: list[str]
    groups: list[Group]
    meshes: list[Value]
    fixed: Ints


@dataclass(slots=True)
class _View:
    """The marks of a stored view."""

    key: str
    elements: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    others: list[Value]


@dataclass(slots=True)
class _Search:
    allowed: frozenset[str]
    meshes: dict[int, int] = field(default_factory=dict)
    mesh_values: list[Value] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)

    def tensor(self, value: Value) -> tuple[_View, int | None]:
        """Return the view of a tensor that is stored, and the number of its mesh."""
        name, args = unwrap(value, self.allowed)
        if name != TYPED:
            view = _view(name, args)
            self.read.update(view.sizes)  # of a plain tensor they are its shape
            self.differing += (view.elements, view.offset, *view.strides)
            self.read |= _marks(view.others, self.seen)
            return view, None
        if named(args[1]) not in DTENSORS or not isinstance(args[2], tuple):
            raise TensorFormError("not a DTensor")
        state = state_of(args[3])
        view = _view(*unwrap(member(state, "_local_tensor"), self.allowed))
        self.differing += (view.elements, view.offset, *view.sizes, *view.strides)
        spec = dict(state_of(member(state, "_spec")))
        mesh, spec_hash = spec.pop("mesh", None), spec.pop("_hash", None)
        self.unread |= _marks([spec_hash], set())
        self.read |= _marks([*view.others, *args[2], *spec.values()], self.seen)
        if id(mesh) not in self.meshes:
            self.meshes[id(mesh)] = len(self.mesh_values)
            self.mesh_values.append(mesh)
        return view, self.meshes[id(mesh)]

    def fixed(self, count: int) -> Ints:
        """Return which of so many numbers must not differ."""
        inside = _marks(self.mesh_values, set())
        if len(inside) > _MAX_MESH:
            raise TensorFormError("meshes of too many parts")
        columns = set(self.differing)
        if len(columns) < len(self.differing) or columns & (self.read | inside):
            raise TensorFormError("one number in several places")
        fixed = np.ones(count, np.bool_)
        fixed[_numbers((columns | inside | self.unread) - self.read)] = False
        return np.flatnonzero(fixed)


def find_blanks(value: Value, table: RankTable, count: int, allowed: frozenset[str]) -> Blanks:
    """Return what the numbers of a pickle say, with marks in their place.

    Args:
        value: what the pickle describes.
        table: what it contains, read in full; without problems.
        count: how many numbers it has.
        allowed: names of tensor subclasses that the user vouches for.

    Raises:
        TensorFormError: it has tensors of other forms than DTensors and plain ones.
    """
    items = items_of(value) or {}
    tensors = {name: one for name, one in items.items() if is_tensor(one)}
    if list(tensors) != table.names:
        raise TensorFormError("other tensors than in the table")
    search = _Search(allowed)
    found = [search.tensor(one) for one in tensors.values()]
    fixed = search.fixed(count)
    members: dict[tuple[int, int | None], list[int]] = {}
    for number, (cut, (_, mesh)) in enumerate(zip(table.cuts.tolist(), found, strict=True)):
        members.setdefault((cut, mesh), []).append(number)
    groups = [
        _group(table.cut_table[cut].form, mesh, inside, [found[one][0] for one in inside])
        for (cut, mesh), inside in members.items()
    ]
    return Blanks([view.key for view, _ in found], groups, search.mesh_values, fixed)


def _group(form: TensorForm, mesh: int | None, inside: list[int], views: list[_View]) -> Group:
    if any(len(view.sizes) != len(form.shape) for view in views):
        raise TensorFormError("an empty part of other dimensions")
    shape = len(inside), len(form.shape)
    return Group(
        form,
        mesh,
        np.array(inside, np.int64),
        _numbers(view.elements for view in views),
        _numbers(view.offset for view in views),
        _numbers(mark for view in views for mark in view.sizes).reshape(shape),
        _numbers(mark for view in views for mark in view.strides).reshape(shape),
    )


def _numbers(marks: Iterable[int]) -> Ints:
    return np.array([number_of(mark) for mark in marks], np.int64)


def _view(name: str, args: tuple[Value, ...]) -> _View:
    match args:
        case (Persistent(pid=pid), int(offset), sizes, strides, *others) if name in _VIEWS:
            pass
        case _:
            raise TensorFormError(f"pickled by {name}")
    match pid:
        case ("storage", Global(), str(key), str(), int(elements), *_):
            view = _View(key, elements, offset, ints(sizes), ints(strides), others)
        case _:
            raise TensorFormError("a storage reference of unknown form")
    if not all(map(is_mark, (elements, offset, *view.sizes, *view.strides))):
        raise TensorFormError("numbers of unknown form")
    return view


def _marks(values: Iterable[Value], seen: set[int]) -> set[int]:
    """Return all marks inside of values, however they are nested; what was seen is left out."""
    found: set[int] = set()
    left = list(values)
    while left:
        value = left.pop()
        if is_mark(value):
            found.add(value)
        elif isinstance(value, Record | Persistent | tuple | list | dict) and id(value) not in seen:
            seen.add(id(value))
            left += _parts(value)
    return found


def _parts(value: Value) -> Iterable[Value]:
    match value:
        case Record(callee, args, state, items, elements):
            return (callee, args, state, items, elements)
        case Persistent(pid):
            return (pid,)
        case dict():
            return value.values()
        case tuple() | list():
            return value
    return ()


def with_numbers(value: Value, numbers: Ints) -> Value:
    """Return a value with these numbers in place of its marks; keys of dicts stay as they are.

    Raises:
        TensorFormError: it contains itself.
    """
    return _Filled(numbers).fill(value)


@dataclass(slots=True)
class _Filled:
    numbers: Ints
    done: dict[int, Value] = field(default_factory=dict)
    depth: int = 0

    def fill(self, value: Value) -> Value:
        if is_mark(value):
            return int(self.numbers[number_of(value)])
        if not isinstance(value, Record | Persistent | tuple | list | dict):
            return value
        if id(value) not in self.done:
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise TensorFormError("nested too deeply")
            self.done[id(value)] = self._filled(value)
            self.depth -= 1
        return self.done[id(value)]

    def _filled(self, value: Value) -> Value:
        match value:
            case Record(callee, args, state):
                made = Record(self.fill(callee), tuple(map(self.fill, args)), self.fill(state))
                made.items.extend((key, self.fill(item)) for key, item in value.items)
                made.elements.extend(map(self.fill, value.elements))
                return made
            case Persistent(pid):
                return Persistent(self.fill(pid))
            case dict():
                return {key: self.fill(item) for key, item in value.items()}
            case tuple():
                return tuple(map(self.fill, value))
            case list():
                return list(map(self.fill, value))
        return value
