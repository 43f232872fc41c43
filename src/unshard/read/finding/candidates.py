"""Finds the sets of weights and the steps in a tree, whatever its folders are called.

Only names and places count; no file is opened. A search ends at the step directories of a run,
which are searched one by one, and at a bound that keeps a mistaken path (a home directory) cheap.
It follows no links: they lead to folders that are found anyway (`last`), or to another run.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.keywords import Weights
from unshard.read.finding.markers import step_of_tag
from unshard.read.format import FAIRSEQ2, ROLES, Format, Location, role_in
from unshard.read.hub_files import RECORD_NAME
from unshard.read.rank_files.reader import RANK_FILES
from unshard.read.step_names import (
    STATE_FOLDER,
    UNIVERSAL,
    family,
    is_state,
    is_unfinished,
    loose_step_of,
    step_of,
    step_of_file,
    step_of_parents,
    version_of,
    without_converted,
)
from unshard.read.tree import Tree

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".th", ".tar")
"""Suffixes of files that may be a checkpoint of their own; such a file may also have none."""
DEPTH = 4
"""Levels of folders that are searched."""
ENTRIES = 10_000
"""Directory entries that are searched, not counting those of step directories."""

_TRAINER = "trainer"  # prime-rl's folder of the model; files of this name are training state
_MODEL_DIR, _EMA_DIR = "pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0"
_RANK_FILE = "model_world_size_"
_FSDP_FOLDER = re.compile(r"pytorch_(?:ema_)?model_fsdp_\d+")
_FOLDERS = ("model", "model_and_optim", "sharded")
_EMA = re.compile(r"(?:.*[-_])?ema(?:[-_].*)?", re.IGNORECASE)
# Files that are a checkpoint by their name alone: of Lightning, nanoGPT, litgpt.
_ALONE = re.compile(r".*\.ckpt|(?:ckpt|checkpoint|lit_model)\.pth?")
_ARCHIVE = ".tar"  # an archive of a step, not a checkpoint that a trainer saved


def formats() -> Iterator[Format]:
    """Yield all formats, in the order in which a directory is searched for them.

    Rank files are the most common, so the other formats are imported only if there are none.
    """
    yield RANK_FILES
    from unshard.read.dcp.reader import DCP
    from unshard.read.megatron.reader import MEGATRON
    from unshard.read.safetensors_shards.reader import SAFETENSORS_SHARDS
    from unshard.read.torch_checkpointing.reader import TORCH_CHECKPOINTING
    from unshard.read.whole_files.reader import WHOLE_FILES
    from unshard.read.zero.reader import ZERO

    yield from (SAFETENSORS_SHARDS, MEGATRON, FAIRSEQ2, DCP)
    yield from (TORCH_CHECKPOINTING, ZERO, WHOLE_FILES)


@dataclass(slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        sets: directories that hold weights, each with its format; those nearer to the top first.
        runs: directories that hold step directories, each with its steps, the highest first.
        folders: all folders that were searched, in order.
        closed: the errors of folders that may not be read.
        stopped: why the search ended early; empty if it saw everything.
        is_cut: whether it ended at the bound of entries, so that other runs may exist.
    """

    sets: list[tuple[Path, Format]] = field(default_factory=list)
    runs: dict[Path, list[tuple[int, Path]]] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)
    closed: list[PermissionError] = field(default_factory=list)
    stopped: str = ""
    is_cut: bool = False


def search(tree: Tree, place: Path) -> SearchResult:
    """Return the weights and the step directories at and below a directory."""
    below = SearchResult()
    entries = 0
    level = [place]
    for depth in range(DEPTH + 1):
        following: list[Path] = []
        for folder in level:
            try:
                entries += len(tree.inside(folder))
                if entries > ENTRIES:
                    below.stopped = f"the search ended after {ENTRIES:,} directory entries"
                    below.is_cut = True
                    return below
                following += _search_folder(tree, folder, below, is_top=folder == place)
            except PermissionError as error:
                below.closed.append(error)
        if depth == DEPTH and following:
            below.stopped = f"the search ended {DEPTH} levels below {place}"
        level = following
    return below


