"""The output's tensors: those that the user selects, each with its dtype and a storable name."""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unshard.convert.precision import Precision
from unshard.convert.recipes import Recipe, stored_dtype
from unshard.errors import ConversionError, UsageError, raise_all
from unshard.tensors.dtypes import DType

__all__ = ["Converted", "finish", "select_names", "select_tensors"]


@dataclass(frozen=True, slots=True)
class Converted:
    """An output tensor before it has a place in a file."""

    name: str
    dtype: DType
    recipe: Recipe


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
        asked = " ".join(f"--{option} {text}" for option, text in given.items() if text is not None)
        raise UsageError(f"{asked}: leaves no tensor", found=f"{', '.join(list(tensors)[:3])}, …")
    return {name: tensors[name] for name in kept}


def select_names(names: Iterable[str], include: str | None, exclude: str | None) -> list[str]:
    """Return the names that `include` matches and `exclude` does not, in order.

    Raises:
        UsageError: an expression is not valid.
    """
    wanted, unwanted = _compiled("include", include), _compiled("exclude", exclude)
    return [
        name
        for name in names
        if (wanted is None or wanted.search(name))
        and not (unwanted is not None and unwanted.search(name))
    ]


def _compiled(option: str, text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(
            f"--{option} {shlex.quote(text)}: not a regular expression: {error}"
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
    raise_all(ConversionError, "tensors that safetensors cannot store", _unstorable(outputs))
    return outputs


def _unstorable(outputs: list[Converted]) -> list[ConversionError]:
    problems = []
    for output in outputs:
        if output.dtype.code is None:
            what = f"tensor {output.name}: safetensors does not have the dtype {output.dtype}"
            problems.append(ConversionError(what))
        if output.name == "__metadata__" or not output.name.isprintable():
            problems.append(ConversionError(f"tensor {output.name!r}: its name is not allowed"))
    return problems
