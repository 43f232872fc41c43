"""vLLM on training shards: the plugin, what an engine is started with, its next checkpoint.

The wheel has the entry point `vllm.general_plugins`: every process of a vLLM in the same
environment calls `register`. vLLM is imported only there.
"""

import logging

# At the end of a process, what was registered last is called first. Engines of vLLM end by
# `weakref.finalize`, which our context uses before vLLM is imported; multiprocessing, which waits
# for the processes of the engine, must be called after that.
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
"""What adds our methods to vLLM's workers."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Add the load format `unshard` to vLLM, in this process.

    If vLLM is absent, nothing happens. If its interface is another one than the loader needs, the
    format raises an error when an engine asks for it, so that other engines are not disturbed.
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
    """Return a loader that cannot be made, and says why."""

    class UnfitLoader(base):  # type: ignore[misc]  # known at run time only
        def __init__(self, load_config: object) -> None:
            del load_config
            raise UsageError(
                "this version of vLLM has another interface than the load format unshard needs",
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
    """Yield what `vllm.LLM` is started with, to serve a checkpoint without a merge.

        with unshard.plugins.vllm.arguments("RUN/global_step_10") as given:
            llm = vllm.LLM(**given, max_model_len=4096)

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
            "model": str(directory),
            "load_format": "unshard",
            "model_loader_extra_config": loader_config(checkpoint, described.step, options),
            "worker_extension_cls": WORKER_EXTENSION,
        }


class _LLMEngine(Protocol):
    def has_unfinished_requests(self) -> bool: ...

    def reset_encoder_cache(self) -> None: ...


class Engine(Protocol):
    """What is used of `vllm.LLM`."""

    llm_engine: _LLMEngine

    def collective_rpc(
        self, method: str, *, kwargs: dict[str, object]
    ) -> list[Mapping[str, object]]:
        """Call a method of every worker."""

    def reset_prefix_cache(self) -> bool:
        """Forget what earlier prompts left; return whether it was forgotten."""


def reload(
    llm: Engine, checkpoint: str | Path, **options: Unpack[EngineKeywords]
) -> list[Mapping[str, object]]:
    """Load another checkpoint into a running engine of vLLM, and check that the engine holds it.

    The engine must have been started with `arguments`, or with the same arguments by other means.
    Its caches are reset. After an error, end the engine, unless the message says that nothing was
    changed.

    Args:
        llm: a `vllm.LLM` without requests in progress.
        checkpoint: as for `merge`; of the same model.
        options: as for `arguments`; those that are not given are as at the start, but for `step`.

    Returns:
        For every worker: path and step of the checkpoint, and how many parameters and elements
        were compared with it.

    Raises:
        UnshardError: the checkpoint cannot be read, the engine cannot take it, or it holds other
            values afterwards.
    """
    if llm.llm_engine.has_unfinished_requests():
        raise UsageError("the engine has requests in progress", hint="wait until they are answered")
    given = loader_config(checkpoint, None, options)
    path = str(given.pop("checkpoint"))
    try:
        found = llm.collective_rpc("unshard_reload", kwargs={"checkpoint": path, "options": given})
    except UnshardError:
        raise
    except Exception as error:
        # A worker in another process: vLLM passes on the text of its error alone.
        raise UnshardError(f"{path}: the engine did not take it: {error}") from error
    llm.llm_engine.reset_encoder_cache()
    if not llm.reset_prefix_cache():
        raise UnshardError(
            f"{path}: the engine has not forgotten what it computed with the weights before",
            hint="end the engine",
        )
    return found
