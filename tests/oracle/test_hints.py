"""Every line that `unshard hint` prints, and MERGE.txt has, run on what trainers wrote.

A shell runs the whole text, comments included. A word in capitals is replaced as its comment says;
two commands that would go on as long as training does are told to end.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from command import unshard
from evaluation.servers import SCORE, Live, live
from oracle.writers.workers import WorkerPool
from ranks import save_ranks
from tiny_models import tiny_model, tiny_tokenizer, with_adapter
from unshard.api.hinting import hint, write_hint
from verl_runs import needs_verl, saved_by_verl

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore"),  # what transformers and peft say
]

# Pastes lines into a shell, with what they need to end.
SHELL = """set -e
unshard() {
  case "$*" in
    *--follow*) set -- "$@" --until 1 ;;
    "eval watch"*) set -- "$@" --once --interval 0.2 ;;
  esac
  echo "+ $*" >&2
  "$PYTHON" -m unshard "$@" >&2
}
"""
TESTS = Path(__file__).parents[1]
Train = Callable[[WorkerPool, Path], None]
LABELS = {"merge", "verify", "follow", "evaluate"}


def scenario(name: str, inner: str = ".") -> Train:
    """Return what trains with a real trainer, two ranks."""
    module, function = name.split(":")

    def train(pool: WorkerPool, run: Path) -> None:
        if find_spec(module) is None and module in {"lightning", "torchtitan"}:
            pytest.skip(f"{module} is not installed")
        pool.run(getattr(import_module(f"oracle.writers.{module}"), function), 2, run / inner)

    return train


def trainer_with_config(pool: WorkerPool, run: Path) -> None:
    scenario("trainer:trainer_fsdp2")(pool, run)
    tiny_model().config.save_pretrained(run)
    tiny_tokenizer().save_pretrained(run)


def deepspeed(pool: WorkerPool, run: Path) -> None:
    del pool
    with tarfile.open(TESTS / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(run.parent, filter="data")
    step = run.parent / "deepspeed" / "hf_trainer_zero2" / "checkpoint-4"
    shutil.copytree(step, run / "checkpoint-4")  # of the other one, parts are gone


def verl(pool: WorkerPool, run: Path, *, lora: bool = False) -> None:
    """Write what verl's checkpoint manager leaves, with torch's own files."""
    del pool
    for role in ("actor", *(() if lora else ("critic",))):
        model = tiny_model(num_hidden_layers=1)
        place = run / "global_step_2" / role
        config = place / "huggingface"
        model.config.dtype = torch.bfloat16
        model.config.save_pretrained(config)
        tiny_tokenizer().save_pretrained(config)
        if lora:
            model = with_adapter(model)
            meta = {"r": 4, "lora_alpha": 32, "task_type": "CAUSAL_LM"}
            place.joinpath("lora_train_meta.json").write_text(json.dumps(meta))
        save_ranks(place, {name: one.float() for name, one in model.state_dict().items()}, 2)


def verl_lora(pool: WorkerPool, run: Path) -> None:
    verl(pool, run, lora=True)


WRITTEN = ("lmms-engine", "Lightning")
# What trains, which lines there are besides `LABELS`, what the merge needs, and on what model.
EMA, LORA, ELSEWHERE = "merge the EMA weights", "LoRA", "resume elsewhere"
RUNS: dict[str, tuple[Train, set[str], str, Callable[[], Any]]] = {
    "HF Trainer": (scenario("trainer:trainer_fsdp2"), {ELSEWHERE}, "--base MODEL", tiny_model),
    "HF Trainer with config": (trainer_with_config, {ELSEWHERE}, "", tiny_model),
    "HF Trainer, LoRA": (
        scenario("trainer:trainer_lora"),
        {LORA},
        "--base MODEL --lora-alpha N",
        tiny_model,
    ),
    "accelerate": (
        scenario("accelerate:accelerate_fsdp2"),
        {ELSEWHERE},
        "--base MODEL",
        lambda: tiny_model("llama"),
    ),
    "lmms-engine": (
        scenario("lmms_engine:lmms_engine_qwen2"),
        {EMA, ELSEWHERE},
        "",
        tiny_model,
    ),
    "torchtitan": (
        scenario("torchtitan:torchtitan_llama"),
        set(),
        "--base MODEL",
        lambda: tiny_model("llama", rms_norm_eps=1e-5),
    ),
    "Lightning": (scenario("lightning:lightning_fsdp2"), set(), "--base", tiny_model),
    "DeepSpeed": (deepspeed, {ELSEWHERE}, "", tiny_model),
    "verl": (verl, {"merge the critic", ELSEWHERE}, "--dtype config", tiny_model),
    "verl, LoRA": (verl_lora, {LORA, ELSEWHERE}, "--dtype config", tiny_model),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of which the profile that lines mean, the default one, is a script."""
    directory = tmp_path_factory.mktemp("server")
    script = directory / "script.py"
    places = ["{checkpoint}", "{output}", "-", "{tasks}", "{step}", "{weights}"]
    command = [sys.executable, "-I", "-S", str(script), *places]
    profiles = {"lm-eval": {"kind": "command", "command": command, "retries": 0, "gpus": 1}}
    with live(directory, script=SCORE, profiles=profiles) as made:
        yield made


