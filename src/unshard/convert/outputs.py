"""The output's tensors: selected by name, each with its dtype; of several models the mean.

Tensors are cast only on request, and integers, booleans and 8-bit floats never, nor what scales
them. Some tensors lose too much in 16 bits (a router's bias is added to scores that differ in the
last digits): transformers keeps them in float32, and so does a cast here.
"""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from unshard.convert.recipes import (
    Dequantized,
    LowRank,
    Recipe,
    WeightedSum,
    shape_of,
    stored_dtype,
)
from unshard.errors import ConversionError, UsageError, raise_all
from unshard.keywords import CHOICES, DtypeLike
from unshard.read.model_config import ModelConfig
from unshard.tensors.dtypes import BY_NAME, CASTS, DType, DTypeKind

# Other names of dtypes: torch's, and those of trainers' options.
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}


_SCALE = re.compile(r"scale|scb|zero|shift|absmax|amax|quant|codebook|centroid|lut", re.IGNORECASE)
_NO_SCALE = re.compile(r".*weight|(?!weight_).*bias")
_NO_ELEMENTS = re.compile(r".*(?:index|indexes|ids|mask)|_extra_state")


class Converted(NamedTuple):
    """An output tensor before it has a place in a file."""

    name: str
    dtype: DType
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Precision:
    """The rule for output dtypes.

    Attributes:
        target: the dtype of floating point tensors of 16 bits and more; None: their own.
        base: dtypes of single tensors instead, by name (`--dtype base`).
        kept: tensors whose names match keep their dtype.
        scales: tensors that keep their dtype, too (`scales_of_kept`).
    """

    target: DType | None = None
    base: Mapping[str, DType] = field(default_factory=dict)
    kept: re.Pattern[str] | None = None
    scales: frozenset[str] = frozenset()

    def casts(self, name: str) -> bool:
        """Return whether a tensor of block FP8 is to become another dtype."""
        target = self.base.get(name, self.target)
        return target is not None and target.castable

    def dtype(self, name: str, stored: DType) -> DType:
        """Return the output's dtype for a tensor of the dtype `stored`."""
        target = self.base.get(name, self.target)
        if target is None or not (stored.castable and target.castable):
            return stored
        if name in self.scales or (self.kept is not None and self.kept.search(name)):
            return stored
        return target


def scales_of_kept(tensors: Mapping[str, Recipe]) -> frozenset[str]:
    """Return the names of what scales elements that no cast changes.

    Elements are 8-bit floats or integers, of up to 32 bits where several are packed; those of 64
    bits number something. What scales them is next to them, under their own name, or a level above
    (quanto's `weight._scale` of `weight._data._data`). Some name it so, of any size (the codebook
    of a few codes); others have fewer elements, under a name that is not that of a weight or bias.
    """
    elements: dict[str, int] = {}
    above = set[str]()
    for name, recipe in tensors.items():
        dtype, count = stored_dtype(recipe), prod(shape_of(recipe))
        module, _, last = name.rpartition(".")
        if dtype.castable or dtype.kind is DTypeKind.BOOL or dtype.itemsize > 4 or not module:
            continue
        if not _NO_ELEMENTS.fullmatch(last):
            above |= {name, module, module.rpartition(".")[0]} - {""}
            for place in (name, module):
                elements[place] = max(count, elements.get(place, 0))
    return frozenset(
        name
        for name, recipe in tensors.items()
        for module, _, last in [name.rpartition(".")]
        if (prod(shape_of(recipe)) < elements.get(module, 0) and not _NO_SCALE.fullmatch(last))
        or _is_named_scale(name, above)
    )


def _is_named_scale(name: str, above: Collection[str]) -> bool:
    module, _, last = name.removesuffix(".weight").rpartition(".")  # VPTQ's `centroids.weight`
    return module in above and _SCALE.search(last) is not None


