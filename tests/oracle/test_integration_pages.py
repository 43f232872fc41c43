"""The code of docs/integrations, run as it stands: in real trainers, or beside what they saved.

The base is a directory instead of an id of the hub, and where a trainer saved another step, its
number is another one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from following import STATE
from oracle.writers.accelerate import accelerate_runs
from oracle.writers.saving import truth_file
from oracle.writers.trainer import trainer_runs
from oracle.writers.workers import WorkerPool
from tiny_models import tiny_model, tiny_tokenizer
from trainers import plant
from verl_runs import needs_verl, saved_by_verl
from waiting import LIMIT_S

TESTS = Path(__file__).parents[1]
PAGES = TESTS.parent / "docs" / "integrations"
BASES = r"Qwen/Qwen3-8B|meta-llama/Llama-3\.1-8B"
MOST_LINES = 15

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore"),  # what transformers and Lightning say
]


def code_of(page: str, section: str) -> str:
    """Return the block of a section, with another base."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    part = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```(?:python|sh)\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
    return re.sub(BASES, "base", str(code))


def save_base(directory: Path, family: str = "qwen2", **fields: Any) -> Any:
    model = tiny_model(family, **fields)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model


def assert_model(output: Path, truth: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Load a model and its tokenizer as users do, and compare it with what was trained."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    model, report = auto.from_pretrained(output, output_loading_info=True)
    assert not any(report.values()), report
    found = model.state_dict()
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor.to(dtype)), name
    assert AutoTokenizer.from_pretrained(output).get_vocab() == tiny_tokenizer().get_vocab()


