"""lmms-engine 0.1.4: its own backend with our client, and our backend in its place."""

import importlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from evaluation.runs import lmms_checkpoint, rotate_like_lmms_engine
from evaluation.servers import Stub, free_port, scores, serving
from ranks import save_ranks, some_tensors
from unshard.errors import UsageError
from unshard.evaluate import lmms_engine as ours
from unshard.evaluate.client.lmms import LmmsClient
from waiting import LIMIT_S
from waiting import wait_until as until

pytestmark = pytest.mark.slow

EVAL_CONFIG: dict[str, object] = {
    "model": "qwen_vl",
    "checkpoint_key": "pretrained",
    "tasks": ["mmmu_val"],
    "model_args": {"max_pixels": 10},
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Stub]:
    with serving(Stub(finishes=scores, results_dir=tmp_path)) as stub:
        yield stub


def wait_as_lmms_engine_does(backend: object) -> list[tuple[int, dict[str, float]]]:
    """`_check_eval_results(wait_until_complete=True)` of its FSDP2 trainer."""
    logged = []
    while len(backend.pending_evals) > 0:  # type: ignore[attr-defined]  # theirs or ours
        for step, metrics in backend.check_and_get_completed():  # type: ignore[attr-defined]
            logged.append((step, metrics))
        time.sleep(backend.poll_interval)  # type: ignore[attr-defined]
    return logged


def test_their_own_backend_works_with_our_client(
    tmp_path: Path, server: Stub, backends: ModuleType
) -> None:
    ours.install_client()
    backend = backends.EvalServerBackend(server.url, poll_interval=0.05, eval_config=EVAL_CONFIG)
    assert isinstance(backend.client, LmmsClient)
    checkpoint = str(tmp_path / "checkpoint-5")
    job = backend.submit_eval(checkpoint, 5, f"{checkpoint}/eval", checkpoint_type="regular")
    assert job == "lmms1"
    (asked,) = server.evaluations
    assert asked["model_args"] == {"max_pixels": 10, "pretrained": checkpoint}
    kwargs = {"model_path": checkpoint, "checkpoint_type": "regular", "output_path": None}
    assert asked["lmms_engine_kwargs"] == kwargs
    until(lambda: not backend.results_queue.empty())
    assert backend.check_and_get_completed() == [(5, {"eval/mmmu_val_acc": 0.25})]
    backend.close()


def test_install_puts_our_backend_in_its_place(backends: ModuleType) -> None:
    package = importlib.import_module("lmms_engine.eval")
    ours.install()
    assert backends.EvalServerBackend is ours.UnshardEvalBackend
    assert vars(package)["EvalServerBackend"] is ours.UnshardEvalBackend


def test_what_the_yaml_says_comes_through_lmms_engines_launch(backends: ModuleType) -> None:
    """`create_train_task` of its launch/cli.py: `EvalConfig(**eval_config).to_dict()`."""
    del backends
    package = importlib.import_module("lmms_engine.eval")
    ours.install()
    given = {**EVAL_CONFIG, "weights": ["model", "ema"], "run": "r7", "flush_timeout": LIMIT_S}
    config = vars(package)["EvalConfig"](**given)
    assert (config.to_dict(), config.run, config.device) == (given, "r7", None)
    backend = vars(package)["EvalServerBackend"](url=None, eval_config=config.to_dict())
    read = backend._config
    assert (read.weights, read.run, read.num_fewshot, read.batch_size) == (
        ("model", "ema"),
        "r7",
        None,
        None,
    )
    assert (read.server_url, read.model_args) == ("http://localhost:8000", {"max_pixels": 10})