def _search_folder(tree: Tree, folder: Path, below: SearchResult, *, is_top: bool) -> list[Path]:
    """Add a folder's weights and steps to the result; return its subfolders to search."""
    inner = list(_folders_to_search(tree, folder))
    form = format_in(tree, folder, sharded=True) or format_in(tree, folder, sharded=False)
    below.folders.append(folder)
    is_our_output = not is_top and RECORD_NAME in tree.inside(folder)
    if form is not None and not is_our_output:
        below.sets.append((folder, form))
    if is_our_output or (form is not None and form.sharded):
        return []  # deeper folders belong to these weights
    steps = steps_in(tree, folder)
    if not is_top:
        steps = [(step, path) for step, path in steps if not tree.is_file(path / RECORD_NAME)]
    if steps:
        below.runs[folder] = steps
    step_dirs = {path for _, path in steps}
    return [path for path in inner if path not in step_dirs]


def format_in(tree: Tree, folder: Path, *, sharded: bool) -> Format | None:
    """Return the format of the files that are directly in a directory, or None."""
    if not tree.is_dir(folder):
        return None
    return next((at for at in formats() if at.sharded is sharded and at.holds(tree, folder)), None)


def _folders_to_search(tree: Tree, folder: Path) -> Iterator[Path]:
    """Yield the folders of a directory that may hold weights, in the order of their names."""
    for name, path in tree.inside(folder).items():
        if is_unfinished(name) or name == STATE_FOLDER or (is_state(name) and name != _TRAINER):
            continue
        if tree.is_dir(path) and not tree.is_link(path):
            yield path


def steps_in(tree: Tree, run: Path) -> list[tuple[int, Path]]:
    """Return the step directories of a run, the highest step first; of one step, the last save.

    Without directories whose names count training, those of an in-house name that hold sharded
    weights are its steps, and also folders of the same name that may not be read.
    """
    folders = without_converted(path for path in tree.inside(run).values() if tree.is_dir(path))
    folders = [path for path in folders if not _is_merged(tree, path)]
    steps = [(step, path) for path in folders if (step := step_of(path.name)) is not None]
    if not steps and step_of_parents(run, sharded=False) is None:  # else a step's own parts
        loose = [(step, path) for path in folders if (step := loose_step_of(path.name)) is not None]
        have_shards = {path: _holds_shards(tree, path) for _, path in loose}
        names = {family(path.name) for path, has_shards in have_shards.items() if has_shards}
        steps = [
            (step, path)
            for step, path in loose
            if have_shards[path] or (have_shards[path] is None and family(path.name) in names)
        ]
    return sorted(steps, key=lambda at: (at[0], version_of(at[1].name), at[1]), reverse=True)


def _is_merged(tree: Tree, folder: Path) -> bool:
    """Return whether lmms-engine merged a folder from rank files that are still complete."""
    shards = tree.inside(folder.parent).get(f"{folder.name}-fsdp")
    if shards is None or step_of(shards.name) is None:
        return False
    names: set[str] = set()
    with suppress(OSError):  # closed: reading the rank files raises the error
        names = {name for name in tree.inside(shards / _MODEL_DIR) if name.startswith(_RANK_FILE)}
    world = len(names)
    return bool(names) and names == {f"{_RANK_FILE}{world}_rank_{n}.pt" for n in range(world)}


def _holds_shards(tree: Tree, folder: Path) -> bool | None:
    """Return whether a folder, or one level below it, has sharded weights; None if it is closed."""
    try:
        inner = [path for path in _folders_to_search(tree, folder) if step_of(path.name) is None]
        return any(format_in(tree, place, sharded=True) for place in (folder, *inner))
    except PermissionError:
        return None


def sets_at(tree: Tree, place: Path, *, sharded: bool) -> list[Location]:
    """Return every set of weights in a place itself, or in its folders with known names."""
    here = format_in(tree, place, sharded=sharded)
    if here is not None:
        return [location_of(tree, place, place, here)]
    names = filter(_FSDP_FOLDER.fullmatch, tree.inside(place))
    sets: list[Location] = []
    for folder in (place / name for name in (*ROLES, *sorted(names, reverse=True), *_FOLDERS)):
        form = format_in(tree, folder, sharded=sharded)
        if form is None and sharded and folder.name == _EMA_DIR and tree.is_dir(folder):
            # lmms-engine leaves the folder empty if nothing was averaged; `choose` reports that.
            form = RANK_FILES if sets_at(tree, place / _MODEL_DIR, sharded=True) else None
        if form is not None:
            sets.append(location_of(tree, folder, place, form))
    tag = step_of_tag(tree, place) if sharded and not sets else None
    if tag is not None and (form := format_in(tree, tag, sharded=True)) is not None:
        sets.append(location_of(tree, tag, place, form))
    return sets


