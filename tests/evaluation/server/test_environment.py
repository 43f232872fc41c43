import sys

import pytest

from unshard.evaluate.server.processes.launching import evaluator_environment, scrub

LAUNCHER = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GROUP_RANK ROLE_NAME"
    " TORCHELASTIC_RUN_ID SLURM_JOB_ID PMIX_ID PMI_RANK OMPI_COMM NCCL_ASYNC_ERROR_HANDLING"
    " ACCELERATE_USE_FSDP"
)
SECRETS = "HF_TOKEN AWS_SECRET_X password OPENAI_API_KEY Google_Credentials"


def environment(
    own: dict[str, str], *, program: str = sys.executable, gpus: tuple[str, ...] = ()
) -> dict[str, str]:
    return evaluator_environment(own, program=program, gpus=gpus, directory="/attempt")


def test_only_the_servers_own_interpreter_gets_the_path_of_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = {"PYTHONPATH": "/ours", "PYTHONHOME": "/home"}
    for name, value in paths.items():
        monkeypatch.setenv(name, value)
    assert paths.items() <= environment({}).items()
    assert not paths.keys() & environment({}, program="/other/bin/python").keys()
    assert environment({"PYTHONPATH": "/own"}, program="/other")["PYTHONPATH"] == "/own"


def test_launchers_and_secrets_do_not_reach_an_evaluator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*LAUNCHER.split(), *SECRETS.split()]:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HF_HOME", "/cache")
    found = environment({"HF_TOKEN": "own"}, gpus=("0", "MIG-8f3a"))
    assert not {*LAUNCHER.split(), *SECRETS.split()} & (found.keys() - {"HF_TOKEN"})
    assert [found[name] for name in ("HF_TOKEN", "HF_HOME")] == ["own", "/cache"]
    assert (found["CUDA_VISIBLE_DEVICES"], found["UNSHARD_ATTEMPT"]) == ("0,MIG-8f3a", "/attempt")


def test_the_servers_url_with_its_password_does_not_reach_an_evaluator() -> None:
    assert scrub({"UNSHARD_EVAL_SERVER": "http://any:secret@host", "A": "b"}) == {"A": "b"}


def test_a_profile_cannot_take_other_gpus() -> None:
    own = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    found = environment(own)
    assert found["CUDA_VISIBLE_DEVICES"] == ""


def test_names_that_only_look_alike_stay() -> None:
    alike = {"PRANKS": "1", "NCCL_DEBUG": "INFO", "MY_RANK": "1"}
    assert scrub(alike) == alike
