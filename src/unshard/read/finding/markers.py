"""Markers that trainers leave next to their weights: the latest step, and the writer.

A marker of the latest step counts only if it agrees with the tree: an earlier run may have left it,
or its step may have been removed. If the tree does not show the writer, the format itself may; else
it is "unknown".

Sources: the trainers in `tests/trainers`.
"""

import fnmatch
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from unshard.read.format import Location
from unshard.read.step_names import step_of, without_converted
from unshard.read.tree import LONGEST_TEXT, Tree

MARKERS = (
    "latest_checkpointed_iteration.txt",  # verl, Megatron
    "latest_ckpt_global_step.txt",  # SkyRL
    "latest",  # DeepSpeed
    "latest.txt",  # nanotron
    "latest_checkpoint.json",
    "latest_checkpoint.txt",  # cosmos-predict
    "last_checkpoint",  # MMEngine
)
"""The names of files that contain the latest step."""
_LINKS = ("last", "latest", "hf-latest")  # lerobot, xtuner
_TAG = "latest"  # DeepSpeed
_TRAINER_STATE = "trainer_state.json"
_UPWARD = 3
_FIRST, _SECOND = "pytorch_model", re.compile(r"pytorch_model_\d+")


class Marker(NamedTuple):
    """A file or a link of a run for its latest step; the step is None if it has no number."""

    name: str
    step: int | None


def find_markers(run: Path) -> list[Marker]:
    """Return the markers in a run's directory."""
    tree, markers = Tree(), list[Marker]()
    for path in (run / name for name in dict.fromkeys((*MARKERS, *_LINKS))):
        with suppress(OSError):  # unreadable, or just removed
            if path.is_symlink() and path.name in _LINKS:
                step = step_of(path.readlink().name)
                markers += [] if step is None else [Marker(path.name, step)]
            elif (text := tree.text(path)) is not None:
                markers.append(Marker(path.name, _step_in(text.strip())))
    return markers


def stated_tag(place: Path, tree: Tree | None = None) -> str | None:
    """Return DeepSpeed's tag of a place: the name of the folder in its file `latest`."""
    tree, path = tree or Tree(), place / _TAG
    tag = (tree.text(path) or "").strip()
    is_name = tag and "\ufffd" not in tag and Path(tag).name == tag
    return tag if is_name and tree.size(path) <= LONGEST_TEXT else None


def step_of_tag(tree: Tree, place: Path) -> Path | None:
    """Return the folder of the tag that is the checkpoint of a place; None if it may be several.

    A trainer's step (`checkpoint-10`) has one tag, whatever its name; a run has one per step. So a
    tag whose name has a step is the place's own only if the place is a step, too. Without `latest`,
    a trainer's step has the tag of the highest step: training resumes from its weights, not from
    those of a whole model next to it.
    """
    tag = stated_tag(place, tree)
    step = step_of(place.name)
    is_trainers = step is not None and tree.is_file(place / _TRAINER_STATE)
    if tag is None or not tree.is_dir(place / tag):
        return _highest_tag(tree, place) if is_trainers else None
    if _SECOND.fullmatch(tag) and tree.is_dir(place / _FIRST):
        return None  # accelerate's `latest` has the tag of the last model it saved, of several
    if is_trainers or step_of(tag) is None:
        return place / tag
    tags = without_converted(path for path in tree.inside(place).values() if tree.is_dir(path))
    is_only = sum(step_of(path.name) is not None for path in tags) == 1
    return place / tag if step is not None and is_only else None


def _highest_tag(tree: Tree, place: Path) -> Path | None:
    """Return the folder of DeepSpeed's files with the highest step; None if several have it."""
    inside = tree.inside(place).values()
    folders = without_converted(p for p in inside if tree.is_dir(p) and _is_zero(tree, p))
    steps = [-1 if (step := step_of(folder.name)) is None else step for folder in folders]
    highest = max(steps, default=-1)
    return folders[steps.index(highest)] if steps.count(highest) == 1 else None


def _is_zero(tree: Tree, folder: Path) -> bool:
    from unshard.read.zero.files import is_zero_file

    with suppress(OSError):  # closed
        return any(map(is_zero_file, tree.inside(folder)))
    return False


def _step_in(text: str) -> int | None:
    """Return the step in a text, or in the path in it; None if there may be several."""
    name = text.rpartition("/")[2]  # MMEngine writes the whole path of a file
    if not name.isascii():
        return None
    numbers = re.findall(r"\d+", name)
    return int(numbers[0]) if len(numbers) == 1 else step_of(Path(name).stem)


def run_of(location: Location) -> Path:
    """Return the directory in which a trainer puts its markers, next to the steps."""
    is_file = location.place != location.weights_dir
    return location.weights_dir if is_file else location.step_dir.parent


