"""Write the files next to the weights: config, tokenizer and the like, training state."""

import json
import shutil
from math import isfinite
from pathlib import Path

from unshard.containers.torch_files.writer import Plain, SavedTensor, write_torch_file
from unshard.read.beside.companions import Companions
from unshard.read.beside.model_config import ModelConfig
from unshard.read.training_state.reader import TrainingState

__all__ = [
    "EXTRA_STATE_NAME",
    "SCHEDULER_NAME",
    "state_file_names",
    "write_companions",
    "write_training_state",
]

EXTRA_STATE_NAME = "extra_state_merged.pt"
SCHEDULER_NAME = "lr_scheduler_state.json"


def write_companions(companions: Companions, config: ModelConfig | None, directory: Path) -> None:
    """Write config.json and copy all other companions."""
    if config is not None:
        text = json.dumps(config.fields, indent=2, ensure_ascii=False) + "\n"
        (directory / "config.json").write_text(text, encoding="utf-8")
    for name, source in companions.files.items():
        target = directory / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)


def state_file_names(state: TrainingState) -> tuple[str, ...]:
    """Return the names of the files that a training state takes."""
    if not state.values:
        return ()
    return (EXTRA_STATE_NAME,) if _scheduler(state) is None else (EXTRA_STATE_NAME, SCHEDULER_NAME)


def write_training_state(state: TrainingState, directory: Path) -> None:
    """Write `extra_state_merged.pt` and, for people, `lr_scheduler_state.json`."""
    names = state_file_names(state)
    if EXTRA_STATE_NAME in names:
        write_torch_file(directory / EXTRA_STATE_NAME, dict(state.values))
    if SCHEDULER_NAME in names:
        text = json.dumps(_json(_scheduler(state)), indent=2, allow_nan=False)
        (directory / SCHEDULER_NAME).write_text(text + "\n", encoding="utf-8")


def _scheduler(state: TrainingState) -> Plain:
    """Return the state of the scheduler, or of all where there are several; None without one."""
    return state.values.get("lr_schedulers", state.values.get("lr_scheduler"))


def _json(value: Plain) -> Plain:
    """Return a value as JSON; as text what JSON does not have: inf, bytes, tensors, other keys."""
    match value:
        case None | bool() | int() | str():
            return value
        case float() if isfinite(value):
            return value
        case dict():
            return {str(key): _json(part) for key, part in value.items()}
        case list() | tuple():
            return [_json(part) for part in value]
        case SavedTensor():
            return f"a tensor of {value.dtype}, shape {list(value.shape)}"
    return str(sorted(value, key=str) if isinstance(value, set) else value)
