"""Write the files beside the weights: config.json, adjusted; everything else, as it is."""

import json
import shutil
from pathlib import Path

from unshard.convert.precision import CASTS, Fields
from unshard.read.beside.companions import read_config
from unshard.tensors.catalog import Companions

__all__ = ["load_config", "output_config", "write_companions"]

_DTYPE_KEYS = ("dtype", "torch_dtype")


def load_config(companions: Companions) -> Fields | None:
    """Return the fields of config.json; None without one.

    Raises:
        CorruptError: it is not a config; see `read_config`.
    """
    if companions.config is None:
        return None
    return read_config(companions.config)


def output_config(config: Fields, written_dtype: str | None) -> Fields:
    """Return a config that tells the truth about the output.

    The dtype keys, also of nested configs that have one, name what was written; `architectures`
    loses the `FSDP` that FSDP2 puts before class names.

    Args:
        config: the training run's config.
        written_dtype: dtype of the weights; None leaves the keys alone.
    """
    fields = dict(config)
    architectures = fields.get("architectures")
    if isinstance(architectures, list):
        fields["architectures"] = [
            name.removeprefix("FSDP") if isinstance(name, str) else name for name in architectures
        ]
    if written_dtype is None:
        return fields
    if not any(key in fields for key in _DTYPE_KEYS):
        fields[_dtype_key(fields)] = written_dtype
    return _with_dtype(fields, written_dtype)


def _with_dtype(fields: Fields, written: str) -> Fields:
    changed = dict(fields)
    for key, value in fields.items():
        if key in _DTYPE_KEYS and (value is None or str(value).removeprefix("torch.") in CASTS):
            changed[key] = written
        elif key.endswith("_config") and isinstance(value, dict) and key != "quantization_config":
            changed[key] = _with_dtype(value, written)
    return changed


def _dtype_key(fields: Fields) -> str:
    """Return the key of that version of transformers: 5 writes `dtype`, 4 `torch_dtype`."""
    major = str(fields.get("transformers_version", "")).partition(".")[0]
    return "dtype" if major.isdigit() and int(major) >= 5 else "torch_dtype"


def write_companions(companions: Companions, config: Fields | None, directory: Path) -> list[str]:
    """Write config.json and copy all other companions; return the names written."""
    names = []
    if config is not None:
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (directory / "config.json").write_text(text, encoding="utf-8")
        names.append("config.json")
    for name, source in companions.files.items():
        target = directory / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
        names.append(name)
    return names
