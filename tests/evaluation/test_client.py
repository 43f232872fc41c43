"""Our client speaks lmms-eval's protocol as the original does, and our own with our errors."""

import asyncio
import base64
import inspect
import json
import os
import socket
import subprocess
import textwrap
import time
from collections.abc import Iterator

import httpx
import pytest

import unshard.evaluate
from evaluation.servers import Stub, free_port, scores, serving
from unshard.errors import UsageError
from unshard.evaluate.client.lmms import AsyncEvalClient, LmmsClient
from unshard.evaluate.client.v1 import EvalClient, RefusedError, ServerAwayError


@pytest.fixture
def server() -> Iterator[Stub]:
    with serving(Stub()) as stub:
        yield stub


BOTH = pytest.mark.parametrize("kind", [EvalClient, LmmsClient])
Kind = type[EvalClient | LmmsClient]


@BOTH
def test_it_speaks_lmms_evals_protocol(server: Stub, kind: Kind) -> None:
    with kind(server.url + "/") as client:
        assert client.health()["status"] == "healthy"
        assert client.is_healthy()
        assert client.list_tasks() == ["mmmu_val"]
        assert client.list_models() == ["qwen_vl"]
        assert client.get_queue_status()["queued_jobs"] == []
        job = client.evaluate("qwen_vl", ["mmmu_val"], {"a": 1}, lmms_engine_kwargs={"x": "y"})
        assert server.evaluations[0] == {
            "model": "qwen_vl",
            "tasks": ["mmmu_val"],
            "model_args": {"a": 1},
            "log_samples": True,
            "predict_only": False,
            "num_gpus": 1,
            "lmms_engine_kwargs": {"x": "y"},
        }
        assert client.wait_for_job(str(job["job_id"]))["status"] == "completed"
        assert client.cancel_job("j") == {"message": "cancelled j"}
        assert client.merge_checkpoint("/c", "/o")["merged_path"] == "/o"


def test_a_text_of_tasks_is_not_its_letters(server: Stub) -> None:
    with EvalClient(server.url) as client:
        client.submit("/c", 1, "p", "mmmu_val")
        client.evaluate("m", "mmmu_val, gsm8k")
    assert [one["tasks"] for one in server.evaluations] == [["mmmu_val", "gsm8k"]]
    assert [one["tasks"] for one in server.submissions] == [["mmmu_val"]]


@BOTH
def test_every_argument_of_an_evaluation_is_sent_under_its_name(server: Stub, kind: Kind) -> None:
    names = list(inspect.signature(kind.evaluate).parameters)[1:]
    values = ("m", ["t"], {"a": 1}, 2, "auto", "cuda", 0.5, "g", False, True, 3, "/o", {"b": "c"})
    with kind(server.url) as client:
        client.evaluate(*values)
    assert server.evaluations == [dict(zip(names, values, strict=True))]


@BOTH
def test_its_lmms_methods_raise_what_the_original_raises(server: Stub, kind: Kind) -> None:
    client = kind(server.url)
    with pytest.raises(httpx.HTTPStatusError):
        client.get_job("unknown")
    server.jobs["bad"] = {"status": "failed", "error": "out of memory"}
    with pytest.raises(RuntimeError, match="out of memory"):
        client.wait_for_job("bad")
    server.jobs["slow"] = {"status": "running"}
    with pytest.raises(TimeoutError, match="slow"):
        client.wait_for_job("slow", poll_interval=0.01, timeout=0.02)
    client.close()
    away = kind(f"http://127.0.0.1:{free_port()}")
    assert not away.is_healthy()
    with pytest.raises(httpx.ConnectError):
        away.health()
    away.close()


def test_the_asynchronous_client_does_the_same(server: Stub) -> None:
    async def use() -> object:
        async with AsyncEvalClient(server.url) as client:
            assert (await client.health())["status"] == "healthy"
            job = await client.evaluate("m", ["t"], limit=None, num_gpus=2)
            await client.get_queue_status()
            await client.cancel_job("x")
            return (await client.wait_for_job(str(job["job_id"])))["status"]

    assert asyncio.run(use()) == "completed"
    assert server.evaluations == [{"model": "m", "tasks": ["t"], "num_gpus": 2}]


def test_the_asynchronous_client_raises_what_the_original_raises(server: Stub) -> None:
    server.jobs["bad"] = {"status": "failed", "error": "out of memory"}
    server.jobs["slow"] = {"status": "running"}

    async def use() -> None:
        async with AsyncEvalClient(server.url) as client:
            with pytest.raises(httpx.HTTPStatusError):
                await client.get_job("unknown")
            with pytest.raises(RuntimeError, match="out of memory"):
                await client.wait_for_job("bad")
            slow = [client.wait_for_job("slow", 0.01, timeout=0.3) for _ in range(100)]
            found = await asyncio.gather(*slow, return_exceptions=True)
            assert {type(one) for one in found} == {TimeoutError}
        async with AsyncEvalClient(f"http://127.0.0.1:{free_port()}") as client:
            with pytest.raises(httpx.ConnectError):
                await client.get_queue_status()

    asyncio.run(use())


