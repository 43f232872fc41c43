"""lmms-engine's YAML is read as it is documented, with what is misplaced in it."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from evaluation.lmms_yaml import DOCUMENTED
from unshard.errors import UsageError
from unshard.evaluate.jobs import Arguments
from unshard.evaluate.pins.pin import Quota
from unshard.evaluate.trainer.config import EvalConfig

LMMS = f"{DOCUMENTED}      model: placeholder\n      attn_implementation: flash_attention_2\n"
LEAST: dict[str, object] = {"server_url": "http://s", "profile": "p", "tasks": ["t"]}


def test_the_documented_form_is_read_and_misplaced_keys_are_lifted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(LMMS)
    config = EvalConfig.from_yaml(file)
    assert config == EvalConfig.from_yaml(LMMS) == EvalConfig.from_yaml(str(file))
    assert (config.server_url, config.profile) == ("http://192.168.8.249:8000", "qwen_vl")
    assert config.tasks == ("mmmu_val", "mme")
    assert (config.num_gpus, config.batch_size) == (8, 256)
    assert config.model_args == {"attn_implementation": "flash_attention_2"}
    assert (config.eval_steps, config.save_steps, config.poll_interval) == (500, 500, 20.0)
    assert "num_gpus belongs in eval_config itself, not in model_args" in caplog.text
    assert "batch_size belongs in eval_config itself, not in model_args" in caplog.text


def test_a_key_in_the_right_place_wins_over_one_that_is_lifted() -> None:
    given = {**LEAST, "batch_size": "auto", "model_args": {"batch_size": 1}}
    assert EvalConfig.from_dict(given).batch_size == "auto"


def test_our_own_keys_are_read() -> None:
    config = EvalConfig.from_yaml(
        "server_url: http://s\nprofile: small\nmodel: qwen_vl\ntasks: mmlu, arc\n"
        "weights: [model, ema]\nrun: big\npath_map: {/mnt/a: /data/a}\ntoken_file: /t\n"
        "quota: {count: 3, bytes: null}\nlimit: 0.5\nflush_timeout: 5\n"
    )
    assert (config.profile, config.tasks, config.run) == ("small", ("mmlu", "arc"), "big")
    assert (config.weights, config.token_file) == (("model", "ema"), Path("/t"))
    assert (config.quota, config.limit, config.flush_timeout) == (Quota(3, None), 0.5, 5)
    assert EvalConfig.from_dict(LEAST).quota == Quota()


def test_keys_one_level_too_high_are_lifted(caplog: pytest.LogCaptureFixture) -> None:
    eval_config = {"server_url": "http://s", "model": "m"}
    trainer = {"tasks": ["t"], "eval_steps": 5, "learning_rate": 1, "eval_config": eval_config}
    assert EvalConfig.from_dict({"trainer_args": trainer}).tasks == ("t",)
    assert "tasks belongs in eval_config itself, not in trainer_args" in caplog.text
    top = {"trainer_args": {"eval_steps": 7}, "eval_config": {**eval_config, "tasks": ["t"]}}
    assert EvalConfig.from_dict(top).eval_steps == 7
    assert "eval_config belongs in trainer_args" in caplog.text


def test_other_steps_are_a_warning_and_the_first_checkpoint_after_one_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EvalConfig.from_dict({**LEAST, "eval_steps": 300, "save_steps": 200})
    assert "eval_steps 300 differs from save_steps 200" in caplog.text
    previous: int | None = None
    due = []
    for step in range(200, 1401, 200):
        if config.is_due(step, previous):
            due.append(step)
        previous = step
    assert due == [400, 600, 1000, 1200]


def test_other_strategies_mean_every_checkpoint_or_none() -> None:
    assert not EvalConfig.from_yaml(
        "server_url: http://h:1\nmodel: m\ntasks: t\neval_strategy: no"
    ).is_due(5, None)
    assert EvalConfig.from_dict({**LEAST, "eval_strategy": "epoch"}).is_due(5, 4)
    assert EvalConfig.from_dict(LEAST).is_due(5, 4)


def test_paths_are_translated_by_the_longest_beginning() -> None:
    config = EvalConfig.from_dict(
        {**LEAST, "path_map": {"/mnt": "/a", "/mnt/runs": "/b", "/m": "/c"}}
    )
    assert config.served("/mnt/runs/x/checkpoint-1") == "/b/x/checkpoint-1"
    assert config.served("/mnt/other") == "/a/other"
    assert config.served("/mnt-more/x") == "/mnt-more/x"


def test_numbers_of_steps_may_be_written_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    read = EvalConfig.from_dict({**LEAST, "eval_steps": 500.0, "poll_interval": 1})
    assert (read.eval_steps, read.poll_interval) == (500, 1)
    assert EvalConfig.from_dict({**LEAST, "eval_steps": 0.1}).eval_steps is None
    assert "eval_steps 0.1: a ratio" in caplog.text


def test_a_files_name_may_hold_a_colon(tmp_path: Path) -> None:
    (tmp_path / "a:b.yaml").write_text(yaml.safe_dump(LEAST))
    assert EvalConfig.of(str(tmp_path / "a:b.yaml")) == EvalConfig.from_dict(LEAST)


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    config = EvalConfig.from_dict({**LEAST, "token_file": str(tmp_path / "token")})
    assert config.token() == "secret"
    assert EvalConfig.from_dict(LEAST).token() is None
    with pytest.raises(UsageError, match="cannot be read"):
        EvalConfig.from_dict({**LEAST, "token_file": str(tmp_path / "none")}).token()


def test_unknown_keys_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    EvalConfig.from_dict({**LEAST, "pol_interval": 3})
    assert "pol_interval" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"server_url": None}, "incomplete"),
        ({"server_url": "http://host:80x"}, "server_url"),
        ({"server_url": "host:80"}, "server_url"),
        ({"tasks": []}, "incomplete"),
        ({"tasks": [1]}, "tasks"),
        ({"eval_steps": -1}, "eval_steps"),
        ({"eval_steps": True}, "eval_steps"),
        ({"flush_timeout": float("inf")}, "flush_timeout"),
        ({"model_args": [1]}, "model_args"),
        ({"model_args": {"a": float("nan")}}, "model_args.a"),
        ({"model_args": {"a": [1]}}, "model_args.a"),
        ({"weights": ["best"]}, "weights"),
        ({"weights": []}, "weights"),
        ({"eval_steps": 1.5}, "eval_steps"),
        ({"path_map": {"here": "/there"}}, "path_map"),
        ({"quota": {"size": 1}}, "quota"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EvalConfig.from_dict({**LEAST, **wrong})


@pytest.mark.parametrize("value", [0, 0.0, -1, float("nan"), float("inf"), "soon", True, [1]])
def test_a_poll_interval_is_above_0(value: float) -> None:
    """However the configuration is made: 0 would ask the server without a pause."""
    with pytest.raises(UsageError, match="poll_interval of the evaluation") as caught:
        EvalConfig.from_dict({**LEAST, "poll_interval": value})
    assert "above 0" in caught.value.expected
    with pytest.raises(UsageError, match="poll_interval of the evaluation"):
        EvalConfig("http://127.0.0.1:9", "p", ("t",), poll_interval=value)
    with pytest.raises(UsageError, match="poll_interval of the evaluation"):
        replace(EvalConfig.from_dict(LEAST), poll_interval=value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"limit": -1},
        {"seed": 2**32},
        {"model_args": {"a": None}},
        {"tasks": [1]},
        {"weights": ("best",)},
        {"quota": {"owner": "me"}},
    ],
)
def test_wrong_values_in_python_are_refused_when_they_are_given(
    wrong: dict[str, object],
) -> None:
    config = EvalConfig("http://127.0.0.1:9", "p", ("t",))
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}.* of the evaluation"):
        replace(config, **wrong)  # type: ignore[arg-type]


def test_what_is_missing_in_python_is_named_without_what_is_there() -> None:
    with pytest.raises(UsageError, match="profile of the evaluation") as caught:
        EvalConfig("http://any:secret@127.0.0.1:9")  # type: ignore[call-arg]  # on purpose
    assert "tasks of the evaluation" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_arguments_are_those_of_a_request() -> None:
    """Same names, same types: the two classes are not written apart."""
    own, theirs = TypeAdapter(EvalConfig).json_schema(), Arguments.model_json_schema()
    names = theirs["properties"].keys() - {"model_args", "metadata"}
    assert {name: own["properties"][name] for name in names} == {
        name: theirs["properties"][name] for name in names
    }
    chosen = {"num_fewshot": 2, "seed": 0, "model_args": {"a": 1}}
    config = EvalConfig.from_dict({**LEAST, **chosen})
    assert config.arguments == Arguments.model_validate(chosen)


@pytest.mark.parametrize("text", ["a: [", "- list\n- of: things\n", "/nowhere.yaml"])
def test_what_is_not_a_configuration_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        EvalConfig.from_yaml(text)
