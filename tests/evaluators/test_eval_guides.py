"""The pages about evaluation: what can run is run as it is written, but for the server's port."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from evaluation.running import child_environment
from evaluation.servers import Live, started
from unshard.evaluate.server.server_yaml import read_server_yaml
from unshard.evaluate.trainer.config import EvalConfig
from waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "async_eval.md"
PAGES = [PAGE, *sorted(DOCS.glob("guides/eval*.md")), *sorted(DOCS.glob("evaluation/*.md"))]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def blocks(page: Path, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory in which the pages' paths are there."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    for venv in ("lm-venv", "lmms-venv"):
        (tmp_path / venv / "bin").mkdir(parents=True)
        (tmp_path / venv / "bin" / "python").symlink_to(sys.executable)
    shutil.copytree(ROOT / "examples" / "checkpoint", tmp_path / "runs" / "my-run")
    shutil.copy(ROOT / "examples" / "server.yaml", tmp_path)
    shutil.copy(ROOT / "examples" / "ray-job.sh", tmp_path)  # the mode, too
    shutil.copy(ROOT / "examples" / "ray-job.sh", tmp_path / "evaluate.py")  # of the tutorial
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_yaml_is_one_that_is_read(
    page: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for text in blocks(page, "yaml"):
        if "profiles:" in text or "on_result:" in text:
            (place / "here.yaml").write_text(text)
            assert read_server_yaml(place / "here.yaml").profiles
        elif "server_url:" in text:
            assert EvalConfig.from_yaml(text).tasks
            assert "are ignored" not in caplog.text
        elif "scrape_configs:" in text:  # of Prometheus
            assert yaml.safe_load(text)["scrape_configs"][0]["static_configs"]
        else:
            assert yaml.safe_load(text)["task"] == "colours"


def test_the_server_yaml_of_the_examples_is_read() -> None:
    assert list(read_server_yaml(ROOT / "examples" / "server.yaml").profiles) == ["size"]


@pytest.fixture
def real(place: Path) -> Iterator[Live]:
    options = (f"--root={place / 'runs'}", "--port=0", f"--work-dir={place / 'work'}")
    with started(Live(place, options)) as running:
        yield running


def run(command: list[str], place: Path, **more: str) -> str:
    done = subprocess.run(
        command,
        cwd=place,
        env={**child_environment(), **OFFLINE, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_python(page: str, number: int, real: Live, place: Path) -> str:
    code = blocks(DOCS / "guides" / page, "python")[number]
    return run([sys.executable, "-c", code.replace("http://127.0.0.1:8000", real.url)], place)


def results(text: str) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"job"')]
    return {line["step"]: line["metrics"] for line in lines}


def test_the_page_about_transformers(real: Live, place: Path) -> None:
    text, _profile = blocks(DOCS / "guides" / "eval-transformers.md", "yaml")
    (place / "eval.yaml").write_text(text.replace("http://127.0.0.1:8000", real.url))
    shutil.rmtree(place / "runs" / "my-run")
    found = results(run_python("eval-transformers.md", 0, real, place))
    assert found.keys() == {2, 4, 6}
    assert len({metrics["unshard_eval/size/parameters"] for metrics in found.values()}) == 1
    left = sorted(path.name for path in (place / "runs" / "my-run").glob("checkpoint-*"))
    assert left == ["checkpoint-6"]


def test_the_page_about_lightning(real: Live, place: Path) -> None:
    pytest.importorskip("lightning", reason="pip install lightning; nothing of it was run")
    shutil.rmtree(place / "runs" / "my-run")
    found = results(run_python("eval-lightning.md", 0, real, place))
    assert found == {step: {"unshard_eval/size/parameters": 3.0} for step in (2, 4, 6)}


def test_the_page_about_lmms_engine(real: Live, place: Path) -> None:
    assert "10 {'eval/size_parameters': 245630.0}" in run_python(
        "eval-lmms-engine.md", 0, real, place
    )


def test_the_page_about_python(real: Live, place: Path) -> None:
    job, loop, lmms = (run_python("eval-python.md", n, real, place) for n in range(3))
    assert "completed {'size/parameters': 245630.0}" in job
    assert "(10, {'unshard_eval/size/parameters': 245630.0})" in loop
    assert lmms == "{'size/parameters': 245630.0}\n"


def test_the_page_about_watching(real: Live, place: Path) -> None:
    page = DOCS / "guides" / "eval-watch.md"
    (line, said) = next(
        block.splitlines() for block in blocks(page, "console") if "--once" in block
    )
    environment = {"UNSHARD_EVAL_SERVER": real.url}
    command = [sys.executable, "-m", *line.removeprefix("$ ").split()]
    assert run(command, place, **environment) == f"{said}\n"
    real.all_ended(1)
    assert "parameters = 245630" in run(command, place, **environment)
    (line,) = next(block.splitlines() for block in blocks(page, "console") if "export" in block)
    command = [sys.executable, "-m", *line.removeprefix("$ ").split()]
    assert run(command, place, **environment) == "my-run: 1 job written, 0 already there\n"


def test_the_curl_lines(real: Live, place: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not there; its lines were not run")
    said = []
    for block in blocks(DOCS / "evaluation" / "http-api.md", "bash"):
        text = block.replace("http://127.0.0.1:8000", real.url).replace(
            "curl -s", "curl -sS --fail"
        )
        said.append(run(["bash", "-ec", text], place))
    assert '"status":"queued"' in said[0] or '"status":"running"' in said[0]
    assert '"results":[' in said[0]
    assert '"job_id"' in said[1]
    (job,) = real.all_ended(1)  # the same one, in both protocols
    assert job["status"] == "completed"


def test_the_page_about_a_model_by_hand(place: Path) -> None:
    page = DOCS / "guides" / "evaluate-by-hand.md"
    merge, lm_eval, *_ = blocks(page, "bash")
    (task,) = blocks(page, "yaml")
    (data,) = blocks(page, "json")
    (place / "tasks" / "colours.yaml").write_text(task)
    (place / "tasks" / "colours.jsonl").write_text(data)
    run([sys.executable, "-m", *merge.split()], place)
    run([sys.executable, *lm_eval.split()[1:]], place)
    (file,) = (place / "results").glob("*/results_*.json")
    assert 0 <= json.loads(file.read_text())["results"]["colours"]["acc,none"] <= 1


def test_the_options_of_lmms_eval_are_its_own() -> None:
    python = os.environ.get("UNSHARD_LMMS_EVAL_PYTHON")
    if python is None:
        pytest.skip("UNSHARD_LMMS_EVAL_PYTHON names no Python with lmms-eval")
    line = blocks(DOCS / "guides" / "evaluate-by-hand.md", "bash")[2]
    where = "import importlib.util as u; print(u.find_spec('lmms_eval').origin)"
    package = Path(run([python, "-c", where], ROOT).strip()).parent
    source = (package / "__main__.py").read_text("utf-8")  # its --help imports torch
    assert all(f'"{option}"' in source for option in re.findall(r"--\w+", line))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", page.read_text("utf-8")):
        other = page.parent / target
        assert other.exists(), target
        headings = (
            re.findall(r"^#+ (.+)$", other.read_text("utf-8"), re.MULTILINE) if anchor else []
        )
        slugs = {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}
        assert not anchor or anchor in slugs, (target, anchor)