def select_tensors(
    tensors: Mapping[str, Recipe], include: str | None, exclude: str | None
) -> dict[str, Recipe]:
    """Return the tensors whose names `include` matches and `exclude` does not, in order.

    Raises:
        UsageError: an expression is not valid, or nothing is left.
    """
    kept = select_names(tensors, include, exclude)
    if tensors and not kept:
        given = {"include": include, "exclude": exclude}
        asked = " ".join(f"⟦--{one} {text}⟧" for one, text in given.items() if text is not None)
        raise UsageError(f"{asked}: leaves no tensor", found=f"{', '.join(list(tensors)[:3])}, …")
    return {name: tensors[name] for name in kept}


def select_names(names: Iterable[str], include: str | None, exclude: str | None) -> list[str]:
    """Return the names that `include` matches and `exclude` does not, in order.

    Raises:
        UsageError: an expression is not valid.
    """
    wanted = None if include is None else _compiled("include", include)
    unwanted = None if exclude is None else _compiled("exclude", exclude)
    return [
        name
        for name in names
        if (wanted is None or wanted.search(name))
        and not (unwanted is not None and unwanted.search(name))
    ]


def _compiled(option: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(
            f"⟦--{option} {shlex.quote(text)}⟧: not a regular expression: {error}"
        ) from error


def finish(tensors: Mapping[str, Recipe], precision: Precision) -> list[Converted]:
    """Return the output's tensors, in order, each with its dtype.

    Raises:
        ConversionError: safetensors cannot store a tensor.
    """
    outputs = [
        Converted(name, precision.dtype(name, stored_dtype(recipe)), recipe)
        for name, recipe in tensors.items()
    ]
    problems = []
    for output in outputs:
        if output.dtype.code is None:
            what = f"tensor {output.name}: safetensors does not have the dtype {output.dtype}"
            problems.append(ConversionError(what))
        if output.name == "__metadata__" or not output.name.isprintable():
            problems.append(ConversionError(f"tensor {output.name!r}: its name is not allowed"))
    raise_all(ConversionError, "tensors that safetensors cannot store", problems)
    return outputs


def dtype_choice(dtype: DtypeLike) -> str:
    """Return the choice that a dtype means: one of CHOICES.

    A dtype is one of these or another name of one, with or without `torch.`; or a dtype of numpy,
    ml_dtypes (the type or the dtype) or torch. None of the three is imported.

    Raises:
        UsageError: it is something else, or a dtype that nothing is cast to (int8, float64).
    """
    name = _name_of(dtype)
    choice = _ALIASES.get(name, name)
    if choice not in (choices := CHOICES["dtype"]):
        raise UsageError(
            f"⟦--dtype {shlex.quote(name)}⟧: unknown",
            expected=f"{', '.join(choices)} (or {', '.join(_ALIASES)})",
        )
    return choice


def _name_of(dtype: DtypeLike) -> str:
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    kind = type(dtype)
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, type):  # Python's float is 32 bits for torch, 64 for numpy
        return dtype.__name__ if hasattr(dtype, "itemsize") else f"builtins.{dtype.__name__}"
    name = getattr(dtype, "name", None) if hasattr(dtype, "itemsize") else None
    return name if isinstance(name, str) else repr(dtype)


def main_dtype(tensors: Iterable[Converted]) -> str | None:
    """Return the dtype of most of the floating point bytes; None if there are none.

    Quantised matrices are not, nor what scales them: engines compute in the dtype of the rest.
    """
    found = {one.name: one for one in tensors}
    scales = scales_of_kept({name: one.recipe for name, one in found.items()})
    sizes: Counter[str] = Counter()
    for one in found.values():
        if one.dtype.castable and one.name not in scales:
            sizes[one.dtype.name] += prod(shape_of(one.recipe)) * one.dtype.itemsize
    return sizes.most_common(1)[0][0] if sizes else None


