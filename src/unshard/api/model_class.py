"""A model class that a user names: it must have a place for every tensor of the output."""

import json
import tempfile
from pathlib import Path

from unshard.api.flow.preparing import Prepared
from unshard.convert.recipes import shape_of
from unshard.errors import ConversionError, UsageError

__all__ = ["check_class"]

_SHOWN = 20


def check_class(prepared: Prepared, model_class: object) -> None:
    """Compare every name and shape of a planned output with those of a model class.

    The class is built on the meta device, from the config that will be written.

    Raises:
        ConversionError: they differ; all that do are named.
        UsageError: torch or transformers is not installed, or there is no config, or it is not a
            class.
        OutputError: the class cannot be built.
    """
    from unshard.write.verification.load import load_as

    if not isinstance(model_class, type):
        raise UsageError(
            f"model_cls: {model_class!r} is not a class",
            hint="give the class itself: from transformers import Qwen2ForCausalLM",
        )
    if prepared.config is None:
        raise UsageError("model_cls: there is no config to build it from", hint="give one: config")
    forms = {one.name: (one.dtype, shape_of(one.recipe)) for one in prepared.tensors}
    with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
        text = json.dumps(prepared.config.fields)
        (Path(scratch) / "config.json").write_text(text, encoding="utf-8")
        found = load_as(model_class, Path(scratch), forms)
    problems = [
        *(f"{name}: is missing" for name in found.missing),
        *(f"{name}: has no place" for name in found.unexpected),
        *(
            f"{one.name}: shape {list(one.found)}, not {list(one.expected)}"
            for one in found.mismatched
        ),
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConversionError(
            f"the checkpoint does not fit {found.model_class} ({len(problems)} problems)",
            found="; ".join(problems[:_SHOWN]) + more,
        )
