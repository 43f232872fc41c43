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
class _ServingEngine:
    """vLLM or SGLang.

    Attributes:
        name: its name in messages.
        package: its Python package.
        command: its command line, up to the model's directory.
        ours: options that unshard sets, so that users cannot.
        tokenizer: two options; without a tokenizer, one of them is needed.
    """

    name: str
    package: str
    command: tuple[str, ...]
    ours: tuple[str, ...]
    tokenizer: tuple[str, ...]


_VLLM = _ServingEngine(
    name="vLLM",
    package="vllm",
    command=("vllm.entrypoints.cli.main", "serve"),
    ours=(*_LOADING, "--worker-extension-cls", "--model"),
    tokenizer=("--tokenizer", "--skip-tokenizer-init"),
)
_SGLANG = _ServingEngine(
    name="SGLang",
    package="sglang",
    command=("sglang.launch_server", "--model-path"),
    ours=(*_LOADING, "--model-path", "--model"),
    tokenizer=("--tokenizer-path", "--skip-tokenizer-init"),
)


@taking(EngineKeywords)
def vllm(context: click.Context, checkpoint: CheckpointArgument, **given: object) -> None:
    """Serve a checkpoint with this environment's vLLM, unmerged.

    Other options, after CHECKPOINT, are passed to `vllm serve`.
    """
    from unshard.plugins.vllm import WORKER_EXTENSION

    options = keywords_of(EngineKeywords, given)
    extension = ("--worker-extension-cls", WORKER_EXTENSION)
    _serve(_VLLM, checkpoint, options, context.args, extension)


@taking(EngineKeywords)
def sglang(context: click.Context, checkpoint: CheckpointArgument, **given: object) -> None:
    """Serve a checkpoint with this environment's SGLang, unmerged.

    Other options, after CHECKPOINT, are passed to `python -m sglang.launch_server`.
    """
    _serve(_SGLANG, checkpoint, keywords_of(EngineKeywords, given), context.args)


def _serve(
    engine: _ServingEngine,
    checkpoint: Path,
    options: EngineKeywords,
    arguments: Sequence[str],
    extension: Sequence[str] = (),
) -> None:
    """Replace this process by an engine that serves a checkpoint.

    Args:
        engine: vLLM or SGLang.
        checkpoint: as for `merge`.
        options: select and read the weights.
        arguments: the user's arguments for the engine.
        extension: our arguments for this engine, which come before them.
    """
    from unshard.plugins.serving import describe, loader_config

    if importlib.util.find_spec(engine.package) is None:
        raise UsageError(
            f"{engine.name} is not installed in the environment of unshard",
            hint=f"install unshard into the environment that has {engine.name}",
        )
    names = {argument.split("=")[0].replace("_", "-") for argument in arguments}
    if reserved := next((name for name in engine.ours if name in names), None):
        raise UsageError(f"{reserved} is set by unshard {engine.package}", hint="leave it out")
    described = describe(checkpoint, options)
    if not described.has_tokenizer and names.isdisjoint(engine.tokenizer):
        tokenizer, skip = engine.tokenizer
        raise UsageError(
            f"{checkpoint}: has no tokenizer",
            hint=f"give it with --config DIR, --base MODEL or {engine.name}'s {tokenizer}, or "
            f"serve token ids with {engine.name}'s {skip}",
        )
    extra = json.dumps(loader_config(checkpoint, described.step, options))
    ours = ["--load-format", "unshard", "--model-loader-extra-config", extra, *extension]
    if "--served-model-name" not in names:
        ours = ["--served-model-name", str(checkpoint), *ours]
    say(f"serving {described.title}")
    _run(engine, described, [*ours, *arguments])


def _run(engine: _ServingEngine, described: "Described", arguments: Sequence[str]) -> None:
    """Execute the engine, or wait for it, to remove its temporary directory afterwards."""
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
