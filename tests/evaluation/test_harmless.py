"""What clients may choose, compared with the evaluators' sources, where they are installed."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unshard.errors import UsageError
from unshard.evaluate.harmless import CHECKPOINT_KEYS, MODEL_TYPES
from unshard.evaluate.profiles import Kind, Profile
from unshard.evaluate.server.service import profile_named

PROFILES = {
    "images": Profile("images", Kind.LMMS_EVAL, model="huggingface"),
    "more": Profile("more", Kind.LMMS_EVAL, model="qwen3_vl", allowed_models=("vllm*",)),
    "fast": Profile("fast", Kind.LMMS_EVAL, model="vllm", checkpoint_key="own"),
    "text": Profile("text", Kind.LM_EVAL),
}


def test_a_type_takes_the_checkpoint_as_it_calls_it() -> None:
    assert profile_named(PROFILES, "images:qwen2_vl").checkpoint_key == "pretrained"
    for name in ("more:vllm", "more:vllm_generate"):
        assert profile_named(PROFILES, name).checkpoint_key == "model"
    assert profile_named(PROFILES, "fast:vllm") == PROFILES["fast"]
    assert profile_named(PROFILES, "fast:qwen2_vl").checkpoint_key == "pretrained"


@pytest.mark.parametrize("name", ["images:qwen3_vl", "images:dummy", "more:qwen2_vl", "more:x/y"])
def test_other_types_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not allowed") as caught:
        profile_named(PROFILES, name)
    assert "`allowed_models`" in caught.value.hint


def test_only_lmms_evals_type_can_be_chosen() -> None:
    with pytest.raises(UsageError, match="cannot be chosen"):
        profile_named(PROFILES, "text:hf")


@pytest.fixture(scope="module")
def models() -> Path:
    """The directory of lmms-eval's models."""
    python = os.environ.get("UNSHARD_LMMS_EVAL_PYTHON", sys.executable)
    find = "import importlib.util; print(importlib.util.find_spec('lmms_eval').origin)"
    done = subprocess.run([python, "-c", find], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("no lmms-eval: make .venv-lmms/.installed")
    return Path(done.stdout.strip()).parent / "models"


def test_no_harmless_type_trusts_a_checkpoints_code(models: Path) -> None:
    for name in MODEL_TYPES:
        files = [
            path for kind in ("chat", "simple") if (path := models / kind / f"{name}.py").exists()
        ]
        assert files, name
        for tree in (ast.parse(path.read_text()) for path in files):
            for node in ast.walk(tree):
                if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                    assert isinstance(node.value, ast.Name), name
                if isinstance(node, ast.FunctionDef):
                    assert _default(node, "trust_remote_code") in {None, "False"}, name


def test_the_checkpoints_keys_are_those_of_the_source(models: Path) -> None:
    for path in sorted([*models.glob("chat/*.py"), *models.glob("simple/*.py")]):
        if path.stem not in {*MODEL_TYPES, *CHECKPOINT_KEYS}:
            continue
        first = {
            node.args.args[1].arg
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
            and node.name == "__init__"
            and len(node.args.args) > 1
        }
        assert first <= {CHECKPOINT_KEYS.get(path.stem, "pretrained")}, path


def _default(function: ast.FunctionDef, name: str) -> str | None:
    """Return the default of an argument as it is written; None if there is no such argument."""
    arguments = function.args.args[-len(function.args.defaults) :] if function.args.defaults else []
    pairs = zip(arguments, function.args.defaults, strict=True)
    return next((ast.unparse(value) for one, value in pairs if one.arg == name), None)
