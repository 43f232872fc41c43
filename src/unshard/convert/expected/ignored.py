"""Tensors in a model's files that its class in transformers ignores, and so training drops."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from unshard.convert.outputs import Precision
from unshard.convert.quantised import dequantise, is_scale
from unshard.convert.recipes import Recipe, take
from unshard.fronts import Text
from unshard.read.model_config import ModelConfig
from unshard.showing import counted
from unshard.tensors.dtypes import BY_NAME

if TYPE_CHECKING:
    from unshard.read.base import Base

Select = Callable[[Iterable[str]], Collection[str]]

BUFFERS = (
    r"(^|\.)rotary_(pos_)?emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$"
    r"|(^|\.)position_ids$|(^|\.)(attn|attention|crossattention)\.(masked_)?bias$"
)
MTP = r"(^|\.)mtp(_\w+)?\."
_FURTHER = re.compile(r"(.*\blayers\.\d+\.)(eh_proj|[eh]norm)\.")
_COUNT = re.compile(r"(num_nextn_predict|num_mtp|mtp_num(_hidden)?)_layers")
_OF_OTHER_CLASSES = {  # classes, and what they lack
    r"(?!.*(PreTraining|NextSentencePrediction)$)": r"^cls\.seq_relationship\.",
    r".*(MaskedLM|LMHeadModel|CausalLM|TokenClassification|QuestionAnswering)$": r"^\w+\.pooler\.",
}


def ignored(config: ModelConfig | None, kept: Collection[str], known: Collection[str]) -> set[str]:
    """Return the `known` names of what a config's class ignores; MTP layers if none is kept."""
    classes = None if config is None else config.fields.get("architectures")
    named = [str(one) for one in classes] if isinstance(classes, list) else []
    lacks = (of for like, of in _OF_OTHER_CLASSES.items() if any(re.match(like, c) for c in named))
    pattern = re.compile("|".join((BUFFERS, *lacks)))
    found = {name for name in known if pattern.search(name)}
    return found if mtp_names(kept) else found | mtp_names(known)


def mtp_names(names: Collection[str]) -> set[str]:
    """Return the names of layers that predict more tokens; some have numbers as others do."""
    further = tuple({found[1] for name in names if (found := _FURTHER.match(name))})
    return {name for name in names if re.search(MTP, name) or name.startswith(further)}


def lost_mtp(config: ModelConfig | None, kept: Collection[str], known: Collection[str]) -> set[str]:
    """Return the `known` names of MTP layers if a config announces some, and none is kept."""
    is_lost = config is not None and _without_mtp(config) is not config and not mtp_names(kept)
    return mtp_names(known) if is_lost else set()


def _without_mtp(config: ModelConfig) -> ModelConfig:
    own, text = (
        dict.fromkeys((key for key, value in fields.items() if value and _COUNT.fullmatch(key)), 0)
        for fields in (config.fields, config.text)
    )
    return config.changed(own, text) if own or text else config


def complete_mtp(
    kept: dict[str, Recipe],
    tensors: Collection[str],
    base: "Base | None",
    config: ModelConfig | None,
    select: Select,
) -> tuple[dict[str, Recipe], ModelConfig | None, tuple[str, ...]]:
    """Return what is kept of the tensors with MTP layers of the base, or a config without; notes.

    What is block FP8 in the base becomes float32, unless the output is FP8, too.
    """
    files, stored = ((), {}) if base is None else (base.files, base.tensors)
    lost = lost_mtp(config, kept, [*tensors, *files])
    if config is None or not lost:
        return kept, config, ()
    wanted = select(sorted(lost & stored.keys()))
    found: dict[str, Recipe] = {name: take(stored[name]) for name in wanted}
    if base is None or not found:
        return kept, _without_mtp(config), ("MTP layers left out; config.json announces none",)
    if not any(map(is_scale, kept)):
        found = dequantise(found, Precision(BY_NAME["float32"]), [base.companions.model])
    what = counted(len(found), "tensor")
    note = f"{what} of untrained MTP layers copied from {base.name} (leave them out: ⟦--exclude⟧)"
    return {**kept, **found}, config, (Text(note),)
