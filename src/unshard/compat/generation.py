"""`generation_config.json` as transformers writes it for a model that has none of its own.

`save_pretrained` derives it from config.json (`GenerationConfig.from_model_config`): which tokens
begin, end and pad a text, and, since transformers 5, what a forward pass returns.
"""

import json

from unshard.read.beside.model_config import Fields

__all__ = ["GENERATION_CONFIG", "generation_config"]

GENERATION_CONFIG = "generation_config.json"

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_TEXT_CONFIGS = ("decoder", "generator", "text_config")
_SINCE_5 = {"output_attentions": False, "output_hidden_states": False, "use_cache": True}


def generation_config(config: Fields) -> bytes | None:
    """Return the file's bytes; None for a model whose config says that it does not generate."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    generates = any(isinstance(name, str) and name.endswith(_GENERATES) for name in names)
    if names and not generates:
        return None
    nested = (config.get(key) for key in _TEXT_CONFIGS)
    inner = next((one for one in nested if isinstance(one, dict)), {})
    version = str(config.get("transformers_version", ""))
    major = version.partition(".")[0]
    fields: dict[str, object] = {"_from_model_config": True, "transformers_version": version}
    known: dict[str, object] = dict.fromkeys(_TOKENS)
    if major.isdigit() and int(major) >= 5:
        known |= _SINCE_5
    for key, default in known.items():
        found = [one[key] for one in (config, inner) if one.get(key) is not None]
        if found or default is not None:
            fields[key] = found[0] if found else default
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()
