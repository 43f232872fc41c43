"""The training steps in the names of directories and files.

A name has a step if it ends in a number after a word that counts training (`global_step_100`,
`ckpt-step-100`, `epoch_2_step_300`, `ep1-ba100`), or if it is a number (`005000`). In-house names
(`save_100`) have one, too, but a sweep's folders look the same (`lr_3`), so they count only for
weights that only a training run writes.

Names that a search ignores are also here: training state, and our own folder in a run.

Sources: the trainers in `tests/trainers`.
"""

import re
from collections.abc import Iterable, Sequence
from math import gcd
from pathlib import Path

STATE_FOLDER = "_unshard"
"""The directory in a run that contains all our files: see `evaluate.run_folder`."""

UNIVERSAL = "_universal"
"""The suffix that DeepSpeed's `ds_to_universal` adds to the name of the step that it converts."""

_COUNTERS = "steps?|iter(?:ation)?|checkpoint|ckpt|epoch|save|snapshot|update|batch|round"
_STEPS = tuple(
    re.compile(pattern)
    for pattern in (
        r".*step=(\d+).*\.ckpt",  # Lightning
        r"ep\d+-ba(\d+)",  # Composer
        rf"(?:.*[^a-z])??(?:global|dist|epoch)?(?:{_COUNTERS})[-_=]?(\d+)(?:-ckpt|{UNIVERSAL})?",
        r"weight_v(\d+)(?:-fsdp)?",  # published by slime, miles and lmms-engine
        r"(\d{1,10})",  # lerobot, lingua, DINOv3; a longer number is a time
    )
)
_SYNC = "policy-sync-#"  # an older name of lmms-engine; `checkpoint-N` in the same run has priority
_LOOSE = re.compile(r"(?P<word>[A-Za-z][A-Za-z_-]*?)[-_](?P<step>\d+)")
_UNFINISHED = re.compile(
    r"(?:\.(?!lmms_weight_sync_ready)|te?mp[-_.]|old[-_]).*|.*\.(?:tmp|incomplete)"
)
# Words in names that have a training step's number, but are not a training step.
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
_VERSION = re.compile(r"-v(\d+)(?=\.|$)")  # Lightning's, if the name already existed
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
    """Return the run, the number of its last steps and the schedule in a path, or None.

    That is RUN@last=5 or RUN@last=5,schedule=cosine, unless a file of this name exists.
    """
    match = _AVERAGE.fullmatch(path.name)
    if match is None or path.exists():
        return None
    run = path.with_name(match[1]) if match[1] else path.parent
    return run, int(match[2]), match[3]


def step_of(name: str) -> int | None:
    """Return the training step in a directory's name."""
    if _UNFINISHED.fullmatch(name) or not _EXPORTED.isdisjoint(re.split(r"[^a-z]+", name.lower())):
        return None
    matches = (pattern.fullmatch(name) for pattern in _STEPS)
    return next((int(match[1]) for match in matches if match), None)


def step_of_file(path: Path) -> int | None:
    """Return the training step in the name of a file, with or without its suffix."""
    own = step_of(path.name)
    return step_of(path.stem) if own is None else own


def version_of(name: str) -> int:
    """Return the version in a name: of several saves of a step, the highest is the latest."""
    match = _VERSION.search(name)
    return int(match[1]) if match else 0


def holds_steps(name: str) -> bool:
    """Return whether trainers give this name to a run's folder of steps."""
    return _HOLDS_STEPS.fullmatch(name) is not None


def loose_step_of(name: str) -> int | None:
    """Return the possible step in a name of any other word and one number."""
    match = _LOOSE.fullmatch(name)
    if match is None or is_unfinished(name) or match["word"].lower() in _NO_COUNTERS:
        return None
    return int(match["step"])


def count_steps(numbers: Sequence[int | None]) -> bool:
    """Return whether numbers grow like those of saved steps (500, 1000), not a sweep's (1, 2).

    Trainers save at a fixed interval, so the numbers are multiples of a number that is not small.
    """
    steps = [number for number in numbers if number is not None]
    is_whole = len(steps) == len(numbers)
    return is_whole and max(steps) >= _MANY_STEPS and gcd(*steps) >= _SAVED_EVERY


def family(name: str) -> str:
    """Return the common part of the names of one run's steps: the name without its numbers."""
    return re.sub(r"\d+", "#", _VERSION.sub("", name.removesuffix(UNIVERSAL)))


def is_sure(name: str) -> bool:
    """Return whether a name is that of a step, not of one run of several."""
    return step_of(name) is not None or family(name) == _SYNC


def without_converted(folders: Iterable[Path]) -> list[Path]:
    """Return folders without the universal ones that were converted from others."""
    every = list(folders)
    converted = {path.with_name(path.name + UNIVERSAL) for path in every}
    return [path for path in every if path not in converted]


def step_of_parents(place: Path, *, sharded: bool) -> tuple[Path, int] | None:
    """Return the nearest directory at or above a place whose name has a step, and the step.

    A bare number counts only in places of trainers: below `checkpoints`, or padded with zeros.
    """
    for at in (place, *list(place.parents)[:_UPWARD]):
        step = step_of(at.name)
        is_bare = at.name.isdecimal()
        if step is not None and is_bare:
            is_padded = at.name[0] == "0" and len(at.name) > _UPWARD
            step = step if is_padded or holds_steps(at.parent.name) else None
        if step is not None:
            return at, step
    for at in (place, place.parent) if sharded else ():
        if (step := loose_step_of(at.name)) is not None:
            return at, step
    return None