def precision(
    dtype: DtypeLike,
    config: ModelConfig | None,
    base: Mapping[str, DType] | None,
    keep: str | None,
) -> Precision:
    """Return the rule that `--dtype` and `--keep-fp32` mean.

    `base` has the dtypes of the base model's tensors, if there is one; tensors that the regular
    expression `keep` matches are not cast.

    Raises:
        UsageError: the dtype is unknown, or needs a base, or the expression is not valid.
        ConversionError: `config` was chosen, and there is none or it does not name a dtype.
    """
    patterns = [_compiled("keep-fp32", keep).pattern] if keep else []
    choice = dtype_choice(dtype)
    if choice == "base":
        if base is None:
            raise UsageError("⟦--dtype base⟧: needs a base model", hint="name it: ⟦+--base MODEL⟧")
        return Precision(None, base, _union(patterns))
    target = _target(choice, config)
    if target is not None and target.itemsize == 2:
        from unshard.convert.kept import kept_names

        patterns += kept_names(config, target)
    return Precision(target, {}, _union(patterns))


def _target(choice: str, config: ModelConfig | None) -> DType | None:
    if choice == "keep":
        return None
    if choice in CASTS:
        return BY_NAME[choice]
    named = None if config is None else config.dtype
    if named is None:
        raise ConversionError(
            "⟦--dtype config⟧: "
            + ("there is no config.json" if config is None else f"{config.path} names no dtype"),
            hint="name the dtype, or give a config: ⟦+--config FILE|DIR⟧",
        )
    if named not in CASTS:
        what = f"⟦--dtype config⟧: {config.path if config else ''} names {named}"
        raise ConversionError(what, expected=", ".join(CASTS))
    return BY_NAME[named]


def _union(patterns: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def average_tensors(
    models: Sequence[Sequence[Converted]], names: Sequence[str], weights: Sequence[float]
) -> tuple[list[Converted], Mapping[str, tuple[Converted, ...]]]:
    """Return (sum of weight * model) / (sum of weights), with one rounding at the end.

    Floating point tensors of 16 bits and more are averaged. Integers, booleans, 8-bit floats (which
    belong to separate scales) and complex numbers do not have a mean of their own type: the output
    has those of the last model, and those of all models are returned too, by name. `names` are
    those of the models, for errors.

    Raises:
        ConversionError: names, shapes or stored dtypes differ, or an adapter would have to be fused
            on the way.
    """
    by_name = [{tensor.name: tensor for tensor in model} for model in models]
    every = dict.fromkeys(name for model in by_name for name in model)
    problems = [
        ConversionError(f"tensor {name} is missing in {names[number]}")
        for name in every
        for number, model in enumerate(by_name)
        if name not in model
    ]
    common = [name for name in by_name[0] if all(name in model for model in by_name)]
    pairs = {name: tuple(model[name] for model in by_name) for name in common}
    problems += [p for same in pairs.values() if (p := _mismatch(same, names)) is not None]
    raise_all(ConversionError, "the checkpoints are not of one model", problems)
    tensors, fixed = [], {}
    for name, same in pairs.items():
        if stored_dtype(same[0].recipe).castable:
            terms = zip(weights, (one.recipe for one in same), strict=True)
            tensors.append(same[0]._replace(recipe=WeightedSum(tuple(terms))))
        else:
            tensors.append(same[-1])
            fixed[name] = same
    return tensors, fixed


def _mismatch(same: Sequence[Converted], names: Sequence[str]) -> ConversionError | None:
    """Return why the tensors of one name cannot be averaged, or None."""
    name = same[0].name
    forms = [f"{stored_dtype(one.recipe)} {list(shape_of(one.recipe))}" for one in same]
    other = next((number for number, form in enumerate(forms) if form != forms[0]), None)
    if other is not None:
        is_cast = len({shape_of(one.recipe) for one in same}) == 1 and all(
            stored_dtype(one.recipe).castable for one in same
        )
        return ConversionError(
            f"tensor {name} differs between {names[0]} and {names[other]}",
            expected=f"{forms[0]} as in {names[0]}",
            found=f"{forms[other]} in {names[other]}",
            hint="merge them to one dtype first, each by itself" if is_cast else "",
        )
    if any(isinstance(one.recipe, WeightedSum | LowRank | Dequantized) for one in same):
        what = "has a LoRA adapter, which is not fused"
        if any(isinstance(one.recipe, Dequantized) for one in same):
            what = "is block FP8, which is not cast"
        return ConversionError(
            f"tensor {name} {what} while averaging",
            hint="merge each checkpoint first, then average the merged models",
        )
    return None
