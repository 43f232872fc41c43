"""`unshard vllm` and `unshard sglang`: an engine on a checkpoint, without a merge."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unshard import signals
from unshard.cli.options import CheckpointArgument, keywords_of, taking
from unshard.cli.running import say
from unshard.errors import UsageError
from unshard.keywords import EngineKeywords

if TYPE_CHECKING:
    from unshard.plugins.serving import Described

_LOADING = ("--load-format", "--model-loader-extra-config")


@dataclass(frozen=True, slots=True)
class _Engine:
    """How an engine is started.

    Attributes:
        name: for people.
        package: what must be installed.
        command: its command line, up to the model's directory.
        ours: options that we set.
        tokenizer: two options; without a tokenizer, one of them is needed.
    """

    name: str
    package: str
    command: tuple[str, ...]
    ours: tuple[str, ...]
    tokenizer: tuple[str, ...]


_VLLM = _Engine(
    name="vLLM",
    package="vllm",
    command=("vllm.entrypoints.cli.main", "serve"),
    ours=(*_LOADING, "--worker-extension-cls", "--model"),
    tokenizer=("--tokenizer", "--skip-tokenizer-init"),
)
_SGLANG = _Engine(
    name="SGLang",
    package="sglang",
    command=("sglang.launch_server", "--model-path"),
    ours=(*_LOADING, "--model-path", "--model"),
    tokenizer=("--tokenizer-path", "--skip-tokenizer-init"),
)


@taking(EngineKeywords)
def vllm(context: click.Context, checkpoint: CheckpointArgument, **given: object) -> None:
    """Serve a checkpoint with this environment's vLLM, unmerged.

    All other options, after CHECKPOINT, are those of `vllm serve`.
    """
    from unshard.plugins.vllm import WORKER_EXTENSION

    options = keywords_of(EngineKeywords, given)
    extension = ("--worker-extension-cls", WORKER_EXTENSION)
    _serve(_VLLM, checkpoint, options, context.args, extension)


@taking(EngineKeywords)
def sglang(context: click.Context, checkpoint: CheckpointArgument, **given: object) -> None:
    """Serve a checkpoint with this environment's SGLang, unmerged.

    All other options, after CHECKPOINT, are those of `python -m sglang.launch_server`.
    """
    _serve(_SGLANG, checkpoint, keywords_of(EngineKeywords, given), context.args)


def _serve(
    engine: _Engine,
    checkpoint: Path,
    options: EngineKeywords,
    given: Sequence[str],
    added: Sequence[str] = (),
) -> None:
    """Become an engine on a checkpoint.

    Args:
        engine: which.
        checkpoint: as for `merge`.
        options: which weights are meant.
        given: arguments for the engine.
        added: those that come before them.
    """
    from unshard.plugins.serving import describe, loader_config

    _check(engine, given)
    described = describe(checkpoint, options)
    if not described.has_tokenizer and not _given(given, engine.tokenizer):
        tokenizer, skip = engine.tokenizer
        raise UsageError(
            f"{checkpoint}: has no tokenizer",
            hint=f"give it with --config DIR, --base MODEL or {engine.name}'s {tokenizer}, or "
            f"serve token ids with {engine.name}'s {skip}",
        )
    extra = json.dumps(loader_config(checkpoint, described.step, options))
    loading = ("--load-format", "unshard", "--model-loader-extra-config", extra)
    say(f"serving {described.title}")
    _run(engine, described, [*_names(checkpoint, given), *loading, *added, *given])


def _check(engine: _Engine, given: Sequence[str]) -> None:
    if importlib.util.find_spec(engine.package) is None:
        raise UsageError(
            f"{engine.name} is not installed in the environment of unshard",
            hint=f"install unshard into the environment that has {engine.name}",
        )
    for name in engine.ours:
        if _given(given, (name,)):
            raise UsageError(f"{name} is set by unshard {engine.package}", hint="leave it out")


def _given(arguments: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether one of some options is among the engine's arguments."""
    return any(one.split("=")[0].replace("_", "-") in names for one in arguments)


def _names(checkpoint: Path, given: Sequence[str]) -> list[str]:
    """Return the name that clients know the model by, unless the user gave one."""
    if _given(given, ("--served-model-name",)):
        return []
    return ["--served-model-name", str(checkpoint)]


def _run(engine: _Engine, described: "Described", arguments: Sequence[str]) -> None:
    """Become the engine; where it needs a temporary directory, wait for it, to remove that."""
    from unshard.plugins.serving import model_directory

    command = [sys.executable, "-m", *engine.command]
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