def location_of(tree: Tree, folder: Path, place: Path, form: Format) -> Location:
    """Return the location of weights in a folder at or below the place that was searched."""
    named = step_of_parents(folder, sharded=form.sharded)
    is_inner = folder.name in ROLES or _FSDP_FOLDER.fullmatch(folder.name)
    above = step_of(folder.parent.name)
    tag = None if above is None else step_of_tag(tree, folder.parent)
    if tag is not None and tag in (folder, folder.with_name(folder.name.removesuffix(UNIVERSAL))):
        step_dir, step = folder.parent, above
    elif named is not None:
        step_dir, step = named
    else:
        step_dir, step = (folder.parent if place == folder and is_inner else place), None
    inner = folder.relative_to(step_dir).parts
    is_ema = folder.name == _EMA_DIR or any(map(_EMA.fullmatch, inner))
    role = role_in(inner) or role_in((step_dir.parent.name,))
    return Location(folder, step_dir, step, role, "ema" if is_ema else "model", form)


def sets_within(tree: Tree, step_dir: Path) -> list[Location]:
    """Return all sets of weights in a step, at any depth; of a role with shards, only these."""
    below = search(tree, step_dir)
    sets = [location_of(tree, folder, step_dir, form) for folder, form in below.sets]
    for steps in below.runs.values():
        sets += sets_at(tree, steps[0][1], sharded=True)
    sharded = {at.role for at in sets if at.format.sharded}
    sets = [at for at in sets if at.format.sharded or at.role not in sharded]
    return sets or [at for folder in below.folders for at in _file_in(tree, folder)]


def is_checkpoint_file(tree: Tree, path: Path) -> bool:
    """Return whether a path is a file of weights that is not a part of a larger set."""
    if not tree.is_file(path) or path.suffix.lower() not in (*WEIGHT_SUFFIXES, ""):
        return False
    if path.suffix and is_state(path.name.partition(".")[0]):
        return False
    return not any(form.claims(tree, path) for form in formats())


def single_file(tree: Tree, file: Path) -> Location:
    """Return the location of a file that is a checkpoint of its own."""
    from unshard.read.whole_files.reader import WHOLE_FILES

    location = location_of(tree, file.parent, file.parent, WHOLE_FILES)
    own = step_of_file(file)
    return replace(location, step=location.step if own is None else own, weights="model", file=file)


def _file_in(tree: Tree, folder: Path) -> list[Location]:
    """Return the one file of a folder that is a checkpoint by its name, if there is one."""
    named = (path for name, path in tree.inside(folder).items() if _ALONE.fullmatch(name))
    files = [path for path in named if is_checkpoint_file(tree, path)]
    return [single_file(tree, files[0])] if len(files) == 1 else []


def numbered_files(tree: Tree, run: Path, step: int | None) -> list[Location]:
    """Return the files of a run that are one step each, as MMEngine and Fabric write them."""
    files = [
        single_file(tree, path)
        for path in tree.inside(run).values()
        if step_of_file(path) is not None
        and path.suffix not in ("", _ARCHIVE)
        and is_checkpoint_file(tree, path)
    ]
    files = [at for at in files if step in (None, at.step)]
    return sorted(files, key=lambda at: (at.step or 0, version_of(at.place.name)), reverse=True)


def sibling_weights(location: Location, weights: Weights) -> Location | None:
    """Return the EMA or the regular weights of a location's step directory, if it has them."""
    folder = location.step_dir / (_EMA_DIR if weights == "ema" else _MODEL_DIR)
    form = format_in(Tree(), folder, sharded=True)
    if form is None:
        return None
    return replace(location, weights_dir=folder, weights=weights, format=form)
