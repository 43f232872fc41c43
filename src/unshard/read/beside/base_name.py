"""Finds the base model in the files of a trainer, if it is on this machine.

The hub is never asked. A base counts only if all files agree on it, each under the key that its
trainer writes: a wrong model of the same shapes would not be noticed.
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

_ANY_FILE = ("*.yaml", "*.yml", "*.toml", "config.json", "train_config.json", ".hydra/config.yaml")


class _Setting(NamedTuple):
    """A setting with a base model.

    Attributes:
        files: patterns, in the folders of weights, step and run.
        keys: from the top of the file; of several, the first whose model is here counts.
        by: the tool that writes it.
        roles: of the model; "" if there is only one.
        revision: the key next to it for the model's revision.
    """

    files: tuple[str, ...]
    keys: str
    by: str
    roles: tuple[str, ...] = ("", "actor")
    revision: str = ""

    @property
    def ways(self) -> list[list[str]]:
        """The keys on the way to each value."""
        return [keys.split(".") for keys in self.keys.split()]


_CRITIC, _REWARD = ("critic", "value"), ("reward",)
_SETTINGS = (
    _Setting(("adapter_config.json",), "base_model_name_or_path", "PEFT", revision="revision"),
    _Setting(("README.md",), "base_model", "model cards of PEFT, TRL, transformers' Trainer"),
    _Setting(
        ("args.json",), "model model_id_or_path model_dir", "ms-swift", revision="model_revision"
    ),
    _Setting(_ANY_FILE, "base_model", "axolotl", revision="revision_of_model"),
    _Setting(
        _ANY_FILE,
        "model_name_or_path",
        "LLaMA-Factory, TRL, settings of the Trainer, hparams.yaml of Lightning",
        revision="model_revision",
    ),
    _Setting(_ANY_FILE, "_name_or_path", "configs of transformers, as W&B and MLflow log them"),
    _Setting(_ANY_FILE, "model.pretrained_model_name_or_path", "NeMo AutoModel"),
    _Setting(_ANY_FILE, "policy.model_name", "NeMo-RL"),
    _Setting(_ANY_FILE, "model_config.load_from_pretrained_path", "lmms-engine"),
    _Setting(_ANY_FILE, "actor_rollout_ref.model.path", "verl"),
    _Setting(_ANY_FILE, "critic.model.path", "verl", _CRITIC),
    _Setting(_ANY_FILE, "reward_model.model.path", "verl", _REWARD),
    _Setting(_ANY_FILE, "trainer.policy.model.path", "SkyRL"),
    _Setting(_ANY_FILE, "trainer.critic.model.path", "SkyRL", _CRITIC),
    _Setting(_ANY_FILE, "actor.path", "AReaL"),
    _Setting(_ANY_FILE, "critic.path", "AReaL", _CRITIC),
    _Setting(_ANY_FILE, "model.name", "prime-rl"),
    _Setting(_ANY_FILE, "hf_checkpoint", "slime"),
    _Setting(_ANY_FILE, "checkpoint.initial_load_path model.hf_assets_path", "torchtitan"),
)
_KNOWN = {name for setting in _SETTINGS for name in setting.files} | {"config.yaml"}
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
    """A base model in a file, by hub id or path, with the directory of its config, if here.

    `lacks` is the reason why it cannot be used; "" if it can.
    """

    name: str
    file: Path
    directory: Path | None = None
    lacks: str = ""


def find_base_names(location: Location) -> list[BaseName]:
    """Return the base models in a trainer's files for this role, each once."""
    tree, models = Tree(), dict[str, BaseName]()
    folders = _folders(location)
    for folder in folders:
        # Files next to the weights are about them, whatever their role.
        role = "" if folder == location.weights_dir else location.role or ""
        places = [p for p in (folder, folders[-1], Path()) if not isinstance(p, RemotePath)]
        for path, settings, doubt in _files(tree, folder):
            own = [setting for setting in settings if role in setting.roles]
            for model in _models_in(path, own, places):
                doubted = model._replace(directory=None, lacks=doubt) if doubt else model
                at = doubted.directory
                models.setdefault(str(at.resolve() if at else doubted.name), doubted)
    return list(models.values())


