"""Which tensors a model has on the hub, by its config.json alone: `whole_models` applied.

A config that leaves anything open gives no names at all: a right checkpoint must not be refused.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from unshard.convert.expected.decoders import Group, NotKnownError, integer
from unshard.convert.expected.ignored import BUFFERS, MTP, Select
from unshard.convert.expected.shapes import stated_shape
from unshard.convert.expected.tensors import Expected
from unshard.convert.expected.whole_models import (
    COMPONENTS,
    LAYER_COUNTS,
    MODELS,
    MORE_LAYERS,
    Component,
    Model,
)
from unshard.read.model_config import Fields

_MOST = 1_000_000  # names; a larger product of layers and experts is a slip, or an attack
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SEES = "ForConditionalGeneration"
_GENERATES = ("ForCausalLM", _SEES, "LMHeadModel")
_CLASSIFIES = ("ForTokenClassification", "ForSequenceClassification")
_BARE = "Model"
_CLASSIFIERS = ("score.weight", "classifier.weight")
_EMBEDDED = ("embed_tokens.weight", "wte.weight")
_TOWER = ("_tower.", "_tower.vision_model.")  # in transformers 5, and until 4
_EXTRA = re.compile(rf"{BUFFERS}|^(v_head|score|classifier)\.|{MTP}")
"""Buffers that old versions saved, heads of critics, and layers that predict more tokens."""


class _Form(NamedTuple):
    """The names that one form of a model must have, and those that it may have.

    `above` has the starts of the names of layers that predict more tokens, `shapes` the shapes as
    far as the config states them.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = {}


def expected_by_config(
    config: Fields, names: Collection[str], kept: Select, *, tied: bool
) -> Expected | None:
    """Return what a model of this config has; None if that is not certain.

    A model may be saved with the head of a language model, with a classifier's, or without any. Of
    these forms, the one that has the given names is returned, else the one that the config names.
    `kept` selects what the user wants of some names; if `tied`, the head may be missing.
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
    """Return the end of the class's name: "" without a class, None if it is of another type."""
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
    """Yield the forms of a model: first that of its class, then others that are complete too.

    Raises:
        NotKnownError: the config leaves something open.
    """
    body, bare = _body(model, config), None
    if len(model.components) == 1:  # may be saved without the class that has the head
        start = len(model.components[0].prefix)
        required, optional, above = (
            tuple(name[start:] for name in names)
            for names in (body.required, body.optional, body.above)
        )
        shapes = {name[start:]: shape for name, shape in body.shapes.items()}
        bare = _Form(required, optional, above, shapes=shapes)
    if tied:
        head = body._replace(optional=(*body.optional, model.head))
    else:
        head = body._replace(required=(*body.required, model.head))
    classifiers = [
        body._replace(required=(*body.required, name))
        for name in _CLASSIFIERS
        if len(model.components) == 1
    ]
    by_kind = {_BARE: [bare], "": [head, *classifiers, bare]}
    # A class ends in `_SEES` if and only if its model has a tower, and so no bare form.
    by_kind |= {one: [head, bare] for one in _GENERATES if (one == _SEES) == (bare is None)}
    by_kind |= {one: list(classifiers) for one in _CLASSIFIES}
    found = [form for form in by_kind.get(kind, []) if form is not None]
    if not found:
        raise NotKnownError
    headless = "the tensors are those of the model without a head: {} is missing, and not tied"
    if not tied and bare in found and kind != _BARE:
        found[-1] = found[-1]._replace(remarks=(headless.format(model.head),))
    yield from found


def _body(model: Model, config: Fields) -> _Form:
    """Return the names of all components, without a head, and the shapes, with that of the head."""
    required: list[str] = []
    optional: list[str] = []
    above: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for component in model.components:
        fields = _fields(component, config)
        kind = component.type or str(fields.get("model_type"))
        if kind not in COMPONENTS:
            raise NotKnownError
        for group in COMPONENTS[kind]:
            may_miss = isinstance(group, Group) and group.optional
            for pattern, names in _named(group, fields, kind):
                made = [component.prefix + name for name in names]
                (optional if may_miss else required).extend(made)
                stated = stated_shape(kind, pattern, fields)
                if stated is not None:
                    shapes |= dict.fromkeys(made + [model.head] * (pattern in _EMBEDDED), stated)
        if kind in MORE_LAYERS:
            layers, more = _layers(fields, kind), integer(fields, "num_nextn_predict_layers", 1)
            above += (f"{component.prefix}layers.{layers + n}." for n in range(more))
    return _Form(tuple(required), tuple(optional), tuple(above), shapes=shapes)


def _fields(component: Component, config: Fields) -> Fields:
    if not component.config:
        return config
    fields = config.get(component.config, config if component.flat else None)
    if not isinstance(fields, dict):
        raise NotKnownError
    return fields


def _named(group: str | Group, config: Fields, kind: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the patterns of a group, without braces, with the names of every layer and expert."""
    known = Group(group) if isinstance(group, str) else group

    def is_in(layer: int) -> bool:
        return all(condition(config, layer) for condition in known.conditions)

    patterns = (  # with each choice of the words in their braces
        "".join(words)
        for pattern in known.names.split()
        for words in product(*(part.split(",") for part in re.split(r"\{([^}]*)\}", pattern)))
    )
    for pattern in patterns:
        numbered = pattern.count("#")
        chosen = [one for one in range(_layers(config, kind) if numbered else 1) if is_in(one)]
        each = range(_experts(config)) if numbered > 1 and chosen else range(1)
        if len(chosen) * len(each) > _MOST:
            raise NotKnownError
        starts = (pattern.replace("#", str(layer), 1) for layer in chosen)
        yield pattern, [start.replace("#", str(one), 1) for start in starts for one in each]


def _layers(config: Fields, kind: str) -> int:
    key = LAYER_COUNTS.get(kind, "num_hidden_layers")
    value = config.get(key)
    count = len(value) if isinstance(value, list) else integer(config, key)
    if count > _MOST:
        raise NotKnownError
    return count


def _experts(config: Fields) -> int:
    """Return how many experts a layer has, by whichever of the keys counts them."""
    found = {integer(config, key) for key in _EXPERTS if config.get(key) is not None}
    if len(found) != 1:
        raise NotKnownError
    return found.pop()


def _expected(form: _Form, names: Collection[str], kept: Select) -> Expected:
    """Return a form, its towers spelled as in the names; what is optional is excused."""
    old = any(_TOWER[1] in name for name in names)
    spelled = {name: name.replace(*_TOWER) if old else name for name in form.required}
    extra = (name for name in names if _EXTRA.search(name) or name.startswith(form.above))
    excused = {*form.optional, *extra}
    advice = "check that this is the config of the model that was trained"
    shapes = {spelled.get(name, name): shape for name, shape in form.shapes.items()}
    return Expected("config.json", kept(spelled.values()), shapes, excused, form.remarks, advice)


def _fits(expected: Expected, names: Collection[str]) -> bool:
    found = {*names}
    required = {*expected.names}
    return required <= found | {*expected.excused} and found <= required | {*expected.excused}
