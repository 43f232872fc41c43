"""Every model of a step, each merged by itself."""

import json
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, merged, rank_path, save_ranks, some_tensors
from unshard import CheckpointError, UnshardError, UsageError
from unshard.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

ROLES = ("actor", "critic", "ref", "reward")


def tensors_of(step: int, role: str) -> dict[str, torch.Tensor]:
    return some_tensors(10 * step + ROLES.index(role))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10):
        for role in ROLES:
            folder = tmp_path / "run" / f"global_step_{step}" / role
            save_ranks(folder, tensors_of(step, role), 2)
    return tmp_path / "run"


def merge(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["merge", *map(str, words), "--config", "none"])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("path", "step"), [(".", 10), ("global_step_5", 5)])
def test_every_role_of_a_step_goes_into_its_own_directory(
    run: Path, tmp_path: Path, path: str, step: int
) -> None:
    assert merge(run / path, tmp_path / "out", "--role", "all") == 0
    assert {one.name for one in (tmp_path / "out").iterdir()} == {*ROLES}
    for role in ROLES:
        assert_same(merged(tmp_path / "out" / role), tensors_of(step, role))
        alone = unshard.merge(run / path, tmp_path / f"alone-{role}", role=role, config="none")
        assert alone.step == step
        assert_same(merged(Path(alone.output)), tensors_of(step, role))


def test_a_step_may_be_named(run: Path, tmp_path: Path) -> None:
    assert merge(run, tmp_path / "out", "--role", "all", "--step", 5) == 0
    assert_same(merged(tmp_path / "out" / "ref"), tensors_of(5, "ref"))


