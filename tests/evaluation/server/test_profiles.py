"""The server's configuration: what it says, what holds without it, and what is refused."""

import sys
from pathlib import Path

import pytest
import yaml

from unshard.errors import UsageError
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.lmms_eval import LmmsEvalProfile
from unshard.evaluate.server.serve import ServeOptions, configure
from unshard.evaluate.server.server_yaml import ServerConfig, read_server_yaml

WHOLE = """
roots: [runs, /data/runs]
gpus: [0, 2]
host: 0.0.0.0
port: 9000
token_file: secret/token
work_directory: work
pin_quota: {count: 3, bytes: 1000000}
profiles:
  math:
    kind: lm-eval
    environment: {HF_HOME: /data/hf, OMP_NUM_THREADS: 4}
    include_paths: [tasks]
    model: vllm
    model_args: {dtype: bfloat16, gpu_memory_utilization: 0.8, enforce_eager: true}
    allowed_tasks: [gsm8k, "mmlu*"]
    timeout: 3600
    keep: best
    best_metric: -gsm8k/loss
    retries: 0
    gpus: 2
    launcher: none
    config: model
  images:
    kind: lmms-eval
    checkpoint_key: model
    model: qwen2_5_vl
  own:
    kind: command
    command: [evaluate, --model, "{checkpoint}", "--out={output}"]
    results: out/numbers.json
    results_bytes: 1000
"""


def read(tmp_path: Path, text: str) -> ServerConfig:
    path = tmp_path / "server.yaml"
    path.write_text(text, encoding="utf-8")
    return read_server_yaml(path)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("{}", (8, None)),
        ("{count: null}", (None, None)),
        ("{count: null, bytes: 5}", (None, 5)),
        ("{count: 0}", (0, None)),
        ("{bytes: null}", (8, None)),
    ],
)
def test_a_quota_of_null_is_not_a_limit(
    tmp_path: Path, quota: str, expected: tuple[int | None, int | None]
) -> None:
    config = read(tmp_path, f"pin_quota: {quota}")
    assert (config.pin_quota.count, config.pin_quota.bytes) == expected


@pytest.mark.parametrize(
    ("said", "expected"), [("", 30), ("keep_days: 7", 7), ("keep_days: null", None)]
)
def test_what_ended_jobs_leave_is_kept_for_thirty_days_or_as_configured(
    tmp_path: Path, said: str, expected: int | None
) -> None:
    assert read(tmp_path, said).keep_days == expected


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    config = read(tmp_path, WHOLE)
    assert config.roots == (tmp_path / "runs", Path("/data/runs"))
    assert config.gpus == ("0", "2")
    assert (config.host, config.port) == ("0.0.0.0", 9000)  # noqa: S104 - read, not bound
    assert config.token_file == tmp_path / "secret" / "token"
    assert config.work_directory == tmp_path / "work"
    assert (config.pin_quota.count, config.pin_quota.bytes) == (3, 1_000_000)
    assert config.profiles["math"] == LmEvalProfile(
        environment={"HF_HOME": "/data/hf", "OMP_NUM_THREADS": "4"},
        include_paths=(tmp_path / "tasks",),
        model="vllm",
        model_args={"dtype": "bfloat16", "gpu_memory_utilization": 0.8, "enforce_eager": True},
        allowed_tasks=("gsm8k", "mmlu*"),
        timeout=3600.0,
        keep="best",
        best_metric="-gsm8k/loss",
        retries=0,
        gpus=2,
        launcher="none",
        config=tmp_path / "model",
    )
    images = LmmsEvalProfile(model="qwen2_5_vl", checkpoint_key="model", gpus=1)
    assert config.profiles["images"] == images
    own = ("evaluate", "--model", "{checkpoint}", "--out={output}")
    assert config.profiles["own"] == CommandProfile(
        command=own, results="out/numbers.json", gpus=1, results_bytes=1000
    )


@pytest.mark.parametrize("text", ["", "{}", "profiles:"])
def test_an_empty_file_says_what_no_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    config = read(tmp_path, text)
    assert config == ServerConfig()
    assert config.gpus == ("1", "3")
    assert config.roots == ()
    assert config.host == "127.0.0.1"
    assert config.profiles["lm-eval"] == LmEvalProfile(gpus=1)
    assert LmEvalProfile().interpreter == sys.executable
    assert LmmsEvalProfile().model == "huggingface"
    assert {name: str(one.kind) for name, one in config.profiles.items()} == {
        name: name for name in ("lm-eval", "lmms-eval", "command")
    }