def filled_in(text: str, base: Path, step: str) -> str:
    """Return a text with its words replaced, each of which a comment explains."""
    values = {"MODEL": shlex.quote(str(base)), "N": "3", "TASKS": "score", "STEP": step}
    blocks = text.rstrip("\n").split("\n\n")
    for number, block in enumerate(blocks):
        comment, _, command = block.rpartition("\n")
        for word, value in values.items():
            if re.search(rf"\b{word}\b", command):
                assert f"{word} is " in comment or f"{word} are " in comment or word == "STEP"
                command = re.sub(rf"\b{word}\b", value.replace("\\", r"\\"), command)
        blocks[number] = f"{comment}\n{command}"
    return "\n\n".join(blocks) + "\n"


def paste(text: str, directory: Path, server: Live) -> str:
    """Have a shell run a text; return what it printed."""
    environment = {**os.environ, "PYTHON": sys.executable, "UNSHARD_EVAL_SERVER": server.url}
    done = subprocess.run(
        ["bash", "-c", SHELL + text],
        cwd=directory,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_line_works(
    worker_pool: WorkerPool, server: Live, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, others, needed, model = RUNS[name]
    top = server.root / name
    base, run, elsewhere = top / "base", top / "it's my run", top / "elsewhere"
    model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    run.mkdir()
    elsewhere.mkdir()
    train(worker_pool, run)
    monkeypatch.chdir(top)  # as training was started there: Lightning recorded a relative path
    if name in WRITTEN:
        write_hint(run)
        shutil.copytree(run, top / "moved")
    lines = hint(run)
    assert {one.label for one in lines} == LABELS | others
    (merge,) = (one.command for one in lines if one.label == "merge")
    assert needed in merge
    assert ("--" in merge) is bool(needed)
    done = unshard("hint", run)
    assert done.returncode == 0, done.stderr
    paste(filled_in(done.stdout, base, ""), elsewhere, server)
    if name in WRITTEN:
        (file,) = (top / "moved").rglob("MERGE.txt")
        (step,) = (one.name for one in file.parent.iterdir() if one.match("*2*"))
        text = filled_in(file.read_text(), base, step.removesuffix(".ckpt"))
        shutil.rmtree(top / "it's my run-resharded", ignore_errors=True)
        paste(text, file.parent, server)
        assert (file.parent / "merged").is_dir()


@pytest.mark.ray
@needs_verl
@pytest.mark.parametrize("kind", ["model", "lora"])
def test_every_line_works_for_what_verl_saved(server: Live, kind: str) -> None:
    run = server.root / f"verl's {kind}" / "run"
    saved_by_verl(run, kind)
    done = unshard("hint", run)
    assert ("--lora adapter" in done.stdout) is (kind == "lora"), done.stderr
    paste(filled_in(done.stdout, run, ""), run.parent, server)
