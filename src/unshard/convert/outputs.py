"""What the output's tensors are: names as in the checkpoint, dtypes by the user's choice."""

from collections.abc import Mapping
from dataclasses import dataclass

from unshard.convert.recipes import Recipe, dtype_of, take
from unshard.errors import ConversionError, UsageError, raise_all
from unshard.tensors.catalog import Catalog
from unshard.tensors.dtypes import BY_NAME, DType

__all__ = ["CASTS", "Converted", "Fields", "config_dtype", "convert", "target_dtype"]

CASTS = ("bfloat16", "float16", "float32")
"""Dtypes that a merge can cast floating point tensors to."""

Fields = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Converted:
    """An output tensor before it has a place in a file."""

    name: str
    dtype: DType
    recipe: Recipe


def convert(catalog: Catalog, target: DType | None) -> list[Converted]:
    """Return the output's tensors, in the checkpoint's order.

    Args:
        catalog: the checkpoint.
        target: dtype for all floating point tensors of 16 bits and more; None keeps every dtype.
            Integers, booleans and 8-bit floats always keep theirs.

    Raises:
        ConversionError: a tensor cannot stand in a safetensors file.
    """
    outputs = []
    for name, entry in catalog.tensors.items():
        recipe = take(entry)
        stored = dtype_of(recipe)
        dtype = target if target is not None and stored.castable else stored
        outputs.append(Converted(name, dtype, recipe))
    raise_all(ConversionError, "tensors that safetensors cannot hold", _unstorable(outputs))
    _refuse_adapters(catalog)
    return outputs


def _unstorable(outputs: list[Converted]) -> list[ConversionError]:
    problems = []
    for output in outputs:
        if output.dtype.code is None:
            what = f"tensor {output.name}: {output.dtype} has no place in safetensors"
            problems.append(ConversionError(what))
        if output.name == "__metadata__" or not output.name.isprintable():
            problems.append(ConversionError(f"tensor {output.name!r}: its name is not allowed"))
    return problems


def _refuse_adapters(catalog: Catalog) -> None:
    """Adapters written out under their own names load as the bare base model, without a word."""
    adapters = [
        name
        for name in catalog.tensors
        if any(part.startswith("lora_") for part in name.split("."))
    ]
    if adapters:
        raise ConversionError(
            f"{catalog.roots[0]}: holds {len(adapters)} LoRA tensors ({adapters[0]} …), and this "
            "version cannot fuse them yet",
            hint="merge the adapter into the model with peft before saving",
        )


def target_dtype(choice: str, config: Fields | None) -> DType | None:
    """Return the dtype that `--dtype` means; None for `keep`.

    Raises:
        UsageError: the choice is not one of keep, config and CASTS.
        ConversionError: `config` was chosen, and there is none or it names no dtype.
    """
    if choice == "keep":
        return None
    if choice in CASTS:
        return BY_NAME[choice]
    if choice != "config":
        raise UsageError(
            f"--dtype {choice}: unknown", expected=", ".join(("keep", "config", *CASTS))
        )
    named = config_dtype(config)
    if named is None:
        raise ConversionError(
            "--dtype config: " + ("there is no config.json" if config is None else "it names none"),
            hint="name the dtype, or give a config with --config",
        )
    if named not in CASTS:
        raise ConversionError(f"--dtype config: config.json names {named}", expected=str(CASTS))
    return BY_NAME[named]


def config_dtype(config: Fields | None) -> str | None:
    """Return the dtype that a model's config names, its own or its text model's; None if none."""
    if config is None:
        return None
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            value = fields.get(key)
            if isinstance(value, str):
                return value.removeprefix("torch.")
    return None
