"""vLLM on training shards: the plugin, the arguments of an engine, and reloads.

The wheel has the entry point `vllm.general_plugins`: every process of a vLLM in the same
environment calls `register`. Only `register` imports vLLM.
"""

import logging

# At exit, callbacks run in reverse order of registration. vLLM's engines end by `weakref.finalize`,
# which our context uses before vLLM is imported; multiprocessing waits for the engine's processes,
# so its callback must run after that, and be registered first.
import multiprocessing.util  # noqa: F401
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Unpack

from unshard.api.options import accepting
from unshard.errors import UnshardError, UsageError
from unshard.keywords import EngineKeywords
from unshard.plugins.serving import describe, loader_config, model_directory

WORKER_EXTENSION = "unshard.plugins.vllm_worker.WorkerExtension"
"""The class that adds our methods to vLLM's workers."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Add the load format `unshard` to vLLM, in this process.

    Does nothing if vLLM is absent. If the loader does not fit vLLM's interface, only engines that
    request the format get an error.
    """
    try:
        from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader
    except ImportError as error:
        _log.debug("no load format unshard: %s", error)
        return
    loader: type[Any]
    try:
        from unshard.plugins.vllm_loader import UnshardLoader

        loader = UnshardLoader
    except (ImportError, AttributeError) as error:
        loader = _unfit_loader(BaseModelLoader, error)
    register_model_loader("unshard")(loader)


def _unfit_loader(base: type[Any], reason: Exception) -> type[Any]:
    """Return a loader whose constructor raises the reason."""

    class UnfitLoader(base):  # type: ignore[misc]  # known at run time only
        def __init__(self, load_config: object) -> None:
            del load_config
            raise UsageError(
                "the load format unshard does not fit the interface of this version of vLLM",
                found=str(reason),
                hint="use vLLM 0.32, or merge the checkpoint: `unshard merge CHECKPOINT OUTPUT`",
            )

        load_weights = download_model = __init__

    return UnfitLoader


@contextmanager
@accepting(EngineKeywords)
def arguments(
    checkpoint: str | Path, **options: Unpack[EngineKeywords]
) -> Iterator[dict[str, object]]:
    """Yield the arguments of `vllm.LLM` to serve a checkpoint without a merge.

        with unshard.plugins.vllm.arguments("RUN/global_step_10") as given:
            llm = vllm.LLM(**given, max_model_len=4096)

    The model's directory has only config and tokenizer. A temporary directory is removed when the
    context ends, so the engine should end before.

    Args:
        checkpoint: as for `merge`.
        options: as for `open_checkpoint`.

    Raises:
        UnshardError: as `open_checkpoint` raises it; tensors are missing or unexpected; or the
            checkpoint has no config.json.
    """
    described = describe(checkpoint, options)
    with model_directory(described) as directory:
        yield {
            "model": str(directory),
            "load_format": "unshard",
            "model_loader_extra_config": loader_config(checkpoint, described.step, options),
            "worker_extension_cls": WORKER_EXTENSION,
        }


class _LLMEngine(Protocol):
    def has_unfinished_requests(self) -> bool: ...

    def reset_encoder_cache(self) -> None: ...


class RunningEngine(Protocol):
    """The used interface of `vllm.LLM`."""

    llm_engine: _LLMEngine

    def collective_rpc(
        self, method: str, *, kwargs: dict[str, object]
    ) -> list[Mapping[str, object]]:
        """Call a method of every worker."""

    def reset_prefix_cache(self) -> bool:
        """Clear the cache of earlier prompts; return whether it is clear."""


def reload(
    llm: RunningEngine, checkpoint: str | Path, **options: Unpack[EngineKeywords]
) -> list[Mapping[str, object]]:
    """Load another checkpoint into a running engine of vLLM, and verify its weights.

    The engine must have been started with `arguments`, or equal arguments. Its caches are reset.
    After an error, end the engine, unless the message says that nothing was changed.

    Args:
        llm: a `vllm.LLM` without requests in progress.
        checkpoint: as for `merge`; of the same model.
        options: as for `arguments`; by default as at the start, except for `step`.

    Returns:
        For every worker: path and step of the checkpoint, and how many parameters and elements
        were compared with it.

    Raises:
        UnshardError: the checkpoint cannot be read, the engine cannot load it, or has other values
            afterwards.
    """
    if llm.llm_engine.has_unfinished_requests():
        raise UsageError("the engine has requests in progress", hint="wait until they are answered")
    config = loader_config(checkpoint, None, options)
    path = str(config.pop("checkpoint"))
    kwargs: dict[str, object] = {"checkpoint": path, "options": config}
    try:
        answers = llm.collective_rpc("unshard_reload", kwargs=kwargs)
    except UnshardError:
        raise
    except Exception as error:
        # From a worker in another process, vLLM passes on only the text of an error.
        raise UnshardError(f"{path}: the engine did not load it: {error}") from error
    llm.llm_engine.reset_encoder_cache()
    if not llm.reset_prefix_cache():
        raise UnshardError(
            f"{path}: the engine's cache still has values from the earlier weights",
            hint="end the engine",
        )
    return answers