def test_without_an_output_each_role_has_its_own(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge(run, "--role", "all", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    names = ["global_step_10", *(f"global_step_10-{role}" for role in ROLES[1:])]
    assert [row["output"] for row in rows] == [str(run / "merged" / name) for name in names]
    assert_same(merged(run / "merged" / "global_step_10-critic"), tensors_of(10, "critic"))


def test_every_role_of_every_step(run: Path, tmp_path: Path) -> None:
    assert merge(run, tmp_path / "out", "--role", "all", "--all-steps") == 0
    reports = unshard.merge_all(run, tmp_path / "python", role="all", config="none")
    assert [report.step for report in reports] == [5] * 4 + [10] * 4
    for out in (tmp_path / "out", tmp_path / "python"):
        assert len([*out.iterdir()]) == 8
        assert_same(merged(out / "global_step_5"), tensors_of(5, "actor"))
        assert_same(merged(out / "global_step_10-reward"), tensors_of(10, "reward"))
    words = ("--role", "all", "--all-steps", "--reuse")
    assert merge(run, tmp_path / "out", *words) == 0


def test_python_merges_every_role_of_one_step(run: Path, tmp_path: Path) -> None:
    unshard.merge_all(run / "global_step_5", tmp_path / "out", role="all", config="none")
    names = {"global_step_5", *(f"global_step_5-{role}" for role in ROLES[1:])}
    assert {one.name for one in (tmp_path / "out").iterdir()} == names


@pytest.mark.parametrize("damage", ["corrupt", "incomplete"])
def test_a_role_that_fails_keeps_back_no_other(
    run: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An incomplete role of the step that was asked for is not passed over."""
    step = run / "global_step_10"
    if damage == "corrupt":
        rank_path(step / "critic", 2, 0).write_bytes(b"not a checkpoint")
    else:
        rank_path(step / "critic", 2, 1).unlink()
    assert merge(step, tmp_path / "out", "--role", "all") == CheckpointError.exit_code
    told = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step 10, critic: failed: ") for line in told)
    assert told[-1] == "3 of 4 models merged, 1 failed"
    assert {one.name for one in (tmp_path / "out").iterdir()} == {"actor", "ref", "reward"}
    assert merge(step, tmp_path / "json", "--role", "all", "--json") == CheckpointError.exit_code
    rows = json.loads(capsys.readouterr().out)
    assert [row.get("role") for row in rows] == [None, "critic", None, None]
    assert "critic" in rows[1]["failed"]
    with pytest.raises(CheckpointError, match="critic"):
        unshard.merge_all(step, tmp_path / "python", role="all", config="none")
    assert len([*(tmp_path / "python").iterdir()]) == 3


@pytest.mark.parametrize("role", ["actor", "reward"])
def test_the_highest_step_of_which_every_role_is_complete_is_taken(
    run: Path, tmp_path: Path, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_path(run / "global_step_10" / role, 2, 1).unlink()
    assert merge(run, tmp_path / "out", "--role", "all") == 0
    assert (
        f"global_step_10 is not complete: {role}: rank 1 of 2 is missing" in capsys.readouterr().err
    )
    for one in ROLES:
        assert_same(merged(tmp_path / "out" / one), tensors_of(5, one))


def test_of_steps_that_are_all_incomplete_the_highest_is_reported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 10):
        rank_path(run / f"global_step_{step}" / "ref", 2, 0).unlink()
    assert merge(run, tmp_path / "out", "--role", "all") == CheckpointError.exit_code
    assert "step 10, ref: failed: " in capsys.readouterr().out


def test_models_without_roles_are_called_like_their_folders(tmp_path: Path) -> None:
    step = tmp_path / "gan" / "global_step_5"
    for seed, name in enumerate(("generator", "discriminator")):
        save_ranks(step / name, some_tensors(seed), 2)
    assert merge(tmp_path / "gan", tmp_path / "out", "--role", "all") == 0
    assert merge(tmp_path / "gan", "--role", "all") == 0
    for seed, name in enumerate(("generator", "discriminator")):
        assert_same(merged(tmp_path / "out" / name), some_tensors(seed))
        assert_same(merged(step.parent / "merged" / f"global_step_5-{name}"), some_tensors(seed))


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_one_model_alone_is_a_model(tmp_path: Path, weights: str) -> None:
    """lmms-engine has no roles, and its average is not one."""
    step = tmp_path / "run" / "checkpoint-5"
    save_ranks(step / "pytorch_model_fsdp_0", some_tensors(0), 2)
    save_ranks(step / "pytorch_ema_model_fsdp_0", some_tensors(1), 2)
    words = ("--role", "all", "--weights", weights)
    assert merge(tmp_path / "run", tmp_path / "out", *words) == 0
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["model"]
    assert_same(merged(tmp_path / "out" / "model"), some_tensors(int(weights == "ema")))


def test_one_role_alone_is_merged_under_its_name(run: Path, tmp_path: Path) -> None:
    assert merge(run / "global_step_5" / "critic", tmp_path / "out", "--role", "all") == 0
    assert_same(merged(tmp_path / "out" / "critic"), tensors_of(5, "critic"))


def test_two_models_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate(("actor", "policy")):
        save_ranks(tmp_path / "global_step_5" / name, some_tensors(seed), 2)
    assert merge(tmp_path, tmp_path / "out", "--role", "all") == UsageError.exit_code
    assert "has 2 sets of weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words", [["--push-to-hub", "a/b"], ["--push-to-hub", "a/b", "--no-local"]]
)
def test_one_repository_cannot_hold_every_role(
    run: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge(run, "--role", "all", "--push-to-hub", "a/b", *words) == UsageError.exit_code
    assert "--role all" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "RUN"],
        ["average", "RUN", "OUT"],
        ["verify", "EXAMPLE", "--against", "RUN"],
        ["reshard", "RUN", "OUT", "--world-size", "1"],
    ],
)
def test_what_needs_one_model_refuses_every_role(
    run: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    example = unshard.merge(run, tmp_path / "example", config="none").output
    places = {"RUN": str(run), "OUT": str(tmp_path / "out"), "EXAMPLE": str(example)}
    with pytest.raises(SystemExit) as ended:
        main([*(places.get(word, word) for word in words), "--role", "all"])
    assert ended.value.code == UsageError.exit_code
    assert "--role all selects several models" in capsys.readouterr().err


def test_python_names_what_merges_every_role(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="role='all' selects several models") as refused:
        unshard.merge(run, tmp_path / "out", role="all")
    assert "unshard.merge_all take role='all'" in str(refused.value)
    with pytest.raises(UnshardError, match="role='all' selects several models"):
        unshard.open_checkpoint(run, role="all")
    with pytest.raises(UsageError, match="role='all' selects several models"):
        unshard.virtual(run, role="all")


@pytest.mark.parametrize("words", [[], ["--all-steps"]])
def test_what_one_model_needs_is_not_advised_for_every_model(
    run: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A base of the critic in a line for all would replace the actor by one with its config."""
    for step in (5, 10):
        for role in ROLES:
            name = f"critic's/base-{step}" if role == "critic" else "ref/base"
            folder = run / f"global_step_{step}" / role
            if role in {"critic", "ref"}:
                fields = {"base_model_name_or_path": name}
                (folder / "adapter_config.json").write_text(json.dumps(fields))
            else:
                (folder / "config.json").write_text('{"model_type": "odd", "dtype": "bfloat16"}')
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), str(tmp_path / "out"), "--role", "all", *words])
    assert ended.value.code == CheckpointError.exit_code
    told = capsys.readouterr().err
    assert "--base ref/base" in told
    assert "to cast them: --dtype config" in told
    assert "use:" not in told
    with pytest.raises(UnshardError, match="base='ref/base'") as failed:
        unshard.merge_all(run, tmp_path / "python", role="all")
    assert "use:" not in str(failed.value)


def test_every_step_of_one_model_keeps_its_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["merge", str(run), str(tmp_path / "out"), "--all-steps"])
    assert " --all-steps --base MODEL" in capsys.readouterr().err
