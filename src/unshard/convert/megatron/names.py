"""Megatron-core's tensors under the names, and in the layout, that transformers has in training.

The table is `families`, the layouts are undone in `layout`. Here they are applied and checked: the
heads against config.json, and config.json against the arguments that the checkpoint records. No
value changes: what would need arithmetic is refused.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from unshard.convert.megatron.families import FAMILIES, TOP, Family, How, Row
from unshard.convert.megatron.layout import (
    Heads,
    by_groups,
    first_rows,
    halves,
    single_layers,
    with_whole_matrices,
)
from unshard.convert.recipes import Recipe, shape_of
from unshard.errors import ConversionError, raise_all
from unshard.noted import Noted
from unshard.read.megatron.config import contradictions, unknown, why_no_config
from unshard.read.model_config import Fields, ModelConfig
from unshard.showing import counted

_IS_MEGATRON = re.compile(
    r"(?P<prefix>(?:\w+\.)*?)decoder\.layers\.(?:\d+\.)?self_attention\.linear_\w+\.\w+"
)
_KEEP = "or keep Megatron's names with ⟦--names training⟧"
_OWN = f"give the config of the model that was trained: ⟦+--config FILE|DIR⟧, {_KEEP}"
# Recorded numbers, and where config.json has the same.
_NUMBERS = """
    num_layers=num_hidden_layers hidden_size=hidden_size norm_epsilon=rms_norm_eps
    num_experts=num_experts num_experts=num_local_experts num_experts=n_routed_experts
    moe_router_topk=num_experts_per_tok moe_router_topk_scaling_factor=routed_scaling_factor
    moe_router_num_groups=n_group moe_router_group_topk=topk_group qk_head_dim=qk_nope_head_dim
    qk_pos_emb_head_dim=qk_rope_head_dim v_head_dim=v_head_dim
"""
_SAME = [tuple(pair.split("=")) for pair in _NUMBERS.split()]
_WIDTHS = {  # of a matrix's rows, by its name; the first that config.json has
    "mlp.down_proj.weight": ("intermediate_size",),
    "mlp.experts.down_proj": ("moe_intermediate_size", "intermediate_size"),
}
_LISTED = 12
_MOST, _MOST_PARTS = 1 << 32, 1 << 14  # larger numbers are slips, or attacks
# Layers that predict more tokens share these with the model; the hub's files repeat them.
_REPEATED = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "lm_head.weight": "shared_head.head.weight",
}
_INSIDE = re.compile(r"(?:transformer_layer|mtp_model_layer)\.")


@dataclass(frozen=True, slots=True)
class _Model:
    """What is known of the model: its family, its config, and what the training recorded."""

    family: Family
    config: Fields
    recorded: Fields

    def number(self, key: str, why: str, default: object = None, most: int = _MOST) -> int:
        """Return an integer of config.json, from 1 to `most`."""
        found = self.config.get(key)
        found = default if found is None else found
        if type(found) is not int or not 1 <= found <= most:
            is_there = found is not None
            raise ConversionError(
                f"config.json: {key} is needed to {why}, and "
                + ("is not a number that a model can have" if is_there else "is not there"),
                found=repr(found) if is_there else "",
            )
        return found

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
) -> Noted[Mapping[str, Recipe]]:
    """Rename tensors from Megatron's names to those of transformers; other models stay.

    `recorded` are the arguments of the training, as far as the checkpoint records them.

    Raises:
        ConversionError: the model's family is not known, or a name of it; or its tensors contradict
            the config, or the config contradicts what the checkpoint records.
    """
    found = next((match for name in tensors if (match := _IS_MEGATRON.fullmatch(name))), None)
    if found is None:
        return Noted(tensors)
    prefix = found["prefix"] if all(name.startswith(found["prefix"]) for name in tensors) else ""
    own = {name.removeprefix(prefix): recipe for name, recipe in tensors.items()}
    family = None if config is None else FAMILIES.get(config.types[0])
    if config is None or family is None:
        raise _unknown_family(own, config, recorded)
    model = _Model(family, config.fields, recorded)
    _compare_with_recorded(model, config)
    renamed = _renamed(with_whole_matrices(own), model, config.types[0])
    return Noted(renamed.value, (*renamed.notes, *unknown(recorded)))


def _unknown_family(
    tensors: Mapping[str, Recipe], config: ModelConfig | None, recorded: Fields
) -> ConversionError:
    names = _shown(tensors)
    if config is None:
        why = why_no_config(recorded)
        what = f"; the recorded arguments do not determine it: {why}" if why else ""
        return ConversionError(
            "no config.json: the tensors have Megatron's names, and which model they are on the "
            f"hub is not known{what}",
            found=names,
            hint=f"give it with ⟦+--config FILE|DIR⟧ or ⟦--base MODEL⟧, {_KEEP}",
        )
    return ConversionError(
        f"the names that Megatron gives a model of type {config.types[0] or '(none)'} are not "
        "known",
        expected=f"one of {', '.join(FAMILIES)}",
        found=names,
        hint=f"convert it with Megatron-Bridge, {_KEEP}",
    )


def _shown(names: Iterator[str] | Mapping[str, Recipe]) -> str:
    """Return the distinct names, without the numbers of layers and experts."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".N", name) for name in names))
    more = f" and {len(kinds) - _LISTED} more" if len(kinds) > _LISTED else ""
    return ", ".join(kinds[:_LISTED]) + more


