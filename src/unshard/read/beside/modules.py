"""Models of sentence-transformers: a folder for each module, and modules.json, which lists them.

The first is a model of transformers, in the directory itself. Trained ones of the others (Dense)
have a model.safetensors, all have a config.json. In training the name of a tensor begins with that
of its module, and in a Transformer also with `auto_model` (until version 5) or `model`. Here its
name is that in its file, after the folder: `2_Dense/linear.weight`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from unshard.containers.json_file import shown
from unshard.containers.open_files import read_whole
from unshard.errors import CorruptError

_INNER = ("auto_model.", "model.")
_KEYS = {"name", "path", "type"}
_LONGEST = 255  # of a name, on every file system that Linux has
_T = TypeVar("_T")


class Module(NamedTuple):
    """A module: its name in training, and its folder, "" for the directory itself."""

    name: str
    folder: str


def modules_at(path: Path) -> tuple[Module, ...]:
    """Return the modules in a modules.json; none if it is not of sentence-transformers.

    Raises:
        CorruptError: a name is not text, or a folder is not inside the model's directory.
    """
    try:
        listed = json.loads(read_whole(path))
    except (ValueError, RecursionError):
        return ()
    is_list = isinstance(listed, list) and all(isinstance(fields, dict) for fields in listed)
    if not is_list or not all({*fields} >= _KEYS for fields in listed):
        return ()
    modules = []
    for fields in listed:
        name, folder = fields["name"], fields["path"]
        if not (isinstance(name, str) and isinstance(folder, str)):
            raise CorruptError(f"{path}: is not a list of modules with a name and a path")
        is_long = any(len(part.encode()) > _LONGEST for part in folder.split("/"))
        if is_long or ".." in folder.split("/") or folder.startswith("/") or "\0" in folder:
            raise CorruptError(f"{path}: a folder outside its own", found=shown(folder))
        modules.append(Module(name, folder))
    return tuple(modules)


def in_folders(tensors: Mapping[str, _T], modules: Iterable[Module]) -> dict[str, _T]:
    """Return tensors under the names in the files of their modules, from those in training."""
    folders = {module.name: module.folder for module in modules}
    renamed: dict[str, _T] = {}
    for name, value in tensors.items():
        first, _, rest = name.partition(".")
        if first not in folders:
            renamed[name] = value
            continue
        if not folders[first]:
            wrapper = next((inner for inner in _INNER if rest.startswith(inner)), "")
            rest = rest.removeprefix(wrapper)
        renamed[f"{folders[first]}/{rest}" if folders[first] else rest] = value
    return renamed


def are_unlisted(names: Iterable[str]) -> bool:
    """Return whether names look like those of modules in training; used without a modules.json."""
    every = list(names)
    starts = tuple(f"0.{inner}" for inner in _INNER)
    is_numbered = all(name.partition(".")[0].isdigit() for name in every)
    return is_numbered and any(name.startswith(starts) for name in every)
