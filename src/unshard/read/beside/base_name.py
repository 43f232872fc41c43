"""Which base model the files of a trainer name, and whether it is on this machine.

The hub is never asked. A file may name several models: of reinforcement learning, the policy's and
the critic's. Only those of the role that is merged count.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from unshard.containers.file_states import check_regular
from unshard.containers.json_file import json_object
from unshard.errors import CorruptError
from unshard.read.format import Location, Role, role_in
from unshard.read.step_names import holds_steps
from unshard.read.tree import Tree
from unshard.stores.remote_path import RemotePath

# Settings of the trainer, and where Hydra, W&B, MLflow and Lightning record them.
_ANY = (
    "*.json *.yaml *.yml *.toml .hydra/*.yaml wandb/run-*/files/config.yaml "
    "mlruns/*/*/params/*name_or_path lightning_logs/version_*/hparams.yaml"
)
_ROWS = (
    # files in the folders of weights, step and run; the ends of keys, the best first; written by
    ("adapter_config.json", "base_model_name_or_path", "PEFT"),
    ("README.md", "base_model", "model cards of PEFT, TRL, transformers' Trainer"),
    ("args.json", "model model_id_or_path model_dir", "ms-swift"),
    (_ANY, "base_model", "axolotl"),
    (_ANY, "model_name_or_path", "LLaMA-Factory, TRL, settings of transformers' Trainer"),
    (_ANY, "pretrained_model_name_or_path", "NeMo AutoModel"),
    (_ANY, "model_name", "NeMo-RL: policy.model_name"),
    (_ANY, "load_from_pretrained_path", "lmms-engine"),
    (_ANY, "model.path", "verl: actor_rollout_ref.model.path, critic.model.path; SkyRL"),
    (_ANY, "actor.path", "AReaL"),
    (_ANY, "critic.path", "AReaL"),
    (_ANY, "model.name", "prime-rl"),
    (_ANY, "hf_checkpoint", "slime"),
    (_ANY, "checkpoint.initial_load_path model.hf_assets_path", "torchtitan"),
    (_ANY, "_name_or_path", "configs of transformers in other files, as W&B gets them"),
)
_LARGEST = 1 << 20
_MOST_FILES = 64
_LINE = re.compile(r"(?P<indent> *)(?:- +)?(?P<key>[\w.]+|\"[\w.]+\") *[:=](?P<value>.*)")
_ITEM = re.compile(r" *- +(?P<value>.*)")
_FLOW = re.compile(r"[{,]\s*[\"']?(?P<key>\w+)[\"']?\s*:\s*(?P<value>[^,}]*)")
_VALUE = re.compile(r"\s*(?:([\"'])(?P<quoted>.*?)\1|(?P<plain>[^\"'\s,}#]+))")
_CARD = re.compile(r"\A---\s*\n(.*?\n)---", re.DOTALL)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_Keys = tuple[str, ...]  # on the way to a value


class BaseName(NamedTuple):
    """A base model that a file names, by hub id or path; and where its config is, if here."""

    name: str
    file: Path
    directory: Path | None = None


def find_base_names(location: Location) -> list[BaseName]:
    """Return the base models that the files of a trainer name for this role, each once."""
    tree, models = Tree(), dict[str, BaseName]()
    folders = _folders(location)
    for folder in folders:
        places = [one for one in (folder, folders[-1], Path()) if not isinstance(one, RemotePath)]
        for path, rows in _files(tree, folder).items():
            named = list(_named(path, rows, places))
            for model in _of_role(named, location.role, is_own=folder == location.weights_dir):
                at = model.directory
                models.setdefault(str(at.resolve() if at else model.name), model)
    # A path on another machine counts only if nothing else is named.
    usable = [one for one in models.values() if one.directory or not one.name.startswith("/")]
    return usable or list(models.values())


def advice(models: Sequence[BaseName], what: str) -> tuple[str, str]:
    """Return which files name which models, and how to give one; `what` a single one lacks here."""
    found = "; ".join(f"{one.file} names {one.name}" for one in models)
    if len(models) > 1:
        return found, " or ".join(f"⟦--base {shlex.quote(one.name)}⟧" for one in models)
    name = shlex.quote(models[0].name) if models else "MODEL"
    return found + f", but {what} not on this machine" * len(models), f"⟦+--base {name}⟧"


def _named(
    path: Path, rows: Sequence[Sequence[_Keys]], places: Sequence[Path]
) -> Iterator[tuple[_Keys, BaseName]]:
    """Yield the models that a file names, with their keys: one for each row and place in it."""
    settings = list(_settings(path))
    for ends in rows:
        groups: dict[_Keys, list[tuple[_Keys, BaseName]]] = {}
        for end in ends:
            for keys, value in settings:
                if keys[-len(end) :] == end and (model := _model(value, path, places)) is not None:
                    groups.setdefault(keys[: -len(end)], []).append((keys, model))
        for group in groups.values():
            yield next((one for one in group if one[1].directory), group[0])


def _model(name: str, file: Path, places: Sequence[Path]) -> BaseName | None:
    """Return the model that the value of a setting means; None if it means none."""
    try:
        for place in places if name else ():
            at = place / os.path.expanduser(name)  # noqa: PTH111 (there may be no home)
            if (at / "config.json").is_file():
                return BaseName(name, file, at)
            if at.is_dir():  # a checkpoint, or a folder of a tokenizer
                return None
        if _HUB_ID.fullmatch(name) is None:
            return BaseName(name, file) if name.startswith("/") else None
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
    except (OSError, ValueError):  # the name is too long, or of no model
        return None
    if isinstance(cached, str):
        return BaseName(name, file, Path(cached).parent)
    return BaseName(name, file) if "/" in name else None


def _of_role(
    named: Sequence[tuple[_Keys, BaseName]], role: Role | None, *, is_own: bool
) -> list[BaseName]:
    """Return the models that may be meant: of the role, the nearest to the top of the file.

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
    return [model for keys, model in kept if len(keys) == nearest]


