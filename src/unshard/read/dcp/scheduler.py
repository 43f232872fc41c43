"""Rebuild the scheduler that a DCP checkpoint has, which torch flattened into items.

Lists are known by their indices. Keys became words: those of `MultiStepLR.milestones`, which are
numbers, are numbers again; of other dicts it is not recorded.

Source: `torch.distributed.checkpoint._traverse`, `torch.optim.lr_scheduler`.
"""

from collections import Counter
from collections.abc import Mapping

from unshard.containers.open_files import opened, pread_many
from unshard.containers.torch_files.dcp_metadata import ItemPath
from unshard.containers.torch_files.writer import Plain, SavedTensor
from unshard.noted import Noted
from unshard.read.dcp.metadata import DcpMetadata, read_metadata
from unshard.read.dcp.optimizer import read_value
from unshard.read.dcp.tensors import metadata_files, read_tensors
from unshard.read.format import Location
from unshard.tensors.catalog import TensorEntry

SCHEDULER = "lr_scheduler"
"""What the scheduler is called in the dict that is saved; so do torchtitan and torch's examples."""
SCHEDULERS = (SCHEDULER, "scheduler")
_MILESTONES = "milestones"
_LARGEST = 1 << 16
"""Bytes of a tensor of a scheduler."""


class _RebuildError(ValueError):
    """The value cannot be rebuilt. The message has why."""


class _Parts(dict[str | int, object]):
    """A dict or list that was flattened, unlike a dict that was saved as an object."""


def read_scheduler(place: Location) -> Noted[Plain]:
    """Return the scheduler that was saved in a directory; None, perhaps with a note, without."""
    metadata = read_metadata(metadata_files(place))
    found: dict[ItemPath, dict[ItemPath, str]] = {}
    for name in (*metadata.objects, *metadata.tensors):
        path = metadata.steps.get(name, (name,))
        at = next((at for at, part in enumerate(path[:-1]) if part in SCHEDULERS), None)
        if at is not None:
            found.setdefault(path[: at + 1], {})[path[at + 1 :]] = name
    if not found:
        return Noted(None)
    notes = [f"{len(found)} schedulers were saved: only the first is written"] * (len(found) > 1)
    start, names = next(iter(found.items()))
    where = ".".join(map(str, start))
    try:
        value = _rebuilt(_parts(metadata, place, names, notes), where, notes)
        if not isinstance(value, dict):
            raise _RebuildError("several schedulers")  # noqa: TRY301 (one place says the rest)
    except _RebuildError as error:
        return Noted(None, (*notes, f"{where}: left out: {error}"))
    return Noted(value, tuple(notes))


def _parts(
    metadata: DcpMetadata, place: Location, names: Mapping[ItemPath, str], notes: list[str]
) -> _Parts:
    """Return the values at their paths."""
    flat = {name: name for name in names.values() if name in metadata.tensors}
    tensors, _ = read_tensors(metadata, flat, place.roots)
    whole = _Parts()
    for path, name in names.items():
        inner = whole
        for part in path[:-1]:
            below = inner.setdefault(part, _Parts())
            if not isinstance(below, _Parts):
                raise _RebuildError(f"{name} is inside another value")
            inner = below
        if name in tensors:
            inner[path[-1]] = _tensor(tensors[name])
        else:
            read = read_value(metadata, place, name)
            inner[path[-1]] = read.value
            notes += [f"left out {one}" for one in read.notes]
    return whole


def _tensor(entry: TensorEntry) -> SavedTensor:
    chunks = entry.chunks
    is_plain = len(chunks) == 1 and chunks.strides is None and not chunks.compressed[0]
    if not is_plain or not entry.size_bytes == chunks.length[0] <= _LARGEST:
        raise _RebuildError(f"the tensor {entry.fqn} is large, compressed or in parts")
    with opened(chunks.paths[int(chunks.file[0])]) as file:
        (data,) = pread_many(file, [(entry.size_bytes, int(chunks.start[0]))])
    return SavedTensor(entry.dtype, entry.shape, data)


def _rebuilt(value: object, where: str, notes: list[str]) -> Plain:
    """Return a value with lists and dicts in place of their parts."""
    if not isinstance(value, _Parts):
        return value
    made = {key: _rebuilt(part, f"{where}.{key}", notes) for key, part in value.items()}
    if any(isinstance(key, int) for key in made):
        if set(made) != set(range(len(made))):
            raise _RebuildError(f"{where} is a list of which parts are missing")
        return [made[index] for index in range(len(made))]
    numbers = [key for key in made if str(key).isdecimal()]
    if where.endswith(f".{_MILESTONES}") and len(numbers) == len(made):
        return Counter({int(key): part for key, part in made.items()})
    if numbers:
        notes.append(f"{where}: its keys, such as {numbers[0]}, are words now, as DCP has them")
    return made
