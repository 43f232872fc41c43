"""Convert Megatron-core's tensors to the names and the layout of transformers in training.

Applies the table in `families` and the layouts in `layout`. Checks the heads against config.json,
and config.json against the training arguments in the checkpoint. No value changes: a conversion
that needs arithmetic is refused.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from unshard.console import counted
from unshard.convert.megatron.families import FAMILIES, TOP, How, HubNames, LayerNames
from unshard.convert.megatron.layout import (
    Heads,
    by_groups,
    halves,
    rows,
    single_layers,
    with_whole_matrices,
)
from unshard.convert.recipes import Recipe, shape_of
from unshard.errors import ConversionError, raise_all
from unshard.read.megatron.config import contradictions, unknown, why_no_config
from unshard.read.model_config import Fields, ModelConfig
from unshard.with_notes import WithNotes

_IS_MEGATRON = re.compile(
    r"(?P<prefix>(?:\w+\.)*?)decoder\.layers\.(?:\d+\.)?self_attention\.linear_\w+\.\w+"
)
_KEEP = "or keep Megatron's names with ⟦--names training⟧"
_OWN = f"pass the config of the model that was trained: ⟦+--config FILE|DIR⟧, {_KEEP}"
_CHECK_CONFIG = "check that this is the config of the model that was trained"
# Training arguments, and the keys of config.json with the same numbers.
_NUMBERS = """
    num_layers=num_hidden_layers hidden_size=hidden_size norm_epsilon=rms_norm_eps
    num_experts=num_experts num_experts=num_local_experts num_experts=n_routed_experts
    moe_router_topk=num_experts_per_tok moe_router_topk_scaling_factor=routed_scaling_factor
    moe_router_num_groups=n_group moe_router_group_topk=topk_group qk_head_dim=qk_nope_head_dim
    qk_pos_emb_head_dim=qk_rope_head_dim v_head_dim=v_head_dim
"""
_SAME = [tuple(pair.split("=")) for pair in _NUMBERS.split()]
_WIDTHS = {  # keys for the length of a matrix's rows; the first in config.json counts
    "mlp.down_proj.weight": ("intermediate_size",),
    "mlp.experts.down_proj": ("moe_intermediate_size", "intermediate_size"),
}
_LISTED = 12
_MOST, _MOST_PARTS = 1 << 32, 1 << 14  # larger numbers are typos, or attacks
# MTP layers share these with the model; the hub's files repeat them.
_REPEATED = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "lm_head.weight": "shared_head.head.weight",
}
_INSIDE = re.compile(r"^(?:transformer_layer|mtp_model_layer)\.")


class _MegatronModel(NamedTuple):
    """A model's table of names, its config.json, and the training arguments in the checkpoint."""

    names: LayerNames
    config: Fields
    recorded: Fields

    def number(self, key: str, why: str, default: object = None, most: int = _MOST) -> int:
        """Return an integer of config.json, from 1 to `most`."""
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise ConversionError(f"config.json: {key} is needed to {why}, but is missing")
        if type(value) is not int or not 1 <= value <= most:
            raise ConversionError(
                f"config.json: {key} is needed to {why}, but is not a valid number",
                found=repr(value),
            )
        return value

    @property
    def layers(self) -> int:
        return self.number("num_hidden_layers", "number the layers", most=_MOST_PARTS)

    @property
    def heads(self) -> Heads:
        why = "divide the queries, keys and values"
        queries = self.number("num_attention_heads", why, most=_MOST_PARTS)
        rows = self.number("hidden_size", why) // queries
        return Heads(
            queries,
            self.number("num_key_value_heads", why, queries, most=_MOST_PARTS),
            self.number("head_dim", why, rows),
        )


def without_megatron_names(
    tensors: Mapping[str, Recipe], config: ModelConfig | None, recorded: Fields
) -> WithNotes[Mapping[str, Recipe]]:
    """Rename tensors from Megatron's names to those of transformers; other models stay.

    `recorded` are the training arguments in the checkpoint.

    Raises:
        ConversionError: the model's family or one of its names is unknown; or its tensors
            contradict the config, or the config contradicts the training arguments.
    """
    match = next((match for name in tensors if (match := _IS_MEGATRON.fullmatch(name))), None)
    if match is None:
        return WithNotes(tensors)
    prefix = match["prefix"] if all(name.startswith(match["prefix"]) for name in tensors) else ""
    own = {name.removeprefix(prefix): recipe for name, recipe in tensors.items()}
    names = None if config is None else FAMILIES.get(config.types[0])
    if config is None or names is None:
        raise _unknown_family(own, config, recorded)
    model = _MegatronModel(names, config.fields, recorded)
    _compare_with_recorded(model, config)
    renamed = _renamed(with_whole_matrices(own), model, config.types[0])
    return WithNotes(renamed.value, (*renamed.notes, *unknown(recorded)))


