"""The files next to the weights: config, tokenizer and the like, training state, adapter config."""

import json
import re
import shutil
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unshard.containers.file_states import check_regular
from unshard.containers.torch_files.writer import Plain, SavedTensor, write_torch_file
from unshard.convert.lora.names import Split
from unshard.errors import OutputError
from unshard.read.beside.adapter_config import AdapterConfig
from unshard.read.beside.companions import Companions
from unshard.read.model_config import ModelConfig
from unshard.read.training_state.reader import TrainingState
from unshard.tensors.dtypes import DTypeKind, numpy_dtype

if TYPE_CHECKING:
    from unshard.read.base import Base
    from unshard.read.optimizer_state import OptimizerState

ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"
PIPELINE_ADAPTER = "pytorch_lora_weights.safetensors"
"""The file from which pipelines of diffusers load an adapter."""
EXTRA_STATE_NAME = "extra_state_merged.pt"
SCHEDULER_NAME = "lr_scheduler_state.json"
OPTIMIZER_NAME = "optimizer.json"
_OPTIMIZER = re.compile(r"optimizer(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

_PLAIN: Mapping[str, object] = {
    "auto_mapping": None,
    "bias": "none",
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "peft_type": "LORA",
    "use_dora": False,
    "use_rslora": False,
}


def companion_files(companions: Companions, config: ModelConfig | None) -> dict[str, bytes | Path]:
    """Return the content of config.json and the paths of all other companions, by name."""
    files: dict[str, bytes | Path] = {}
    if config is not None:
        text = json.dumps(config.fields, indent=2, ensure_ascii=False) + "\n"
        files[f"{companions.folder}config.json"] = text.encode()
    return {**files, **companions.files}


def write_files(files: Mapping[str, bytes | Path], directory: Path) -> None:
    """Write new files into a directory, by name: bytes, or a file to copy.

    Raises:
        OutputError: a file of that name exists, perhaps in other letter case.
    """
    for name, source in files.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            copy = target.open("xb")
        except FileExistsError as error:
            existing = {path.name.casefold(): path.name for path in target.parent.iterdir()}
            other = existing.get(target.name.casefold(), "another")
            raise OutputError(
                f"{target}: is the same file as {other} there",
                found="a file system that ignores the case of names",
                hint="write to another file system, or rename one of them in the checkpoint",
            ) from error
        with copy:
            if isinstance(source, bytes):
                copy.write(source)
            else:
                check_regular(source)
                with source.open("rb") as file:
                    shutil.copyfileobj(file, copy)


def is_state_file(name: str) -> bool:
    """Return whether a merge writes training state to a file of this name."""
    names = (EXTRA_STATE_NAME, SCHEDULER_NAME, OPTIMIZER_NAME)
    return name in names or _OPTIMIZER.fullmatch(name) is not None


def state_file_names(state: TrainingState) -> tuple[str, ...]:
    """Return the names of the files of a training state."""
    if not state.values:
        return ()
    return (EXTRA_STATE_NAME,) if _scheduler(state) is None else (EXTRA_STATE_NAME, SCHEDULER_NAME)


def write_training_state(state: TrainingState, directory: Path) -> None:
    """Write `extra_state_merged.pt` and, in readable form, `lr_scheduler_state.json`."""
    names = state_file_names(state)
    if EXTRA_STATE_NAME in names:
        write_torch_file(directory / EXTRA_STATE_NAME, dict(state.values))
    if SCHEDULER_NAME in names:
        text = json.dumps(plain_json(_scheduler(state)), indent=2, allow_nan=False)
        (directory / SCHEDULER_NAME).write_text(text + "\n", encoding="utf-8")


def _scheduler(state: TrainingState) -> Plain:
    """Return the state of the scheduler or schedulers; None if there is none."""
    return state.values.get("lr_schedulers", state.values.get("lr_scheduler"))


def optimizer_fields(state: "OptimizerState") -> dict[str, Plain]:
    """Return the JSON fields of an optimizer's state, without its tensors.

    `step` applies to all parameters; if their steps differ, it is null and `steps` lists them.
    """
    steps = {*state.steps.values()}
    step: dict[str, Plain] = {"step": min(steps, default=None)}
    if len(steps) > 1:
        step = {"step": None, "steps": plain_json(dict(state.steps))}
    values = {
        name: plain_json({key: value for key, value in fields.items() if key != "step"})
        for name, fields in state.values.items()
    }
    groups = [{**group.values, "params": [*group.params]} for group in state.groups]
    return {
        **step,
        "param_groups": plain_json(groups),
        "values": {name: fields for name, fields in values.items() if fields},
        "names": state.names,
    }


def optimizer_json(state: "OptimizerState") -> bytes:
    """Return `optimizer.json`."""
    return (json.dumps(optimizer_fields(state), indent=2, allow_nan=False) + "\n").encode()


def plain_json(value: Plain) -> Plain:  # noqa: PLR0911 (a case each)
    """Return a value as JSON; inf, bytes, tensors and keys that are not strings become text."""
    match value:
        case SavedTensor(shape=(), source=bytes() as data) if (
            value.dtype.kind is not DTypeKind.COMPLEX
        ):
            number: Plain = np.frombuffer(data, numpy_dtype(value.dtype))[0].item()
            return plain_json(number)
        case None | bool() | int() | str():
            return value
        case float() if isfinite(value):
            return value
        case dict():
            return {str(key): plain_json(part) for key, part in value.items()}
        case list() | tuple():
            return [plain_json(part) for part in value]
        case SavedTensor():
            return f"a tensor of {value.dtype}, shape {list(value.shape)}"
    return str(sorted(value, key=str) if isinstance(value, set) else value)


def adapter_config_json(
    split: Split,
    config: AdapterConfig | None,
    alpha: float | None,
    model_config: Mapping[str, object] | None,
    *,
    base: "Base | None" = None,
) -> bytes:
    """Return a complete adapter_config.json, which PEFT needs to load an adapter.

    Fields of the run's own file stay; missing fields follow from the tensors, and origin and task
    perhaps from the model's config. The user's alpha and base override both.

    Raises:
        UsageError: the user's alpha is not a positive number.
        ConversionError: alpha or the adapter's target modules are not known.
    """
    from unshard.convert.lora.files import completed
    from unshard.convert.lora.fuse import known_alpha

    config = config or AdapterConfig()
    lora_alpha = known_alpha(config, alpha)
    config = completed(split, config, () if base is None else base.files)
    saved = config.fields if "peft_type" in config.fields else {}
    targets, task = config.target_modules or (), _task(config, model_config)
    fields: dict[str, object] = {
        **_PLAIN,
        **saved,
        "alpha_pattern": dict(config.alpha_pattern),
        "auto_mapping": saved.get("auto_mapping") or _class(model_config, base, task),
        "base_model_name_or_path": _origin(config, model_config, base),
        "fan_in_fan_out": config.fan_in_fan_out,
        "inference_mode": True,
        "lora_alpha": int(lora_alpha) if lora_alpha.is_integer() else lora_alpha,
        "modules_to_save": list(config.modules_to_save) or None,
        "r": config.rank,
        "rank_pattern": dict(config.rank_pattern),
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "task_type": task,
    }
    if config.target_parameters:  # older versions of PEFT reject the field
        fields["target_parameters"] = list(config.target_parameters)
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def _origin(
    config: AdapterConfig, model_config: Mapping[str, object] | None, base: "Base | None"
) -> str | None:
    """Return the name or path of the model that was trained, if it is given or recorded."""
    if base is not None:
        path = Path(base.name)  # absolute, because the adapter is loaded from other directories
        return str(path.absolute()) if path.is_dir() else base.name
    if config.base_model_name_or_path:
        return config.base_model_name_or_path
    name = (model_config or {}).get("_name_or_path")
    return name if isinstance(name, str) and name else None


def _class(
    model_config: Mapping[str, object] | None, base: "Base | None", task: str | None
) -> dict[str, str] | None:
    """Return AutoPeftModel's class of the base model, which PEFT records if there is no task."""
    if base is None or task is not None:
        return None
    match model_config or {}:
        case {"architectures": [str(name)], **others} if "auto_map" not in others:
            return {"base_model_class": name, "parent_library": "transformers"}
    return None


def _task(config: AdapterConfig, model_config: Mapping[str, object] | None) -> str | None:
    """Return PEFT's name of the task; None unless it is recorded or the model is causal."""
    if config.task_type:
        return config.task_type
    classes = (model_config or {}).get("architectures")
    names = map(str, classes) if isinstance(classes, list) else ()
    return "CAUSAL_LM" if any(name.endswith("ForCausalLM") for name in names) else None
