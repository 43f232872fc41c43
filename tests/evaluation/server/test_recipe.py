"""The script by which a job can be done again: it is run, and gives the same numbers."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from evaluation.running import request, scheduler, script_profile, wait_for
from evaluation.runs import checkpoint
from unshard.evaluate.jobs import Job, Request, Status
from unshard.evaluate.server.attempts.recipe import make_recipe
from unshard.evaluate.server.attempts.redaction import LEFT_OUT, redact, redact_command
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.work import EvalInput
from unshard.evaluate.server.store.overview import recipe_of

DIGEST = """
import hashlib
print("on GPU", os.environ["CUDA_VISIBLE_DEVICES"], os.environ["JUDGE"])
files = sorted(model.glob("*.safetensors"))
done(digest=int(hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12], 16))
"""
SECRET = "a-secret-of-the-profile"  # noqa: S105


def test_the_script_merges_and_measures_the_same_numbers(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "a run", 5, ema=True)
    own = {"JUDGE": "it's me", "JUDGE_API_KEY": SECRET, "JUDGE_URL": f"http://me:{SECRET}@h/"}
    profile = script_profile(environment=own)
    store, server = scheduler(tmp_path / "work", DIGEST, profile=profile)
    job, _ = store.submit(request(place, 5, weights="ema"), pin=None)
    server.start()
    try:
        done = wait_for(store, job.id, Status.COMPLETED)
    finally:
        server.stop(end=True)
    with closing(store):
        script, record = recipe_of(store.connection, job.id)
    assert SECRET not in script
    assert json.loads(record)["source"]["weights"] == "ema"
    assert str(tmp_path / "work") not in script
    again = tmp_path / "again"
    again.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["/bin/sh", "-c", script],
        cwd=again,
        env={"PATH": path, "JUDGE_API_KEY": "mine"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "on GPU 0 it's me" in ran.stdout
    assert json.loads((again / "output" / "metrics.json").read_text()) == done.metrics
    assert {one.name for one in again.iterdir()} == {"model", "output"}


def test_the_files_of_a_command_are_in_its_script(tmp_path: Path) -> None:
    """lm-eval's command has its configuration in a file; nothing of it is left out or shown."""
    pytest.importorskip("yaml")
    profile = LmEvalProfile(kind="lm-eval", model_args={"api_key": SECRET, "max_length": 512})
    asked = Request("/runs/x/step_1", "lm-eval", ("a", "b"), 1, "x\nrm -rf")
    merged, directory = tmp_path / "merged" / "id", tmp_path / "jobs" / "id" / "1"
    for one in (merged, directory / "output"):
        one.mkdir(parents=True)
    pin = tmp_path / "_unshard" / "pins" / "1" / "step_1"
    job = Job("id", asked, Status.RUNNING, 0.0, pin=str(pin))
    work = EvalInput(pin, directory / "output", directory, asked, profile)  # a whole model
    script, _ = make_recipe(job, work, profile.command_line(work), (), merged)
    assert "pretrained: /runs/x/step_1\n" in script
    assert "unshard merge" not in script
    for weights in ("merged", "direct"):
        chosen = profile.model_copy(update={"weights": weights})
        work = EvalInput(merged, directory / "output", directory, asked, chosen)
        script, _ = make_recipe(job, work, chosen.command_line(work), (), merged)
        assert "\nrm -rf" not in script
        assert (SECRET in script, str(tmp_path) in script) == (False, False)
        assert "cat > ./job.yaml <<" in script
        for line in ("pretrained: ./model", "output_path: ./output/results.json", "- b"):
            assert line in script
        assert "max_length: 512" in script
        ran = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
        assert (ran.returncode, LEFT_OUT in ran.stderr) == (2, True)
        assert script.endswith("-m lm_eval run --config=./job.yaml\n")
        assert ("without a merge" in script) is (weights == "direct")


def test_a_secret_of_the_launch_alone_does_not_stop_the_script(tmp_path: Path) -> None:
    launch = ("env", f"API_KEY={SECRET}")
    profile = LmEvalProfile(kind="lm-eval", launch=launch)
    asked = Request("/runs/x/step_1", "lm-eval", ("a",), 1, "x")
    directory = tmp_path / "jobs" / "id" / "1"
    (directory / "output").mkdir(parents=True)
    job = Job("id", asked, Status.RUNNING, 0.0)
    work = EvalInput(tmp_path / "model", directory / "output", directory, asked, profile)
    command = profile.command_line(work)
    script, _ = make_recipe(job, work, command, (), tmp_path / "merged")
    assert f"# The server put before its command: env API_KEY={LEFT_OUT}" in script
    assert SECRET not in script
    assert "exit 2" not in script


@pytest.mark.parametrize(
    "text",
    [
        "add_bos_token: false\nmax_gen_tokens: 512\neos_token_id: 2",
        "pad_token: <pad>\nbos_token: '[CLS]'",
        "system_instruction: \"The secret: say 'yes' and the password: please\"",
        "pretrained=./model,dtype=float32",
        "hf_transformers_model",
        "until=secret",
    ],
)
def test_what_is_not_a_secret_stays(text: str) -> None:
    assert redact(text) == text
    assert [*redact_command(["--add_bos_token", "False", text])][-1] == text


@pytest.mark.parametrize(
    "text",
    [
        f"api_key: {SECRET}\nmax_length: 512",
        f"  hf-token: '{SECRET} with blanks'",
        f'{{"limit": 1, "password": "{SECRET}, \\" and more"}}',
        f"pretrained=./model,token={SECRET},dtype=float32",
        f"--api-key={SECRET}",
        f"OPENAI_API_KEY={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"https://user:{SECRET}@host/path?limit=1",
        f"https://host/path?limit=1&access_token={SECRET}",
        f"a path of sk-{SECRET} within",
    ],
)
def test_a_secret_is_left_out(text: str) -> None:
    shown = redact(text)
    assert SECRET not in shown
    assert LEFT_OUT in shown
    assert [
        word for word in ("limit", "512", "dtype=float32") if word in text and word not in shown
    ] == []


def test_a_value_after_the_option_of_a_secret_is_left_out() -> None:
    command = ["run", "--hf-token", SECRET, "--password", SECRET, "--token", "--x", SECRET]
    assert [*redact_command(command)] == [
        one if i in (0, 1, 3, 5, 6, 7) else LEFT_OUT for i, one in enumerate(command)
    ]
