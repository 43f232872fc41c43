"""What a profile chooses of its evaluator, what a submission may choose, and the revision."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from evaluation.local_tasks import lm_eval_tasks, work_at
from evaluation.running import script_profile
from unshard.errors import UsageError
from unshard.evaluate.jobs import Arguments, Request, Settings
from unshard.evaluate.server.admission import list_unfitting
from unshard.evaluate.server.evaluators import revision
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.lmms_eval import LmmsEvalProfile
from unshard.evaluate.server.evaluators.work import OwnArguments, Profile
from unshard.evaluate.server.server_yaml import read_server_yaml

OWN = OwnArguments(
    apply_chat_template=True,
    system_instruction="Be brief.",
    limit=20,
    model_args={"dtype": "float32", "max_length": 10},
    metadata={"max_seq_lengths": [4096]},
    confirm_run_unsafe_code=True,
)


def read(tmp_path: Path, profile: object) -> Profile:
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump({"gpus": 0, "profiles": {"p": profile}}))
    return read_server_yaml(path).profiles["p"]


def chosen_line(profile: Profile, tmp_path: Path, **chosen: object) -> list[str]:
    asked = Arguments.model_validate(chosen)
    work = work_at(
        tmp_path, tmp_path / "model", Request("/a", "p", ("t",), arguments=asked), profile
    )
    return profile.command_line(work)


def test_keys_of_requests_stay_and_new_arguments_are_other_evaluations() -> None:
    """The first two keys are those that earlier versions had."""
    least = Request("/a", "lm", ("b", "a"), step=3, run="r")
    assert least.key == "e5f9f52b138812dfeb997c6b3db42e58"
    some = {"limit": 5, "seed": 7, "model_args": {"x": 1}, "num_gpus": 2}
    assert changed(least, some).key == "e169608833a4d1ff8dc100d6d3a53f53"
    others: list[dict[str, object]] = [
        {"apply_chat_template": True}, {"apply_chat_template": False}, {"apply_chat_template": "a"},
        {"system_instruction": "a"}, {"fewshot_as_multiturn": True}, {"max_batch_size": 4},
        {"metadata": {"a": 1}}, {"metadata": {"a": [1]}},
    ]  # fmt: skip
    assert len({changed(least, other).key for other in others} | {least.key}) == 9
    one, two = {"metadata": {"a": 1, "b": 2}}, {"metadata": {"b": 2, "a": 1}}
    assert changed(least, one).key == changed(least, two).key


def changed(request: Request, chosen: object) -> Request:
    return Request(request.checkpoint, request.profile, request.tasks, request.step, request.run,
                   arguments=Arguments.model_validate(chosen))  # fmt: skip


def test_a_submission_chooses_over_its_profile() -> None:
    profile = LmEvalProfile(arguments=OWN)
    assert profile.chosen(Arguments()).given() == {
        "apply_chat_template": True,
        "system_instruction": "Be brief.",
        "limit": 20,
        "model_args": {"dtype": "float32", "max_length": 10},
        "metadata": {"max_seq_lengths": [4096]},
    }
    asked = Arguments(
        apply_chat_template=False, num_fewshot=0, limit=5, num_gpus=2, model_args={"max_length": 5}
    )
    given = profile.chosen(asked).given()
    assert given["model_args"] == {"dtype": "float32", "max_length": 5}
    assert (given["apply_chat_template"], given["num_fewshot"]) == (False, 0)
    assert (given["limit"], given["num_gpus"]) == (5, 2)


def test_without_its_template_a_profiles_turns_mean_nothing() -> None:
    own = OwnArguments(apply_chat_template=True, fewshot_as_multiturn=True)
    profile = LmEvalProfile(arguments=own)
    without = Arguments(apply_chat_template=False)
    assert profile.chosen(without).given() == {"apply_chat_template": False}
    assert list(profile.list_unfitting(without)) == []
    both = Arguments(apply_chat_template=False, fewshot_as_multiturn=True)
    assert len(list(profile.list_unfitting(both))) == 1


def test_arguments_reach_lm_eval_and_what_allows_code_only_from_the_profile(tmp_path: Path) -> None:
    profile = LmEvalProfile(arguments=OWN, model_args={"attn_implementation": "eager"})
    chosen_line(profile, tmp_path, fewshot_as_multiturn=False, max_batch_size=8)
    written = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert (
        written.items()
        >= {
            "apply_chat_template": True,
            "system_instruction": "Be brief.",
            "fewshot_as_multiturn": False,
            "max_batch_size": 8,
            "limit": 20,
            "metadata": {"max_seq_lengths": [4096]},
            "confirm_run_unsafe_code": True,
        }.items()
    )
    assert written["model_args"] == {
        "dtype": "float32",
        "max_length": 10,
        "attn_implementation": "eager",
        "pretrained": str(tmp_path / "model"),
    }
    with pytest.raises(ValueError, match="confirm_run_unsafe_code"):
        Arguments.model_validate({"confirm_run_unsafe_code": True}, extra="forbid")


def test_arguments_reach_lmms_eval(tmp_path: Path) -> None:
    own = OwnArguments(system_instruction="--tasks x", max_batch_size=4)
    line = chosen_line(LmmsEvalProfile(arguments=own), tmp_path, apply_chat_template=False)
    assert {"--system_instruction=--tasks x", "--max_batch_size=4"} <= {*line}
    assert not [part for part in line if "chat_template" in part]


def test_arguments_reach_a_command(tmp_path: Path) -> None:
    profile = CommandProfile(
        command=("x", "{limit}", "{apply_chat_template}"), arguments=OwnArguments(limit=7)
    )
    assert chosen_line(profile, tmp_path / "1") == ["x", "7", ""]
    assert chosen_line(profile, tmp_path / "2", limit=3, apply_chat_template=True) == [
        "x",
        "3",
        "true",
    ]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("lm-eval", {"num_gpus": 1}, r"arguments: num_gpus cannot be read"),
        ("lm-eval", {"apply_chat_templates": 1}, r"did you mean 'apply_chat_template'"),
        ("lm-eval", {"limit": 0}, r"arguments: limit cannot be read"),
        ("lm-eval", {"confirm_run_unsafe_code": 1}, r"confirm_run_unsafe_code cannot be read"),
        (
            "lm-eval",
            {"fewshot_as_multiturn": True},
            r"(?s)profiles.p.*has no effect without a chat",
        ),
        ("lm-eval", {"model_args": {"pretrained": "x"}}, r"sets again: pretrained"),
        ("lm-eval", {"model_args": {"a": "b,c"}}, r"cannot be handed over"),
        ("lm-eval", {"gen_kwargs": "a"}, r"gen_kwargs cannot be read"),
        ("lmms-eval", {"confirm_run_unsafe_code": True}, r"(?s)profiles.p.*kind lm-eval"),
        ("lmms-eval", {"apply_chat_template": True}, r"(?s)profiles.p.*apply the template"),
        ("lmms-eval", {"metadata": {"a": 1}}, r"(?s)nothing: lmms-eval has none"),
        ("command", {"confirm_run_unsafe_code": True}, r"(?s)profiles.p.*kind lm-eval"),
        ("command", {"limit": 5}, r"(?s)the profile's command has no {limit}"),
        ("command", {"metadata": {"a": 1}}, r"(?s)takes no metadata"),
    ],
)
def test_arguments_that_a_profile_cannot_have(
    tmp_path: Path, kind: str, arguments: object, message: str
) -> None:
    profile: dict[str, object] = {"kind": kind, "arguments": arguments}
    if kind == "command":
        profile["command"] = ["true"]
    with pytest.raises(UsageError, match=message) as caught:
        read(tmp_path, profile)
    assert str(tmp_path / "server.yaml") in str(caught.value)


@pytest.mark.parametrize(
    ("profile", "chosen", "field"),
    [
        (LmEvalProfile(), {"metadata": {"tokenizer": "x/y"}}, "metadata"),  # with its code
        (LmEvalProfile(), {"metadata": {"pretrained": "x"}}, "metadata"),
        (LmEvalProfile(), {"metadata": {"version": 9}}, "metadata"),
        (LmEvalProfile(), {"fewshot_as_multiturn": True}, "fewshot_as_multiturn"),
        (LmmsEvalProfile(), {"apply_chat_template": "default"}, "apply_chat_template"),
        (LmmsEvalProfile(), {"fewshot_as_multiturn": True}, "fewshot_as_multiturn"),
        (LmmsEvalProfile(), {"metadata": {"max_seq_lengths": [1]}}, "metadata"),
        (CommandProfile(command=("x",)), {"system_instruction": "x"}, "system_instruction"),
    ],
)
def test_what_a_submission_cannot_choose(profile: Profile, chosen: object, field: str) -> None:
    [problem] = list_unfitting(changed(Request("/a", "p", ("t",)), chosen), profile)
    assert field in str(problem)


def test_what_a_submission_can_choose() -> None:
    own = OwnArguments(apply_chat_template=True)
    profile = LmEvalProfile(arguments=own, allowed_model_args=("depth",))
    metadata = {"max_seq_lengths": [128, 256], "depth": 3}
    chosen = {"fewshot_as_multiturn": True, "metadata": metadata, "system_instruction": "a\n{b}"}
    assert list(list_unfitting(changed(Request("/a", "p", ("t",)), chosen), profile)) == []


def revision_of(tmp_path: Path, **keys: object) -> str:
    return read(tmp_path, {"kind": "lm-eval", "interpreter": sys.executable, **keys}).revision()


def test_a_revision_changes_only_with_what_can_change_a_number(tmp_path: Path) -> None:
    tasks = lm_eval_tasks(tmp_path / "tasks")
    other = lm_eval_tasks(tmp_path / "elsewhere")
    config = tmp_path / "model"
    config.mkdir()
    (config / "config.json").write_text('{"model_type": "llama"}')
    before = revision_of(tmp_path)
    for same in (
        {"timeout": 5}, {"retries": 3}, {"order": "newest"}, {"max_lag": 3}, {"keep": "all"},
        {"launcher": "none"}, {"allowed_tasks": ["a"]}, {"results_bytes": 10},
        {"keep": "best", "best_metric": "a/b"}, {"allowed_model_args": ["x"]},
        {"arguments": {"batch_size": 8, "max_batch_size": 16}}, {"weights": "direct"},
        {"arguments": {"confirm_run_unsafe_code": True}}, {"model": "hf"},
        {"environment": {"HF_HOME": "/a", "HF_TOKEN": "x", "OPENAI_API_KEY": "y", "DATA": "/d",
                         "API_URL": "https://x/y"}},
    ):  # fmt: skip
        assert revision_of(tmp_path, **same) == before, same
    digests = {
        before,
        revision_of(tmp_path, arguments={"limit": 5}),
        revision_of(tmp_path, arguments={"apply_chat_template": True}),
        revision_of(tmp_path, model="vllm"),
        revision_of(tmp_path, model_args={"dtype": "float16"}),
        revision_of(tmp_path, environment={"GPT_EVAL_MODEL_NAME": "openai/gpt-4o"}),
        revision_of(tmp_path, include_paths=[str(tasks)]),
        revision_of(tmp_path, config=str(config)),
    }
    assert len(digests) == 8
    assert all(len(digest) == 12 and int(digest, 16) >= 0 for digest in digests)
    # Equal tasks in another place: but for the data, whose path they name.
    for path in other.glob("*.yaml"):
        path.write_bytes((tasks / path.name).read_bytes())
    assert revision_of(tmp_path, include_paths=[str(other)]) == revision_of(
        tmp_path, include_paths=[str(tasks)]
    )


def test_a_revision_changes_with_a_local_file(tmp_path: Path) -> None:
    tasks = lm_eval_tasks(tmp_path / "tasks")
    profile = LmEvalProfile(include_paths=(tasks,))
    first = profile.revision()
    for name in ("README.md", ".colours.yaml.swp", "__pycache__/utils.cpython-311.pyc"):
        (tasks / name).parent.mkdir(exist_ok=True)
        (tasks / name).write_text("x")
    assert profile.revision() == first
    (tasks / "nested").mkdir()
    (tasks / "nested" / "utils.py").write_text("A = 1\n")
    second = profile.revision()
    path = tasks / "colours_of_day.yaml"
    text = path.read_text()
    path.write_text(text.replace("version: 1.0", "version: 1.1"))  # of the same size
    third = profile.revision()
    assert len({first, second, third}) == 3
    path.write_text(text)
    assert profile.revision() == second


def test_a_revision_costs_nothing_if_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is read, and no interpreter is started."""
    profile = LmEvalProfile(include_paths=(lm_eval_tasks(tmp_path / "tasks"),))
    for path in (tmp_path / "tasks").iterdir():
        os.utime(path, (1, 1))
    first = profile.revision()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)
    assert profile.revision() == first


