"""An evaluation without a merge: the evaluator reads the shards itself."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

from evaluation.local_tasks import run_evaluator, surprise_task
from ranks import save_ranks, snapshot
from tiny_models import tiny_model, tiny_tokenizer
from unshard.errors import UsageError
from unshard.evaluate.jobs import EvaluationError, Job, Request, Status, WeightsName
from unshard.evaluate.server.admission import check_request, list_unfitting
from unshard.evaluate.server.attempts.merging import CheckpointGoneError, Merger
from unshard.evaluate.server.evaluators import lm_eval
from unshard.evaluate.server.evaluators.direct import MODEL_TYPE, PLACE_NAME
from unshard.evaluate.server.evaluators.installed import why_missing
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.work import EvalInput, Profile
from unshard.evaluate.server.server_yaml import ServerConfig, read_server_yaml

TASK = "colours_surprise"


def sharded(step: Path, *, ema: bool = False) -> Path:
    """Save a tiny model as lmms-engine does, with its tokenizer."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    model.config.save_pretrained(step)
    tokenizer.save_pretrained(step)
    save_ranks(step / "pytorch_model_fsdp_0", model.state_dict(), 2)
    if ema:
        with torch.no_grad():
            tensors = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
        save_ranks(step / "pytorch_ema_model_fsdp_0", tensors, 2)
    return step


def direct(**changed: object) -> LmEvalProfile:
    return LmEvalProfile(weights="direct", **changed)  # type: ignore[arg-type]  # its own fields


def prepare(
    tmp_path: Path, checkpoint: Path, profile: Profile, weights: WeightsName = "model"
) -> EvalInput:
    """Do what an attempt does before its evaluator is started."""
    directory = tmp_path / f"attempt-{profile.weights}-{weights}"
    (directory / "output").mkdir(parents=True)
    request = Request(str(checkpoint), "lm", (TASK,), weights=weights)
    job = Job(directory.name, request, Status.RUNNING, 0.0)
    merger = Merger(tmp_path / "merged", at_once=1)
    model = merger.prepare(job, profile, directory=directory, is_given_up=lambda: False)
    return EvalInput(model, directory / "output", directory, request, profile)


def configured(tmp_path: Path, **profile: object) -> Profile:
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump({"profiles": {"lm": {"kind": "lm-eval", **profile}}}))
    return read_server_yaml(path, {"gpus": []}).profiles["lm"]


def test_a_profile_says_whether_its_checkpoints_are_merged(tmp_path: Path) -> None:
    assert configured(tmp_path).weights == "merged"
    assert configured(tmp_path, weights="merged", keep="all").weights == "merged"
    assert configured(tmp_path, weights="direct").weights == "direct"
    assert not configured(tmp_path, weights="direct").engine
    engine = {"weights": "direct", "model": "vllm"}
    for given, expected in ({}, 600), ({"idle_timeout": 5}, 5):
        kept = configured(tmp_path, **engine, **given)
        assert kept.engine
        assert kept.engine.idle_s == expected
    assert not configured(tmp_path, model="vllm").engine


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "lmms-eval"}, "expected: kind lm-eval, or `weights: merged` found: kind lmms"),
        ({"kind": "command", "command": ["true"]}, "found: kind command"),
        ({"model": "sglang"}, "with this type of model expected: model: hf or vllm;"),
        ({"idle_timeout": 5}, "idle_timeout has no effect without a kept engine"),
        ({"keep": "all"}, "with `keep: all`: there is no merged model to keep"),
        ({"keep": "best", "best_metric": "a/b"}, "with `keep: best`: there is no merged model"),
        ({"weights": "none"}, "weights cannot be read expected: merged, direct"),
    ],
)
def test_where_a_merge_is_needed_direct_is_refused(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=r"profiles\.lm ") as caught:
        configured(tmp_path, **{"weights": "direct"} | changed)
    assert message in " ".join(caught.value.text.split())


def test_the_evaluator_gets_what_a_merged_model_has_but_its_weights(tmp_path: Path) -> None:
    checkpoint = sharded(tmp_path / "run" / "checkpoint-3", ema=True)
    before = snapshot(checkpoint)
    whole = prepare(tmp_path, checkpoint, LmEvalProfile()).model
    work = prepare(tmp_path, checkpoint, direct(), weights="ema")
    assert work.model == work.directory / "model"
    expected = {path.name: path.read_bytes() for path in whole.iterdir()}
    for name in ("model.safetensors", "unshard.json"):
        del expected[name]
    place = json.loads((work.model / PLACE_NAME).read_bytes())
    assert (place["checkpoint"], place["weights"]) == (str(checkpoint), "ema")
    (work.model / PLACE_NAME).unlink()
    assert {path.name: path.read_bytes() for path in work.model.iterdir()} == expected
    assert [path.name for path in work.model.iterdir() if not path.is_symlink()] == ["config.json"]
    assert snapshot(checkpoint) == before
    assert [path.name for path in (tmp_path / "merged").iterdir()] == [whole.name]


