"""Write adapter_config.json, which PEFT needs to load an adapter."""

import json
from collections.abc import Mapping

from unshard.convert.lora.files import completed
from unshard.convert.lora.fuse import known_alpha
from unshard.convert.lora.names import Split
from unshard.read.beside.adapter_config import AdapterConfig

__all__ = ["ADAPTER_CONFIG_NAME", "ADAPTER_NAME", "adapter_config_json"]

ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"

_PLAIN: Mapping[str, object] = {
    "auto_mapping": None,
    "bias": "none",
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "peft_type": "LORA",
    "use_dora": False,
    "use_rslora": False,
}


def adapter_config_json(
    split: Split,
    config: AdapterConfig | None,
    alpha: float | None,
    model_config: Mapping[str, object] | None,
) -> bytes:
    """Return a complete adapter_config.json.

    Fields of the training run's own file stay; fields that it lacks follow from the tensors.

    Args:
        split: the checkpoint's tensors.
        config: what the training run wrote about the adapter.
        alpha: the user's, which overrides the config.
        model_config: the model's config.json; it may name the model's origin and its task.

    Raises:
        UsageError: the user's alpha is not a positive number.
        ConversionError: alpha or the adapter's target modules are not known.
    """
    known, config = known_alpha(config, alpha), completed(split, config)
    written = config.fields if "peft_type" in config.fields else {}
    targets = config.target_modules or ()
    fields: dict[str, object] = {
        **_PLAIN,
        **written,
        "alpha_pattern": dict(config.alpha_pattern),
        "base_model_name_or_path": _origin(config, model_config),
        "fan_in_fan_out": config.fan_in_fan_out,
        "inference_mode": True,
        "lora_alpha": int(known) if known.is_integer() else known,
        "modules_to_save": list(config.modules_to_save) or None,
        "r": config.rank,
        "rank_pattern": dict(config.rank_pattern),
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "task_type": _task(config, model_config),
    }
    if config.target_parameters:  # older versions of PEFT do not know the field
        fields["target_parameters"] = list(config.target_parameters)
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def _origin(config: AdapterConfig, model_config: Mapping[str, object] | None) -> str | None:
    """Return the name or path of the model that was trained, if it is recorded."""
    if config.base_model_name_or_path:
        return config.base_model_name_or_path
    name = (model_config or {}).get("_name_or_path")
    return name if isinstance(name, str) and name else None


def _task(config: AdapterConfig, model_config: Mapping[str, object] | None) -> str | None:
    """Return PEFT's word for the task. Other classes than causal models may have heads of it."""
    if config.task_type:
        return config.task_type
    classes = (model_config or {}).get("architectures")
    causal = isinstance(classes, list) and any(
        str(name).endswith("ForCausalLM") for name in classes
    )
    return "CAUSAL_LM" if causal else None
