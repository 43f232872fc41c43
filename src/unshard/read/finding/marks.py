"""Completion marks, by which trainers show whether a checkpoint is complete.

The files of the weights themselves are checked by their format (`Format.missing`).
"""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from time import time_ns

from unshard.containers.json_file import JsonFields, json_object
from unshard.errors import CorruptError
from unshard.read.finding.markers import find_markers, run_of, stated_tag
from unshard.read.finding.versions import Stamps, stamps_of
from unshard.read.format import Location
from unshard.read.rank_files.reader import missing_rank, ranks_in
from unshard.read.step_names import step_of
from unshard.read.whole_files.names import DELTA
from unshard.stores.remote_path import RemotePath

_LMMS_ENGINE = ("pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0")
_LATEST = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt", "last")
_COMPLETE = ("CHECKPOINT_COMPLETE", "COMPLETED", "ok")  # LLaMA-Factory, open-instruct, Fast-LLM
_MOST_OTHERS = 4  # steps of the run that are searched for such a file
_OLMO = ".metadata.json"
_TRAINER_STATE = "trainer_state.json"
_CONTENTS = "ckpt_contents.json"
_LAST = (
    *(".metadata", "metadata.json", "latest", _TRAINER_STATE, _OLMO, _CONTENTS, "meta.pt"),
    *_COMPLETE,
)
_COPIED_NS = 600 * 10**9  # a save takes less: older files are a copy, with times in any order
_AUTOMODEL = re.compile(r"epoch_\d+_step_\d+")


def _tag(location: Location) -> str | None:
    """DeepSpeed writes `latest` after all ranks have written their files of a tag.

    In a trainer's own step, other files are written after it.
    """
    if not location.format.tagged:
        return None
    tag = stated_tag(location.weights_dir.parent)
    latest, step = step_of(tag or ""), location.step
    if tag is None:
        return "latest is missing"
    if tag != location.weights_dir.name and (latest is None or step is None or latest < step):
        return f"latest has {tag}"
    return None if (location.step_dir / _TRAINER_STATE).is_file() else ""


def _latest_step(location: Location) -> str | None:
    step, run = location.step, location.step_dir.parent
    for latest in find_markers(run):
        if latest.name not in _LATEST or step is None:
            continue
        if latest.step is None or latest.step < step:
            return f"{latest.name} has {'nothing' if latest.step is None else latest.step}"
        if latest.step in _steps_of(run):  # else an earlier run left it
            return ""
    return None


def _complete_file(location: Location) -> str | None:
    step_dir, run = location.step_dir, location.step_dir.parent
    others = _steps_of(run).values()
    for name in _COMPLETE:
        if (step_dir / name).is_file():
            return ""
        if any((run / other / name).is_file() for other in islice(others, _MOST_OTHERS)):
            return f"{name} is missing"
    return None


def _trainer_state(location: Location) -> str | None:
    state = location.step_dir / _TRAINER_STATE
    if not state.is_file():
        return None
    with suppress(CorruptError):
        if JsonFields(state, json_object(state)).count("global_step") == location.step:
            return ""
    return f"{state.name} is of another step"


def _olmo(location: Location) -> str | None:
    is_olmo = location.weights_dir.name == "model_and_optim"
    is_begun = is_olmo and not (location.step_dir / _OLMO).is_file()
    return f"{_OLMO} is missing" if is_begun else None


def _contents(location: Location) -> str | None:
    """Verl's Megatron manager (0.9.0) lists a role's contents after all ranks have written them."""
    *_, above, name = location.weights_dir.parts
    is_listed = above == "model" and name in ("dist_ckpt", "huggingface")
    has_list = (location.weights_dir.parent.parent / _CONTENTS).is_file()
    return f"{_CONTENTS} is missing" if is_listed and not has_list else None


def _automodel(location: Location) -> str | None:
    """NeMo AutoModel removes `.incomplete` last; up to 0.5.0 config.yaml is its last file."""
    step = location.step_dir
    if not _AUTOMODEL.fullmatch(step.name):
        return None
    is_begun = (step / "losses.json").is_file() and not (step / "config.yaml").is_file()
    why = "config.yaml is missing" if is_begun else None
    return "it has .incomplete" if (step / ".incomplete").exists() else why


def unfinished_lmms(location: Location) -> str | None:
    """Return the missing file among those that lmms-engine writes after the weights."""
    folder, loader = location.weights_dir, location.step_dir / "dataloader_state"
    if (folder / DELTA).is_file():
        return "it is a delta, not a model"
    worlds = ranks_in(folder)
    if worlds and loader.is_dir():
        loaders = ranks_in(loader) or {world: set() for world in worlds}
        if why := missing_rank(loader, loaders):
            return why
    is_lmms = bool(worlds) and folder.name in _LMMS_ENGINE
    is_begun = is_lmms and not (location.step_dir / "config.json").is_file()
    return "config.json is missing" if is_begun else None  # lmms-engine writes it last


def half_saved(location: Location, former: Stamps) -> str | None:
    """Return a sign that a step on a disk is being saved again, or removed; None without any.

    `former` are its stamps when it was last complete, if it was. A file that has not changed since
    then belongs to another save than the changed files, unless a mark is as new as these: then it
    is left over from a save by more ranks. Without `former`, weights both older and newer than the
    last mark are a sign.
    """
    now = {} if isinstance(location.path, RemotePath) else stamps_of(location)
    unchanged = sorted(name for name, stamp in now.items() if former.get(name) == stamp)
    if not now or now == former:
        return None
    if len(unchanged) == len(now):
        return f"{min(former.keys() - now.keys())} was removed"
    times = [written for _, written in now.values()]
    marks = _times_of_marks(location)
    last = max(marks, key=lambda path: marks[path], default=None)
    if last is not None and marks[last] >= max(times):
        return None
    if unchanged:
        return f"{unchanged[0]} is as it was before the step was saved again"
    is_copied = abs(time_ns() - max(times)) > _COPIED_NS
    if last is None or is_copied or (not former and marks[last] < min(times)):
        return None
    return f"its weights are newer than {last.name}"


def _times_of_marks(location: Location) -> dict[Path, int]:
    """Return the mtime of each mark of a step, or of its run, in ns."""
    run, times = run_of(location), dict[Path, int]()
    inside = [at / name for at in (location.weights_dir, location.step_dir) for name in _LAST]
    for path in (*inside, *(run / name for name in ("latest", *_LATEST))):
        with suppress(OSError):  # just replaced
            times |= {path: path.stat().st_mtime_ns} if path.is_file() else {}
    return times


MARKS: tuple[Callable[[Location], str | None], ...] = (
    _tag,
    _contents,
    _automodel,
    _latest_step,  # verl, SkyRL, lerobot
    _complete_file,
    _trainer_state,  # transformers
    _olmo,
)
"""Each returns why a checkpoint is not complete, "" if it is; None if it cannot tell.

The first that can tell decides.
"""


def _steps_of(run: Path) -> dict[int, str]:
    """Return the names of a run's steps by number; cached by mtime, which stores do not have."""
    if isinstance(run, RemotePath):
        return _list_steps.__wrapped__(run, 0)
    return _list_steps(run, run.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _list_steps(run: Path, changed: int) -> dict[int, str]:
    """List a run's directory; `changed` is its mtime in ns, as a key of the cache."""
    del changed
    steps = {step_of(path.name): path.name for path in run.iterdir()}
    return {step: name for step, name in steps.items() if step is not None}