def advice(models: Sequence[BaseName], what: str = "it is") -> tuple[str, str]:
    """Return the files with their models, and how to pass one; `what` of a single model is away."""
    if len(models) == 1 and models[0].directory:
        models = [models[0]._replace(lacks=f"{what} not on this machine")]
    shown = models[:_MOST_SHOWN]
    mentions = [f"{m.file} names {m.name}{m.lacks and ', but '}{m.lacks}" for m in shown]
    mentions += [f"and {len(models) - len(shown)} more"] if len(models) > len(shown) else []
    names = [shlex.quote(model.name) for model in shown] or ["MODEL"]
    if len(names) > 1:
        return "; ".join(mentions), " or ".join(f"⟦--base {name}⟧" for name in names)
    return "; ".join(mentions), f"⟦+--base {names[0]}⟧"


def _models_in(
    path: Path, settings: Sequence[_Setting], places: Sequence[Path]
) -> Iterator[BaseName]:
    """Yield the models in a file: for each setting one, or all of a list."""
    with suppress(CorruptError, OSError, ValueError, RecursionError):  # an invalid file has none
        for document in _documents(path):
            for setting in settings:
                groups = [
                    [*_models(document, keys, setting, path, places)] for keys in setting.ways
                ]
                local = (group for group in groups if any(model.directory for model in group))
                yield from next(local, next(filter(None, groups), []))


def _models(
    document: object, keys: Sequence[str], setting: _Setting, file: Path, places: Sequence[Path]
) -> Iterator[BaseName]:
    """Yield the models in the value of a setting."""
    value, version = _at(document, keys), _at(document, [*keys[:-1], setting.revision])
    for name in value if isinstance(value, list) else [value]:
        model = _model(str(name or ""), str(version or ""), file, places)
        # prime-rl's `model.name` is an id of the hub, torchtitan's the name of a family.
        if model is not None and (model.directory or keys[-1] != "name" or "/" in model.name):
            yield model


def _at(document: object, keys: Sequence[str]) -> object:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _model(name: str, version: str, file: Path, places: Sequence[Path]) -> BaseName | None:
    """Return the model of a name; None if the name is not valid."""
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
                yield {name: _at(value, ["value"]) for name, value in document.items()}
            else:
                yield document


def _read_yaml(text: str) -> list[object]:
    """Return the documents of a text; the value of a node with a tag is the tag.

    Raises:
        ValueError: it is not YAML.
    """
    import yaml

    class TagLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass

    TagLoader.add_multi_constructor("", lambda _loader, tag, _node: f"!{tag}")
    try:
        return list(yaml.load_all(text, TagLoader))
    except (yaml.YAMLError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(str(error)) from None


def _folders(location: Location) -> list[Path]:
    """Return the folders of settings, from the weights' up to the run's."""
    step = location.step_dir
    between = [folder for folder in location.weights_dir.parents if folder.is_relative_to(step)]
    folders = dict.fromkeys([location.weights_dir, *between])
    if location.step is not None:
        run = step.parent.parent if holds_steps(step.parent.name) else step.parent
        folders |= dict.fromkeys([step.parent, run])
    return list(folders)


def _files(tree: Tree, folder: Path) -> Iterator[tuple[Path, list[_Setting], str]]:
    """Yield the small files of settings of a folder, their settings, and a reason for doubt."""
    with suppress(OSError):
        settings: dict[Path, list[_Setting]] = {}
        for setting in _SETTINGS:
            for path in (path for glob in setting.files for path in tree.glob(folder, glob)):
                settings.setdefault(path, []).append(setting)
        if len(settings) > _MOST_FILES:  # a folder for another purpose
            settings = {path: own for path, own in settings.items() if path.name in _KNOWN}
        doubts = dict.fromkeys(settings, "")
        for runs, inner in _LOGGED.items():
            logged = [run for run in tree.glob(folder, runs) if tree.is_dir(run)]
            logged = [run for run in logged if run.name != "models"]  # MLflow's, next to its runs
            place = folder / runs.partition("/")[0]
            doubt = f"{place} has {len(logged)} runs" if len(logged) > 1 else ""
            paths = {path: doubt for run in logged for path in tree.glob(run, inner)}
            settings |= {path: [s for s in _SETTINGS if s.files == _ANY_FILE] for path in paths}
            doubts |= paths
        for path, doubt in doubts.items():
            if tree.is_file(path) and tree.size(path) <= _LARGEST:
                yield path, settings[path], doubt
