"""Rebuilds a scheduler, which torch flattens into items of a DCP checkpoint.

Indices show which values were lists. DCP turns keys into words: those of `MultiStepLR.milestones`
become numbers again; for other dicts the type of the keys is not recorded.

Source: `torch.distributed.checkpoint._traverse`, `torch.optim.lr_scheduler`.
"""

from collections import Counter
from collections.abc import Mapping

from unshard.containers.open_files import opened, pread_many
from unshard.containers.torch_files.dcp_metadata import ItemPath
from unshard.containers.torch_files.writer import Plain, SavedTensor
from unshard.read.dcp.metadata import DcpMetadata, read_metadata
from unshard.read.dcp.optimizer import read_value
from unshard.read.dcp.tensors import metadata_files, read_tensors
from unshard.read.format import Location
from unshard.tensors.catalog import TensorEntry
from unshard.with_notes import WithNotes

SCHEDULER = "lr_scheduler"
"""The scheduler's key in the dict that torchtitan and torch's examples save."""
SCHEDULERS = (SCHEDULER, "scheduler")
_LARGEST = 1 << 16
"""Bytes of a tensor of a scheduler."""


class _RebuildError(ValueError):
    """The value cannot be rebuilt. The message is the reason."""


class _Branch(dict[str | int, object]):
    """A flattened dict or list; a dict that was saved as one object is not a branch."""


def read_scheduler(place: Location) -> WithNotes[Plain]:
    """Return the scheduler in a directory, or None; with notes of problems."""
    metadata = read_metadata(metadata_files(place))
    schedulers: dict[ItemPath, dict[ItemPath, str]] = {}
    for name in (*metadata.objects, *metadata.tensors):
        path = metadata.steps.get(name, (name,))
        at = next((at for at, part in enumerate(path[:-1]) if part in SCHEDULERS), None)
        if at is not None:
            schedulers.setdefault(path[: at + 1], {})[path[at + 1 :]] = name
    if not schedulers:
        return WithNotes(None)
    notes = []
    if len(schedulers) > 1:
        notes.append(f"{len(schedulers)} schedulers were saved: only the first is written")
    start, names = next(iter(schedulers.items()))
    where = ".".join(map(str, start))
    try:
        value = _rebuilt(_tree(metadata, place, names, notes), where, notes)
    except _RebuildError as error:
        return WithNotes(None, (*notes, f"{where}: left out: {error}"))
    if not isinstance(value, dict):
        return WithNotes(None, (*notes, f"{where}: left out: several schedulers"))
    return WithNotes(value, tuple(notes))


def _tree(
    metadata: DcpMetadata, place: Location, names: Mapping[ItemPath, str], notes: list[str]
) -> _Branch:
    """Return the values at their paths."""
    in_tensors = {name: name for name in names.values() if name in metadata.tensors}
    tensors, _ = read_tensors(metadata, in_tensors, place.roots)
    root = _Branch()
    for path, name in names.items():
        branch = root
        for part in path[:-1]:
            inner = branch.setdefault(part, _Branch())
            if not isinstance(inner, _Branch):
                raise _RebuildError(f"{name} is inside another value")
            branch = inner
        if name in tensors:
            branch[path[-1]] = _tensor(tensors[name])
        else:
            branch[path[-1]], left_out = read_value(metadata, place, name)
            notes += [f"left out {note}" for note in left_out]
    return root


def _tensor(entry: TensorEntry) -> SavedTensor:
    chunks = entry.chunks
    is_plain = len(chunks) == 1 and chunks.strides is None and not chunks.compressed[0]
    if not is_plain or not entry.size_bytes == chunks.length[0] <= _LARGEST:
        raise _RebuildError(f"{entry.fqn} cannot be inlined: too large, compressed or sharded")
    with opened(chunks.paths[int(chunks.file[0])]) as file:
        (data,) = pread_many(file, [(entry.size_bytes, int(chunks.start[0]))])
    return SavedTensor(entry.dtype, entry.shape, data)


def _rebuilt(value: object, where: str, notes: list[str]) -> Plain:
    """Return a value with lists and dicts in place of branches."""
    if not isinstance(value, _Branch):
        return value
    values = {key: _rebuilt(part, f"{where}.{key}", notes) for key, part in value.items()}
    if any(isinstance(key, int) for key in values):
        if set(values) != set(range(len(values))):
            raise _RebuildError(f"{where} is a list without some of its parts")
        return [values[index] for index in range(len(values))]
    numbers = [key for key in values if str(key).isdecimal()]
    if where.endswith(".milestones") and len(numbers) == len(values):
        return Counter({int(key): part for key, part in values.items()})
    if numbers:
        notes.append(f"{where}: its keys, such as {numbers[0]}, stay words, as DCP stores them")
    return values