def test_what_cannot_be_merged_is_refused_before_the_evaluator_starts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointGoneError, match="does not exist"):
        prepare(tmp_path / "gone", tmp_path / "nothing", direct())
    checkpoint = sharded(tmp_path / "run" / "checkpoint-3")
    (checkpoint / "config.json").unlink()
    with pytest.raises(EvaluationError, match=r"no config\.json was found") as caught:
        prepare(tmp_path / "bare", checkpoint, direct())
    assert "`config` of the profile" in caught.value.text
    (checkpoint / "pytorch_model_fsdp_0" / "model_world_size_2_rank_1.pt").write_bytes(b"")
    with pytest.raises(EvaluationError, match="rank_1") as caught:
        prepare(tmp_path / "bad", checkpoint, direct())
    assert type(caught.value) is EvaluationError


def test_lm_evals_own_command_line_runs_with_another_type_of_model(tmp_path: Path) -> None:
    checkpoint = sharded(tmp_path / "run" / "checkpoint-3")
    profile = direct(model_args={"dtype": "float32"}, gpus=2)
    work = prepare(tmp_path, checkpoint, profile)
    command = profile.command_line(work)
    assert command[1:4] == ["-m", "accelerate.commands.launch", "--multi_gpu"]
    config = work.directory / "job.yaml"
    assert command[-4:] == ["-m", lm_eval.DIRECT, "run", f"--config={config}"]
    found = yaml.safe_load(config.read_text())
    assert found["model"] == MODEL_TYPE
    assert found["model_args"] == {"dtype": "float32", "pretrained": str(work.model)}


def test_a_job_for_an_engine_that_is_kept_is_handed_to_its_worker(tmp_path: Path) -> None:
    """The launcher means nothing then: there is one process, whatever the number of GPUs."""
    checkpoint = sharded(tmp_path / "run" / "checkpoint-3")
    profile = direct(model="vllm", gpus=2, interpreter="other", model_args={"dtype": "auto"})
    work = prepare(tmp_path, checkpoint, profile)
    command = profile.command_line(work)
    config = work.directory / "job.yaml"
    client = "unshard.evaluate.server.warm.client"
    assert command == [sys.executable, "-m", client, "run", f"--config={config}"]
    found = yaml.safe_load(config.read_text())
    assert found["model"] == "vllm"
    assert found["model_args"] == {"dtype": "auto", "pretrained": str(work.model)}
    worker = "unshard.evaluate.server.warm.worker"
    assert profile.engine
    assert profile.engine.command[:3] == ("other", "-m", worker)
    several = direct(model="vllm", model_args={"data_parallel_size": 2})
    (problem,) = list_unfitting(work.request, several)
    assert "data_parallel_size is not possible" in str(problem)


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_the_numbers_are_those_of_the_merged_model(tmp_path: Path, weights: WeightsName) -> None:
    checkpoint = sharded(tmp_path / "run" / "checkpoint-3", ema=True)
    tasks = (surprise_task(tmp_path / "tasks"),)
    found = []
    for profile in (
        LmEvalProfile(include_paths=tasks),
        direct(include_paths=tasks),
    ):
        work = prepare(tmp_path, checkpoint, profile, weights)
        done = run_evaluator(profile.command_line(work), work.directory)
        assert done.returncode == 0, done.stdout
        found.append(profile.read_scores(work, done.returncode).metrics)
    assert found[0] == found[1]
    assert found[0].keys() == {f"{TASK}/perplexity", f"{TASK}/acc"}
    assert not list((tmp_path / "attempt-direct-model").glob("**/*.safetensors"))


def test_shards_that_are_gone_when_the_evaluator_reads_them_are_named(tmp_path: Path) -> None:
    checkpoint = sharded(tmp_path / "run" / "checkpoint-3")
    profile = direct(include_paths=(surprise_task(tmp_path / "tasks"),))
    work = prepare(tmp_path, checkpoint, profile)
    (checkpoint / "pytorch_model_fsdp_0" / "model_world_size_2_rank_1.pt").unlink()
    done = run_evaluator(profile.command_line(work), work.directory)
    assert done.returncode == 1
    assert "rank 1" in done.stdout.splitlines()[-1] or "rank_1" in done.stdout
    assert "Traceback" not in done.stdout
    with pytest.raises(EvaluationError, match="exit code 1"):
        profile.read_scores(work, done.returncode)


def test_an_interpreter_without_unshard_or_torch_is_reported(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    bare = tmp_path / "python"  # has no packages: it is not its environment's python
    bare.symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    profile = direct(interpreter=str(bare), environment={"PYTHONPATH": str(packages)})
    for module, package in (
        ("lm_eval", "lm_eval[hf]"),
        ("unshard", "unshard[torch]"),
        ("torch", "unshard[torch]"),
    ):
        missing = why_missing(profile, tmp_path)
        assert missing is not None
        assert f"{module} is not installed for {bare}" in missing
        assert f'-m pip install "{package}"' in missing
        (packages / module).mkdir(parents=True)
        (packages / module / "__init__.py").write_text("raise RuntimeError('imported')")
    assert why_missing(profile, tmp_path) is None


def test_a_server_without_torch_refuses_jobs_that_its_own_python_would_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    config = ServerConfig(profiles={"lm": direct()})
    with pytest.raises(UsageError, match="torch is not installed for the server's Python"):
        check_request(Request("/a", "lm", (TASK,)), config)
