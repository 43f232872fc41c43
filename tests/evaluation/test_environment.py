import pytest

from unshard.evaluate.environment import evaluator_environment, scrubbed

LAUNCHER = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GROUP_RANK ROLE_NAME"
    " TORCHELASTIC_RUN_ID SLURM_JOB_ID PMIX_ID PMI_RANK OMPI_COMM NCCL_ASYNC_ERROR_HANDLING"
)
SECRETS = "HF_TOKEN AWS_SECRET_X password OPENAI_API_KEY Google_Credentials"


def test_launchers_and_secrets_do_not_reach_an_evaluator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*LAUNCHER.split(), *SECRETS.split()]:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HF_HOME", "/cache")
    found = evaluator_environment({"HF_TOKEN": "own"}, devices="0,1", directory="/attempt")
    assert not {*LAUNCHER.split(), *SECRETS.split()} & (found.keys() - {"HF_TOKEN"})
    assert [found[name] for name in ("HF_TOKEN", "HF_HOME")] == ["own", "/cache"]
    assert (found["CUDA_VISIBLE_DEVICES"], found["UNSHARD_ATTEMPT"]) == ("0,1", "/attempt")


def test_a_profile_cannot_take_other_gpus() -> None:
    own = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    found = evaluator_environment(own, devices="", directory="/attempt")
    assert found["CUDA_VISIBLE_DEVICES"] == ""


def test_names_that_only_look_alike_stay() -> None:
    alike = {"PRANKS": "1", "NCCL_DEBUG": "INFO", "MY_RANK": "1"}
    assert scrubbed(alike) == alike