def _compare_with_recorded(model: _Model, of: ModelConfig) -> None:
    """Compare the config with the recorded arguments: a wrong one could fit the shapes by chance.

    Raises:
        ConversionError: they differ, or the tensors are stored in a way that needs arithmetic.
    """
    recorded, config = model.recorded, model.config
    # Source: `layernorm_zero_centered_gamma` of TransformerConfig; the first is the option's name.
    for key in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"):
        if recorded.get(key) is True:
            raise ConversionError(
                f"common.pt: {key} is set, so the weights of norms are stored minus 1",
                expected="weights that are moved; adding 1 to them is arithmetic",
                hint=f"convert the checkpoint with Megatron-Bridge, {_KEEP}",
            )
    pairs = [(key, config.get(other), other) for key, other in _SAME]
    if recorded.get("position_embedding_type") == "rope":
        pairs.append(("rotary_base", _rope_theta(config, of.types[0]), "rope_theta"))
    if any(row.how is How.GROUPS for row in model.family.layers.values()):
        heads = model.heads
        grouped = recorded.get("group_query_attention") is not False
        pairs += [
            ("num_attention_heads", heads.queries, "num_attention_heads"),
            ("num_query_groups", heads.groups if grouped else None, "num_key_value_heads"),
            ("kv_channels", heads.rows, "head_dim"),
        ]
    problems = [
        ConversionError(
            f"config.json: {other} is {stated!r}, but the training had {key} {recorded[key]}"
        )
        for key, stated, other in pairs
        if stated is not None and type(recorded.get(key)) in {int, float}
        if recorded[key] != stated
    ]
    kind = f"config.json: is of a {of.types[0]} model, but the training had"
    problems += [
        ConversionError(f"{kind} {what}", hint=_OWN) for what in contradictions(recorded, of)
    ]
    stated, known = config.get("vocab_size"), recorded.get("vocab_size")
    if type(stated) is int and type(known) is int and known > stated:
        # A larger number in config.json is right: the hub's models have padding of their own.
        what = f"config.json: vocab_size is {stated}, but the training had {known}"
        problems.append(ConversionError(f"{what}: rows that it trained would be left out"))
    raise_all(ConversionError, "config.json is not that of the model that was trained", problems)


def _rope_theta(config: Fields, model_type: str) -> object:
    """Return the base of the positions: transformers 5 has it in `rope_parameters`."""
    parameters = config.get("rope_parameters")
    inner = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    default = 1e6 if model_type == "mixtral" else 1e4  # where config.json has none
    return next((one for one in (inner, config.get("rope_theta")) if one is not None), default)


