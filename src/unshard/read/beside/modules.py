"""Models of sentence-transformers: a folder for each module, and modules.json, which lists them.

The first is a model of transformers, in the directory itself. Of the others those that were trained
have a model.safetensors (Dense), all have a config.json. In training the name of a tensor begins
with that of its module, and of a Transformer also with `auto_model` (until version 5) or `model`.
Here its name is that of its file, with the folder before it: `2_Dense/linear.weight`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

from unshard.containers.json_file import shown
from unshard.errors import ConversionError, CorruptError
from unshard.read.hub_files import MODULES

_INNER = ("auto_model.", "model.")
_T = TypeVar("_T")


class Module(NamedTuple):
    """A module: its name in training, and its folder, "" for the directory itself."""

    name: str
    folder: str


def modules_at(path: Path) -> tuple[Module, ...]:
    """Return what a modules.json lists.

    Raises:
        CorruptError: it is damaged, or a folder is not inside the model's directory.
    """
    import json

    try:
        listed = json.loads(path.read_bytes())
        found = tuple(Module(str(one["name"]), str(one["path"])) for one in listed)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptError(f"{path}: is not a list of modules with a name and a path") from error
    for one in found:
        parts = PurePosixPath(one.folder).parts
        if ".." in parts or one.folder.startswith("/") or "\0" in one.folder:
            raise CorruptError(f"{path}: a folder outside its own", found=shown(one.folder))
    return found


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


def refuse_unlisted(names: Iterable[str]) -> None:
    """Raise a ConversionError for the names of a model of modules, where nothing lists them."""
    if all(name.partition(".")[0].isdigit() for name in names) and any(
        name.startswith(tuple(f"0.{inner}" for inner in _INNER)) for name in names
    ):
        raise ConversionError(
            f"a model of sentence-transformers, whose {MODULES} was not found",
            hint="give the model that was trained: ⟦+--base MODEL⟧",
        )
