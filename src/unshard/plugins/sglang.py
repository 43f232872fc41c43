"""SGLang on training shards: the plugin, and the arguments of an engine.

The wheel has the entry point `sglang.srt.plugins`: every process of an SGLang in the same
environment calls `register`. Only `register` imports SGLang.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Unpack

from unshard.api.options import accepting
from unshard.errors import UsageError
from unshard.keywords import EngineKeywords
from unshard.plugins.serving import describe, loader_config, model_directory

_FORMAT = "unshard"
_log = logging.getLogger(__name__)


def register() -> None:
    """Add the load format `unshard` to SGLang, in this process.

    Does nothing if SGLang is absent. If the loader does not fit SGLang's interface, only engines
    that request the format get an error.
    """
    try:
        from sglang.srt.arg_groups.choices import add_load_format_choices
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        _log.debug("no load format unshard: %s", error)
        return
    # A load format may be a loader class, which `get_model_loader` instantiates.
    target = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    HookRegistry.register(target, _verify_load_format, HookType.AROUND)
    add_load_format_choices([_FORMAT])


class _LoadConfig(Protocol):
    load_format: object


def _verify_load_format(original: Callable[[_LoadConfig], None], config: _LoadConfig) -> None:
    """Replace the name of our format by our loader; leave all other formats to SGLang."""
    if config.load_format != _FORMAT:
        original(config)
        return
    try:
        from unshard.plugins.sglang_loader import UnshardLoader
    except (ImportError, AttributeError) as error:
        raise UsageError(
            "the load format unshard does not fit the interface of this version of SGLang",
            found=str(error),
            hint="use SGLang 0.5.23, or merge the checkpoint: `unshard merge CHECKPOINT OUTPUT`",
        ) from error
    config.load_format = UnshardLoader


@contextmanager
@accepting(EngineKeywords)
def arguments(
    checkpoint: str | Path, **options: Unpack[EngineKeywords]
) -> Iterator[dict[str, object]]:
    """Yield the arguments of `sglang.Engine` to serve a checkpoint without a merge.

        with unshard.plugins.sglang.arguments("RUN/global_step_10") as given:
            engine = sglang.Engine(**given, context_length=4096)

    Arguments, directory and errors are as for `unshard.plugins.vllm.arguments`.
    """
    described = describe(checkpoint, options)
    config = json.dumps(loader_config(checkpoint, described.step, options))
    with model_directory(described) as directory:
        yield {
            "model_path": str(directory),
            "load_format": _FORMAT,
            "model_loader_extra_config": config,
        }
