"""An adapter as pipelines of diffusers load it: one file, with its config in the metadata.

Source: `save_lora_adapter` and `_load_lora_into_transformer` of diffusers 0.42.
"""

import json
from collections.abc import Mapping

from unshard.convert.lora.names import FRONT
from unshard.convert.recipes import Recipe
from unshard.errors import ConversionError
from unshard.read.model_config import ModelConfig

_CONFIG = "lora_adapter_metadata"
_PARTS = (("UNet", "unet."), ("Transformer", "transformer."), ("DiT", "transformer."))


def pipeline_adapter(
    tensors: Mapping[str, Recipe], config: Mapping[str, object], model: ModelConfig
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Return the tensors under the names of a pipeline, and the metadata of their file.

    Args:
        tensors: as PEFT's file has them.
        config: the fields of PEFT's adapter_config.json, with which diffusers gets rank and alpha.
        model: the config of the model that was adapted: a UNet, or a transformer.

    Raises:
        ConversionError: modules were trained whole, for which a pipeline has no place.
    """
    name = str(model.fields["_class_name"])
    part = next((one for key, one in _PARTS if key in name), None)
    if part is None:
        raise ConversionError(
            f"pipelines load the adapters of transformers and UNets, and this is a {name}",
            hint="fuse the adapter: ⟦+--lora fuse⟧",
        )
    if saved := config.get("modules_to_save"):
        raise ConversionError(
            "modules were trained whole beside the adapter, and diffusers loads none with it",
            found=str(saved),
            hint="fuse the adapter: ⟦+--lora fuse⟧",
        )
    named = {part + name.removeprefix(FRONT): recipe for name, recipe in tensors.items()}
    stated = {f"{part}{key}": value for key, value in config.items() if value is not None}
    return named, {_CONFIG: json.dumps(stated, indent=2, sort_keys=True)}
