"""Select the output's tensors by name, choose their dtypes, and average models.

Tensors are cast only on request. Integers, booleans, 8-bit floats and their scales are never cast.
Some tensors lose too much in 16 bits (a router's bias is added to scores that differ in the last
digits): transformers keeps them in float32, and so does a cast here.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


class ConvertedTensor(NamedTuple):
    """An output tensor before it has a place in a file."""

    name: str
    dtype: DType
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Precision:
    """The rule for output dtypes.

    Attributes:
        target: the dtype of floating point tensors of 16 bits and more; None keeps theirs.
        base: dtypes of single tensors, which override `target`, by name (`--dtype base`).
        kept: tensors whose names match keep their dtype.
        scales: names of tensors that keep their dtype, too (`scales_of_kept`).
    """

    target: DType | None = None
    base: Mapping[str, DType] = field(default_factory=dict)
    kept: re.Pattern[str] | None = None
    scales: frozenset[str] = frozenset()

    def casts(self, name: str) -> bool:
        """Return whether a block FP8 tensor gets another dtype."""
        target = self.base.get(name, self.target)
        return target is not None and target.castable

    def dtype(self, name: str, stored: DType) -> DType:
        """Return the output dtype of a tensor whose dtype is `stored`."""
        target = self.base.get(name, self.target)
        if target is None or not (stored.castable and target.castable):
            return stored
        if name in self.scales or (self.kept is not None and self.kept.search(name)):
            return stored
        return target


def scales_of_kept(tensors: Mapping[str, Recipe]) -> frozenset[str]:
    """Return the names of the scales of quantised elements, which are never cast.

    Elements are 8-bit floats or integers, up to 32-bit integers where several are packed; 64-bit
    integers are indices. A scale is next to its elements, below their name, or a level above
    (quanto's `weight._scale` of `weight._data._data`). It is recognised by its name at any size
    (the codebook of a few codes), or by having fewer elements and not the name of a weight or bias.
    """
    elements: dict[str, int] = {}
    modules = set[str]()
    for name, recipe in tensors.items():
        dtype, count = stored_dtype(recipe), prod(shape_of(recipe))
        module, _, last = name.rpartition(".")
        if dtype.castable or dtype.kind is DTypeKind.BOOL or dtype.itemsize > 4 or not module:
            continue
        if not _NO_ELEMENTS.fullmatch(last):
            modules |= {name, module, module.rpartition(".")[0]} - {""}
            for path in (name, module):
                elements[path] = max(count, elements.get(path, 0))

    def is_scale(name: str, recipe: Recipe) -> bool:
        module, _, last = name.rpartition(".")
        if prod(shape_of(recipe)) < elements.get(module, 0) and not _NO_SCALE.fullmatch(last):
            return True
        module, _, last = name.removesuffix(".weight").rpartition(".")  # VPTQ's `centroids.weight`
        return module in modules and _SCALE.search(last) is not None

    return frozenset(name for name, recipe in tensors.items() if is_scale(name, recipe))


def select_tensors(
    tensors: Mapping[str, Recipe], include: str | None, exclude: str | None
) -> dict[str, Recipe]:
    """Return the tensors whose names `include` matches and `exclude` does not, in order.

    Raises:
        UsageError: an expression is not valid, or nothing is left.
    """
    names = select_names(tensors, include, exclude)
    if tensors and not names:
        values = {"include": include, "exclude": exclude}
        options = " ".join(f"⟦--{key} {text}⟧" for key, text in values.items() if text is not None)
        raise UsageError(f"{options}: leaves no tensor", found=f"{', '.join(list(tensors)[:3])}, …")
    return {name: tensors[name] for name in names}


def select_names(names: Iterable[str], include: str | None, exclude: str | None) -> list[str]:
    """Return the names that `include` matches and `exclude` does not, in order.

    Raises:
        UsageError: an expression is not valid.
    """
    included = None if include is None else _compiled("include", include)
    unwanted = None if exclude is None else _compiled("exclude", exclude)
    return [
        name
        for name in names
        if not (included and included.search(name) is None)
        and not (unwanted and unwanted.search(name))
    ]


def _compiled(option: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(
            f"⟦--{option} {shlex.quote(text)}⟧: not a regular expression: {error}"
        ) from error


def finish(tensors: Mapping[str, Recipe], precision: Precision) -> list[ConvertedTensor]:
    """Return the output's tensors, in order, each with its dtype.

    Raises:
        ConversionError: safetensors cannot store a tensor.
    """
    outputs = [
        ConvertedTensor(name, precision.dtype(name, stored_dtype(recipe)), recipe)
        for name, recipe in tensors.items()
    ]
    problems = []
    for output in outputs:
        if output.dtype.code is None:
            message = f"tensor {output.name}: safetensors does not have the dtype {output.dtype}"
            problems.append(ConversionError(message))
        if output.name == "__metadata__" or not output.name.isprintable():
            problems.append(ConversionError(f"tensor {output.name!r}: its name is not allowed"))
    raise_all(ConversionError, "tensors that safetensors cannot store", problems)
    return outputs


def dtype_choice(dtype: DtypeLike) -> str:
    """Return a dtype as one of CHOICES.

    `dtype` may be a choice or an alias, with or without `torch.`; or a dtype of numpy, ml_dtypes
    (the type or the dtype) or torch. None of the three is imported.

    Raises:
        UsageError: it is anything else, or a dtype that no cast has as its target (int8, float64).
    """
    name = _name_of(dtype)
    choice, choices = _ALIASES.get(name, name), CHOICES["dtype"]
    if choice not in choices:
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


def main_dtype(tensors: Iterable[ConvertedTensor]) -> str | None:
    """Return the dtype of most of the floating point bytes; None if there are none.

    Quantised matrices and their scales do not count: engines compute in the dtype of the others.
    """
    tensors = list(tensors)
    scales = scales_of_kept({name: recipe for name, _, recipe in tensors})
    sizes: Counter[str] = Counter()
    for name, dtype, recipe in tensors:
        if dtype.castable and name not in scales:
            sizes[dtype.name] += prod(shape_of(recipe)) * dtype.itemsize
    return sizes.most_common(1)[0][0] if sizes else None


def precision(
    dtype: DtypeLike,
    config: ModelConfig | None,
    base: Mapping[str, DType] | None,
    keep: str | None,
) -> Precision:
    """Return the rule of `--dtype` and `--keep-fp32`.

    `base` has the dtypes of a base model's tensors; tensors that the regular expression `keep`
    matches are not cast.

    Raises:
        UsageError: the dtype is unknown, or needs a base, or the expression is not valid.
        ConversionError: the choice is `config`, and there is no config or it has no dtype.
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
    if config is None or config.dtype is None:
        reason = "there is no config.json" if config is None else f"{config.path} has no dtype"
        raise ConversionError(
            f"⟦--dtype config⟧: {reason}",
            hint="name the dtype, or pass a config: ⟦+--config FILE|DIR⟧",
        )
    if config.dtype not in CASTS:
        raise ConversionError(
            f"⟦--dtype config⟧: {config.path} has the dtype {config.dtype}",
            expected=", ".join(CASTS),
        )
    return BY_NAME[config.dtype]


def _union(patterns: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def average_tensors(
    models: Sequence[Sequence[ConvertedTensor]], names: Sequence[str], weights: Sequence[float]
) -> tuple[list[ConvertedTensor], Mapping[str, tuple[ConvertedTensor, ...]]]:
    """Return (sum of weight * model) / (sum of weights), with one rounding at the end.

    Floating point tensors of 16 bits and more are averaged. Integers, booleans, 8-bit floats (which
    belong to separate scales) and complex numbers do not have a mean of their own type: the output
    has the last model's, and the second value has those of all models, by name. `names` are the
    models' names, for errors.

    Raises:
        ConversionError: names, shapes or stored dtypes differ, or a tensor is fused or dequantised.
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
    versions = {name: tuple(model[name] for model in by_name) for name in common}
    problems += [p for same in versions.values() if (p := _mismatch(same, names)) is not None]
    raise_all(ConversionError, "the checkpoints are of different models", problems)
    tensors, fixed = [], {}
    for name, same in versions.items():
        if stored_dtype(same[0].recipe).castable:
            terms = zip(weights, (tensor.recipe for tensor in same), strict=True)
            tensors.append(same[0]._replace(recipe=WeightedSum(tuple(terms))))
        else:
            tensors.append(same[-1])
            fixed[name] = same
    return tensors, fixed


def _mismatch(same: Sequence[ConvertedTensor], names: Sequence[str]) -> ConversionError | None:
    """Return why the tensors of one name cannot be averaged, or None."""
    name, recipes = same[0].name, [tensor.recipe for tensor in same]
    forms = [f"{stored_dtype(recipe)} {list(shape_of(recipe))}" for recipe in recipes]
    other = next((number for number, form in enumerate(forms) if form != forms[0]), None)
    if other is not None:
        only_dtypes_differ = len(set(map(shape_of, recipes))) == 1 and all(
            stored_dtype(recipe).castable for recipe in recipes
        )
        return ConversionError(
            f"tensor {name} differs between {names[0]} and {names[other]}",
            expected=f"{forms[0]} as in {names[0]}",
            found=f"{forms[other]} in {names[other]}",
            hint="merge each checkpoint to the same dtype first" if only_dtypes_differ else "",
        )
    if any(isinstance(recipe, WeightedSum | LowRank | Dequantized) for recipe in recipes):
        reason = "has a LoRA adapter, which averaging does not fuse"
        if any(isinstance(recipe, Dequantized) for recipe in recipes):
            reason = "is block FP8, which averaging does not cast"
        return ConversionError(
            f"tensor {name} {reason}",
            hint="merge each checkpoint first, then average the merged models",
        )
    return None