def _renamed(
    tensors: Mapping[str, Recipe], model: _Model, model_type: str
) -> Noted[Mapping[str, Recipe]]:
    made: dict[str, Recipe] = {}
    unknown: list[str] = []
    problems: list[ConversionError] = []
    for name, recipe in tensors.items():
        try:
            pieces = list(chain(_top(name, recipe, model), _of_layers(name, recipe, model)))
        except ConversionError as problem:
            problems.append(problem)
            continue
        unknown += [] if pieces else [name]
        twice = [new for new, _ in pieces if new in made]
        problems += [ConversionError(f"tensor {name} would be {one}, twice") for one in twice[:1]]
        made.update(pieces)
    if unknown:
        what = f"no known place for {counted(len(unknown), 'tensor')} in a {model_type} model"
        hint = f"check that the config is that of the model that was trained, {_KEEP}"
        problems.append(ConversionError(what, found=_shown(iter(unknown)), hint=hint))
    raise_all(ConversionError, "Megatron's tensors do not fit the model", problems)
    return Noted({**made, **_repeated(made, model)}, tuple(_notes(tensors, made)))


_Named = tuple[str, Recipe]


def _top(name: str, recipe: Recipe, model: _Model) -> Iterator[_Named]:
    if name in TOP:
        yield from _parts(name, recipe, TOP[name], model)


def _of_layers(name: str, recipe: Recipe, model: _Model) -> Iterator[_Named]:
    """Yield what a tensor is in each of its layers; nothing if its name is not known."""
    for part, number, rest, one in single_layers(name, recipe, model.layers):
        layer, row = number, model.family.layers.get(rest)
        if part == "mtp":
            inside = _INSIDE.match(rest)
            rows = model.family.mtp if inside is None else model.family.layers
            row = rows.get(rest[inside.end() :] if inside else rest) if model.family.mtp else None
            layer += model.layers
        if row is None:
            return
        for new, piece in _parts(name, one, row, model):
            yield f"model.layers.{layer}.{new}", piece


def _parts(name: str, recipe: Recipe, row: Row, model: _Model) -> Iterator[_Named]:
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
    yield from zip(row.hub, parts, strict=True)


def _check_width(name: str, recipe: Recipe, row: Row, model: _Model) -> None:
    """Compare the width of a model's inner layers, which nothing else needs, with the config."""
    keys = (key for key in _WIDTHS.get(row.hub[0], ()) if type(model.config.get(key)) is int)
    key, shape = next(keys, None), shape_of(recipe)
    if key is not None and shape and shape[-1] != model.config[key]:
        raise ConversionError(
            f"tensor {name} does not fit config.json",
            expected=f"rows of {key} {model.config[key]}",
            found=f"shape {list(shape)}",
            hint="check that this is the config of the model that was trained",
        )


def _without_padding(name: str, recipe: Recipe, model: _Model) -> Recipe:
    rows = shape_of(recipe)[0] if shape_of(recipe) else 0
    size = model.number("vocab_size", "cut the padding of the vocabulary")
    if rows < size:
        raise ConversionError(
            f"tensor {name} has {rows} rows, fewer than the vocabulary",
            expected=f"at least {size}, the vocab_size of config.json",
            hint="check that this is the config of the model that was trained",
        )
    return recipe if rows == size else first_rows(recipe, size)


def _repeated(made: Mapping[str, Recipe], model: _Model) -> dict[str, Recipe]:
    """Return the embedding and the head again for each layer that predicts more tokens."""
    above = [name for name in made if name.endswith(".eh_proj.weight")]
    return {
        f"{name.removesuffix('eh_proj.weight')}{repeated}": made[shared]
        for name in above
        for shared, repeated in _REPEATED.items()
        if shared in made and model.family.mtp
    }


def _notes(tensors: Mapping[str, Recipe], made: Mapping[str, Recipe]) -> Iterator[str]:
    for name, row in TOP.items():
        (new,) = row.hub
        if row.how is How.VOCABULARY and name in tensors and new in made:
            rows, kept = shape_of(tensors[name])[0], shape_of(made[new])[0]
            if rows != kept:
                yield f"{rows - kept} rows of padding are left out of {new}, which has {kept}"
