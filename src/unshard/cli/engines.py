"""`unshard vllm`: an engine on a checkpoint, without a merge."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from unshard import signals
from unshard.cli.options import CheckpointArgument, keywords_of, taking
from unshard.cli.running import say
from unshard.errors import UsageError, how_to_install
from unshard.keywords import EngineKeywords

if TYPE_CHECKING:
    from unshard.plugins.serving import Described

__all__ = ["vllm"]

_OURS = ("--load-format", "--model-loader-extra-config", "--worker-extension-cls", "--model")
_WITHOUT_TOKENIZER = ("--tokenizer", "--skip-tokenizer-init")


@taking(EngineKeywords)
def vllm(context: typer.Context, checkpoint: CheckpointArgument, **given: object) -> None:
    """Serve a checkpoint with vLLM of the same environment, without a merge.

    All other options, after CHECKPOINT, are those of `vllm serve`.
    """
    from unshard.plugins.serving import describe
    from unshard.plugins.vllm import loader_config

    options = keywords_of(EngineKeywords, given)
    arguments = list(context.args)
    _check(arguments)
    described = describe(checkpoint, options)
    if not described.has_tokenizer and not _given(arguments, _WITHOUT_TOKENIZER):
        raise UsageError(
            f"{checkpoint}: has no tokenizer",
            hint="give it with --config DIR, --base MODEL or vLLM's --tokenizer, or serve token "
            "ids with vLLM's --skip-tokenizer-init",
        )
    extra = json.dumps(loader_config(checkpoint, described.step, options))
    say(f"serving {described.title}")
    _run(described, [*_names(checkpoint, arguments), *_loading(extra), *arguments])


def _check(arguments: Sequence[str]) -> None:
    if importlib.util.find_spec("vllm") is None:
        hint = how_to_install("vllm", "vllm")
        raise UsageError("vLLM is not installed in the environment of unshard", hint=hint)
    for name in _OURS:
        if _given(arguments, (name,)):
            raise UsageError(f"{name} is set by unshard vllm", hint="leave it out")


def _given(arguments: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether one of some options is among vLLM's arguments."""
    return any(one.split("=")[0].replace("_", "-") in names for one in arguments)


def _names(checkpoint: Path, arguments: Sequence[str]) -> list[str]:
    """Return the name that clients know the model by, unless the user gave one."""
    if _given(arguments, ("--served-model-name",)):
        return []
    return ["--served-model-name", str(checkpoint)]


def _loading(extra: str) -> list[str]:
    from unshard.plugins.vllm import WORKER_EXTENSION

    return [
        *("--load-format", "unshard", "--model-loader-extra-config", extra),
        *("--worker-extension-cls", WORKER_EXTENSION),
    ]


def _run(described: "Described", arguments: Sequence[str]) -> None:
    """Become `vllm serve`; where it needs a temporary directory, wait for it, to remove that."""
    from unshard.plugins.serving import model_directory

    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    if described.directory is not None:
        sys.stdout.flush()
        os.execv(command[0], [*command, str(described.directory), *arguments])  # noqa: S606
    signals.raise_them()
    with model_directory(described) as directory:
        child = subprocess.Popen([*command, str(directory), *arguments])  # noqa: S603
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise
    raise SystemExit(code if code >= 0 else 128 - code)
