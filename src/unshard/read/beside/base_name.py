"""Which base model the files of a trainer name, and whether it is on this machine.

The hub is never asked. A base is believed only if all files name it, each under the key that its
trainer writes: another model of the same shapes would be taken for it, unnoticed.
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
from unshard.read.format import Location
from unshard.read.step_names import holds_steps
from unshard.read.tree import Tree
from unshard.stores.remote_path import RemotePath

_SETTINGS = ("*.yaml", "*.yml", "*.toml", "config.json", "train_config.json", ".hydra/config.yaml")


class _Row(NamedTuple):
    """Which model a file names.

    Attributes:
        files: patterns, in the folders of weights, step and run.
        keys: from the top of the file; several name one model, and the first that is here is meant.
        by: what writes it.
        roles: whose model it is; "": of the only one.
        revision: the key next to it that has the model's revision.
    """

    files: tuple[str, ...]
    keys: str
    by: str
    roles: tuple[str, ...] = ("", "actor")
    revision: str = ""

    @property
    def ways(self) -> list[list[str]]:
        """The keys on the way to each value."""
        return [one.split(".") for one in self.keys.split()]


_CRITIC, _REWARD = ("critic", "value"), ("reward",)
_ROWS = (
    _Row(("adapter_config.json",), "base_model_name_or_path", "PEFT", revision="revision"),
    _Row(("README.md",), "base_model", "model cards of PEFT, TRL, transformers' Trainer"),
    _Row(("args.json",), "model model_id_or_path model_dir", "ms-swift", revision="model_revision"),
    _Row(_SETTINGS, "base_model", "axolotl", revision="revision_of_model"),
    _Row(
        _SETTINGS,
        "model_name_or_path",
        "LLaMA-Factory, TRL, settings of the Trainer, hparams.yaml of Lightning",
        revision="model_revision",
    ),
    _Row(_SETTINGS, "_name_or_path", "configs of transformers, as W&B and MLflow log them"),
    _Row(_SETTINGS, "model.pretrained_model_name_or_path", "NeMo AutoModel"),
    _Row(_SETTINGS, "policy.model_name", "NeMo-RL"),
    _Row(_SETTINGS, "model_config.load_from_pretrained_path", "lmms-engine"),
    _Row(_SETTINGS, "actor_rollout_ref.model.path", "verl"),
    _Row(_SETTINGS, "critic.model.path", "verl", _CRITIC),
    _Row(_SETTINGS, "reward_model.model.path", "verl", _REWARD),
    _Row(_SETTINGS, "trainer.policy.model.path", "SkyRL"),
    _Row(_SETTINGS, "trainer.critic.model.path", "SkyRL", _CRITIC),
    _Row(_SETTINGS, "actor.path", "AReaL"),
    _Row(_SETTINGS, "critic.path", "AReaL", _CRITIC),
    _Row(_SETTINGS, "model.name", "prime-rl"),
    _Row(_SETTINGS, "hf_checkpoint", "slime"),
    _Row(_SETTINGS, "checkpoint.initial_load_path model.hf_assets_path", "torchtitan"),
)
_KNOWN = frozenset(one for row in _ROWS for one in row.files if "*" not in one) | {"config.yaml"}
# Where loggers keep the settings of a run, each run in a folder of its own.
_LOGGED = {
    "lightning_logs/version_*": "hparams.yaml",
    "wandb/run-*": "files/config.yaml",
    "mlruns/*/*": "params/*name_or_path",
}
_LARGEST, _MOST_FILES, _MOST_SHOWN = 1 << 17, 32, 5
_CARD = re.compile(r"\A---\s*\n(.*?\n)---", re.DOTALL)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class BaseName(NamedTuple):
    """A base model that a file names, by hub id or path; and where its config is, if here.

    `lacks` is why it is not taken; "" if it is here.
    """

    name: str
    file: Path
    directory: Path | None = None
    lacks: str = ""


def find_base_names(location: Location) -> list[BaseName]:
    """Return the base models that the files of a trainer name for this role, each once."""
    tree, models = Tree(), dict[str, BaseName]()
    folders = _folders(location)
    for folder in folders:
        # What is next to the weights is about them, whatever role they have.
        role = "" if folder == location.weights_dir else location.role or ""
        places = [one for one in (folder, folders[-1], Path()) if not isinstance(one, RemotePath)]
        for path, rows, doubt in _files(tree, folder):
            for model in _named(path, [row for row in rows if role in row.roles], places):
                one = model._replace(directory=None, lacks=doubt) if doubt else model
                at = one.directory
                models.setdefault(str(at.resolve() if at else one.name), one)
    return list(models.values())


def advice(models: Sequence[BaseName], what: str = "it is") -> tuple[str, str]:
    """Return which files name which models, and how to give one; `what` of the only one is away."""
    if len(models) == 1 and models[0].directory:
        models = [models[0]._replace(lacks=f"{what} not on this machine")]
    shown = models[:_MOST_SHOWN]
    found = [f"{one.file} names {one.name}{one.lacks and ', but '}{one.lacks}" for one in shown]
    found += [f"and {len(models) - len(shown)} more"] if len(models) > len(shown) else []
    names = [shlex.quote(one.name) for one in shown] or ["MODEL"]
    if len(names) > 1:
        return "; ".join(found), " or ".join(f"⟦--base {name}⟧" for name in names)
    return "; ".join(found), f"⟦+--base {names[0]}⟧"


def _named(path: Path, rows: Sequence[_Row], places: Sequence[Path]) -> Iterator[BaseName]:
    """Yield the models that a file names: for each row one, or all of a list."""
    with suppress(CorruptError, OSError, ValueError, RecursionError):  # not valid: it names none
        for document in _documents(path):
            for row in rows:
                named = [[*_models(document, keys, row, path, places)] for keys in row.ways]
                here = (group for group in named if any(one.directory for one in group))
                yield from next(here, next(filter(None, named), []))


def _models(
    document: object, keys: Sequence[str], row: _Row, file: Path, places: Sequence[Path]
) -> Iterator[BaseName]:
    """Yield the models that the value of a setting means."""
    value, version = _at(document, keys), _at(document, [*keys[:-1], row.revision])
    for one in value if isinstance(value, list) else [value]:
        model = _model(str(one or ""), str(version or ""), file, places)
        # prime-rl's `model.name` is an id of the hub, torchtitan's the name of a family.
        if model is not None and (model.directory or keys[-1] != "name" or "/" in model.name):
            yield model


def _at(document: object, keys: Sequence[str]) -> object:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _model(name: str, version: str, file: Path, places: Sequence[Path]) -> BaseName | None:
    """Return the model of a name; None if nothing can have such a name."""
    lacks = f"its revision {version} is" if version else "it is"
    lacks += " not on this machine"
    try:
        for place in places if name and not version else ():
            at = place / os.path.expanduser(name)  # noqa: PTH111 (there may be no home)
            if (at / "config.json").is_file():
                return BaseName(name, file, at)
            lacks = f"{at} has no config.json" if at.is_dir() else lacks
        if _HUB_ID.fullmatch(name):
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(name, "config.json", revision=version or None)
            if isinstance(cached, str):
                return BaseName(name, file, Path(cached).parent)
    except (OSError, ValueError):  # too long, or with a zero byte
        return None
    return BaseName(name, file, None, lacks) if name else None


def _documents(path: Path) -> Iterator[object]:
    """Yield the documents of a file of settings."""
    check_regular(path)
    if path.suffix == ".json":
        yield json_object(path)
        return
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if path.suffix == ".toml":
        yield tomllib.loads(text)
    elif path.parent.name == "params":  # MLflow: a file for each value
        yield {path.name: text.strip()}
    else:
        text = "".join(_CARD.findall(text)) if path.suffix == ".md" else text
        for document in _read_yaml(text):
            if path.parent.name == "files" and isinstance(document, dict):  # of W&B
                yield {name: _at(one, ["value"]) for name, one in document.items()}
            else:
                yield document


def _read_yaml(text: str) -> list[object]:
    """Return the documents of a text; of a value with a tag of Python, its tag.

    Raises:
        ValueError: it is not YAML.
    """
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass

    Loader.add_multi_constructor("", lambda _loader, tag, _node: f"!{tag}")
    try:
        return list(yaml.load_all(text, Loader))
    except (yaml.YAMLError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(str(error)) from None


def _folders(location: Location) -> list[Path]:
    """Return the folders of settings, from that of the weights up to the run."""
    step = location.step_dir
    between = [one for one in location.weights_dir.parents if one.is_relative_to(step)]
    folders = dict.fromkeys([location.weights_dir, *between])
    if location.step is not None:
        run = step.parent.parent if holds_steps(step.parent.name) else step.parent
        folders |= dict.fromkeys([step.parent, run])
    return list(folders)


def _files(tree: Tree, folder: Path) -> Iterator[tuple[Path, list[_Row], str]]:
    """Yield the small files of settings of a folder, their rows, and why they are not believed."""
    with suppress(OSError):
        rows: dict[Path, list[_Row]] = {}
        for row in _ROWS:
            for path in (path for one in row.files for path in tree.glob(folder, one)):
                rows.setdefault(path, []).append(row)
        if len(rows) > _MOST_FILES:  # a folder of something else
            rows = {path: found for path, found in rows.items() if path.name in _KNOWN}
        doubts = dict.fromkeys(rows, "")
        for runs, inner in _LOGGED.items():
            logged = [one for one in tree.glob(folder, runs) if tree.is_dir(one)]
            logged = [one for one in logged if one.name != "models"]  # MLflow's, next to its runs
            place = folder / runs.partition("/")[0]
            why = f"{place} has {len(logged)} runs" if len(logged) > 1 else ""
            found = {path: why for one in logged for path in tree.glob(one, inner)}
            rows |= {path: [row for row in _ROWS if row.files == _SETTINGS] for path in found}
            doubts |= found
        for path, why in doubts.items():
            if tree.is_file(path) and tree.size(path) <= _LARGEST:
                yield path, rows[path], why
