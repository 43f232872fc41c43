"""Reader for weights that are whole already: a Hugging Face directory, or one file of weights.

Safetensors and files of torch.save, one or several. An index is compared with the files: every name
must be in the file that the index lists, and in no other.

In a torch.save file the state dict is often under a key. Known keys are those of training
frameworks; an unknown key counts if it is the only key with tensors. Several are refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unshard.console import counted
from unshard.containers.json_file import json_object, shown
from unshard.containers.pickles.records import Global, Record, Value
from unshard.containers.torch_files.reader import read_torch_file
from unshard.errors import CheckpointError, CorruptError, NotMergeableError, UnshardError, raise_all
from unshard.read.format import Location, ReadOptions, shortened
from unshard.read.hub_files import (
    MODULES,
    RECORD_NAME,
    natural_order,
    read_header,
    saved_offsets,
    size_problem,
)
from unshard.read.model_config import ConfigFile, config_at
from unshard.read.torch_save.gathering import Gathering
from unshard.read.torch_save.state_dict import tensors_of
from unshard.read.torch_save.values import is_lightning, is_tensor, items_of
from unshard.read.whole_files.names import choose_files
from unshard.read.wrapper_names import without_wrapper_module
from unshard.tensors.catalog import ByteRange, Catalog, Skipped, TensorEntry
from unshard.tensors.chunk_rows import TensorDraft

_PATHS = (("model",), ("state_dict",), ("module",), ("state", "model"))


def read(location: Location, options: ReadOptions) -> Catalog:
    """Read the weights of a checkpoint."""
    chosen = choose_files(location)
    union = _UnitedFiles(chosen.files, options.allowed_globals)
    for number, path in enumerate(chosen.files):
        if path.suffix == ".safetensors":
            union.add_safetensors(number, path)
        else:
            union.add_torch(number, path)
    problems, gaps = _compare(*chosen.index, union.holders) if chosen.index else ([], [])
    union.problems += problems
    if location.file is None and (location.weights_dir / MODULES).is_file():
        _add_modules(union, location.weights_dir, options.allowed_globals)
    place = location.file or location.weights_dir
    raise_all(CorruptError, f"{place}: the weights cannot be read", union.problems)
    writer, source_notes = _origin(chosen.files, options.config_file)
    return Catalog(
        writer=union.writer or writer,
        world_size=1,
        tensors=union.tensors,
        skipped=tuple(union.skipped.values()),
        archives=tuple(union.archives),
        notes=(*chosen.notes, *source_notes, *union.notes, *gaps),
    )


class _UnitedFiles:
    """Unites the tensors of files; `holders` has the file of each tensor."""

    def __init__(self, paths: tuple[Path, ...], allowed: frozenset[str]) -> None:
        self.tensors: dict[str, TensorEntry] = {}
        self.holders: dict[str, Path] = {}
        self.skipped: dict[str, Skipped] = {}
        self.archives: list[ByteRange] = []
        self.problems: list[UnshardError] = []
        self.notes: list[str] = []
        self.writer = ""  # if a file of torch.save shows it
        self._paths = paths
        self._allowed = allowed

    def add_safetensors(self, number: int, path: Path) -> None:
        """Add the tensors of the file that is `number` among the paths."""
        file = read_header(path)
        starts = (saved_offsets(file) or {}).values()
        if any(at != 0 for offsets in starts if isinstance(offsets, list) for at in offsets):
            raise NotMergeableError(
                f"{path}: one rank's shard of a checkpoint, not a whole model",
                found="pieces that start at offsets, in DCP_SHARDING_INFO",
                hint="pass the directory with the shards of all ranks, under their own names",
            )
        for entry in sorted(file.entries, key=lambda entry: natural_order(entry.name)):
            problem = size_problem(path, entry)
            if problem is not None:
                self.problems.append(problem)
                continue
            draft = TensorDraft(entry.name, entry.dtype, entry.shape)
            draft.add(rank=0, file=number, start=file.data_start + entry.begin)
            self._add(path, draft.entry(self._paths))

    def add_torch(self, number: int, path: Path) -> None:
        """Add the tensors of the state dict in the file that is `number` among the paths."""
        file = read_torch_file(path)
        state = _find_state_dict(path, file.value)
        table = tensors_of(file, state.items, rank=0, file_number=number, allowed=self._allowed)
        gathered = Gathering()
        gathered.add(table)
        self.problems += gathered.problems
        names = {name: name for name in gathered.names}
        if state.under == "state.model" or is_lightning(file.value):
            self.writer = "Composer" if state.under == "state.model" else "Lightning"
            names = without_wrapper_module(names)
        for name, entry in gathered.entries(self._paths).items():
            self._add(path, replace(entry, fqn=names[name]))
        others = {name: Skipped(name, reason) for name, reason in state.skipped.items()}
        self.skipped |= gathered.skipped | others
        if state.under:
            self.notes.append(f"{path.name}: the weights were taken from {state.under}")
        if any(storage.crc for storage in file.storages.values()):
            self.archives.append(ByteRange(path, 0, path.stat().st_size))

    def _add(self, path: Path, entry: TensorEntry) -> None:
        first = self.holders.setdefault(entry.fqn, path)
        if entry.fqn in self.tensors:
            self.problems.append(
                CorruptError(
                    f"tensor {entry.fqn}: two files have it",
                    found=f"{first.name} and {path.name}",
                    hint="are these files of one model?",
                )
            )
        self.tensors.setdefault(entry.fqn, entry)


def _add_modules(union: _UnitedFiles, directory: Path, allowed: frozenset[str]) -> None:
    """Add the weights in the folders of the modules of sentence-transformers."""
    from unshard.read.beside.modules import modules_at

    folders = dict.fromkeys(module.folder for module in modules_at(directory / MODULES))
    for folder in filter(None, folders):
        paths = (directory / folder / name for name in ("model.safetensors", "pytorch_model.bin"))
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            continue
        own = _UnitedFiles((path,), allowed)
        own.add_torch(0, path) if path.suffix == ".bin" else own.add_safetensors(0, path)
        for entry in own.tensors.values():
            name = f"{folder}/{entry.fqn}"
            union.tensors[name] = replace(entry, fqn=name)
        union.problems += own.problems
        union.archives += own.archives


class _StateDict(NamedTuple):
    """The state dict of a file: tensors (and other values) by name.

    Attributes:
        items: the values by name.
        under: its keys in the file, joined by dots; empty if it is the whole file.
        skipped: the reasons why other values of the file were left out, by name.
    """

    items: Mapping[str, Value]
    under: str
    skipped: Mapping[str, str]


def _find_state_dict(path: Path, value: Value) -> _StateDict:
    """Return the state dict in a file's value, or the value itself.

    Raises:
        NotMergeableError: there are no tensors by name, or several sets of them.
    """
    top = items_of(value)
    if top is None:
        callee = value.callee if isinstance(value, Record) else None
        kind = str(callee) if isinstance(callee, Global) else type(value).__name__
        raise NotMergeableError(
            f"{path}: not a state dict",
            expected="a dict of tensors by name",
            found=kind[:200],
            hint="if it is a pickled model: load it in its own code, and save its state_dict()",
        )
    for names in _PATHS:
        if _has_tensors(_under(top, names)):
            return _nested(top, names)
    if _has_tensors(top):
        return _StateDict(top, "", {})
    candidates = [name for name in top if _has_tensors(_under(top, (name,)))]
    if len(candidates) == 1:
        return _nested(top, (candidates[0],))
    paths = ", ".join(".".join(names) for names in _PATHS)
    if candidates:
        raise NotMergeableError(
            f"{path}: several of its values have tensors, and none has a known name",
            expected=paths,
            found=", ".join(sorted(candidates)[:12]),
            hint="save the state dict that you want in a separate file",
        )
    raise NotMergeableError(
        f"{path}: has no tensors by name",
        expected=f"a state dict, or one under {paths}",
        found=", ".join(list(top)[:12]) or "an empty dict",
    )


def _under(top: Mapping[str, Value], names: tuple[str, ...]) -> Mapping[str, Value]:
    for name in names:
        top = items_of(top.get(name)) or {}
    return top


def _has_tensors(items: Mapping[str, Value]) -> bool:
    return any(is_tensor(value) for value in items.values())


def _nested(top: Mapping[str, Value], names: tuple[str, ...]) -> _StateDict:
    """Return a nested state dict, with the reasons why other values were left out."""
    under = ".".join(names)
    skipped: dict[str, str] = {}
    level, prefix = top, ""
    for name in names:
        for other, value in level.items():
            has_tensors = is_tensor(value) or _has_tensors(items_of(value) or {})
            kind = "tensors next to the model's" if has_tensors else "not the model's weights"
            if other != name:
                skipped[prefix + other] = f"{kind}, which were taken from {under}"
        level, prefix = items_of(level[name]) or {}, f"{prefix}{name}."
    return _StateDict(level, under, skipped)


def _compare(
    index: Path, listed: Mapping[str, str], holders: Mapping[str, Path]
) -> tuple[list[CorruptError], list[str]]:
    """Return errors of tensors that are not in their file of an index, and notes about its gaps."""
    wrong: dict[str, list[str]] = {}
    for name, file in listed.items():
        if name not in holders or holders[name].name != file:
            wrong.setdefault(file, []).append(name)
    problems = [
        CorruptError(
            f"{index}: {file} lacks {counted(len(names), 'tensor')} of the index",
            found=f"no {shortened(names)}",
            hint="does the index belong to another save?",
        )
        for file, names in wrong.items()
    ]
    unlisted = [name for name in holders if name not in listed]  # transformers loads them, too
    count = counted(len(unlisted), "tensor")
    note = f"{index.name} does not list {count} that its files have: {shortened(unlisted)}"
    return problems, [note] if unlisted else []


def _origin(files: tuple[Path, ...], known: ConfigFile | None) -> tuple[str, list[str]]:
    """Return the tool that wrote the files, and a note about their source, if it is known."""
    directory = files[0].parent
    try:
        record = json_object(directory / RECORD_NAME)
    except CheckpointError:
        record = {}
    match record:
        case {"output": {"files": dict(named)}, "source": dict(source)} if all(
            path.name in named for path in files
        ):
            return f"unshard {_word(record.get('unshard'))}", [_made_from(source)]
    if files[0].name == "pytorch_model_fsdp.bin":
        return "accelerate", []
    config = config_at(directory / "config.json", known)
    fields = {} if config is None else config.fields
    by = (("transformers_version", "transformers"), ("_diffusers_version", "diffusers"))
    return next((writer for mark, writer in by if mark in fields), "unknown"), []


def _made_from(source: Mapping[str, object]) -> str:
    words = {name: _word(value) for name, value in source.items() if value is not None}
    writer = words.get("writer", "unknown")
    facts = [
        words.get("format", "unknown format"),
        "unknown writer" if writer == "unknown" else f"of {writer}",
        f"world size {words.get('world_size')}",
        *([f"step {words['step']}"] if "step" in words else []),
    ]
    return f"made by unshard from {words.get('name')} ({', '.join(facts)})"


def _word(value: object) -> str:
    return value if isinstance(value, str) else shown(value)
