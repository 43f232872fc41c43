"""Block FP8: choose the matrices to quantise, adapt config.json, and dequantise.

The format is DeepSeek's: float8_e4m3fn elements under the matrix's name, and one float32 scale per
block of 128 x 128 under that name plus `_scale_inv`. The weights of linear layers are quantised,
except those that slime keeps in their dtype, and vision and audio towers, which Qwen's published
models keep.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from unshard.convert.heads import is_head
from unshard.convert.outputs import ConvertedTensor, Precision
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
from unshard.read.model_config import Fields, ModelConfig
from unshard.tensors.dtypes import BY_NAME
from unshard.with_notes import WithNotes

_ELEMENTS, _SCALES = BY_NAME["float8_e4m3fn"], BY_NAME["float32"]
_WEIGHT, _SCALE = ".weight", "_scale_inv"
_CONFIG = "quantization_config"
_KEPT = re.compile(
    r"norm|embed|router|lm_head|eh_proj|weights_proj|conv1d|A_log|dt_bias|in_proj_a|in_proj_b"
    r"|visual|vision|audio|projector|mtp\.fc\."
    r"|(^|\.)(gate|shared_expert_gate|score|classifier|v_head)\."
)


def is_scale(name: str) -> bool:
    """Return whether a tensor has the name of the scales of a block FP8 matrix."""
    return name.endswith(_WEIGHT + _SCALE)


def quantise(tensors: Sequence[ConvertedTensor]) -> WithNotes[list[ConvertedTensor]]:
    """Return the output's tensors with its matrices in block FP8.

    Raises:
        ConversionError: nothing can be quantised, or experts are in one tensor.
    """
    problems = [
        ConversionError(
            f"tensor {name}: has all experts in one tensor, and engines read block FP8 only from "
            "a matrix per expert",
            hint="leave out ⟦--quantize⟧",
        )
        for name, dtype, recipe in tensors
        if "experts." in name and len(shape_of(recipe)) == 3 and dtype.castable
    ]
    raise_all(ConversionError, "experts that cannot be quantised", problems)
    outputs: list[ConvertedTensor] = []
    ragged = []
    for tensor in tensors:
        name, dtype, recipe = tensor
        if dtype is _ELEMENTS:
            raise ConversionError(
                f"tensor {name}: is {dtype} already, so the model cannot be quantised",
                hint="leave out ⟦--quantize⟧",
            )
        if not _is_quantised(tensor):
            outputs.append(tensor)
            continue
        ragged += [name] if any(size % BLOCK for size in shape_of(recipe)) else []
        outputs.append(ConvertedTensor(name, _ELEMENTS, Quantized(recipe, name)))
        outputs.append(ConvertedTensor(name + _SCALE, _SCALES, BlockScales(recipe, name)))
    if len(outputs) == len(tensors):
        raise ConversionError("⟦--quantize fp8-block⟧: the model has no matrix to quantise")
    if not ragged:
        return WithNotes(outputs)
    note = (
        f"the rows or columns of {len(ragged)} matrices in block FP8 are not a multiple of "
        f"{BLOCK}: {ragged[0]}; engines may refuse them"
    )
    return WithNotes(outputs, (note,))


def _is_quantised(tensor: ConvertedTensor) -> bool:
    return (
        tensor.name.endswith(_WEIGHT)
        and tensor.dtype.castable
        and len(shape_of(tensor.recipe)) == 2
        and not is_head(tensor.name)
        and _KEPT.search(tensor.name) is None
    )


def quantisation_config(config: ModelConfig, tensors: Sequence[ConvertedTensor]) -> ModelConfig:
    """Return the config of a quantised output, with the fields that DeepSeek and slime write.

    Modules that are not quantised are listed by name, without those of one dimension (norms). The
    head is always listed, because a tied head has no tensor.
    """
    unquantised = {
        name.removesuffix(_WEIGHT)
        for name, dtype, recipe in tensors
        if name.endswith(_WEIGHT) and dtype is not _ELEMENTS and len(shape_of(recipe)) > 1
    }
    section = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted(unquantised | {"lm_head"}),
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    return config.changed({_CONFIG: section})


def dequantise(
    tensors: Mapping[str, Recipe], precision: Precision, configs: Iterable[ModelConfig | None]
) -> dict[str, Recipe]:
    """Return a model's tensors, those in block FP8 dequantised if they get another dtype.

    A model without scales of blocks is returned as it is. The block size comes from the first of
    `configs` that has it, and is 128 x 128 otherwise.

    Raises:
        ConversionError: a scale is missing, or does not fit its matrix.
    """
    outputs, problems = dict(tensors), []
    if not any(map(is_scale, tensors)):
        return outputs
    block = next(filter(None, map(_block_of, configs)), (BLOCK, BLOCK))
    for name, recipe in tensors.items():
        if not isinstance(recipe, Take) or recipe.entry.dtype is not _ELEMENTS:
            continue
        if not precision.casts(name):
            continue
        scales = outputs.pop(name + _SCALE, None)
        if isinstance(scales, Take) and _fit(shape_of(recipe), shape_of(scales), block):
            outputs[name] = Dequantized(recipe, scales, block)
            continue
        problems.append(
            ConversionError(
                f"tensor {name}: is block FP8, but its scales are missing or do not fit",
                expected=f"{name}{_SCALE} with one number per {block[0]} x {block[1]} elements of "
                f"{list(shape_of(recipe))}",
                found="no such tensor" if scales is None else str(list(shape_of(scales))),
                hint="write it unchanged: ⟦+--dtype keep⟧",
            )
        )
    raise_all(ConversionError, "tensors that cannot be cast", problems)
    return outputs


def true_config(config: ModelConfig, tensors: Iterable[ConvertedTensor]) -> ModelConfig:
    """Remove FP8 from the config of an output without FP8: cast, or trained from an FP8 model."""
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
    """Return rows and columns of a block, if the config has them."""
    fields = {} if config is None else config.fields
    for section in (fields, *fields.values()):  # a text model's config is nested
        match section:
            case {"quantization_config": {"weight_block_size": [int(rows), int(columns)]}} if (
                rows > 0 and columns > 0
            ):
                return rows, columns
    return None


def _fit(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Return whether `scales` is the shape of one scale for every block of a matrix."""
    rows, columns = block
    return len(shape) == 2 and scales == (-(-shape[0] // rows), -(-shape[1] // columns))