def notes_of(location: Location, *, is_chosen: bool) -> list[str]:
    """Return notes about markers that disagree with the step or tag of a location.

    If the user chose the step (`is_chosen`), those of the run do not matter.
    """
    tree, run, place, tag = Tree(), run_of(location), location.step_dir, location.weights_dir
    is_trainers = step_of(place.name) is not None and tree.is_file(place / _TRAINER_STATE)
    notes = []
    if is_trainers and tag.parent == place and _is_zero(tree, tag):
        latest = stated_tag(place, tree)
        why = "is missing" if latest is None else f"has {latest}, which does not exist"
        if latest != tag.name:
            notes = [f"{place / _TAG} {why}: {tag.name}, the highest step, was taken"]
    return notes + [
        f"{run / name} names step {step}, but step {location.step} was taken: the highest there "
        "that is complete"
        for name, step in ([] if is_chosen else find_markers(run))
        if step is not None and location.step is not None and step != location.step
    ]


class _Signs(NamedTuple):
    """The signs of a writer in the tree around the weights."""

    writer: str
    files: tuple[str, ...] = ()  # FOLDERS/PATTERNS: one of these folders has one of these files
    inner: str = ".*"  # the folders between the step and the weights
    step: str = ".*"
    also: Callable[[Location], bool] = lambda _: True


# The first match counts; each needs more than a name that another trainer might use.
_WRITERS = (
    _Signs("lerobot", ("weights|above/train_config.json",), r"(.*/)?pretrained_model(/.*)?"),
    _Signs("NeMo-RL", ("step/training_info.json",)),
    _Signs(
        "SkyRL",
        ("weights/model_world_size_*", "step|run/trainer_state.pt|latest_ckpt_global_step.txt"),
        "policy|critic",
    ),
    _Signs("LLaMA-Factory", ("step/CHECKPOINT_COMPLETE",)),
    _Signs("LLaMA-Factory", ("step/trainer_state.json", "step|run/trainer_log.jsonl")),
    _Signs("ms-swift", ("step/args.json", "step/trainer_state.json")),
    _Signs("VeOmni", ("weights/.metadata", "step/extra_state"), step="global_.*"),
    _Signs("OLMo-core", ("step/model_and_optim", "step/.metadata.json")),
    _Signs("ROLL", ("weights/.metadata",), "(.*/)?dcp", also=lambda at: at.role is not None),
    _Signs(
        "xtuner",
        inner="weights",
        also=lambda at: any((p / ".xtuner").is_file() for p in at.step_dir.parents[:_UPWARD]),
    ),
    _Signs("finetrainers", step="finetrainers_step_.*"),
    _Signs("AReaL", step=r"epoch\d+epochstep\d+globalstep\d+"),
    _Signs("torchtitan", inner="sharded", step=r"step-\d+"),
    _Signs("torchtune", ("run/recipe_state",)),
    _Signs("torchtune", step=r"dist_epoch_\d+"),
    _Signs("NeMo AutoModel", ("weights/.hf_metadata",), step="epoch_.*_step_.*"),
    _Signs("fairseq2", ("step/model", "step/trainer"), "hg"),
    _Signs("litgpt", ("weights/lit_model.pth",)),
    _Signs(
        "MMEngine",
        ("weights/last_checkpoint",),
        also=lambda at: at.file is not None and at.file.suffix == ".pth",
    ),
    _Signs("lingua", ("weights/.metadata", "step/params.json", "step/train_state_00000.json")),
)


def writer_by_tree(location: Location) -> str | None:
    """Return the trainer that wrote the weights, by the tree around them, or None.

    Raises:
        FileNotFoundError: the weights have just been removed.
    """
    weights, step = location.weights_dir, location.step_dir
    folders = {"weights": weights, "above": weights.parent, "step": step}
    folders |= {} if location.step is None else {"run": step.parent}
    inner = "/".join(weights.relative_to(step).parts)

    @cache
    def inside(where: str) -> list[str]:
        folder = folders.get(where)
        return [] if folder is None or not folder.is_dir() else [at.name for at in folder.iterdir()]

    def exists(sign: str) -> bool:
        where, _, names = sign.partition("/")
        patterns = names.split("|")
        return any(fnmatch.filter(inside(at), glob) for at in where.split("|") for glob in patterns)

    matching = (
        signs.writer
        for signs in _WRITERS
        if re.fullmatch(signs.inner, inner, re.DOTALL)
        and re.fullmatch(signs.step, step.name, re.DOTALL)
        and signs.also(location)
        and all(map(exists, signs.files))
    )
    return next(matching, None)