def test_no_block_has_more_than_15_lines() -> None:
    blocks = [
        block
        for page in PAGES.glob("*.md")
        for block in re.findall(
            r"^```\w+\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
    ]
    assert len(blocks) >= 10
    assert [one for one in blocks if one.count("\n") > MOST_LINES] == []


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_transformers(worker_pool: WorkerPool, tmp_path: Path, version: int) -> None:
    run = tmp_path / "my-run"
    run.mkdir()
    code = code_of("in-process", "transformers' Trainer")
    worker_pool.run(partial(trainer_runs, version=version, code=code), 2, run)
    (left,) = run.glob("checkpoint-*")
    assert not list(left.rglob("*config*.json"))  # as the Trainer leaves it
    assert json.loads((run / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    output = tmp_path / "models" / "my-run" / left.name
    assert_model(output, torch.load(truth_file(run)), torch.bfloat16)
    log = (run / STATE / "follow.log").read_text()
    assert log.count("saved to ") == len(list(output.parent.glob("checkpoint-*")))


def lightning_runs(rank: int, world: int, directory: Path, *, code: str) -> None:
    from oracle.writers import lightning

    lightning.lightning_runs(rank, world, directory, code=code)


MERGING = {
    "accelerate": (accelerate_runs, "llama"),
    "Lightning": (lightning_runs, "qwen2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("section", MERGING)
def test_a_merge_in_the_script(worker_pool: WorkerPool, tmp_path: Path, section: str) -> None:
    if find_spec(section.lower()) is None:
        pytest.skip(f"{section} is not installed")
    (scenario, family), directory = MERGING[section], tmp_path / "run"
    save_base(directory / "base", family)
    worker_pool.run(partial(scenario, code=code_of("in-process", section)), 2, directory)
    assert_model(directory / "my-model", torch.load(truth_file(directory)), torch.bfloat16)


@pytest.mark.slow
def test_lmms_engine(
    worker_pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oracle.writers.lmms_engine import lmms_engine_qwen2

    run = tmp_path / "output"
    run.mkdir()
    worker_pool.run(lmms_engine_qwen2, 2, run)
    (run / "checkpoint-2").rename(run / "checkpoint-1000")
    monkeypatch.chdir(tmp_path)
    exec(code_of("in-process", "lmms-engine"), {})  # noqa: S102
    assert_model(tmp_path / "my-model", torch.load(truth_file(run)), torch.bfloat16)


def run_beside(section: str, directory: Path, trained: Path, *, step: int = 100) -> None:
    """Run a block in a shell; instead of a trainer, something copies what was trained into place.

    `trained` has the tree as the block has it, below a directory of its own.
    """
    programs = directory / "bin"
    programs.mkdir()
    stand_in = f"#!/bin/sh\ncp -r '{trained}/.' .\n"
    scripts = {
        "unshard": f"#!/bin/sh\nexec '{sys.executable}' -m unshard \"$@\"\n",
        **dict.fromkeys(("python3", "uv", "../run_train.sh"), stand_in),
    }
    for name, script in scripts.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    code = re.sub(r"\b100\b", str(step), code_of("beside", section))
    if "--follow" not in code:
        shutil.copytree(trained, directory, dirs_exist_ok=True)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", code],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


READ = {
    "SkyRL": ("SkyRL", "ckpts/my-run", "global_step_100/policy/huggingface"),
    "NeMo-RL": ("NeMo-RL, DCP", "results/grpo", "step_100/policy/tokenizer"),
    "NeMo AutoModel": ("NeMo AutoModel", "checkpoints", "epoch_0_step_100/model/.hf_metadata"),
    "lerobot": ("lerobot", "outputs/train/run", "checkpoints/005000/pretrained_model"),
}
"""The tree of each trainer that cannot be run, its place, and what is next to the weights."""


@pytest.mark.parametrize("section", READ)
def test_a_trainer_that_was_read(tmp_path: Path, section: str) -> None:
    name, place, beside = READ[section]
    model = save_base(tmp_path / "base")
    truth = {name: one.clone() + 1 for name, one in model.state_dict().items()}
    run = tmp_path / "trained" / place
    plant(run, name, truth)
    shutil.copytree(
        tmp_path / "base",
        run / beside,
        ignore=shutil.ignore_patterns(
            "*.safetensors", "config.json" if "tokenizer" in beside else ""
        ),
        dirs_exist_ok=True,
    )
    if section == "SkyRL":
        (run / "latest_ckpt_global_step.txt").write_text("100")
    if section == "lerobot":
        (run / beside / "config.json").write_text('{"type": "act"}')
    run_beside(section, tmp_path, tmp_path / "trained")
    if section == "lerobot":
        from safetensors.torch import load_file

        found = load_file(tmp_path / "my-policy" / "model.safetensors")
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[name], one) for name, one in truth.items())
        assert (tmp_path / "my-policy" / "config.json").read_text() == '{"type": "act"}'
        return
    dtype = torch.bfloat16 if section == "SkyRL" else torch.float32
    (output,) = (path.parent for path in tmp_path.glob("m*/**/unshard.json"))
    assert_model(output, truth, dtype)


@pytest.mark.slow
def test_torchtitan(worker_pool: WorkerPool, tmp_path: Path) -> None:
    if find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    from oracle.writers.torchtitan import torchtitan_llama

    run = tmp_path / "trained" / "outputs"
    run.mkdir(parents=True)
    worker_pool.run(torchtitan_llama, 2, run)
    save_base(tmp_path / "base", "llama", rms_norm_eps=1e-5)
    truth = torch.load(truth_file(run))
    run_beside("torchtitan", tmp_path, tmp_path / "trained", step=2)
    assert_model(tmp_path / "models" / "my-run" / "step-2", truth, torch.float32)


@pytest.mark.ray
@needs_verl
def test_verl(tmp_path: Path) -> None:
    run = tmp_path / "trained" / "checkpoints" / "my-run"
    saved_by_verl(run, "model")
    truth = torch.load(truth_file(run))
    run_beside("verl", tmp_path, tmp_path / "trained", step=2)
    assert_model(tmp_path / "models" / "my-run" / "global_step_2", truth, torch.bfloat16)
