"""What trainers leave next to their weights: which step is the latest, and who wrote them.

A marker of the latest step is believed only where it agrees with what is there: it may be left by
an earlier run, or name a step that was removed. What the tree does not show of the writer, the
format itself may: else it is "unknown".

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
"""The names of files that state the latest step."""
_LINKS = ("last", "latest", "hf-latest")  # lerobot, xtuner
_TAG = "latest"  # DeepSpeed
_TRAINER_STATE = "trainer_state.json"
_UPWARD = 3
_FIRST, _SECOND = "pytorch_model", re.compile(r"pytorch_model_\d+")


class Marker(NamedTuple):
    """A file or a link of a run that states its latest step; None for one without a number."""

    name: str
    step: int | None


def find_markers(run: Path) -> list[Marker]:
    """Return the markers in a run's directory."""
    tree, found = Tree(), list[Marker]()
    for path in (run / name for name in (*MARKERS, *(one for one in _LINKS if one not in MARKERS))):
        with suppress(OSError):  # unreadable, or just removed
            if path.is_symlink() and path.name in _LINKS:
                step = step_of(path.readlink().name)
                found += [] if step is None else [Marker(path.name, step)]
            elif (text := tree.text(path)) is not None:
                found.append(Marker(path.name, _stated(text.strip())))
    return found


def stated_tag(place: Path, tree: Tree | None = None) -> str | None:
    """Return the folder of a place that its file `latest` names: DeepSpeed's tag."""
    tree, path = tree or Tree(), place / _TAG
    tag = (tree.text(path) or "").strip()
    is_name = tag and "\ufffd" not in tag and Path(tag).name == tag
    return tag if is_name and tree.size(path) <= LONGEST_TEXT else None


def step_of_tag(tree: Tree, place: Path) -> Path | None:
    """Return the folder of the tag that is the checkpoint of a place; None if it may be several.

    A trainer's step (`checkpoint-10`) has one tag, whatever its name; a run has one per step. So a
    tag whose name states a step is the place's own only if that is a step, too. Where `latest` does
    not say which it is, a trainer's step has that of the highest step: its weights are what the
    training goes on from, and those of a whole model next to it are not.
    """
    tag = stated_tag(place, tree)
    step = step_of(place.name)
    is_trainers = step is not None and tree.is_file(place / _TRAINER_STATE)
    if tag is None or not tree.is_dir(place / tag):
        return _highest_tag(tree, place) if is_trainers else None
    if _SECOND.fullmatch(tag) and tree.is_dir(place / _FIRST):
        return None  # accelerate names the tag of each model, and the last one stays
    if is_trainers or step_of(tag) is None:
        return place / tag
    tags = without_converted(one for one in tree.inside(place).values() if tree.is_dir(one))
    is_only = sum(step_of(one.name) is not None for one in tags) == 1
    return place / tag if step is not None and is_only else None


def _highest_tag(tree: Tree, place: Path) -> Path | None:
    """Return the folder of DeepSpeed's files with the highest step; None if that is not one."""
    inside = tree.inside(place).values()
    folders = without_converted(one for one in inside if tree.is_dir(one) and _is_zero(tree, one))
    steps = [-1 if (step := step_of(one.name)) is None else step for one in folders]
    highest = max(steps, default=-1)
    return folders[steps.index(highest)] if steps.count(highest) == 1 else None


def _is_zero(tree: Tree, folder: Path) -> bool:
    from unshard.read.zero.files import is_zero_file

    with suppress(OSError):  # closed
        return any(map(is_zero_file, tree.inside(folder)))
    return False


def _stated(text: str) -> int | None:
    """Return the step that a text, or the path in it, states; None if it may be several."""
    name = text.rpartition("/")[2]  # MMEngine writes the whole path of a file
    if not name.isascii():
        return None
    numbers = re.findall(r"\d+", name)
    return int(numbers[0]) if len(numbers) == 1 else step_of(Path(name).stem)


def run_of(location: Location) -> Path:
    """Return the directory in which a trainer puts its markers: that of the steps."""
    is_file = location.place != location.weights_dir
    return location.weights_dir if is_file else location.step_dir.parent


def notes_of(location: Location, *, is_chosen: bool) -> list[str]:
    """Return, for the user, which markers name another step or tag than the one that was taken.

    If the step `is_chosen`, those of the run do not matter.
    """
    tree, run, place, tag = Tree(), run_of(location), location.step_dir, location.weights_dir
    is_trainers = step_of(place.name) is not None and tree.is_file(place / _TRAINER_STATE)
    notes = []
    if is_trainers and tag.parent == place and _is_zero(tree, tag):
        stated = stated_tag(place, tree)
        why = "is missing" if stated is None else f"names {stated}, which is not there"
        if stated != tag.name:
            notes = [f"{place / _TAG} {why}: {tag.name} was taken, the highest there"]
    return notes + [
        f"{run / name} names step {step}, but step {location.step} was taken: the highest there "
        "that is complete"
        for name, step in ([] if is_chosen else find_markers(run))
        if step is not None and location.step is not None and step != location.step
    ]


class _Signs(NamedTuple):
    """What shows a writer: what is in which folders, and how those of the weights are called."""

    writer: str
    there: tuple[str, ...] = ()  # FOLDERS/PATTERNS: in one of these folders, what fits one of these
    inner: str = ".*"  # the folders between the step and the weights
    step: str = ".*"
    also: Callable[[Location], bool] = lambda _: True


# The first that holds; each needs more than a name that another trainer might use.
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
        also=lambda at: any((one / ".xtuner").is_file() for one in at.step_dir.parents[:_UPWARD]),
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
    """Return the trainer that the tree around the weights shows, or None.

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

    def is_there(sign: str) -> bool:
        where, _, names = sign.partition("/")
        patterns = names.split("|")
        return any(fnmatch.filter(inside(at), one) for at in where.split("|") for one in patterns)

    return next(
        (
            one.writer
            for one in _WRITERS
            if re.fullmatch(one.inner, inner, re.DOTALL)
            and re.fullmatch(one.step, step.name, re.DOTALL)
            and one.also(location)
            and all(map(is_there, one.there))
        ),
        None,
    )