def _unknown_family(
    tensors: Mapping[str, Recipe], config: ModelConfig | None, recorded: Fields
) -> ConversionError:
    names = _shown(tensors)
    if config is None:
        why = why_no_config(recorded)
        reason = f"; the recorded arguments do not determine it: {why}" if why else ""
        return ConversionError(
            f"no config.json: the tensors have Megatron's names, and their model on the hub is "
            f"unknown{reason}",
            found=names,
            hint=f"pass it with ⟦+--config FILE|DIR⟧ or ⟦--base MODEL⟧, {_KEEP}",
        )
    return ConversionError(
        f"Megatron's names for a model of type {config.types[0] or '(none)'} are unknown",
        expected=f"one of {', '.join(FAMILIES)}",
        found=names,
        hint=f"convert it with Megatron-Bridge, {_KEEP}",
    )


def _shown(names: Iterator[str] | Mapping[str, Recipe]) -> str:
    """Return distinct names for a message, with N for the numbers of layers and experts."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".N", name) for name in names))
    more = f" and {len(kinds) - _LISTED} more" if len(kinds) > _LISTED else ""
    return ", ".join(kinds[:_LISTED]) + more


def _compare_with_recorded(model: _MegatronModel, of: ModelConfig) -> None:
    """Compare the config with the training arguments: a wrong config may fit the shapes by chance.

    Raises:
        ConversionError: they differ, or the conversion of norms needs arithmetic.
    """
    recorded, config = model.recorded, model.config
    # Source: `layernorm_zero_centered_gamma` of TransformerConfig; the first key is the option.
    for key in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"):
        if recorded.get(key) is True:
            raise ConversionError(
                f"common.pt: {key} is set, so the weights of norms are stored minus 1",
                expected="weights that need no arithmetic",
                hint=f"convert the checkpoint with Megatron-Bridge, {_KEEP}",
            )
    pairs = [(key, config.get(other), other) for key, other in _SAME]
    if recorded.get("position_embedding_type") == "rope":
        pairs.append(("rotary_base", _rope_theta(config, of.types[0]), "rope_theta"))
    if any(row.how is How.GROUPS for row in model.names.layers.values()):
        heads = model.heads
        grouped = recorded.get("group_query_attention") is not False
        pairs += [
            ("num_attention_heads", heads.queries, "num_attention_heads"),
            ("num_query_groups", heads.groups if grouped else None, "num_key_value_heads"),
            ("kv_channels", heads.rows, "head_dim"),
        ]
    problems = [
        ConversionError(
            f"config.json: {other} is {value!r}, but the training had {key} {recorded[key]}"
        )
        for key, value, other in pairs
        if value is not None and type(recorded.get(key)) in {int, float}
        if recorded[key] != value
    ]
    kind = f"config.json: is of a {of.types[0]} model, but the training had"
    problems += [
        ConversionError(f"{kind} {argument}", hint=_OWN)
        for argument in contradictions(recorded, of)
    ]
    size, trained = config.get("vocab_size"), recorded.get("vocab_size")
    if type(size) is int and type(trained) is int and trained > size:
        # A larger number in config.json is right: the hub's models have padding of their own.
        message = f"config.json: vocab_size is {size}, but the training had {trained}"
        problems.append(ConversionError(f"{message}: trained rows would be left out"))
    raise_all(ConversionError, "config.json is not that of the model that was trained", problems)


def _rope_theta(config: Fields, model_type: str) -> object:
    """Return the base of rotary positions, which transformers 5 has in `rope_parameters`."""
    parameters = config.get("rope_parameters")
    theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    theta = config.get("rope_theta") if theta is None else theta
    default = 1e6 if model_type == "mixtral" else 1e4  # defaults of transformers
    return default if theta is None else theta


def _renamed(
    tensors: Mapping[str, Recipe], model: _MegatronModel, model_type: str
) -> WithNotes[Mapping[str, Recipe]]:
    renamed: dict[str, Recipe] = {}
    unnamed: list[str] = []
    problems: list[ConversionError] = []
    for name, recipe in tensors.items():
        try:
            row = TOP.get(name)
            top = () if row is None else _parts(name, recipe, row, model)
            pieces = list(chain(top, _of_layers(name, recipe, model)))
        except ConversionError as problem:
            problems.append(problem)
            continue
        unnamed += [] if pieces else [name]
        twice = [new for new, _ in pieces if new in renamed]
        problems += [ConversionError(f"tensor {name} would be {new}, twice") for new in twice[:1]]
        renamed.update(pieces)
    if unnamed:
        count = counted(len(unnamed), "tensor")
        problems.append(
            ConversionError(
                f"no known name for {count} in a {model_type} model",
                found=_shown(iter(unnamed)),
                hint=f"{_CHECK_CONFIG}, {_KEEP}",
            )
        )
    raise_all(ConversionError, "Megatron's tensors do not fit the model", problems)
    return WithNotes({**renamed, **_repeated(renamed, model)}, tuple(_notes(tensors, renamed)))


_Named = tuple[str, Recipe]


def _of_layers(name: str, recipe: Recipe, model: _MegatronModel) -> Iterator[_Named]:
    """Yield the tensors of each layer in a tensor; nothing if its name is unknown."""
    names, mtp = model.names
    for part, number, rest, piece in single_layers(name, recipe, model.layers):
        layer, row = number, names.get(rest)
        if part == "mtp":
            inner = _INSIDE.sub("", rest, count=1)
            row = None if not mtp else mtp.get(rest) if inner == rest else names.get(inner)
            layer += model.layers
        if row is None:
            return
        for new, values in _parts(name, piece, row, model):
            yield f"model.layers.{layer}.{new}", values


def _parts(name: str, recipe: Recipe, row: HubNames, model: _MegatronModel) -> Iterator[_Named]:
    match row.how:
        case How.WHOLE:
            _check_width(name, recipe, row, model)
            parts = [recipe]
        case How.VOCABULARY:
            parts = [_without_padding(name, recipe, model)]
        case How.HALVES:
            parts = halves(name, recipe)
        case How.GROUPS:
            parts = by_groups(name, recipe, model.heads)
    yield from zip(row.names, parts, strict=True)


def _check_width(name: str, recipe: Recipe, row: HubNames, model: _MegatronModel) -> None:
    """Compare the width of a model's inner layers, which no other step checks, with the config."""
    keys = (key for key in _WIDTHS.get(row.names[0], ()) if type(model.config.get(key)) is int)
    key, shape = next(keys, None), shape_of(recipe)
    if key is not None and shape and shape[-1] != model.config[key]:
        raise ConversionError(
            f"tensor {name} does not fit config.json",
            expected=f"rows of {key} {model.config[key]}",
            found=f"shape {list(shape)}",
            hint=_CHECK_CONFIG,
        )


