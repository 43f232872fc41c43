"""Derive the names of a model's tensors on the hub from its config.json alone.

Applies the table in `whole_models`. A config that leaves anything open gives no names at all, so
that a correct checkpoint is never refused.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import NamedTuple

from unshard.convert.expected.decoders import NameGroup, NotKnownError, integer
from unshard.convert.expected.ignored import BUFFERS, MTP, Select
from unshard.convert.expected.shapes import shape_in_config
from unshard.convert.expected.tensors import Expected
from unshard.convert.expected.whole_models import (
    COMPONENTS,
    LAYER_COUNTS,
    MODELS,
    MTP_DECODERS,
    Component,
    WholeModel,
)
from unshard.read.model_config import Fields

_MOST = 1_000_000  # names; a larger product of layers and experts is a typo, or an attack
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SEES = "ForConditionalGeneration"
_GENERATES = ("ForCausalLM", _SEES, "LMHeadModel")
_CLASSIFIES = ("ForTokenClassification", "ForSequenceClassification")
_BARE = "Model"
_CLASSIFIERS = ("score.weight", "classifier.weight")
_EMBEDDED = ("embed_tokens.weight", "wte.weight")
_TOWER = ("_tower.", "_tower.vision_model.")  # in transformers 5, and until 4
_EXTRA = re.compile(rf"{BUFFERS}|^(v_head|score|classifier)\.|{MTP}")
"""Buffers that old versions saved, heads of critics, and MTP layers."""


class _Form(NamedTuple):
    """The names that one form of a model must have, and those that it may have.

    `mtp` has the starts of the names of MTP layers, `shapes` the shapes that the config determines.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    mtp: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = {}


def expected_by_config(
    config: Fields, names: Collection[str], select: Select, *, tied: bool
) -> Expected | None:
    """Return the tensors of a config's model; None if that is not certain.

    A model may be saved with the head of a language model, with a classifier's, or without a head.
    Returns the form with the given `names`, else the form of the config's class. `select` returns
    the names that the user wants; if `tied`, the head may be missing.
    """
    model_type = str(config.get("model_type"))
    model = MODELS.get(model_type)
    kind = _class_of(config, model_type)
    if model is None or kind is None or config.get("quantization_config") is not None:
        return None
    try:
        forms = [_expected(form, names, select) for form in _forms(model, config, kind, tied=tied)]
    except NotKnownError:
        return None
    present = {*names}
    for form in forms:
        required, allowed = {*form.names}, {*form.names, *form.excused}
        if required <= present | {*form.excused} and present <= allowed:
            return form
    return forms[0]


def _class_of(config: Fields, model_type: str) -> str | None:
    """Return the end of the class's name: "" without a class, None if it is of another type."""
    classes = config.get("architectures")
    if classes is None or classes == []:
        return ""
    if not isinstance(classes, list) or len(classes) != 1:
        return None
    name = str(classes[0]).removeprefix("FSDP")
    kind = next((end for end in (*_GENERATES, *_CLASSIFIES, _BARE) if name.endswith(end)), None)
    if kind is None:
        return None
    stem, own = (
        text.lower().replace("_", "").removesuffix("text")
        for text in (name.removesuffix(kind), model_type)
    )
    return kind if stem == own else None


def _forms(model: WholeModel, config: Fields, kind: str, *, tied: bool) -> Iterator[_Form]:
    """Yield the forms of a model: first the form of its class, then others that are complete, too.

    Raises:
        NotKnownError: the config leaves something open.
    """
    body, bare = _body(model, config), None
    if len(model.components) == 1:  # may be saved without the class that has the head
        start = len(model.components[0].prefix)
        required, optional, mtp = (
            tuple(name[start:] for name in names)
            for names in (body.required, body.optional, body.mtp)
        )
        shapes = {name[start:]: shape for name, shape in body.shapes.items()}
        bare = _Form(required, optional, mtp, shapes=shapes)
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
    by_kind |= {end: [head, bare] for end in _GENERATES if (end == _SEES) == (bare is None)}
    by_kind |= {end: list(classifiers) for end in _CLASSIFIES}
    forms = [form for form in by_kind.get(kind, []) if form is not None]
    if not forms:
        raise NotKnownError
    if not tied and bare in forms and kind != _BARE:
        remark = f"the model has no head: {model.head} is missing, and not tied"
        forms[-1] = forms[-1]._replace(remarks=(remark,))
    yield from forms


