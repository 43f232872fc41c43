"""Maps the numbers of a rank file's pickle to the metadata of its tensors.

Takes the same way through a pickle as `tensors.TensorDecoder`, with marks in place of numbers
(`containers.pickles.template`). Every number that decides how a tensor is read is in a column here
or part of a device mesh, or it must not differ between files.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
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


class SlotGroup(NamedTuple):
    """Tensors of equal form, on the same mesh, with the positions of their numbers in the pickle.

    Attributes:
        form: as the rank of the template sees them.
        mesh: number of their mesh; None for plain tensors.
        tensors: their numbers.
        elements, offset: the positions of each storage's size and of each view's offset.
        sizes, strides: (tensors, dimensions), likewise.
    """

    form: TensorForm
    mesh: int | None
    tensors: Ints
    elements: Ints
    offset: Ints
    sizes: Ints
    strides: Ints


class TemplateSlots(NamedTuple):
    """The numbers of a rank file's pickle, by their role.

    Attributes:
        keys: of the tensors' storages, in the order of the tensors.
        groups: the tensors.
        meshes: the device meshes, with marks.
        fixed: positions of the numbers that must equal those of the template.
    """

    keys: list[str]
    groups: list[SlotGroup]
    meshes: list[Value]
    fixed: Ints


class _ViewMarks(NamedTuple):
    """The marks of a stored view; `others` are the other arguments of the pickled call."""

    key: str
    elements: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    others: list[Value]


@dataclass(slots=True)
class _Search:
    """Finds the marks of tensors: those that may differ, those read elsewhere, and unread ones."""

    allowed: frozenset[str]
    mesh_numbers: dict[int, int] = field(default_factory=dict)
    meshes: list[Value] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    visited: set[int] = field(default_factory=set)

    def tensor(self, value: Value) -> tuple[_ViewMarks, int | None]:
        """Return the marks of a tensor's view, and the number of its mesh."""
        name, args = unwrap(value, self.allowed)
        if name != TYPED:
            view = _view_marks(name, args)
            self.read.update(view.sizes)  # the sizes of a plain tensor are its shape
            self.differing += (view.elements, view.offset, *view.strides)
            self.read |= _marks(view.others, self.visited)
            return view, None
        if named(args[1]) not in DTENSORS or not isinstance(args[2], tuple):
            raise TensorFormError("not a DTensor")
        state = state_of(args[3])
        view = _view_marks(*unwrap(member(state, "_local_tensor"), self.allowed))
        self.differing += (view.elements, view.offset, *view.sizes, *view.strides)
        spec = dict(state_of(member(state, "_spec")))
        mesh, spec_hash = spec.pop("mesh", None), spec.pop("_hash", None)
        self.unread |= _marks([spec_hash], set())
        self.read |= _marks([*view.others, *args[2], *spec.values()], self.visited)
        if id(mesh) not in self.mesh_numbers:
            self.mesh_numbers[id(mesh)] = len(self.meshes)
            self.meshes.append(mesh)
        return view, self.mesh_numbers[id(mesh)]

    def fixed(self, count: int) -> Ints:
        """Return the positions, among `count`, of numbers that must not differ."""
        in_meshes = _marks(self.meshes, set())
        if len(in_meshes) > _MAX_MESH:
            raise TensorFormError("meshes of too many parts")
        columns = set(self.differing)
        if len(columns) < len(self.differing) or columns & (self.read | in_meshes):
            raise TensorFormError("one number in several places")
        fixed = np.ones(count, np.bool_)
        fixed[_positions((columns | in_meshes | self.unread) - self.read)] = False
        return np.flatnonzero(fixed)


def find_slots(
    value: Value, table: RankTable, count: int, allowed: frozenset[str]
) -> TemplateSlots:
    """Return the roles of a pickle's numbers.

    Args:
        value: the content of the pickle, with marks in place of numbers.
        table: the table of the file, read in full, without problems.
        count: the number of marks.
        allowed: names of tensor subclasses that the user vouches for.

    Raises:
        TensorFormError: it has tensors of other forms than DTensors and plain ones.
    """
    items = items_of(value) or {}
    tensors = {name: item for name, item in items.items() if is_tensor(item)}
    if list(tensors) != table.names:
        raise TensorFormError("other tensors than in the table")
    search = _Search(allowed)
    views = [search.tensor(tensor) for tensor in tensors.values()]
    fixed = search.fixed(count)
    members: dict[tuple[int, int | None], list[int]] = {}
    for number, (cut, (_, mesh)) in enumerate(zip(table.cuts.tolist(), views, strict=True)):
        members.setdefault((cut, mesh), []).append(number)
    groups = [
        _group(table.cut_table[cut].form, mesh, numbers, [views[number][0] for number in numbers])
        for (cut, mesh), numbers in members.items()
    ]
    return TemplateSlots([view.key for view, _ in views], groups, search.meshes, fixed)


def _group(
    form: TensorForm, mesh: int | None, tensors: list[int], views: list[_ViewMarks]
) -> SlotGroup:
    if any(len(view.sizes) != len(form.shape) for view in views):
        raise TensorFormError("an empty part of other dimensions")
    shape = len(tensors), len(form.shape)
    return SlotGroup(
        form,
        mesh,
        np.array(tensors, np.int64),
        _positions(view.elements for view in views),
        _positions(view.offset for view in views),
        _positions(mark for view in views for mark in view.sizes).reshape(shape),
        _positions(mark for view in views for mark in view.strides).reshape(shape),
    )


def _positions(marks: Iterable[int]) -> Ints:
    return np.array([number_of(mark) for mark in marks], np.int64)


def _view_marks(name: str, args: tuple[Value, ...]) -> _ViewMarks:
    match args:
        case (Persistent(pid=pid), int(offset), sizes, strides, *others) if name in _VIEWS:
            pass
        case _:
            raise TensorFormError(f"pickled by {name}")
    match pid:
        case ("storage", Global(), str(key), str(), int(elements), *_):
            view = _ViewMarks(key, elements, offset, ints(sizes), ints(strides), others)
        case _:
            raise TensorFormError("a storage reference of unknown form")
    if not all(map(is_mark, (elements, offset, *view.sizes, *view.strides))):
        raise TensorFormError("numbers of unknown form")
    return view


def _marks(values: Iterable[Value], visited: set[int]) -> set[int]:
    """Return all marks inside of values at any depth, except in those already visited."""
    marks: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if is_mark(value):
            marks.add(value)
        elif id(value) not in visited and (parts := _parts(value)):
            visited.add(id(value))
            waiting += parts
    return marks


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
    return _filled(value, 0, numbers, {})


def _filled(value: Value, depth: int, numbers: Ints, done: dict[int, Value]) -> Value:
    if is_mark(value):
        return int(numbers[number_of(value)])
    if id(value) in done:
        return done[id(value)]
    if depth > _MAX_DEPTH:
        raise TensorFormError("nested too deeply")
    fill = partial(_filled, depth=depth + 1, numbers=numbers, done=done)
    result: Value
    match value:
        case Record(callee, args, state):
            result = Record(fill(callee), tuple(map(fill, args)), fill(state))
            result.items.extend((key, fill(item)) for key, item in value.items)
            result.elements.extend(map(fill, value.elements))
        case Persistent(pid):
            result = Persistent(fill(pid))
        case dict():
            result = {key: fill(item) for key, item in value.items()}
        case tuple():
            result = tuple(map(fill, value))
        case list():
            result = list(map(fill, value))
        case _:
            return value
    done[id(value)] = result
    return result