PROFILE = "gpus: 1\nprofiles: {a: {kind: lm-eval, %s}}"
COMMAND = "profiles: {a: {kind: command, %s}}"
LMMS = "profiles: {a: {kind: lmms-eval, %s}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rots: [a]",
            r"server\.yaml has the unknown key 'rots'\n  expected: cpu_slots, gpus, host, ",
        ),
        ("executor: embedded", r"'executor' no longer exists[^$]*profile `launch`"),
        ("executor: ray\nray_address: auto", r"'executor' no longer exists[^$]*\[srun, "),
        ("ray_address: 10.0.0.1:6379\nrots: [a]", "'ray_address' no longer[^$]*`slots: N`"),
        ("[1]", "server.yaml cannot be read\n  expected: a mapping"),
        ("a: [", "cannot be read"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
        ("port: 70000", "port cannot be read\n  expected: a whole number, 0 to 65535"),
        ("port: true", "port cannot be read"),
        ("port: '80'", r"port cannot be read\n.*\n  found:    '80' \(str\)"),
        ("host: ''", "host cannot be read"),
        ("roots: [1]", "roots cannot be read"),
        ("gpus: [a]", "gpus cannot be read"),
        ("gpus: [-1]", "gpus cannot be read"),
        ("gpus: [0, GPU-]", "gpus cannot be read"),
        ("gpus: [[0]]", "gpus cannot be read"),
        ("gpus: GPU-8f3a", "gpus cannot be read"),
        ("gpus: -1", "gpus cannot be read"),
        (PROFILE % "keep: best", "best_metric is missing\n  expected: TASK/METRIC"),
        (PROFILE % "keep: some", "keep cannot be read\n  expected: none, best, all"),
        ("keep_days: 0", "keep_days cannot be read\n  expected: a whole number, at least 1"),
        ("keep_days: soon", "keep_days cannot be read"),
        ("pin_quota: 8", "pin_quota cannot be read"),
        ("pin_quota: {size: 8}", "pin_quota has the unknown key 'size'"),
        (
            "pin_quota: {owner: me}",
            "pin_quota has the unknown key 'owner'\n  expected: bytes, count",
        ),
        ("pin_quota: {count: -1}", "pin_quota: count cannot be read"),
        ("profiles: [a]", "profiles cannot be read"),
        ("profiles: {'a/b': {kind: lm-eval}}", "cannot be a name"),
        ("profiles: {a: {}}", "profiles.a: kind is missing"),
        ("profiles: {a: {kind: other}}", "expected: lm-eval, lmms-eval, command"),
        ("profiles: {a: lm-eval}", "profiles.a cannot be read"),
        ("profiles: {a: 2026-01-01}", "profiles.a cannot be read\n  expected: a mapping"),
        ("profiles: {a: {kind: [1]}}", r"profiles.a: kind cannot be read\n.*\n  found:    \[1\]"),
        (
            PROFILE % "modle: x",
            r"\(kind lm-eval\) has the unknown key 'modle'[^$]*mean 'model'",
        ),
        (PROFILE % "command: [x]", r"profiles.a \(kind lm-eval\) has the unknown key 'command'"),
        (PROFILE % "timeout: 0", "timeout cannot be read\n  expected: seconds"),
        (PROFILE % "timeout: .inf", "timeout cannot be read"),
        (PROFILE % "timeout: 1h", "timeout cannot be read"),
        (PROFILE % "retries: -1", "retries cannot be read"),
        (
            PROFILE % "gpus: 2",
            "gpus cannot be read\n  expected: 0 to 1, which is how many GPUs the server has",
        ),
        (
            "gpus: 0\nprofiles: {a: {kind: lm-eval, gpus: 1}}",
            "gpus cannot be read\n  expected: 0: the server has no GPUs",
        ),
        (
            "gpus: [a]\nprofiles: {a: {kind: lm-eval, gpus: 1}}",
            "yaml: gpus cannot be read\n  expected: how many",
        ),
        (PROFILE % "launcher: torchrun", "expected: accelerate, none"),
        (PROFILE % "interpreter: /nowhere/python", "interpreter cannot be read"),
        (PROFILE % "interpreter: no-such-python", "interpreter cannot be read"),
        (PROFILE % "include_paths: [nowhere]", "include_paths cannot be read"),
        (PROFILE % "config: nowhere", "config cannot be read\n  expected: a config.json, or a dir"),
        (PROFILE % "config: .", "config cannot be read"),
        (PROFILE % "config: server.yaml", "config cannot be read"),
        (PROFILE % "environment: {A: true}", "environment cannot be read"),
        (PROFILE % "environment: {'A=B': c}", "environment cannot be read"),
        (PROFILE % "environment: [A]", "environment cannot be read"),
        (PROFILE % "model_args: {a: [1]}", "model_args cannot be read"),
        (LMMS % "model_args: {a: 'b,c'}", "model_args: 'a' cannot be handed over"),
        (LMMS % "include_paths: [., .]", r"expected: at most 1.*\n  found:    \['\.', '\.'\]"),
        (PROFILE % "on: x", r"\(kind lm-eval\) has the unknown key 'True'"),
        (COMMAND % "timeout: 1", r"command is missing\n  expected: a list of arguments"),
        (COMMAND % "command: ['{chekpoint}']", "command cannot be read"),
        (COMMAND % "command: []", "command cannot be read"),
        (COMMAND % "command: [./nothing]", r"command cannot be read\n  expected: a program"),
        (
            COMMAND % "command: [./server.yaml]",
            r"command cannot be read\n.*a program",
        ),
        (COMMAND % "command: [a], results: ../a", "results cannot be read"),
        (COMMAND % "command: [a], results: /a", "results cannot be read"),
        (COMMAND % "command: [a], model: hf", "unknown key 'model'"),
        (PROFILE % "resume: true", r"\(kind lm-eval\): 'resume' no longer.*\n.*from its start"),
        (PROFILE % "resume: false", r"\(kind lm-eval\): 'resume' no longer exists"),
        (LMMS % "resume: true", r"\(kind lmms-eval\): 'resume' no longer exists"),
        ("resume: true", "has the unknown key 'resume'"),
    ],
)
def test_what_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read(tmp_path, text)
    assert "server.yaml" in str(caught.value)


