"""Which base model the files of a trainer name: for a hint, never to be loaded unasked.

Such a file may name several: of reinforcement learning, the policy's and the critic's. Only the one
of the role that is merged is taken, and none where that is not clear.
"""

import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from unshard.containers.file_states import check_regular
from unshard.containers.json_file import json_object
from unshard.errors import CorruptError
from unshard.read.format import Location, Role, role_in
from unshard.read.step_names import holds_steps
from unshard.read.tree import Tree

_FILES = ("adapter_config.json", "args.json", "train_config.json", "config.yaml", "config.toml")
_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
_LARGEST = 1 << 20
_MOST_FILES = 64
# ms-swift, PEFT, axolotl, LLaMA-Factory, NeMo-RL, slime, and what configs of transformers have.
_KEYS = frozenset(
    """
    base_model_name_or_path model_name_or_path base_model pretrained_model_name_or_path
    _name_or_path model_id_or_path model_dir hf_checkpoint hf_assets_path model_name
    """.split()
)
# verl and SkyRL, prime-rl; AReaL has `path` below the role itself.
_NESTED = (("model", "path"), ("model", "name"), ("actor", "path"), ("critic", "path"))
_LINE = re.compile(r"(?P<indent> *)(?:- +)?(?P<key>[\w.]+|\"[\w.]+\") *[:=](?P<value>.*)")
_FLOW = re.compile(r"[{,]\s*[\"']?(?P<key>\w+)[\"']?\s*:\s*(?P<value>[^,}]*)")
_VALUE = re.compile(r"\s*[\"']?(?P<name>[^\"'\s,}#]+)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_Setting = tuple[tuple[str, ...], str]  # the keys on the way to a value, and the value


class BaseName(NamedTuple):
    """A base model that a file names: a hub id, or a directory that exists."""

    name: str
    file: Path


def find_base_name(location: Location) -> BaseName | None:
    """Return the base model that the nearest file of a trainer names for this role, or None."""
    for path in _files(location):
        named = [(keys, name) for keys, name in _settings(path) if _names_base(keys, name)]
        is_own = path.parent == location.weights_dir
        names = _of_role(named, location.role, is_own=is_own)
        if names:
            return BaseName(names.pop(), path) if len(names) == 1 else None
    return None


def _names_base(keys: tuple[str, ...], name: str) -> bool:
    if keys[-1] not in _KEYS and keys[-2:] not in _NESTED:
        return False
    return bool(_HUB_ID.fullmatch(name)) or (name.startswith("/") and Path(name).is_dir())


def _of_role(named: list[_Setting], role: Role | None, *, is_own: bool) -> set[str]:
    """Return the names that may be meant: of the role, the nearest to the top of the file.

    Args:
        named: all base models that a file names.
        role: whose weights are merged; None: the model that was trained.
        is_own: whether the file is next to the weights, so that what has no role is theirs.
    """
    wanted = role or "actor"
    kept = [one for one in named if _role_of(one[0]) == wanted]
    if not kept and (is_own or wanted == "actor"):
        kept = [one for one in named if _role_of(one[0]) is None]
    nearest = min((len(keys) for keys, _ in kept), default=0)
    names = {name for keys, name in kept if len(keys) == nearest}
    return {name for name in names if not name.startswith("/")} or names


def _role_of(keys: tuple[str, ...]) -> Role | None:
    is_actor = any(key.startswith("actor_") for key in keys)  # verl: actor_rollout_ref
    return role_in(keys) or ("actor" if is_actor else None)


def _settings(path: Path) -> Iterator[_Setting]:
    """Yield the text values of a file, each with its keys; of a file that is not valid, none."""
    with suppress(CorruptError, OSError, ValueError, RecursionError):
        check_regular(path)
        if path.suffix == ".json":
            yield from _leaves(json_object(path))
        elif path.suffix == ".toml":
            yield from _leaves(tomllib.loads(path.read_text(encoding="utf-8")))
        else:
            yield from _lines(path.read_text(encoding="utf-8", errors="replace"))


def _leaves(fields: object, above: tuple[str, ...] = ()) -> Iterator[_Setting]:
    if isinstance(fields, dict):
        for key, value in fields.items():
            yield from _leaves(value, (*above, str(key)))
    elif isinstance(fields, str) and above:
        yield above, fields


def _lines(text: str) -> Iterator[_Setting]:
    """Yield the settings of a YAML file, as its lines and their indentation show them."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        indent = len(match["indent"])
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, match["key"].strip('"')))
        keys = tuple(part for _, key in above for part in key.split("."))
        inner = list(_FLOW.finditer(match["value"]))
        found = [((*keys, one["key"]), one["value"]) for one in inner] or [(keys, match["value"])]
        for path, value in found:
            if name := _VALUE.match(value):
                yield path, name["name"]


def _files(location: Location) -> Iterator[Path]:
    """Yield the small text files of settings from the weights up to the run, known names first."""
    step = location.step_dir
    between = [one for one in location.weights_dir.parents if one.is_relative_to(step)]
    folders = dict.fromkeys([location.weights_dir, *between])
    if location.step is not None:
        run = step.parent.parent if holds_steps(step.parent.name) else step.parent
        folders |= dict.fromkeys([step.parent, run])
    for folder in folders:
        for place in (folder, folder / ".hydra"):
            with suppress(OSError):
                inside = Tree().inside(place).values()
                found = [one for one in inside if one.suffix in _SUFFIXES]
                found.sort(key=lambda one: one.name not in _FILES)
                yield from (one for one in found[:_MOST_FILES] if _is_small(one))


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= _LARGEST
