"""What clients may choose, compared with the evaluators' sources, where they are installed."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.lmms_yaml import DOCUMENTED
from evaluation.local_tasks import work_at
from evaluation.running import whole_model
from unshard.errors import UsageError
from unshard.evaluate.jobs import Request
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.lmms_eval import (
    CHECKPOINT_KEYS,
    GUARDED_TYPES,
    MODEL_TYPES,
    LmmsEvalProfile,
)
from unshard.evaluate.server.evaluators.profiles import profile_named
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.serve import make_service
from unshard.evaluate.server.server_yaml import ServerConfig
from unshard.evaluate.trainer.config import EvalConfig

PROFILES: dict[str, Profile] = {
    "images": LmmsEvalProfile(model="huggingface"),
    "more": LmmsEvalProfile(model="qwen3_vl", allowed_models=("vllm*",)),
    "fast": LmmsEvalProfile(model="vllm", checkpoint_key="own"),
    "text": LmEvalProfile(),
}


def chosen(name: str) -> LmmsEvalProfile:
    profile = profile_named(PROFILES, name)
    assert isinstance(profile, LmmsEvalProfile)
    return profile


def test_a_type_takes_the_checkpoint_as_it_calls_it() -> None:
    assert chosen("images:qwen2_vl").checkpoint_key == "pretrained"
    for name in ("more:vllm", "more:vllm_generate"):
        assert chosen(name).checkpoint_key == "model"
    assert chosen("fast:vllm") == PROFILES["fast"]
    assert chosen("fast:qwen2_vl").checkpoint_key == "pretrained"


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


def test_a_guarded_type_trusts_what_its_argument_says(models: Path) -> None:
    for name in GUARDED_TYPES:
        files = [path for path in models.glob(f"*/{name}.py") if path.parent.name != "tests"]
        assert files, name
        for tree in (ast.parse(path.read_text()) for path in files):
            made = [one for one in ast.walk(tree) if getattr(one, "name", "") == "__init__"]
            assert any(
                isinstance(one, ast.FunctionDef) and _default(one, "trust_remote_code") == "True"
                for one in made
            ), name
            for node in ast.walk(tree):
                if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                    assert isinstance(node.value, ast.Name), name


def test_lmms_engines_documented_yaml_and_a_server_without_a_configuration(tmp_path: Path) -> None:
    config = EvalConfig.from_yaml(DOCUMENTED)
    server = ServerConfig(
        gpus=tuple("01234567"), roots=(tmp_path,), work_directory=tmp_path / "work"
    )
    python = os.environ.get("UNSHARD_LMMS_EVAL_PYTHON", "python3")
    lmms_eval = server.profiles["lmms-eval"].model_copy(update={"interpreter": python})
    server = server.model_copy(update={"profiles": {"lmms-eval": lmms_eval}})
    service = make_service(server)
    place = whole_model(tmp_path / "run" / "checkpoint-500")
    asked = Request(str(place), config.profile, config.tasks, arguments=config.arguments)
    job, is_new = service.submit(asked, None)
    service.store.close()
    assert (is_new, job.request.profile) == (True, "lmms-eval:qwen_vl")
    assert job.request.arguments.num_gpus == 8
    profile = profile_named(server.profiles, job.request.profile)
    work = work_at(tmp_path / "attempt", place, job.request, profile)
    command = profile.command_line(work)
    assert "--model=qwen_vl" in command
    assert f"--model_args=trust_remote_code=False,pretrained={place}" in command


def test_a_type_that_the_configuration_allows_is_trusted() -> None:
    assert chosen("more:vllm").model_args == {}
    assert chosen("images:vllm").model_args == {"trust_remote_code": False}
    with pytest.raises(UsageError, match="is not allowed"):
        profile_named(PROFILES, "more:qwen_vl")


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
    """Return the default of an argument as it is written; None if it has no such argument."""
    arguments = function.args.args[-len(function.args.defaults) :] if function.args.defaults else []
    pairs = zip(arguments, function.args.defaults, strict=True)
    return next((ast.unparse(value) for one, value in pairs if one.arg == name), None)
