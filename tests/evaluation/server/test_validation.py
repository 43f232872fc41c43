"""What clients may ask for, and what they try."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from another_user import another_user, open_directory
from unshard.errors import UsageError
from unshard.evaluate.jobs import Arguments, Request
from unshard.evaluate.server import admission as validation
from unshard.evaluate.server.admission import check_request
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.lmms_eval import LmmsEvalProfile
from unshard.evaluate.server.http.views import Submission
from unshard.evaluate.server.placing import place
from unshard.evaluate.server.roots import check_there, resolve_checkpoint
from unshard.evaluate.server.server_yaml import ServerConfig

CONFIG = ServerConfig(
    gpus=("0", "1"),
    profiles={
        "lm": LmEvalProfile(interpreter="python3", model_args={"dtype": "bfloat16"}),
        "few": LmmsEvalProfile(
            interpreter="python3",
            allowed_tasks=("mme", "mmlu_*"),
            allowed_model_args=("codec_*", "revision"),
        ),
        "own": CommandProfile(command=("x",)),
    },
)
GOOD = Request(
    "/runs/a/global_step_10",
    "lm",
    ("gsm8k", "mmlu_flan_n_shot_loglikelihood_stem", "wmt16-ro-en"),
    step=0,
    run="qwen 2.5 lr=1e-5 (Größe)".replace("(", "").replace(")", ""),
    weights="ema",
    arguments=Arguments(
        model_args={
            "max_pixels": 12845056,
            "attn_implementation": "sdpa",
            "use_cache": True,
            "system_prompt": "You are a helpful assistant.",
        },
        num_fewshot=0,
        batch_size="auto:4",
        limit=0.1,
        gen_kwargs="temperature=0.7,do_sample=true,top_p=0.9",
        num_gpus=2,
    ),
)


def changed(request: Request = GOOD, /, **changes: object) -> Request:
    """Return a request with other fields or arguments, which are not validated here."""
    chosen = {name: changes.pop(name) for name in Arguments.model_fields.keys() & changes.keys()}
    changes["arguments"] = request.arguments.model_copy(update=chosen)
    return replace(request, **changes)  # type: ignore[arg-type]  # its own fields


def refused(field: str, **changes: object) -> None:
    with pytest.raises(UsageError, match=field):
        check_request(changed(**changes), CONFIG)


def test_a_good_request_and_a_small_one() -> None:
    check_request(GOOD, CONFIG)
    check_request(Request("/a", "lm", ("a",)), CONFIG)
    check_request(Request("/a", "own", ("a",)), CONFIG)


@pytest.mark.parametrize(
    "task",
    [
        "bertaqa_en_mt_latxa-13b-v1.1",
        "darijammlu_arabic_language_(general)",
        "longproc_tom_tracking_0.5k",
        "a",
    ],
)
def test_names_that_evaluators_know(task: str) -> None:
    check_request(replace(GOOD, tasks=(task,)), CONFIG)


@pytest.mark.parametrize(
    "task",
    [
        "/data/evil.yaml",
        "evil.yaml",
        "evil.yml",
        "evil.YAML",
        "evil.yaml ",
        "../evil",
        "..",
        ".",
        ".hidden",
        "a/b",
        "a\\b",
        "~",
        "-x",
        "--trust_remote_code",
        "log.txt",
        "job.yaml",
        "gsm8k,--trust_remote_code",
        "a,b",
        "a b",
        " a",
        "a\n",
        "a\n--x",
        "a\0",
        "a\x1b[2J",
        "*",
        "mm?u",
        "[a]",
        "{checkpoint}",
        "$HOME",
        "gsm8\u212a",  # the kelvin sign, which casefolds to k
        "\uff0fetc",  # a wide slash
        "a\u202egnp",  # writes from right to left
        "a\u200b",  # no width
        "\u0661",  # a digit, but not of ASCII
        "a\ud800",
        "",
        "a" * 201,
        1,
        None,
    ],
)
def test_names_that_are_not_tasks(task: object) -> None:
    refused("tasks cannot be accepted", tasks=("gsm8k", task))


def test_how_many_tasks() -> None:
    refused("tasks", tasks=())
    refused("tasks", tasks=("a",) * 1001)


def test_only_allowed_tasks() -> None:
    changes: dict[str, object] = {"profile": "few", "model_args": {}}
    check_request(changed(tasks=("mme", "mmlu_stem"), **changes), CONFIG)
    refused("tasks", tasks=("mme", "mme_more"), **changes)
    refused("tasks", tasks=("MMLU_stem",), **changes)


@pytest.mark.parametrize(
    "key",
    [
        "trust_remote_code",
        "TRUST_REMOTE_CODE",
        "confirm_run_unsafe_code",
        "pretrained",
        "Pretrained",
        "model",
        "model_path",
        "checkpoint",
        "peft",
        "tokenizer",
        "hf_overrides",
        "worker_cls",
        "worker_extension_cls",
        "logits_processors",
        "custom_generate",
        "weights_only",  # False: pickles run what they like
        "subfolder",
        "use_kernels",
        "revision",
        "load_format",
        "config",
        "generation_config",
        "vision_tower",
        "chat_template",
        "output_dir",
        "penalty_alpha",  # transformers fetches code for it
        "DTYPE",
        "dtype",  # the profile's own
        "",
        "a b",
        "a-b",
        "a=b",
        "a,pretrained",
        "a\nb",
        "__class__",
        "1a",
        "prétrained",
        "\uff50retrained",  # a wide p: the same identifier to Python's parser
        "a" * 201,
        1,
    ],
)
def test_arguments_that_are_the_servers(key: object) -> None:
    refused("model_args cannot be accepted", model_args={"max_pixels": 1, key: 1})
    if key != "dtype" and isinstance(key, str) and key and not set(key) & set("=,"):
        refused("gen_kwargs cannot be accepted", gen_kwargs=f"{key}=1")


def test_a_profile_allows_more_arguments() -> None:
    more: dict[str, str | int] = {"codec_patch": 14, "revision": "main"}
    asked = changed(profile="few", tasks=("mme",), model_args=more, gen_kwargs="codec_x=1")
    check_request(asked, CONFIG)
    for key in ("weights_only", "subfolder", "Revision", "codec"):
        with pytest.raises(UsageError, match="`allowed_model_args`"):
            check_request(changed(asked, model_args={key: False}), CONFIG)
    with pytest.raises(UsageError, match="slashes"):
        check_request(changed(asked, model_args={"revision": "refs/pr/1"}), CONFIG)


@pytest.mark.parametrize(
    "value",
    [
        "..",
        ".",
        "bf16,trust_remote_code=True",
        "a=b",
        "a\nb",
        "a\r",
        "a\x00",
        "a\x1b",
        '"',
        "'",
        '{"a":1}',
        "[1",
        "\\",
        " a",
        "",
        "/etc/passwd",
        "org/kernels",  # as attn_implementation: code from the hub
        "../x",
        "a\u2028b",
        "a\u202eb",
        "a\ud800",
        "a" * 4001,
        float("nan"),
        float("inf"),
        10**400,
        None,
        [1],
        {"a": 1},
    ],
)
def test_values_that_are_more_than_a_value(value: object) -> None:
    refused("model_args: max_pixels cannot be accepted", model_args={"max_pixels": value})


@pytest.mark.parametrize("text", ["a", "a=1,a=2", "=1", "until=/a", "a='1"])
def test_generation_arguments_that_cannot_be_read(text: str) -> None:
    refused("gen_kwargs", gen_kwargs=text)


def test_how_many_arguments() -> None:
    refused("model_args", model_args={f"a{number}": 1 for number in range(65)})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("profile", ["", "other", "lm-eval"]),
        ("num_gpus", [3]),
        ("run", ["a/b", "..", "a..b", ".a", "-a", "_a", " a", "a ", "a\n", "a\u202eb", "a\ud800",
                 "x" * 201, "ä" * 101, "a\0", "~", "a:b", "<script>"]),
    ],
)  # fmt: skip
def test_fields_with_other_values(field: str, values: list[object]) -> None:
    for value in values:
        refused(f"{field} cannot be accepted", **{field: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("step", [-1, 1.5, True, "x", 2**53 + 1]),
        ("num_fewshot", [-1, 0.5, False, "x", 2**60]),
        ("num_gpus", [-1, True, 1.5]),
        ("batch_size", [0, -1, 1.5, True, "", "auto:", "auto:0", "auto:4\n", "AUTO", 2**60]),
        ("limit", [0, -1, float("nan"), float("inf"), True, "x", 10**400]),
        ("gen_kwargs", ["a" * 4001, 1]),
        ("seed", [-1, 2**32, 0.5, True, "1,2,3,4"]),
        ("model_args", [{"a": [1]}, {"a": None}, [1]]),
        ("weights", ["", "Model", "regular", None]),
    ],
)
def test_values_that_no_request_can_have(field: str, values: list[object]) -> None:
    least = {"checkpoint": "/a", "profile": "lm", "tasks": ["a"]}
    for value in values:
        with pytest.raises(ValidationError) as caught:
            Submission.model_validate({**least, field: value})
        assert {problem["loc"][0] for problem in caught.value.errors()} == {field}


def test_numbers_that_are_written_as_text_are_numbers() -> None:
    read = Arguments.model_validate({"batch_size": "8", "limit": 8, "num_fewshot": 5.0})
    assert read == Arguments(batch_size=8, limit=8, num_fewshot=5)
    assert isinstance(read.limit, int)  # as the evaluator's command line has it


def test_more_gpus_than_there_are_are_refused_with_their_number() -> None:
    with pytest.raises(UsageError, match="num_gpus cannot be accepted") as caught:
        check_request(changed(num_gpus=3), CONFIG)
    assert "0 to 2, which is how many GPUs the server has" in str(caught.value)
    with pytest.raises(UsageError, match="num_gpus cannot be accepted") as caught:
        check_request(changed(num_gpus=1), CONFIG.model_copy(update={"gpus": ()}))
    assert "0: the server has no GPUs" in str(caught.value)


def test_an_evaluator_that_the_servers_python_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "find_spec", {"lm_eval": "there"}.get)
    here = ServerConfig(gpus=("0",))
    check_request(Request("/a", "lm-eval", ("a",)), here)
    check_request(Request("/a", "command", ("size",)), here)
    with pytest.raises(UsageError, match="lmms_eval is not installed") as caught:
        check_request(Request("/a", "lmms-eval", ("a",)), here)
    assert "interpreter" in caught.value.hint


def test_a_command_takes_the_options_that_it_has_placeholders_for() -> None:
    own = CommandProfile(command=("x", "--limit={limit}", "{batch_size}"))
    config = ServerConfig(gpus=CONFIG.gpus, profiles={"own": own})
    asked = Request("/a", "own", ("a",), arguments=Arguments(limit=5, batch_size="auto"))
    check_request(asked, config)
    with pytest.raises(UsageError, match="num_fewshot cannot be accepted") as caught:
        check_request(changed(asked, num_fewshot=1), config)
    assert caught.value.expected == "nothing: the profile's command has no {num_fewshot}"


def test_a_command_without_placeholders_takes_no_arguments() -> None:
    with pytest.raises(UsageError, match=r"5 problems") as caught:
        check_request(replace(GOOD, profile="own"), CONFIG)
    for field in ("model_args", "num_fewshot", "batch_size", "limit", "gen_kwargs"):
        assert f"- {field} cannot be accepted" in str(caught.value)


@given(st.text(), st.text(), st.text())
def test_any_text_is_accepted_or_refused(task: str, key: str, value: str) -> None:
    """Nothing else comes out, and what is accepted has no separator."""
    try:
        chosen = Arguments(model_args={key: value}, gen_kwargs=value)
        request = Request("/a", "lm", (task,), run=value, arguments=chosen)
        check_request(request, CONFIG)
    except UsageError:
        return
    assert not set(task + key + value) & set(",=\n/'\"")


def test_a_checkpoint_under_a_root_is_resolved(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    (root / "a" / "step").mkdir(parents=True)
    (root / "latest").symlink_to("a")
    (tmp_path / "link").symlink_to(root)
    expected = root / "a" / "step"
    for path in (expected, root / "latest" / "step", root / "b" / ".." / "a" / "step"):
        assert resolve_checkpoint(str(path), [root]) == expected
        assert resolve_checkpoint(str(path), [tmp_path / "link"]) == expected
    assert resolve_checkpoint(str(tmp_path / "link" / "a" / "step"), [root]) == expected
    assert resolve_checkpoint(str(root / "gone"), [root]) == root / "gone"


def test_an_average_that_is_not_written_is_refused(tmp_path: Path) -> None:
    """Nothing would keep its steps until it is evaluated."""
    with pytest.raises(UsageError, match="cannot be accepted") as error:
        resolve_checkpoint(f"{tmp_path}/run@last=5", [tmp_path])
    assert "unshard average" in error.value.hint
    (tmp_path / "run@last=5").mkdir()
    assert resolve_checkpoint(f"{tmp_path}/run@last=5", [tmp_path]) == tmp_path / "run@last=5"


def test_a_checkpoint_elsewhere_is_refused(tmp_path: Path) -> None:
    root, other = tmp_path / "runs", tmp_path / "runs-of-others"
    root.mkdir()
    (other / "a").mkdir(parents=True)
    (root / "out").symlink_to(other)
    (root / "loop").symlink_to("loop")
    outside = ["out/a", "../runs-of-others/a", "../../etc/passwd", "out/../runs-of-others", ".."]
    for path in [*(f"{root}/{name}" for name in outside), str(other), "/", "/etc"]:
        with pytest.raises(UsageError, match="not under a directory that this server may read"):
            resolve_checkpoint(path, [root])
    with pytest.raises(UsageError, match="none is configured"):
        resolve_checkpoint(str(root), [])


@pytest.mark.parametrize(
    "path", ["", "a", "~/a", "./a", "/a\0b", "/a\nb", "/a\u202eb", "/a" * 2049]
)
def test_what_is_not_an_absolute_path(tmp_path: Path, path: str) -> None:
    with pytest.raises(UsageError, match="checkpoint cannot be accepted"):
        resolve_checkpoint(path, [tmp_path, Path("/")])


def test_names_that_are_too_long_and_links_that_go_round(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name in ("loop", "loop/a", "x" * 300):
        try:
            resolved = resolve_checkpoint(str(tmp_path / name), [tmp_path])
        except UsageError:
            continue
        assert resolved.is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("path", "is_step"),
    [
        ("run", False),
        ("run/global_step_10", False),
        ("run/checkpoint-9", False),
        ("run/global_step_9/actor", False),
        ("run/pins/model", True),
        ("run/weights", True),
    ],
)
def test_a_step_that_its_run_may_have_removed_is_accepted(
    tmp_path: Path, path: str, *, is_step: bool
) -> None:
    (tmp_path / "run" / "global_step_10").mkdir(parents=True)
    (tmp_path / "run" / "pins").mkdir()
    check_there(tmp_path / path, is_step=is_step)


@pytest.mark.parametrize(
    ("path", "is_step"),
    [
        ("typo", False),
        ("run/global_stp_10", False),
        ("typo/global_step_10", False),
        ("typo/global_step_10/actor", True),
        ("run/file/global_step_10", False),
        ("typo/weights", True),
    ],
)
def test_a_path_without_a_checkpoint_and_without_a_run_is_refused(
    tmp_path: Path, path: str, *, is_step: bool
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    with pytest.raises(UsageError, match="neither does the directory of its run") as caught:
        check_there(tmp_path / path, is_step=is_step)
    assert caught.value.found == str(tmp_path / path)
    assert "check the path" in caught.value.hint


def test_what_the_server_may_not_read_is_named_with_what_to_do() -> None:
    with open_directory() as root:
        step = root / "run" / "checkpoint-10"
        step.mkdir(parents=True)
        step.chmod(0o000)
        with another_user(), pytest.raises(UsageError, match="not allowed to read") as caught:
            place(Request(str(step), "lm", ("a",)))
        assert caught.value.found == f"{step}: Permission denied"
        step.parent.chmod(0o000)
        with another_user(), pytest.raises(UsageError, match="not allowed to read"):
            resolve_checkpoint(str(step), [root])
        with another_user(), pytest.raises(UsageError, match="not allowed to read") as caught:
            check_there(step, is_step=True)
        assert "the right to read and enter" in caught.value.hint
        step.parent.chmod(0o700)


def test_a_checkpoint_that_is_gone_has_the_step_that_its_name_states(tmp_path: Path) -> None:
    """As it had while it was there: the same submission is the same job."""
    run = tmp_path / "run"
    for name in ("checkpoint-5", "checkpoint-5/actor"):
        placed = place(Request(str(run / name), "lm", ("a",)))
        assert (placed.request.step, placed.run, placed.folder) == (5, run, run)
    given = place(Request(str(run / "checkpoint-5"), "lm", ("a",), step=7))
    assert given.request.step == 7
    other = place(Request(str(run / "weights"), "lm", ("a",)))
    assert (other.request.step, other.run) == (None, run / "weights")
    named = place(Request(str(run / "weights"), "lm", ("a",), run="given"))
    assert named.run is None
