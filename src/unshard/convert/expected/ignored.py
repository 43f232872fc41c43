"""Find tensors that a model's class in transformers ignores, so that training drops them."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from unshard.console import counted
from unshard.convert.outputs import Precision
from unshard.convert.quantised import dequantise, is_scale
from unshard.convert.recipes import Recipe, take
from unshard.fronts import Text
from unshard.read.model_config import ModelConfig
from unshard.tensors.dtypes import BY_NAME

if TYPE_CHECKING:
    from unshard.read.base import Base

Select = Callable[[Iterable[str]], Collection[str]]

BUFFERS = (
    r"(^|\.)rotary_(pos_)?emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$"
    r"|(^|\.)position_ids$|(^|\.)(attn|attention|crossattention)\.(masked_)?bias$"
)
MTP = r"(^|\.)mtp(_\w+)?\."
_MTP_LAYER = re.compile(r"(.*\blayers\.\d+\.)(eh_proj|[eh]norm)\.")
_COUNT = re.compile(r"(num_nextn_predict|num_mtp|mtp_num(_hidden)?)_layers")
_OF_OTHER_CLASSES = {  # classes, and tensors that they lack
    r"(?!.*(PreTraining|NextSentencePrediction)$)": r"^cls\.seq_relationship\.",
    r".*(MaskedLM|LMHeadModel|CausalLM|TokenClassification|QuestionAnswering)$": r"^\w+\.pooler\.",
}


def ignored(
    config: ModelConfig | None, written: Collection[str], names: Collection[str]
) -> set[str]:
    """Return the names that a config's class ignores, including MTP layers if none is written."""
    value = None if config is None else config.fields.get("architectures")
    classes = [str(one) for one in value] if isinstance(value, list) else []
    lacks = (
        tensors
        for pattern, tensors in _OF_OTHER_CLASSES.items()
        if any(re.match(pattern, name) for name in classes)
    )
    pattern = re.compile("|".join((BUFFERS, *lacks)))
    dropped = {name for name in names if pattern.search(name)}
    return dropped if mtp_names(written) else dropped | mtp_names(names)


def mtp_names(names: Collection[str]) -> set[str]:
    """Return the names of MTP layers, which some models number like other layers."""
    starts = tuple({match[1] for name in names if (match := _MTP_LAYER.match(name))})
    return {name for name in names if re.search(MTP, name) or name.startswith(starts)}


def lost_mtp(
    config: ModelConfig | None, written: Collection[str], names: Collection[str]
) -> set[str]:
    """Return the names of MTP layers if the config has some, and none is written."""
    is_lost = config is not None and _without_mtp(config) is not config and not mtp_names(written)
    return mtp_names(names) if is_lost else set()


def _without_mtp(config: ModelConfig) -> ModelConfig:
    """Return the config with 0 MTP layers; the same object if it has none."""
    own, text = (
        dict.fromkeys((key for key, value in fields.items() if value and _COUNT.fullmatch(key)), 0)
        for fields in (config.fields, config.text)
    )
    return config.changed(own, text) if own or text else config


def complete_mtp(
    written: dict[str, Recipe],
    tensors: Collection[str],
    base: "Base | None",
    config: ModelConfig | None,
    select: Select,
) -> tuple[dict[str, Recipe], ModelConfig | None, tuple[str, ...]]:
    """Add the base's MTP layers to the written tensors, or remove them from the config; with notes.

    The base's block FP8 becomes float32, unless the output is FP8, too.
    """
    files, stored = ((), {}) if base is None else (base.files, base.tensors)
    lost = lost_mtp(config, written, [*tensors, *files])
    if config is None or not lost:
        return written, config, ()
    wanted = select(sorted(lost & stored.keys()))
    copied: dict[str, Recipe] = {name: take(stored[name]) for name in wanted}
    if base is None or not copied:
        note = "MTP layers are left out, and config.json is changed to have none"
        return written, _without_mtp(config), (note,)
    if not any(map(is_scale, written)):
        copied = dequantise(copied, Precision(BY_NAME["float32"]), [base.companions.model])
    count = counted(len(copied), "tensor")
    note = f"{count} of untrained MTP layers copied from {base.name} (leave them out: ⟦--exclude⟧)"
    return {**written, **copied}, config, (Text(note),)
