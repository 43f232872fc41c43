"""A real vLLM with processes of its own: the command, HTTP, two workers of tensor parallelism."""

import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from served_layouts import greedy, matrices, save_verl_step, served_model
from vllm_child import PROMPTS
from vllm_runs import PYTHON, called_vllm, environment, needs_vllm, run_vllm
from waiting import wait_until

pytestmark = [needs_vllm, pytest.mark.vllm, pytest.mark.xdist_group("vllm")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two steps, whose config ties a head that differs: engines need another."""
    directory = tmp_path_factory.mktemp("run")
    for step in (10, 20):
        save_verl_step(directory, model_of(step), step)
    return directory


def model_of(step: int) -> Any:
    model = served_model(tie_word_embeddings=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * step)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.roll(step, 0))
    return model


@contextmanager
def serving(checkpoint: Path, log: Path) -> Iterator[str]:
    """Run `unshard vllm` as long as the context lasts; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = "--dtype float32 --enforce-eager --max-model-len 64 --seed 0 --host 127.0.0.1"
    command = [PYTHON, "-m", "unshard", "vllm", str(checkpoint), "--port", str(port)]
    env = environment(VLLM_SERVER_DEV_MODE="1")
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, *options.split()],
            env={**env, "PYTHONPATH": f"{called_vllm(log.parent)}:{env['PYTHONPATH']}"},
            stdout=out,
            stderr=out,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: server.poll() is not None or is_up(url), "the server answers")
        assert server.poll() is None, log.read_text()[-6000:]
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM, log.read_text()[-6000:]


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as answer:  # noqa: S310 (our own server)
            return bool(answer.status == 200)
    except OSError:
        return False


def post(url: str, body: Mapping[str, object] | None = None) -> Any:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310 (our own server)
        return json.loads(answer.read() or b"null")


def complete(url: str, name: str) -> list[list[int]]:
    """Return the tokens that follow the prompts."""
    asked = {"model": name, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    found = [
        post(f"{url}/v1/completions", {**asked, "prompt": prompt, "return_token_ids": True})
        for prompt in PROMPTS
    ]
    return [one["choices"][0]["token_ids"] for one in found]


def test_the_command_serves_shards_and_takes_the_next_over_http(run: Path, tmp_path: Path) -> None:
    first, second = (run / f"global_step_{step}" for step in (10, 20))
    with serving(first, tmp_path / "log") as url:
        assert complete(url, str(first)) == [greedy(model_of(10), one) for one in PROMPTS]
        order = {"method": "unshard_reload", "kwargs": {"checkpoint": str(second)}}
        (found,) = post(f"{url}/collective_rpc", order)["results"]
        assert found["step"] == 20
        assert post(f"{url}/reset_prefix_cache") == {"success": True}
        assert complete(url, str(first)) == [greedy(model_of(20), one) for one in PROMPTS]
        with pytest.raises(urllib.error.HTTPError):
            post(f"{url}/collective_rpc", {**order, "kwargs": {"checkpoint": str(tmp_path)}})
        assert complete(url, str(first)) == [greedy(model_of(20), one) for one in PROMPTS]


def test_two_workers_of_tensor_parallelism_take_and_check_the_next(
    run: Path, tmp_path: Path
) -> None:
    order: dict[str, object] = {
        "do": "serve",
        "checkpoint": str(run / "global_step_10"),
        "options": {},
        "arguments": {"tensor_parallel_size": 2},
    }
    again: dict[str, object] = {"do": "reload", "checkpoint": str(run), "options": {"step": 20}}
    orders: list[dict[str, object]] = [order, {"do": "answer"}, again, {"do": "answer"}]
    # One core for each: by itself vLLM wants a NUMA node for each.
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}  # kernels are files
    answers = run_vllm(tmp_path / "child", orders, **env)
    assert [one["error"] for one in answers if "error" in one] == []
    for answer, step in ((answers[1], 10), (answers[3], 20)):
        tokens = [found for found, _ in answer["result"]]
        assert tokens == [greedy(model_of(step), one) for one in PROMPTS]
    assert [one["step"] for one in answers[2]["result"]] == [20, 20]
    # All processes: at the start they exchange messages, and config and tokenizer are copied.
    # An answer says nothing: on some processors the workers exchange activations over sockets,
    # and the kernel counts these as written, too.
    start, _, reload, _ = [one["written"] for one in answers]
    assert start < sum(matrices()) / 4
    assert reload < min(matrices())