def test_an_asynchronous_request_is_given_up_at_once() -> None:
    """Nothing of it is left that the end of the loop would wait for, as for a thread."""

    async def use() -> None:
        async with AsyncEvalClient(f"http://127.0.0.1:{port}") as client:
            for request in (client.health(), client.get_job("x"), client.wait_for_job("x")):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(request, 0.2)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began = time.monotonic()
        asyncio.run(use())
        assert time.monotonic() - began < 10


SIGNATURES = """
import inspect, json
from lmms_eval.entrypoints import client

found = []
for kind in ("EvalClient", "AsyncEvalClient"):
    for name, method in inspect.getmembers(getattr(client, kind), inspect.isfunction):
        if not name.startswith("_") or name == "__init__":
            parameters = inspect.signature(method).parameters.values()
            found.append([kind, name, [(one.name, repr(one.default)) for one in parameters]])
print(json.dumps(found))
"""


@pytest.mark.evaluators
def test_it_has_what_lmms_evals_client_has() -> None:
    """Names and defaults of lmms_eval 0.7.3's client."""
    python = os.environ.get("UNSHARD_LMMS_EVAL_PYTHON")
    if python is None:
        pytest.skip("UNSHARD_LMMS_EVAL_PYTHON names no Python with lmms-eval")
    told = subprocess.run([python, "-c", SIGNATURES], capture_output=True, text=True, check=True)
    theirs = json.loads(told.stdout.splitlines()[-1])
    assert len(theirs) > 10
    kinds = {"EvalClient": LmmsClient, "AsyncEvalClient": AsyncEvalClient}
    for kind, name, parameters in theirs:
        mine = inspect.signature(getattr(kinds[kind], name)).parameters
        defaults = {one.name: repr(one.default) for one in mine.values()}
        named = [one for one in parameters if one[0] in defaults]
        rest = {one for one in mine if one in {"kwargs", "arguments"}}
        assert len(parameters) - len(named) <= len(rest - {one for one, _ in named}), name
        assert [defaults[one] for one, _ in named] == [default for _, default in named], name


def test_it_submits_and_follows_jobs_of_our_own_protocol(server: Stub) -> None:
    server.finishes = scores
    with EvalClient(server.url) as client:
        job = client.submit("/c", 50, "qwen", ["mmlu"], weights="ema", model_args={"a": "b"})
        assert server.submissions == [
            {
                "checkpoint": "/c",
                "step": 50,
                "profile": "qwen",
                "tasks": ["mmlu"],
                "weights": "ema",
                "model_args": {"a": "b"},
            }
        ]
        assert job["metrics"] == {"mmlu/acc": 0.5}
        job_id = str(job["id"])
        assert (
            client.submit("/c", 50, "qwen", ["mmlu"], weights="ema", model_args={"a": "b"}) == job
        )
        assert client.job(job_id) == job
        assert client.jobs(status="completed") == [job]
        assert client.jobs(status="failed") == []
        assert client.results(step=50) == [{"step": 50, "metric": "acc", "value": 0.5}]
        assert client.log(job_id, 4) == {"text": f"of {job_id}", "offset": 11, "ended": True}
        assert [event["number"] for event in client.events(since=4)] == [5, 6, 7]
        assert client.cancel(job_id)["status"] == "cancelled"


def test_refusals_are_usage_errors_with_what_the_server_says(server: Stub) -> None:
    client = EvalClient(server.url)
    with pytest.raises(RefusedError, match="no job nobody") as caught:
        client.job("nobody")
    assert caught.value.status == 404
    assert isinstance(caught.value, UsageError)
    assert (caught.value.expected, caught.value.found, caught.value.hint) == (
        "this",
        "that",
        "do so",
    )
    client.close()


def test_a_server_that_does_not_answer_or_is_another_program_is_away(server: Stub) -> None:
    away = EvalClient(f"http://user:secret@127.0.0.1:{free_port()}")
    with pytest.raises(ServerAwayError, match="ConnectError") as caught:
        away.jobs()
    assert "secret" not in str(caught.value)
    away.close()
    gateway = EvalClient(f"{server.url}/nothing-here")
    with pytest.raises(ServerAwayError, match="404"):
        gateway.job("x")
    with pytest.raises(ServerAwayError, match="404"):
        next(gateway.events())
    gateway.close()


def test_a_token_and_a_password_are_sent(server: Stub) -> None:
    with EvalClient(server.url, token="t0") as client:  # noqa: S106  (of this test)
        client.jobs()
    assert server.headers[-1]["authorization"] == "Bearer t0"
    with EvalClient(server.url.replace("http://", "http://any:t1@")) as client:
        client.jobs()
        client.health()
    expected = "Basic " + base64.b64encode(b"any:t1").decode()
    assert [found["authorization"] for found in server.headers[-2:]] == [expected] * 2


def test_the_room_gives_what_a_trainer_needs() -> None:
    from unshard import evaluate

    assert evaluate.EvalClient is EvalClient
    assert evaluate.AsyncEvalClient is AsyncEvalClient


def test_the_example_of_the_package_runs() -> None:
    with serving(Stub()) as stub:
        lines = (unshard.evaluate.__doc__ or "").splitlines(keepends=True)
        text = "".join(line for line in lines if line.startswith("    "))
        exec(textwrap.dedent(text).replace("http://127.0.0.1:8000", stub.url))  # noqa: S102  (ours)
        assert [body["step"] for body in stub.submissions] == [1000]
