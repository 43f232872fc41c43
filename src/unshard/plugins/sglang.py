"""SGLang on training shards: the plugin, and what an engine is started with.

The wheel has the entry point `sglang.srt.plugins`: every process of an SGLang in the same
environment calls `register`. SGLang is imported only there.
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

    If SGLang is absent, nothing happens. If its interface is another one than the loader needs,
    the format raises an error when an engine asks for it, so that other engines are not disturbed.
    """
    try:
        from sglang.srt.arg_groups.choices import add_load_format_choices
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        _log.debug("no load format unshard: %s", error)
        return
    # A load format may be the class of a loader. `get_model_loader` makes an instance of it then.
    target = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    HookRegistry.register(target, _verify_load_format, HookType.AROUND)
    add_load_format_choices([_FORMAT])


class _LoadConfig(Protocol):
    load_format: object


def _verify_load_format(original: Callable[[_LoadConfig], None], config: _LoadConfig) -> None:
    """Put our loader in the place of its name; leave all other formats to SGLang."""
    if config.load_format != _FORMAT:
        original(config)
        return
    try:
        from unshard.plugins.sglang_loader import UnshardLoader
    except (ImportError, AttributeError) as error:
        raise UsageError(
            "this version of SGLang has another interface than the load format unshard needs",
            found=str(error),
            hint="use SGLang 0.5.23, or merge the checkpoint: `unshard merge CHECKPOINT OUTPUT`",
        ) from error
    config.load_format = UnshardLoader


@contextmanager
@accepting(EngineKeywords)
def arguments(
    checkpoint: str | Path, **options: Unpack[EngineKeywords]
) -> Iterator[dict[str, object]]:
    """Yield what `sglang.Engine` is started with, to serve a checkpoint without a merge.

        with unshard.plugins.sglang.arguments("RUN/global_step_10") as given:
            engine = sglang.Engine(**given, context_length=4096)

    The model's directory has config and tokenizer only. If the checkpoint does not have both
    together, as the engine must read them, it is a temporary one, removed when the context ends:
    the engine should end before.

    Args:
        checkpoint: as for `merge`.
        options: as for `open_checkpoint`, which explains each.

    Raises:
        UnshardError: as `open_checkpoint` raises it; tensors are missing or unexpected; or the
            checkpoint has no config.json.
    """
    described = describe(checkpoint, options)
    with model_directory(described) as directory:
        yield {
            "model_path": str(directory),
            "load_format": _FORMAT,
            "model_loader_extra_config": json.dumps(
                loader_config(checkpoint, described.step, options)
            ),
        }