class Rows:
    """Takes results as W&B's sink does: one for every row that the trainer commits."""

    name = "rows"
    is_ready = True

    def __init__(self) -> None:
        self.got: list[tuple[int, bool]] = []

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        del metrics, job_id
        self.got.append((step, False))
        self.is_ready = False

    def log_now(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        del metrics, job_id
        self.got.append((step, True))
        self.is_ready = True

    def close(self) -> None:
        self.is_ready = True


def test_where_wandb_is_open_results_come_into_its_rows_and_not_through_lmms_engine(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows()
    monkeypatch.setattr(ours, "open_wandb", lambda: rows)
    backend = ours.UnshardEvalBackend(server.url, 0.02, EVAL_CONFIG)
    for step in (10, 20, 30):
        backend.submit_eval(str(lmms_checkpoint(tmp_path / "run", step)), step)
    assert backend._submitter is not None
    submitter = backend._submitter
    results = tmp_path / "run" / "_unshard" / "results.jsonl"
    until(lambda: results.exists() and len(results.read_text().splitlines()) == 3)
    until(lambda: not submitter.pending())
    assert [backend.check_and_get_completed() for _ in range(3)] == [[], [], []]
    assert len(rows.got) == 1
    rows.is_ready = True  # the trainer has committed its row
    assert backend.check_and_get_completed() == []
    assert wait_as_lmms_engine_does(backend) == []
    assert sorted(step for step, _ in rows.got) == [10, 20, 30]
    assert [is_own for _, is_own in rows.got] == [False, False, True]
    backend.close()


def test_the_first_save_leaves_the_lines_to_merge_it(tmp_path: Path, server: Stub) -> None:
    backend = ours.UnshardEvalBackend(server.url, 0.02, EVAL_CONFIG)
    place = tmp_path / "run" / "checkpoint-10"
    save_ranks(place / "pytorch_model_fsdp_0", some_tensors(), 2)
    backend.submit_eval(str(place), 10)
    backend.close()
    assert "unshard merge STEP --base MODEL" in (tmp_path / "run" / "MERGE.txt").read_text()


def test_no_result_is_lost_at_the_end_and_all_come_with_their_steps(
    tmp_path: Path, server: Stub
) -> None:
    backend = ours.UnshardEvalBackend(server.url, 0.02, EVAL_CONFIG)
    for step in (10, 20, 30):
        checkpoint = lmms_checkpoint(tmp_path / "run", step)
        rotate_like_lmms_engine(tmp_path / "run", 1)
        backend.submit_eval(str(checkpoint), step, "ignored", checkpoint_type="regular")
    logged = wait_as_lmms_engine_does(backend)
    assert sorted(logged) == [(step, {"eval/mmmu_val_acc": step / 100}) for step in (10, 20, 30)]
    assert [body["profile"] for body in server.submissions] == ["qwen_vl"] * 3
    assert server.submissions[0]["model_args"] == {"max_pixels": 10}
    backend.close()


def test_one_result_is_handed_over_at_a_time_while_training_goes_on(
    tmp_path: Path, server: Stub
) -> None:
    backend = ours.UnshardEvalBackend(server.url, 0.02, EVAL_CONFIG)
    for step in (10, 20):
        backend.submit_eval(str(lmms_checkpoint(tmp_path / "run", step)), step)
    results = tmp_path / "run" / "_unshard" / "results.jsonl"
    until(lambda: results.exists() and len(results.read_text().splitlines()) == 2)
    assert backend._submitter is not None
    submitter = backend._submitter
    until(lambda: not submitter.pending())
    handed = [backend.check_and_get_completed() for _ in range(3)]
    assert sorted(len(one) for one in handed) == [0, 1, 1]
    backend.close()


def test_ema_runs_are_evaluated_with_their_ema_weights(tmp_path: Path, server: Stub) -> None:
    backend = ours.UnshardEvalBackend(server.url, 0.02, EVAL_CONFIG)
    checkpoint = lmms_checkpoint(tmp_path / "run", 10, ema=True)
    backend.submit_eval(str(checkpoint), 10, checkpoint_type="ema")
    assert wait_as_lmms_engine_does(backend) == [(10, {"eval/ema/mmmu_val_acc": 0.1})]
    assert server.submissions[0]["weights"] == "ema"
    backend.close()


def test_the_end_of_a_training_says_what_has_no_result(
    tmp_path: Path, server: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    """lmms-engine itself says that all evaluation jobs completed."""
    server.finishes = lambda body: {"status": "failed", "error": "no memory"}  # noqa: ARG005
    backend = ours.UnshardEvalBackend(server.url, 0.02, EVAL_CONFIG)
    backend.submit_eval(str(lmms_checkpoint(tmp_path / "run", 10)), 10)
    assert wait_as_lmms_engine_does(backend) == []
    assert [backend.pending_evals for _ in range(2)] == [{}, {}]
    said = [one.message for one in caplog.records if one.message.startswith("no result")]
    assert said == ["no result: step 10: job job1 failed: no memory"]
    backend.close()


def test_the_trainer_comes_to_its_end_without_a_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = f"http://127.0.0.1:{free_port()}"
    backend = ours.UnshardEvalBackend(absent, 0.01, {**EVAL_CONFIG, "flush_timeout": 0.1})
    backend.submit_eval(str(lmms_checkpoint(tmp_path / "run", 10)), 10)
    assert wait_as_lmms_engine_does(backend) == []
    assert "no result yet: step 10; the next trainer on" in caplog.text
    backend.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": None}, "is incomplete: profile"),
        ({"tasks": []}, "is incomplete: tasks"),
        ({"poll_interval": 0}, "poll_interval"),
        ({"server_url": "evaluator"}, "server_url"),
        ({"quota": {"size": 1}}, "quota"),
    ],
)
def test_a_wrong_configuration_stops_the_trainer_at_its_start(
    backends: ModuleType, wrong: dict[str, object], said: str
) -> None:
    """Its trainer makes the backend like this before the first step."""
    ours.install()
    config = {"server_url": "http://127.0.0.1:9", **EVAL_CONFIG, **wrong}
    with pytest.raises(UsageError, match=said):
        backends.EvalServerBackend(
            url=config.get("server_url"),
            poll_interval=config.get("poll_interval", 20.0),
            eval_config=config,
        )


def test_lmms_engine_waits_as_long_as_we_poll(backends: ModuleType) -> None:
    """It sleeps for the backend's `poll_interval`, also where the YAML says null."""
    ours.install()
    for given, waited in ((None, 20.0), (3, 3)):
        assert backends.EvalServerBackend(None, given, EVAL_CONFIG).poll_interval == waited