def _role_of(keys: _Keys) -> Role | None:
    is_actor = any(key.startswith("actor_") for key in keys)  # verl: actor_rollout_ref
    return role_in(keys) or ("actor" if is_actor else None)


def _settings(path: Path) -> Iterator[tuple[_Keys, str]]:
    """Yield the text values of a file, each with its keys; of a file that is not valid, none."""
    with suppress(CorruptError, OSError, ValueError, RecursionError):
        check_regular(path)
        if path.suffix == ".json":
            yield from _leaves(json_object(path))
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".toml":
            yield from _leaves(tomllib.loads(text))
        elif path.suffix == ".md":
            yield from _lines("".join(_CARD.findall(text)))
        elif path.parent.name == "params":  # MLflow: a file for each value
            yield (path.name,), text.strip()
        else:
            is_wandb = path.parent.name == "files"  # where each value is below `value`
            for keys, value in _lines(text):
                yield tuple(key for key in keys if not (is_wandb and key == "value")), value


def _leaves(fields: object, above: _Keys = ()) -> Iterator[tuple[_Keys, str]]:
    if isinstance(fields, dict):
        for key, value in fields.items():
            yield from _leaves(value, (*above, str(key)))
    elif isinstance(fields, str) and above:
        yield above, fields


def _lines(text: str) -> Iterator[tuple[_Keys, str]]:
    """Yield the settings of a YAML file, as its lines and their indentation show them."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        match, item = _LINE.match(line), _ITEM.match(line)
        if match is None:
            if item and above and (name := _VALUE.match(item["value"])):  # of a card's list
                yield (above[-1][1],), name["quoted"] or name["plain"] or ""
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
                yield path, name["quoted"] or name["plain"] or ""


def _folders(location: Location) -> list[Path]:
    """Return the folders of settings, from that of the weights up to the run."""
    step = location.step_dir
    between = [one for one in location.weights_dir.parents if one.is_relative_to(step)]
    folders = dict.fromkeys([location.weights_dir, *between])
    if location.step is not None:
        run = step.parent.parent if holds_steps(step.parent.name) else step.parent
        folders |= dict.fromkeys([step.parent, run])
    return list(folders)


def _files(tree: Tree, folder: Path) -> dict[Path, list[list[_Keys]]]:
    """Return the small files of settings of a folder, with the keys of their rows."""
    rows: dict[Path, list[list[_Keys]]] = {}
    for patterns, ends, _ in _ROWS:
        keys = [tuple(end.split(".")) for end in ends.split()]
        with suppress(OSError):
            for path in (path for one in patterns.split() for path in tree.glob(folder, one)):
                is_small = tree.is_file(path) and tree.size(path) <= _LARGEST
                if is_small and (path in rows or len(rows) < _MOST_FILES):
                    rows.setdefault(path, []).append(keys)
    return rows
