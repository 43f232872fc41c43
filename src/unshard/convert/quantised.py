"""Block FP8: which matrices are quantised, what config.json says then, and the way back.

The form is that of DeepSeek's models: float8_e4m3fn elements under the matrix's own name, and one
float32 scale for each block of 128 x 128 under that name with `_scale_inv` at its end. A matrix is
what a linear layer multiplies with; what slime keeps in its own dtype is kept, and the towers of
models that see or hear, as in the models that Qwen publishes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from unshard.convert.heads import is_head
from unshard.convert.outputs import Converted, Precision
from unshard.convert.recipes import (
    BLOCK,
    BlockScales,
    Dequantized,
    Quantized,
    Recipe,
    Take,
    shape_of,
)
from unshard.errors import ConversionError, raise_all
from unshard.noted import Noted
from unshard.read.model_config import Fields, ModelConfig
from unshard.tensors.dtypes import BY_NAME

_ELEMENTS, _SCALES = BY_NAME["float8_e4m3fn"], BY_NAME["float32"]
_WEIGHT, _SCALE = ".weight", "_scale_inv"
_CONFIG = "quantization_config"
_KEPT = re.compile(
    r"norm|embed|router|lm_head|eh_proj|weights_proj|conv1d|A_log|dt_bias|in_proj_a|in_proj_b"
    r"|visual|vision|audio|projector|mtp\.fc\."
    r"|(^|\.)(gate|shared_expert_gate|score|classifier|v_head)\."
)


def is_scale(name: str) -> bool:
    """Return whether a tensor has the scales of a matrix in block FP8, by its name."""
    return name.endswith(_WEIGHT + _SCALE)


def quantise(tensors: Sequence[Converted]) -> Noted[list[Converted]]:
    """Return the output's tensors with its matrices in block FP8.

    Raises:
        ConversionError: nothing can be quantised, or experts are in one tensor.
    """
    problems = [
        ConversionError(
            f"tensor {one.name}: has all experts in one tensor, of which engines read block FP8 "
            "only where each is a matrix of its own",
            hint="leave out ⟦--quantize⟧",
        )
        for one in tensors
        if "experts." in one.name and len(shape_of(one.recipe)) == 3 and one.dtype.castable
    ]
    raise_all(ConversionError, "experts that cannot be quantised", problems)
    made: list[Converted] = []
    ragged = []
    for one in tensors:
        if one.dtype is _ELEMENTS:
            raise ConversionError(
                f"tensor {one.name}: is {one.dtype} already, so the model cannot be quantised",
                hint="leave out ⟦--quantize⟧",
            )
        if not _is_quantised(one):
            made.append(one)
            continue
        ragged += [one.name] if any(size % BLOCK for size in shape_of(one.recipe)) else []
        made.append(Converted(one.name, _ELEMENTS, Quantized(one.recipe, one.name)))
        scales = BlockScales(one.recipe, one.name)
        made.append(Converted(one.name + _SCALE, _SCALES, scales))
    if len(made) == len(tensors):
        raise ConversionError("⟦--quantize fp8-block⟧: the model has no matrix that is quantised")
    if not ragged:
        return Noted(made)
    what = f"rows or columns that are not a multiple of {BLOCK}"
    note = f"{len(ragged)} matrices in block FP8 have {what}: {ragged[0]}; engines may refuse them"
    return Noted(made, (note,))


def _is_quantised(tensor: Converted) -> bool:
    return (
        tensor.name.endswith(_WEIGHT)
        and tensor.dtype.castable
        and len(shape_of(tensor.recipe)) == 2
        and not is_head(tensor.name)
        and _KEPT.search(tensor.name) is None
    )


def quantisation_config(config: ModelConfig, tensors: Sequence[Converted]) -> ModelConfig:
    """Return the config of an output that was quantised, as DeepSeek and slime write it.

    The modules that are kept are listed by name, but for those of one dimension (norms). The head
    is always listed: one that is tied to the embedding has no tensor.
    """
    kept = {
        one.name.removesuffix(_WEIGHT)
        for one in tensors
        if one.name.endswith(_WEIGHT)
        and one.dtype is not _ELEMENTS
        and len(shape_of(one.recipe)) > 1
    }
    stated = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted(kept | {"lm_head"}),
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    return config.changed({_CONFIG: stated})


def dequantise(
    tensors: Mapping[str, Recipe], precision: Precision, configs: Iterable[ModelConfig | None]
) -> dict[str, Recipe]:
    """Return a model's tensors; what is block FP8 and gets another dtype is computed.

    A model without scales of blocks is returned as it is. The first of `configs` that states the
    size of a block decides; without one it is 128 x 128.

    Raises:
        ConversionError: a scale is missing, or does not fit its matrix.
    """
    made, problems = dict(tensors), []
    if not any(map(is_scale, tensors)):
        return made
    block = next(filter(None, map(_block_of, configs)), (BLOCK, BLOCK))
    for name, recipe in tensors.items():
        if not isinstance(recipe, Take) or recipe.entry.dtype is not _ELEMENTS:
            continue
        if not precision.casts(name):
            continue
        scales = made.pop(name + _SCALE, None)
        if not isinstance(scales, Take) or not _fit(shape_of(recipe), shape_of(scales), block):
            problems.append(
                ConversionError(
                    f"tensor {name}: is block FP8, and its scales are not known",
                    expected=f"{name}{_SCALE} with one number for every {block[0]} x {block[1]} "
                    f"elements of {list(shape_of(recipe))}",
                    found="no such tensor" if scales is None else str(list(shape_of(scales))),
                    hint="write it as it is: ⟦+--dtype keep⟧",
                )
            )
            continue
        made[name] = Dequantized(recipe, scales, block)
    raise_all(ConversionError, "tensors that cannot be cast", problems)
    return made


def true_config(config: ModelConfig, tensors: Iterable[Converted]) -> ModelConfig:
    """Return a config that does not say FP8 of a model that is not: cast, or trained from one."""
    if any(one.dtype.name.startswith("float8") for one in tensors):
        return config
    fields = {
        key: _without_fp8(value) if isinstance(value, dict) else value
        for key, value in config.fields.items()
    }
    return replace(config, fields=_without_fp8(fields))


def _without_fp8(fields: Fields) -> Fields:
    stated = fields.get(_CONFIG)
    is_fp8 = isinstance(stated, dict) and stated.get("quant_method") == "fp8"
    return {key: value for key, value in fields.items() if key != _CONFIG} if is_fp8 else fields


def _block_of(config: ModelConfig | None) -> tuple[int, int] | None:
    """Return rows and columns of a block, if the config states them."""
    fields = {} if config is None else config.fields
    for section in (fields, *fields.values()):  # also that of the text model
        stated = section.get(_CONFIG) if isinstance(section, dict) else None
        match stated.get("weight_block_size") if isinstance(stated, dict) else None:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
    return None


def _fit(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Return whether there is one scale for every block of a matrix."""
    if len(shape) != 2:
        return False
    return scales == tuple(-(-size // of) for size, of in zip(shape, block, strict=True))