def test_the_version_of_an_installed_evaluator_is_found_and_its_change_noticed(
    tmp_path: Path,
) -> None:
    """The package is not imported: it would fail."""

    def install(version: str) -> None:
        for old in tmp_path.glob("lm_eval-*"):
            (old / "METADATA").unlink()
            old.rmdir()
        info = tmp_path / f"lm_eval-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: lm_eval\nVersion: {version}\n"
        )

    (tmp_path / "lm_eval.py").write_text("raise ImportError\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    profile = LmEvalProfile(environment=environment)
    install("0.4.13")
    first = profile.revision()
    assert revision.installed_versions(sys.executable, "lm_eval", environment)[0] == "0.4.13"
    assert LmEvalProfile(environment=environment).revision() == first
    install("0.5.0")
    assert revision.installed_versions(sys.executable, "lm_eval", environment)[0] == "0.5.0"
    assert profile.revision() != first


def test_a_directory_with_much_data_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revision, "_MOST_BYTES", 1000)
    monkeypatch.setattr(revision, "_MOST_TOGETHER", 2500)
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_bytes(bytes(900))
    (tmp_path / "large.jsonl").write_bytes(bytes(2000))
    found = dict(revision.digests_of({"tasks": tmp_path})["tasks"])
    assert [len(found[f"{number}.jsonl"]) == 64 for number in range(5)] == [True] * 2 + [False] * 3
    assert (found["4.jsonl"], found["large.jsonl"]) == ("900 bytes", "2000 bytes")
    monkeypatch.setattr(revision, "_MOST_FILES", 3)
    assert len(revision.digests_of({"tasks": tmp_path})["tasks"]) == 3


