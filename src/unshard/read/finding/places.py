"""Which sets of weights are at a place, in its folders of known names, or anywhere in a step.

Only names and places count; no file is opened.
"""

import re
from dataclasses import replace
from pathlib import Path

from unshard.keywords import Weights
from unshard.read.finding.markers import is_tag, step_of_tag
from unshard.read.finding.search import FORMATS, WEIGHT_SUFFIXES, format_in, search
from unshard.read.format import ROLES, Choice, Format, Location, role_in
from unshard.read.rank_files.reader import RANK_FILES
from unshard.read.step_names import children, is_state, step_of, step_of_file, step_of_parents
from unshard.read.whole_files.reader import WHOLE_FILES

_MODEL_DIR, _EMA_DIR = "pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0"
_FSDP_FOLDER = re.compile(r"pytorch_(?:ema_)?model_fsdp_\d+")
_FOLDERS = ("model", "model_and_optim", "sharded")
_EMA = re.compile(r"(?:.*[-_])?ema(?:[-_].*)?", re.IGNORECASE)
# Files that are a checkpoint by their name alone: of Lightning, nanoGPT, litgpt.
_ALONE = re.compile(r".*\.ckpt|(?:ckpt|checkpoint|lit_model)\.pth?")


def is_checkpoint_file(path: Path) -> bool:
    """Return whether a path is a file of weights that is not a part of a larger set."""
    is_weights = path.is_file() and path.suffix.lower() in {*WEIGHT_SUFFIXES, ""}
    if path.suffix and is_state(path.name.partition(".")[0]):
        return False
    return is_weights and not any(one.claims(path) for one in FORMATS)


def alone(file: Path) -> Location:
    """Return where a file is that is a checkpoint of its own."""
    location = location_of(file.parent, file.parent, WHOLE_FILES)
    own = step_of_file(file)
    return replace(location, step=location.step if own is None else own, weights="model", file=file)


def nearby(place: Path, choice: Choice, *, sharded: bool) -> list[Location]:
    """Return the sets of weights of a place in it and its known folders; of a role, in all."""
    found = instep_of(place, sharded=sharded)
    has_role = choice.role is None or any(at.is_called(choice.role) for at in found)
    has_weights = choice.weights is None or any(at.weights == choice.weights for at in found)
    if not found or (has_role and has_weights):
        return found
    known = {at.weights_dir for at in found}
    return found + [at for at in within(place) if at.weights_dir not in known]


def instep_of(place: Path, *, sharded: bool) -> list[Location]:
    """Return every set of weights in a place itself, or in its folders with known names."""
    here = format_in(place, sharded=sharded)
    if here is not None:
        return [location_of(place, place, here)]
    names = (child.name for child in children(place) if _FSDP_FOLDER.fullmatch(child.name))
    found: list[Location] = []
    for folder in (place / name for name in (*ROLES, *sorted(names, reverse=True), *_FOLDERS)):
        form = format_in(folder, sharded=sharded)
        if form is None and sharded and folder.name == _EMA_DIR and folder.is_dir():
            # lmms-engine leaves the folder empty if nothing was averaged: `choose` says so.
            form = RANK_FILES if instep_of(place / _MODEL_DIR, sharded=True) else None
        if form is not None:
            found.append(location_of(folder, place, form))
    tag = step_of_tag(place) if sharded and not found else None
    if tag is not None and (form := format_in(tag, sharded=True)) is not None:
        found.append(location_of(tag, place, form))
    return found


def location_of(folder: Path, place: Path, form: Format) -> Location:
    """Return where weights are that were found from a place, at or above their folder."""
    named = step_of_parents(folder, sharded=form.sharded)
    is_inner = folder.name in ROLES or _FSDP_FOLDER.fullmatch(folder.name)
    if is_tag(folder) and step_of(folder.parent.name) is not None:
        step_dir, step = folder.parent, step_of(folder.parent.name)
    elif named is not None:
        step_dir, step = named
    else:
        step_dir, step = (folder.parent if place == folder and is_inner else place), None
    inner = folder.relative_to(step_dir).parts
    is_ema = folder.name == _EMA_DIR or any(_EMA.fullmatch(name) for name in inner)
    role = role_in(inner) or role_in((step_dir.parent.name,))
    return Location(folder, step_dir, step, role, "ema" if is_ema else "model", form)


def within(step_dir: Path) -> list[Location]:
    """Return all sets of weights at any depth of a step directory, the sharded if there are any."""
    below = search(step_dir)
    found = [location_of(folder, step_dir, form) for folder, form in below.sets]
    nested = [path for steps in below.runs.values() for _, path in steps[:1]]
    found += [at for path in nested for at in instep_of(path, sharded=True)]
    files_alone = (_files_in(folder) for folder in below.folders)
    sharded = {at.role for at in found if at.format.sharded}
    kept = [at for at in found if at.format.sharded or at.role not in sharded]
    return kept or [at for files in files_alone for at in files]


def _files_in(place: Path) -> list[Location]:
    """Return the one file of a place that is a checkpoint by its name, if there is one."""
    files = [
        child
        for child in children(place)
        if _ALONE.fullmatch(child.name) and is_checkpoint_file(child)
    ]
    return [alone(files[0])] if len(files) == 1 else []


def at_same_step(location: Location, weights: Weights) -> Location | None:
    """Return where the step directory has its EMA or its regular weights, if it has them."""
    folder = location.step_dir / (_EMA_DIR if weights == "ema" else _MODEL_DIR)
    form = format_in(folder, sharded=True)
    if form is None:
        return None
    return replace(location, weights_dir=folder, weights=weights, format=form)
