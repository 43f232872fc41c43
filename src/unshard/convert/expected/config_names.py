"""Which tensors a model has on the hub, by its config.json alone: `whole_models` applied.

Of a config that leaves anything open nothing is said: a right checkpoint must not be refused.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from unshard.convert.expected.conditions import NotKnownError, integer
from unshard.convert.expected.decoders import Group
from unshard.convert.expected.tensors import Expected
from unshard.convert.expected.whole_models import MODELS, PARTS, Model, Place
from unshard.read.beside.model_config import Fields

__all__ = ["expected_by_config"]

Select = Callable[[Iterable[str]], Collection[str]]

_MOST = 1_000_000  # names; a larger product of layers and experts is a slip, or an attack
_SEES = "ForConditionalGeneration"
_GENERATES = ("ForCausalLM", _SEES, "LMHeadModel")
_CLASSIFIES = ("ForTokenClassification", "ForSequenceClassification")
_BARE = "Model"
_CLASSIFIERS = ("score.weight", "classifier.weight")
_TOWER = ("_tower.", "_tower.vision_model.")  # in transformers 5, and until 4
_EXTRA = re.compile(
    r"(^|\.)rotary_(pos_)?emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$"
    r"|\.position_ids$|(^|\.)attn\.(masked_)?bias$"
    r"|^(v_head|score|classifier)\.|^(model\.)?mtp\."
)
"""Buffers that old versions saved, heads of critics, and what predicts further tokens."""


@dataclass(frozen=True, slots=True)
class _Form:
    """The names of one form of a model: those that must be there, and those that may be.

    `above` has starts of layers' names that predict further tokens.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def expected_by_config(
    config: Fields, names: Collection[str], kept: Select, *, tied: bool
) -> Expected | None:
    """Return what a model of this config has; None if that is not certain.

    Of the forms in which it may be saved (with the head of a language model, with a classifier's,
    without any) the one that the names are; if they are none, the one that the config names.

    Args:
        config: config.json of the output.
        names: of the output's tensors, as on the hub; they tell the form.
        kept: what the user selected of names.
        tied: the head may be missing.
    """
    model_type = str(config.get("model_type"))
    model = MODELS.get(model_type)
    kind = _class_of(config, model_type)
    if model is None or kind is None or config.get("quantization_config") is not None:
        return None
    try:
        forms = list(_forms(model, config, kind, tied=tied))
    except NotKnownError:
        return None
    found = [_expected(form, names, kept) for form in forms]
    return next((one for one in found if _fits(one, names)), found[0])


def _class_of(config: Fields, model_type: str) -> str | None:
    """Return what ends the class's name, if that is of this type; "" without one, None if not."""
    stated = config.get("architectures")
    if stated is None or stated == []:
        return ""
    if not isinstance(stated, list) or len(stated) != 1:
        return None
    name = str(stated[0]).removeprefix("FSDP")
    kind = next((end for end in (*_GENERATES, *_CLASSIFIES, _BARE) if name.endswith(end)), None)
    if kind is None:
        return None
    stem, own = (
        text.lower().replace("_", "").removesuffix("text")
        for text in (name.removesuffix(kind), model_type)
    )
    return kind if stem == own else None


def _forms(model: Model, config: Fields, kind: str, *, tied: bool) -> Iterator[_Form]:
    """Yield the forms of a model: what its class has, then what else is whole by itself.

    Raises:
        NotKnownError: the config leaves something open.
    """
    body = _body(model, config)
    bare = _without_prefix(body, model)
    head = replace(
        body,
        required=body.required if tied else (*body.required, model.head),
        optional=(*body.optional, model.head) if tied else body.optional,
    )
    classifiers = [
        replace(body, required=(*body.required, name))
        for name in _CLASSIFIERS
        if len(model.places) == 1
    ]
    by_kind = {_BARE: [bare], "": [head, *classifiers, bare]}
    by_kind |= {one: [head, bare] for one in _GENERATES if (one == _SEES) == (bare is None)}
    by_kind |= {one: list(classifiers) for one in _CLASSIFIES}
    found = [form for form in by_kind.get(kind, []) if form is not None]
    if not found:
        raise NotKnownError
    headless = "the tensors are those of the model without a head: {} is not there, and not tied"
    if not tied and bare in found and kind != _BARE:
        found[-1] = replace(found[-1], remarks=(headless.format(model.head),))
    yield from found


