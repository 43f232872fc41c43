"""Which training step the name of a directory, or of a file, states.

A name states a step if it ends in a number after a word that counts training (`global_step_100`,
`ckpt-step-100`, `epoch_2_step_300`, `ep1-ba100`), or if it is a number (`005000`). In-house names
(`save_100`) state one, too, but a sweep's folders look the same (`lr_3`), so they count only for
weights that a training run alone writes.

What a search ignores has its names here, too: training state, and our own folder in a run.

Sources: the trainers in `tests/trainers`.
"""

import re
from collections.abc import Iterable, Sequence
from math import gcd
from pathlib import Path

STATE_FOLDER = "_unshard"
"""The directory in a run that contains all our files: see `evaluate.run_folder`."""

UNIVERSAL = "_universal"
"""What DeepSpeed's `ds_to_universal` adds to the name of the step that it converts."""

_COUNTERS = "steps?|iter(?:ation)?|checkpoint|ckpt|epoch|save|snapshot|update|batch|round"
_STEPS = tuple(
    re.compile(pattern)
    for pattern in (
        r".*step=(\d+).*\.ckpt",  # Lightning
        r"ep\d+-ba(\d+)",  # Composer
        rf"(?:.*[^a-z])??(?:global|dist|epoch)?(?:{_COUNTERS})[-_=]?(\d+)(?:-ckpt|{UNIVERSAL})?",
        r"weight_v(\d+)(?:-fsdp)?",  # what slime, miles and lmms-engine publish
        r"(\d{1,10})",  # lerobot, lingua, DINOv3; more digits are a time
    )
)
_SYNC = "policy-sync-#"  # lmms-engine's, before; `checkpoint-N` in the same run is meant instead
_LOOSE = re.compile(r"(?P<word>[A-Za-z][A-Za-z_-]*?)[-_](?P<step>\d+)")
_UNFINISHED = re.compile(
    r"(?:\.(?!lmms_weight_sync_ready)|te?mp[-_.]|old[-_]).*|.*\.(?:tmp|incomplete)"
)
# What is not a step of training although it has the number of one.
_EXPORTED = frozenset(
    """
    hf eval evals evaluation merged merge export exported exports rollout rollouts data dataset log
    logs result results best old tmp temp converted fused consolidated samples generated ema
    """.split()
)
_NO_COUNTERS = frozenset(
    """
    rank node gpu host worker process part shard stage run exp experiment seed trial fold version v
    lr bs job task group split pp tp dp cp sdp replica ft-replica model fsdp pytorch_model_fsdp
    pytorch_ema_model_fsdp optimizer optim scheduler sampler layer phase mp_rank random_states
    ctx context seq len length dim hidden width depth size tokens
    """.split()
)
_STATE = re.compile(
    r"(?:(?:lr_|train_)?(?:optim(?:izer)?s?|scheduler|sampler|scaler|data(?:loader)?|rng|random"
    r"|extra|trainer|training|client)(?:_states?|_args)?)(?:_\d+|_merged)?"
)
_VERSION = re.compile(r"-v(\d+)(?=\.|$)")  # Lightning's, of a name that was there already
_AVERAGE = re.compile(r"(.*)@last=(\d+)(?:,schedule=([\w.:-]+))?")
_HOLDS_STEPS = re.compile(r"(?:.*[-_])?(?:checkpoints?|ckpts?)", re.IGNORECASE)
_UPWARD = 4
_MANY_STEPS, _SAVED_EVERY = 100, 10


def is_state(name: str) -> bool:
    """Return whether a folder of this name, or a file without its suffix, is training state."""
    return _STATE.fullmatch(name) is not None


def is_unfinished(name: str) -> bool:
    """Return whether a trainer gives a directory this name until it is complete, or replaced."""
    return _UNFINISHED.fullmatch(name) is not None


def named_average(path: Path) -> tuple[Path, int, str | None] | None:
    """Return the run, the number of its last steps and the schedule that a path names, or None.

    That is RUN@last=5 or RUN@last=5,schedule=cosine, unless there is a file of this name.
    """
    match = _AVERAGE.fullmatch(path.name)
    if match is None or path.exists():
        return None
    run = path.with_name(match[1]) if match[1] else path.parent
    return run, int(match[2]), match[3]


def step_of(name: str) -> int | None:
    """Return the training step that a directory's name states."""
    if _UNFINISHED.fullmatch(name) or not _EXPORTED.isdisjoint(re.split(r"[^a-z]+", name.lower())):
        return None
    matches = (pattern.fullmatch(name) for pattern in _STEPS)
    return next((int(match[1]) for match in matches if match), None)


def step_of_file(path: Path) -> int | None:
    """Return the training step that the name of a file states, with or without its suffix."""
    own = step_of(path.name)
    return step_of(path.stem) if own is None else own


def version_of(name: str) -> int:
    """Return which save of its step a name states: of several, the highest is the latest."""
    match = _VERSION.search(name)
    return int(match[1]) if match else 0


def holds_steps(name: str) -> bool:
    """Return whether trainers call a folder of a run that has its steps by this name."""
    return _HOLDS_STEPS.fullmatch(name) is not None


def loose_step_of(name: str) -> int | None:
    """Return the step that a name of any other word and one number may state."""
    match = _LOOSE.fullmatch(name)
    if match is None or is_unfinished(name) or match["word"].lower() in _NO_COUNTERS:
        return None
    return int(match["step"])


def count_steps(numbers: Sequence[int | None]) -> bool:
    """Return whether numbers grow as those of saved steps do (500, 1000), not as a sweep's (1, 2).

    Trainers save every so many steps, so the numbers are multiples of one that is not small.
    """
    known = [number for number in numbers if number is not None]
    is_whole = len(known) == len(numbers)
    return is_whole and max(known) >= _MANY_STEPS and gcd(*known) >= _SAVED_EVERY


def family(name: str) -> str:
    """Return what the names of one run's steps have in common: the name without its numbers."""
    return re.sub(r"\d+", "#", _VERSION.sub("", name.removesuffix(UNIVERSAL)))


def is_sure(name: str) -> bool:
    """Return whether a name states a step, not one run of several."""
    return step_of(name) is not None or family(name) == _SYNC


def without_converted(folders: Iterable[Path]) -> list[Path]:
    """Return folders but for the universal ones that were made of others."""
    every = list(folders)
    made = {one.with_name(one.name + UNIVERSAL) for one in every}
    return [one for one in every if one not in made]


def step_of_parents(place: Path, *, sharded: bool) -> tuple[Path, int] | None:
    """Return the nearest directory at or above a place whose name states a step, and the step.

    A bare number counts only where a trainer puts one: below `checkpoints`, or padded with zeros.
    """
    for at in (place, *list(place.parents)[:_UPWARD]):
        step = step_of(at.name)
        is_bare = at.name.isdecimal()
        if step is not None and is_bare:
            is_meant = at.name[0] == "0" and len(at.name) > _UPWARD
            step = step if is_meant or holds_steps(at.parent.name) else None
        if step is not None:
            return at, step
    for at in (place, place.parent) if sharded else ():
        if (step := loose_step_of(at.name)) is not None:
            return at, step
    return None
