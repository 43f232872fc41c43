"""The script that repeats an attempt without the server.

It merges the checkpoint, writes the files that the evaluator's command reads, and runs the command
in an empty directory. It stops at once if a secret was left out of its command or files.
"""

import os
import platform
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from unshard import __version__
from unshard.evaluate.jobs import Job
from unshard.evaluate.server.attempts.redaction import LEFT_OUT, redact, redact_command
from unshard.evaluate.server.evaluators.work import EvalInput
from unshard.evaluate.server.processes.launching import scrub
from unshard.read.hub_files import RECORD_NAME

_MOST = 1 << 16  # characters of a file
_END = "END_OF_UNSHARD_FILE"
# Variables of the server's own environment that can change an evaluator's results.
_RELEVANT = re.compile(r"(?:HF|TRANSFORMERS|CUDA|TORCH|VLLM|NCCL|OMP|TOKENIZERS|LMMS?)_.*")


def make_recipe(
    job: Job, work: EvalInput, command: Sequence[str], gpus: Sequence[str], merged: Path
) -> tuple[str, str]:
    """Return the script, and the record of the model that it makes, "" if there is none.

    `merged` is the directory of the job's merged model, which `work` need not use.
    """
    notes, request = list[str](), job.request
    is_merged = work.model == merged
    if work.profile.weights == "direct" or work.profile.engine:
        notes.append("The server read the shards without a merge, which gives the same numbers.")
        profile = work.profile.model_copy(update={"weights": "merged"})
        work = replace(work, profile=profile, directory=work.directory / "again")
        work.directory.mkdir(exist_ok=True)
        command, is_merged = profile.command_line(work), True
    replaced = {str(work.model): "./model"} if is_merged else {}
    replaced |= {job.pin: request.checkpoint} if job.pin else {}  # it will be removed
    replaced |= {str(work.output): "./output", str(work.directory): "."}

    def here(text: str) -> str:
        for path, name in replaced.items():
            text = text.replace(path, name)
        return text

    about = [*_describe(job, work), *notes]
    lines = ["#!/bin/sh", *(f"# {' '.join(line.split())}" for line in about), "set -e"]
    if is_merged:
        lines.append(shlex.join(_merge_command(work)))
    lines.append("mkdir output")
    for argument in command:
        path = Path(argument.rpartition("=")[2])
        if path.parent == work.directory and path.is_file():
            with suppress(OSError, UnicodeDecodeError):
                text = redact(here(path.read_text(encoding="utf-8")[:_MOST])).rstrip("\n")
                lines += [f"cat > {shlex.quote(here(str(path)))} <<'{_END}'", text, _END]
    lines += _list_variables(work, gpus)
    lines += [f"exec {shlex.join(redact_command([*map(here, command)]))}", ""]
    start = lines.index("set -e")  # below the comments, which may name a secret of `launch`
    if any(LEFT_OUT in line for line in lines[start:]):  # another value would mislead
        stop = f"echo 'Replace {LEFT_OUT} in this script, then remove this line.' >&2; exit 2"
        lines.insert(start, stop)
    with suppress(OSError), (work.model / RECORD_NAME).open(errors="replace") as file:
        return "\n".join(lines), file.read(_MOST)
    return "\n".join(lines), ""


def _describe(job: Job, work: EvalInput) -> Iterator[str]:
    versions = [f"unshard {__version__}", *filter(None, [work.profile.versions])]
    step = "" if job.request.step is None else f", step {job.request.step}"
    yield f"Job {job.id}: run {job.request.run or '-'}{step}"
    yield "Run this in an empty directory."
    yield f"It ran on {platform.node()} with {', '.join(versions)}."
    if work.profile.launch:
        launch = shlex.join(redact_command(work.profile.launch))
        yield f"The server put before its command: {launch}"


def _merge_command(work: EvalInput) -> list[str]:
    request, config = work.request, work.profile.config
    options = [] if request.weights == "model" else [f"--weights={request.weights}"]
    if config is None and not (work.model / "config.json").exists():
        options.append("--config=none")
    elif config is not None:
        options.append(f"--config={config}")
    return ["unshard", "merge", request.checkpoint, "model", "--no-extra-state", *options]


def _list_variables(work: EvalInput, gpus: Sequence[str]) -> Iterator[str]:
    """Yield lines that set the variables that can change results, without values of secrets."""
    inherited = scrub(os.environ).items()
    variables = {name: value for name, value in inherited if _RELEVANT.fullmatch(name)}
    variables |= work.profile.environment
    if not work.profile.launch:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    plain = scrub(variables)
    for name, value in variables.items():
        if name in plain and redact(value) == value:
            yield f"export {name}={shlex.quote(value)}"
        else:
            yield f"export {name}  # set it: it may be a secret"