def _without_prefix(body: _Form, model: Model) -> _Form | None:
    """Return the names that a model of text has by itself, outside one with a head."""
    if len(model.places) > 1:
        return None
    start = len(model.places[0].prefix)
    return _Form(
        *(
            tuple(name[start:] for name in names)
            for names in (body.required, body.optional, body.above)
        )
    )


def _body(model: Model, config: Fields) -> _Form:
    """Return the names of all parts, without a head."""
    required = [name for group in model.groups for name in _named(group, config, 0, ())]
    optional: list[str] = []
    above: list[str] = []
    for place in model.places:
        fields = _fields(place, config)
        part = PARTS.get(place.of or str(fields.get("model_type")))
        if part is None:
            raise NotKnownError
        layers = _count(fields, part.layers)
        for group in part.groups:
            made = [place.prefix + name for name in _named(group, fields, layers, part.experts)]
            (optional if group.optional else required).extend(made)
        if part.more_layers:
            more = integer(fields, "num_nextn_predict_layers", 1)
            above += (f"{place.prefix}layers.{layers + n}." for n in range(more))
    return _Form(tuple(required), tuple(optional), tuple(above))


def _fields(place: Place, config: Fields) -> Fields:
    """Return the config of a part."""
    if not place.config:
        return config
    fields = config.get(place.config, config if place.flat else None)
    if not isinstance(fields, dict):
        raise NotKnownError
    return fields


def _named(group: Group, config: Fields, layers: int, experts: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of a group, for every layer and every expert."""
    for pattern in _spelled(group.names):
        numbered = pattern.count("#")
        if not numbered:
            yield from [pattern] if group.when(config, 0) else []
            continue
        chosen = [layer for layer in range(layers) if group.when(config, layer)]
        each = range(_one(config, experts)) if numbered > 1 and chosen else range(1)
        if len(chosen) * len(each) > _MOST:
            raise NotKnownError
        for layer in chosen:
            start = pattern.replace("#", str(layer), 1)
            yield from (start.replace("#", str(one), 1) for one in each)


def _spelled(patterns: str) -> Iterator[str]:
    """Yield patterns with one of the words of every pair of braces."""
    for pattern in patterns.split():
        fixed = re.split(r"\{([^}]*)\}", pattern)
        yield from map("".join, product(*(part.split(",") for part in fixed)))


def _count(config: Fields, key: str) -> int:
    value = config.get(key)
    count = len(value) if isinstance(value, list) else integer(config, key)
    if count > _MOST:
        raise NotKnownError
    return count


def _one(config: Fields, keys: tuple[str, ...]) -> int:
    """Return a count that has one of several keys."""
    found = {integer(config, key) for key in keys if config.get(key) is not None}
    if len(found) != 1:
        raise NotKnownError
    return found.pop()


def _expected(form: _Form, names: Collection[str], kept: Select) -> Expected:
    """Return a form under the spelling of the names; what may be there is excused."""
    old = any(_TOWER[1] in name for name in names)
    required = [name.replace(*_TOWER) for name in form.required] if old else form.required
    extra = (name for name in names if _EXTRA.search(name) or name.startswith(form.above))
    excused = {*form.optional, *extra}
    advice = "check that this is the config of the model that was trained"
    return Expected("config.json", kept(required), {}, excused, form.remarks, advice)


def _fits(expected: Expected, names: Collection[str]) -> bool:
    found = {*names}
    required = {*expected.names}
    return required <= found | {*expected.excused} and found <= required | {*expected.excused}
