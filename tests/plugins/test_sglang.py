"""A real SGLang on the shards of several layouts, and updates of its weights.

It runs on CPUs, without the kernels of its own package, in processes of its own.
"""

import json
import os
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

import sglang_child
import unshard
from oracle.writers.workers import WorkerPool
from served_layouts import RANKS, greedy, save_layouts, save_lora, save_verl_step, served_model
from unshard.progress import ignore
from vllm_child import PROMPTS
from waiting import wait_until

PYTHON = os.environ.get("UNSHARD_SGLANG_PYTHON", "")
SOURCE, TESTS = Path(unshard.__file__).parents[1], Path(sglang_child.__file__).parent
SAME = ("dcp", "fsdp1", "shards", "verl")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="UNSHARD_SGLANG_PYTHON names no interpreter with SGLang"),
    pytest.mark.xdist_group("vllm"),  # with the other engines: a gigabyte and two cores each
]

Order = dict[str, object]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a run of each layout, and what a merge makes of three of them."""
    directory = tmp_path_factory.mktemp("runs")
    WorkerPool(RANKS).run(save_layouts, RANKS, directory)
    save_lora(directory / "lora")
    save_verl_step(directory / "next", next_model(), 20)
    save_verl_step(directory / "smaller", served_model(num_hidden_layers=3), 10)
    for folder in ("verl", "lora", "lmms"):
        unshard.merge(directory / folder, directory / f"merged-{folder}", listener=ignore)
    return directory


def next_model() -> Any:
    model = served_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of a process with SGLang, which has our plugin and that of a test."""
    plugin = directory / "losing-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: losing\nVersion: 1\n")
    entry = "[sglang.srt.plugins]\nlosing = sglang_child:plugin\n"
    (plugin / "entry_points.txt").write_text(entry)
    times = directory / "lose"
    times.write_text("0")
    path = f"{SOURCE}:{TESTS}:{directory}"
    return {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "LOSE": str(times),
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # of two workers: a core each
    }


@pytest.fixture(scope="module")
def said(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return what an engine answered to all orders of this module, by name, and its log."""
    steps = dict(orders(runs))
    directory = tmp_path_factory.mktemp("sglang")
    asked, told, log = (directory / name for name in ("orders.json", "answers.json", "log"))
    asked.write_text(json.dumps(list(steps.values())))
    with log.open("wb") as out:
        command = [PYTHON, str(sglang_child.__file__), str(asked), str(told)]
        subprocess.run(command, env=environment(directory), stdout=out, stderr=out, check=False)
    assert told.is_file(), log.read_text()[-6000:]
    return dict(zip(steps, json.loads(told.read_text()), strict=False)), log.read_text()


def orders(runs: Path) -> Iterator[tuple[str, Order]]:
    """Yield names and orders; the last one ends the engine."""
    serve: Order = {"do": "serve", "checkpoint": str(runs / "verl"), "options": {}, "arguments": {}}
    yield "start", serve
    yield "started", {"do": "answer"}
    for folder in ("merged-verl", *SAME, "merged-lora", "lora"):
        merged: Order = {"load_format": "auto"} if folder.startswith("merged") else {}
        yield f"update {folder}", {"do": "update", "path": str(runs / folder), **merged}
        yield folder, {"do": "answer"}
    yield "smaller", {"do": "update", "path": str(runs / "smaller")}
    yield "absent", {"do": "update", "path": str(runs / "absent")}
    yield "after refusals", {"do": "answer"}
    yield "lost once", {"do": "update", "path": str(runs / "next"), "lose": 1}
    yield "update next", {"do": "update", "path": str(runs / "next")}
    yield "next", {"do": "answer"}
    yield "lost", {"do": "update", "path": str(runs / "verl"), "lose": 9}
    yield "after loss", {"do": "answer"}


def tokens(answer: Any) -> list[list[int]]:
    return [one for one, _ in answer]


def test_an_engine_on_shards_answers_as_on_the_merged_model(said: Any) -> None:
    answers, _ = said
    assert tokens(answers["started"]) == [greedy(served_model(), one) for one in PROMPTS]
    for folder in ("started", *SAME):
        assert answers[folder] == answers["merged-verl"], folder
    assert answers["lora"] == answers["merged-lora"] != answers["merged-verl"]


def test_what_does_not_fit_is_refused_and_nothing_is_changed(said: Any) -> None:
    answers, _ = said
    for name, message in (("smaller", "the engine did not start with"), ("absent", "no such file")):
        assert not answers[name][0]
        assert message in answers[name][1]
    assert tokens(answers["after refusals"]) == tokens(answers["lora"])


def test_an_update_that_lost_a_layer_is_noticed(said: Any) -> None:
    """After a failure SGLang loads again; if that fails as well, the engine is gone."""
    answers, log = said
    assert not answers["lost once"][0]
    assert "does not hold this checkpoint after the update" in answers["lost once"][1]
    assert answers["update next"][0]
    assert tokens(answers["next"]) == [greedy(next_model(), one) for one in PROMPTS]
    assert "lost" not in answers
    assert "UnshardError" in log


@contextmanager
def serving(arguments: list[str], directory: Path) -> Iterator[str]:
    """Run `unshard sglang` as long as the context lasts; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = {**sglang_child.COMMON, "host": "127.0.0.1", "port": port}
    options = [
        part
        for name, value in given.items()
        for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    log = directory / "log"
    with log.open("wb") as out:
        command = [PYTHON, "-m", "unshard", "sglang", *arguments, *options]
        server = subprocess.Popen(command, env=environment(directory), stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: server.poll() is not None or is_up(url), "the server answers")
        assert server.poll() is None, log.read_text()[-6000:]
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as answer:  # noqa: S310 (our own server)
            return bool(answer.status == 200)
    except OSError:
        return False


def post(url: str, body: Mapping[str, object]) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request) as answer:  # noqa: S310 (our own server)
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def complete(url: str) -> list[list[int]]:
    how = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    _, found = post(f"{url}/generate", {"input_ids": PROMPTS, "sampling_params": how})
    return [one["output_ids"] for one in found]


def test_two_workers_of_the_command_serve_averaged_weights_and_an_update_keeps_that_option(
    runs: Path, tmp_path: Path
) -> None:
    raw = [greedy(served_model(), one) for one in PROMPTS]
    with serving([str(runs / "lmms"), "--weights", "ema", "--tp-size", "2"], tmp_path) as url:
        averaged = complete(url)
        assert averaged != raw
        update = f"{url}/update_weights_from_disk"
        merged = {"model_path": str(runs / "merged-lmms"), "load_format": "auto"}
        assert post(update, merged)[0] == 200
        assert complete(url) == raw
        again = {"model_path": str(runs / "lmms"), "load_format": "unshard"}
        assert post(update, again)[0] == 200
        assert complete(url) == averaged
        code, answer = post(update, {**again, "model_path": str(tmp_path)})
        assert (code, answer["success"]) == (400, False)
        assert str(tmp_path) in answer["message"]
        (tmp_path / "lose").write_text("second worker fails")
        code, answer = post(update, again)
        assert code == 400
        assert "another worker cannot load the checkpoint: no such device" in answer["message"]
        (tmp_path / "lose").write_text("0")
        assert post(update, again)[0] == 200
        assert complete(url) == averaged
