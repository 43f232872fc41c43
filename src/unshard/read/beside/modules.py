"""Models of sentence-transformers: a folder for each module, and modules.json, which lists them.

The first is a model of transformers, in the directory itself. Of the others those that were trained
have a model.safetensors (Dense), all have a config.json. In training the name of a tensor begins
with that of its module, and of a Transformer also with `auto_model` (until version 5) or `model`.
Here its name is that of its file, with the folder before it: `2_Dense/linear.weight`.
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
    """Return what a modules.json lists; nothing if it is not one of sentence-transformers.

    Raises:
        CorruptError: a name is none, or a folder is not inside the model's directory.
    """
    try:
        listed = json.loads(read_whole(path))
    except (ValueError, RecursionError):
        return ()
    known = isinstance(listed, list) and all(isinstance(one, dict) for one in listed)
    if not known or not all({*one} >= _KEYS for one in listed):
        return ()
    found = []
    for one in listed:
        name, folder = one["name"], one["path"]
        if not (isinstance(name, str) and isinstance(folder, str)):
            raise CorruptError(f"{path}: is not a list of modules with a name and a path")
        is_long = any(len(part.encode()) > _LONGEST for part in folder.split("/"))
        if is_long or ".." in folder.split("/") or folder.startswith("/") or "\0" in folder:
            raise CorruptError(f"{path}: a folder outside its own", found=shown(folder))
        found.append(Module(name, folder))
    return tuple(found)


def in_folders(tensors: Mapping[str, _T], modules: Iterable[Module]) -> dict[str, _T]:
    """Return tensors in training under the names that they have in the folders of their modules."""
    folders = {one.name: one.folder for one in modules}
    found: dict[str, _T] = {}
    for name, value in tensors.items():
        first, _, rest = name.partition(".")
        if first not in folders:
            found[name] = value
            continue
        if not folders[first]:
            wrapper = next((one for one in _INNER if rest.startswith(one)), "")
            rest = rest.removeprefix(wrapper)
        found[f"{folders[first]}/{rest}" if folders[first] else rest] = value
    return found


def are_unlisted(names: Iterable[str]) -> bool:
    """Return whether names may be those of a model of modules in training, where no list says."""
    found = list(names)
    starts = tuple(f"0.{inner}" for inner in _INNER)
    is_numbered = all(name.partition(".")[0].isdigit() for name in found)
    return is_numbered and any(name.startswith(starts) for name in found)