def test_everything_that_is_wrong_is_named_in_one_error(tmp_path: Path) -> None:
    text = "rots: [a]\nport: 70000\nprofiles: {a: {kind: lm-eval, modle: x, retries: -1}, b: {}, "
    text += "c: {kind: command, comand: [x]}}"
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    named = ("'rots'", "port", "'modle'", "retries", "profiles.b: kind", "'comand'", "command is")
    for problem in named:
        assert problem in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.yaml cannot be read"):
        read_server_yaml(tmp_path / "nothing.yaml")


def test_a_program_that_is_a_path_starts_at_the_files_directory(tmp_path: Path) -> None:
    (tmp_path / "run.sh").touch(mode=0o755)
    config = read(tmp_path, COMMAND % "command: [./run.sh, ./run.sh, 'awk {{print}}']")
    own = (str(tmp_path / "run.sh"), "./run.sh", "awk {{print}}")
    assert config.profiles["a"] == CommandProfile(command=own)


@pytest.mark.parametrize("gpus", [None, 2, [4, 5, 6]])
def test_given_gpus_are_known_before_the_profiles_are_read(tmp_path: Path, gpus: object) -> None:
    text = yaml.safe_dump(
        {"gpus": gpus, "profiles": {"a": {"kind": "lm-eval", "gpus": 2}, "b": {"kind": "lm-eval"}}}
    )
    path = tmp_path / "server.yaml"
    path.write_text(text)
    config = configure(ServeOptions(config=path, gpus="0,1,2,3"))
    assert config.gpus == ("0", "1", "2", "3")
    assert [one.gpus for one in config.profiles.values()] == [2, 1]
    default = configure(ServeOptions(gpus="3,"))
    assert default.gpus == ("3",)
    assert [one.gpus for one in default.profiles.values()] == [1, 1, 0]
    with pytest.raises(UsageError, match=r"profiles\.a .*gpus cannot be read"):
        configure(ServeOptions(config=path, gpus="1"))


def test_an_interpreter_is_not_replaced_by_what_it_links_to(tmp_path: Path) -> None:
    """The link is what makes it the interpreter of its environment."""
    (tmp_path / "python").symlink_to(sys.executable)
    text = yaml.safe_dump({"profiles": {"a": {"kind": "lm-eval", "interpreter": "./python"}}})
    own = LmEvalProfile(interpreter=str(tmp_path / "python"))
    assert read(tmp_path, text).profiles["a"] == own