def _body(model: WholeModel, config: Fields) -> _Form:
    """Return the names of all components, without a head, and all shapes, including the head's."""
    required: list[str] = []
    optional: list[str] = []
    mtp: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for component in model.components:
        fields = _fields(component, config)
        kind = component.type or str(fields.get("model_type"))
        if kind not in COMPONENTS:
            raise NotKnownError
        for entry in COMPONENTS[kind]:
            group = NameGroup(entry) if isinstance(entry, str) else entry
            for pattern, ends in _named(group, fields, kind):
                names = [component.prefix + end for end in ends]
                (optional if group.optional else required).extend(names)
                shape = shape_in_config(kind, pattern, fields)
                if shape is not None:
                    shapes |= dict.fromkeys(names + [model.head] * (pattern in _EMBEDDED), shape)
        if kind in MTP_DECODERS:
            layers, more = _layers(fields, kind), integer(fields, "num_nextn_predict_layers", 1)
            mtp += (f"{component.prefix}layers.{layers + n}." for n in range(more))
    return _Form(tuple(required), tuple(optional), tuple(mtp), shapes=shapes)


def _fields(component: Component, config: Fields) -> Fields:
    if not component.config:
        return config
    fields = config.get(component.config, config if component.flat else None)
    if not isinstance(fields, dict):
        raise NotKnownError
    return fields


def _named(group: NameGroup, config: Fields, kind: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the patterns of a group, without braces, with the names of every layer and expert."""

    def is_in(layer: int) -> bool:
        return all(condition(config, layer) for condition in group.conditions)

    patterns = (  # one for each choice of the words in braces
        "".join(words)
        for pattern in group.names.split()
        for words in product(*(part.split(",") for part in re.split(r"\{([^}]*)\}", pattern)))
    )
    for pattern in patterns:
        numbers = pattern.count("#")
        layers = [layer for layer in range(_layers(config, kind) if numbers else 1) if is_in(layer)]
        experts = range(_experts(config)) if numbers > 1 and layers else range(1)
        if len(layers) * len(experts) > _MOST:
            raise NotKnownError
        starts = (pattern.replace("#", str(layer), 1) for layer in layers)
        yield pattern, [start.replace("#", str(at), 1) for start in starts for at in experts]


def _layers(config: Fields, kind: str) -> int:
    key = LAYER_COUNTS.get(kind, "num_hidden_layers")
    value = config.get(key)
    count = len(value) if isinstance(value, list) else integer(config, key)
    if count > _MOST:
        raise NotKnownError
    return count


def _experts(config: Fields) -> int:
    """Return the number of experts in a layer, which any of several keys may contain."""
    counts = {integer(config, key) for key in _EXPERTS if config.get(key) is not None}
    if len(counts) != 1:
        raise NotKnownError
    return counts.pop()


def _expected(form: _Form, names: Collection[str], select: Select) -> Expected:
    """Return a form, with towers spelled as in `names` and optional names excused."""
    old = any(_TOWER[1] in name for name in names)
    spelled = {name: name.replace(*_TOWER) if old else name for name in form.required}
    extra = (name for name in names if _EXTRA.search(name) or name.startswith(form.mtp))
    excused = {*form.optional, *extra}
    advice = "check that this is the config of the model that was trained"
    shapes = {spelled.get(name, name): shape for name, shape in form.shapes.items()}
    return Expected("config.json", select(spelled.values()), shapes, excused, form.remarks, advice)
