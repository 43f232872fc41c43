"""The files that `save_pretrained` of transformers writes next to the weights, for the drop-ins."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from unshard.errors import ConversionError

if TYPE_CHECKING:
    from unshard.api.making import PlannedMerge
    from unshard.read.model_config import Fields

_GENERATION_CONFIG = "generation_config.json"

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_TEXT_CONFIGS = ("decoder", "generator", "text_config")
_SINCE_5 = {"output_attentions": False, "output_hidden_states": False, "use_cache": True}


class SavesItself(Protocol):
    """A config of transformers."""

    def save_pretrained(self, save_directory: str, /) -> object:
        """Write config.json into a directory."""


def as_transformers_saves(prepared: "PlannedMerge") -> "PlannedMerge":
    """Return the merge with the generation_config.json that `save_pretrained` writes.

    Raises:
        ConversionError: there is no config; the original tools fail, too.
    """
    if prepared.config is None:
        location = prepared.checkpoint.location
        folders = dict.fromkeys((location.weights_dir, location.step_dir))
        searched = " or ".join(f"{folder} or its huggingface/" for folder in folders)
        raise ConversionError(
            f"{location.place}: there is no config.json, without which the output is not a model",
            expected=f"config.json in {searched}",
            hint="give it with ⟦--config FILE|DIR⟧ or ⟦--base MODEL⟧",
        )
    text = generation_config(prepared.config.fields)
    if text is None or _GENERATION_CONFIG in prepared.checkpoint.companions.files:
        return prepared
    return replace(prepared, files={**prepared.files, _GENERATION_CONFIG: text})


def generation_config(config: "Fields") -> bytes | None:
    """Return `generation_config.json` as `save_pretrained` derives it from config.json.

    It has the ids of special tokens and, since transformers 5, the flags of a forward pass. None if
    no architecture of the config generates text.
    """
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    generates = any(isinstance(name, str) and name.endswith(_GENERATES) for name in names)
    if names and not generates:
        return None
    nested = (config.get(key) for key in _TEXT_CONFIGS)
    inner = next((value for value in nested if isinstance(value, dict)), {})
    version = str(config.get("transformers_version", ""))
    major = version.partition(".")[0]
    fields: dict[str, object] = {"_from_model_config": True, "transformers_version": version}
    defaults: dict[str, object] = dict.fromkeys(_TOKENS)
    if major.isdigit() and int(major) >= 5:
        defaults |= _SINCE_5
    for key, default in defaults.items():
        values = (config.get(key), inner.get(key), default)
        value = next((value for value in values if value is not None), None)
        if value is not None:
            fields[key] = value
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


@contextmanager
def as_file(config: SavesItself | str | Path | None) -> Iterator[Path | None]:
    """Yield a config of transformers as a file; a path or None is yielded unchanged."""
    if config is None or isinstance(config, str | Path):
        yield None if config is None else Path(config)
        return
    with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
        config.save_pretrained(scratch)
        yield Path(scratch) / "config.json"