def _without_padding(name: str, recipe: Recipe, model: _MegatronModel) -> Recipe:
    count = shape_of(recipe)[0] if shape_of(recipe) else 0
    size = model.number("vocab_size", "cut the padding of the vocabulary")
    if count < size:
        raise ConversionError(
            f"tensor {name} has {count} rows, fewer than the vocabulary",
            expected=f"at least {size}, the vocab_size of config.json",
            hint=_CHECK_CONFIG,
        )
    return recipe if count == size else rows(recipe, 0, size)


def _repeated(renamed: Mapping[str, Recipe], model: _MegatronModel) -> dict[str, Recipe]:
    """Return copies of the embedding and the head for each MTP layer."""
    return {
        f"{name.removesuffix('eh_proj.weight')}{repeated}": renamed[shared]
        for name in renamed
        if name.endswith(".eh_proj.weight") and model.names.mtp
        for shared, repeated in _REPEATED.items()
        if shared in renamed
    }


def _notes(tensors: Mapping[str, Recipe], renamed: Mapping[str, Recipe]) -> Iterator[str]:
    for name, row in TOP.items():
        (new,) = row.names
        if row.how is How.VOCABULARY and name in tensors and new in renamed:
            stored, written = shape_of(tensors[name])[0], shape_of(renamed[new])[0]
            if stored != written:
                yield f"{stored - written} rows of padding are left out of {new}: {written} remain"
