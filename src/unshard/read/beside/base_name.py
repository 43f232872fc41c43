"""Which base model the files of a trainer name: for a hint, never to be loaded unasked."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unshard.read.finding.step_names import holds_steps
from unshard.read.format import Location

__all__ = ["BaseName", "find_base_name"]

_FILES = ("adapter_config.json", "args.json", "train_config.json", "config.yaml", "config.toml")
_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
_LARGEST = 1 << 20
_MOST_FILES = 64
# ms-swift, PEFT, axolotl, LLaMA-Factory, NeMo-RL, slime, and what configs of transformers have.
_KEY = re.compile(
    r"""(?:^[^\S\n]*|[{,]\s*)["']?(?:base_model_name_or_path|model_name_or_path|base_model
    |pretrained_model_name_or_path|_name_or_path|model_id_or_path|model_dir|hf_checkpoint
    |hf_assets_path|model_name)["']?\s*[:=]\s*["']?(?P<name>[^"'\s,}#]+)""",
    re.MULTILINE | re.VERBOSE,
)
# verl, SkyRL: `model:` and, indented below it, `path: NAME`; prime-rl: `[model]`, `name = NAME`.
_YAML = re.compile(
    r"""^[^\S\n]*model:[^\S\n]*\n(?:[^\S\n]+[^\n]*\n){0,5}?[^\S\n]+path:\s*
    ["']?(?P<name>[^"'\s,}#]+)""",
    re.MULTILINE | re.VERBOSE,
)
_TOML = re.compile(
    r"""^\[model\][^\S\n]*\n(?:[^\[\n][^\n]*\n){0,5}?name\s*=\s*["'](?P<name>[^"'\n]+)""",
    re.MULTILINE | re.VERBOSE,
)
_PATTERNS = (_KEY, _YAML, _TOML)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class BaseName(NamedTuple):
    """A base model that a file names: a hub id, or a directory that exists."""

    name: str
    file: Path


def find_base_name(location: Location) -> BaseName | None:
    """Return the base model that the nearest file of a trainer names, or None."""
    for path in _files(location):
        text = path.read_text(encoding="utf-8", errors="replace")
        for match in (found for pattern in _PATTERNS for found in pattern.finditer(text)):
            name = match["name"]
            if _HUB_ID.fullmatch(name) or (name.startswith("/") and Path(name).is_dir()):
                return BaseName(name, path)
    return None


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
            can_list = os.access(place, os.R_OK | os.X_OK) and place.is_dir()
            children = sorted(place.iterdir()) if can_list else []
            found = [one for one in children if one.suffix in _SUFFIXES and one.is_file()]
            found.sort(key=lambda one: one.name not in _FILES)
            small = (one for one in found[:_MOST_FILES] if one.stat().st_size <= _LARGEST)
            yield from (one for one in small if os.access(one, os.R_OK))