def test_an_interpreter_elsewhere_with_the_same_version_is_the_same_revision(
    tmp_path: Path,
) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    one = CommandProfile(command=(sys.executable, "-m", "x"))
    two = CommandProfile(command=(str(link), "-m", "x"))
    assert one.revision() == two.revision()
    assert one.revision() != CommandProfile(command=(sys.executable, "-m", "y")).revision()


def test_a_commands_own_files_count_by_their_content_not_by_their_place(tmp_path: Path) -> None:
    def at(name: str, text: str, form: str = "{}") -> str:
        script = tmp_path / name / "eval.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(text)
        command = (sys.executable, form.format(script), "{checkpoint}")
        return CommandProfile(command=command).revision()

    first = at("a", "print(1)")
    assert at("b", "print(1)") == first
    assert at("b", "print(2)") != first
    assert at("c", "print(1)", "--script={}") == at("d", "print(1)", "--script={}") != first
    scripts = []
    for name in ("one", "two"):
        script = tmp_path / name
        script.write_text(f"#!/{name}/bin/python\nprint(1)\n")
        (tmp_path / f"in-{name}").mkdir()
        scripts.append(script.rename(tmp_path / f"in-{name}" / "evaluate"))
    revisions = {CommandProfile(command=(str(script), "x")).revision() for script in scripts}
    assert len(revisions) == 1
    plain = CommandProfile(command=("evaluate", "x"))
    assert plain.revision() != plain.model_copy(update={"metrics": ("scores.*",)}).revision()
    assert plain.revision() != plain.model_copy(update={"results": "other.json"}).revision()


def test_what_a_submission_chooses_is_not_in_the_basis_of_its_settings() -> None:
    """The same limit by the profile and by the submission is one line."""

    def of(own: OwnArguments, asked: Arguments) -> str:
        profile = script_profile(arguments=own)
        basis = profile.revision(with_arguments=False)
        return Settings(profile.chosen(asked).given(), profile.revision(), basis=basis).id

    five, nine = Arguments(limit=5), Arguments(limit=9)
    assert of(OwnArguments(limit=5), Arguments()) == of(OwnArguments(), five)
    assert of(OwnArguments(limit=9), five) == of(OwnArguments(), Arguments(limit=5.0))
    assert of(OwnArguments(limit=9), Arguments()) == of(OwnArguments(limit=5), nine)
    assert of(OwnArguments(), five) != of(OwnArguments(), nine)
