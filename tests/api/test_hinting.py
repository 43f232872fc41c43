"""`hint` and MERGE.txt: what they leave alone, and what a name or a path cannot do to a line."""

import json
import os
import shlex
from pathlib import Path

import pytest
import torch

from command import unshard as command
from ranks import rank_path, save_ranks, some_tensors
from unshard.api.hinting import as_text, hint, write_hint


def saved(run: Path, step: int, role: str = "actor", config: str = "llama") -> Path:
    place = save_ranks(run / f"global_step_{step}" / role, some_tensors(), 2)
    if config:
        (place / "config.json").write_text(json.dumps({"model_type": config}))
    return place


def merges(run: Path) -> dict[str, str]:
    return {one.label: one.command for one in hint(run)}


@pytest.mark.parametrize("make", ["nothing", "empty", "incomplete", "file"])
def test_a_bad_run_is_the_error_of_inspect(tmp_path: Path, make: str) -> None:
    run = tmp_path / "run"
    if make == "empty":
        run.mkdir()
    elif make == "file":
        run.write_text("no checkpoint")
    elif make == "incomplete":
        rank_path(saved(run, 1), 2, 0).unlink()
    found, known = command("hint", run), command("inspect", run)
    assert (found.returncode, found.stdout, found.stderr) == (known.returncode, "", known.stderr)
    assert found.returncode == 3


def test_the_highest_complete_step_of_a_run_is_meant_and_any_step_by_its_path(
    tmp_path: Path,
) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    rank_path(tmp_path / "global_step_3" / "actor", 2, 1).unlink()
    assert merges(tmp_path)["merge"].split()[2].endswith("/global_step_2")
    assert merges(tmp_path / "global_step_1")["merge"].split()[2].endswith("/global_step_1")


def test_a_path_inside_a_step_stays_what_it_means(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    critic = saved(tmp_path, 1, "critic")
    lines = merges(critic)
    assert lines["merge"] == f"unshard merge {critic}"
    assert lines.keys() == {"merge", "verify", "resume elsewhere"}  # of a run it is the actor
    assert lines["resume elsewhere"].split()[2] == str(critic)
    assert "merge the critic" in merges(tmp_path)


def test_a_model_that_several_files_name_differently_is_to_be_filled_in(tmp_path: Path) -> None:
    place = saved(tmp_path, 1, config="")
    (place / "README.md").write_text("---\nbase_model: a/first\n---\n")
    (tmp_path / "config.yaml").write_text("model_name_or_path: a/second\n")
    (line,) = (one for one in hint(tmp_path) if one.label == "merge")
    assert line.command.endswith(" --base MODEL")
    assert "a/first" in line.comment
    assert "MODEL is the model that training started from" in line.comment


def test_a_critic_needs_its_own_config_and_the_actor_does_not(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    saved(tmp_path, 1, "critic", config="")
    lines = merges(tmp_path)
    assert lines["merge the critic"].endswith(" --role critic --config FILE")
    assert "--config" not in lines["merge"]


def test_a_name_in_a_file_cannot_become_another_line(tmp_path: Path) -> None:
    place = saved(tmp_path, 1, config="")
    name = "a ;' $(touch pwned) `touch pwned`\\"
    (place / "README.md").write_text(f"---\nbase_model: {json.dumps(name)}\n---\n")
    run = tmp_path / "my\nrun; touch pwned"
    run.mkdir()
    (tmp_path / "global_step_1").rename(run / "global_step_1")
    for block in as_text(hint(run)).rstrip("\n").split("\n\n"):
        comment, _, line = block.partition("\n")
        assert comment.startswith("# ")
        words = shlex.split(line)
        assert words[0] == "unshard"
        assert "touch" not in words


def test_a_run_that_cannot_be_merged_says_why_and_has_no_other_line(tmp_path: Path) -> None:
    start = "model.layers.0.mlp.experts"
    stacked = {f"{start}.gate_up_proj": (3, 4, 8), f"{start}.down_proj": (3, 4, 4)}
    place = tmp_path / "global_step_1" / "actor"
    save_ranks(place, {name: torch.ones(shape) for name, shape in stacked.items()}, 1)
    sizes = {"hidden_size": 4, "moe_intermediate_size": 4, "num_experts": 5}
    (place / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **sizes}))
    lines = hint(tmp_path)
    assert {one.label for one in lines} <= {"merge", "resume elsewhere"}
    assert lines[0].comment.startswith("nothing: ")
    assert "\n\n" not in as_text(lines[:1])


def told(run: Path) -> str:
    """Have another process of this training write its file; return what is there."""
    write_hint(run, set())
    return (run / "MERGE.txt").read_text()


def test_a_file_of_the_same_lines_is_not_touched_and_of_others_is_written_again(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 1)
    first = told(tmp_path)
    assert first.startswith("# Written by unshard ")
    before = (tmp_path / "MERGE.txt").stat()
    saved(tmp_path, 2)
    assert told(tmp_path) == first
    assert (tmp_path / "MERGE.txt").stat() == before
    saved(tmp_path, 2, "critic")
    assert "--role critic" in told(tmp_path)
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


@pytest.mark.parametrize("text", ["my own notes\n", ""])
def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, text: str) -> None:
    saved(tmp_path, 1)
    (tmp_path / "MERGE.txt").write_text(text)
    assert told(tmp_path) == text


def test_a_step_is_named_in_its_own_place_and_not_in_the_name_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "from-global_step_5"
    saved(run, 5)
    lines = told(run)
    assert "unshard reshard STEP ../from-global_step_5-resharded/STEP" in lines


def test_the_lines_are_those_of_what_was_just_saved(tmp_path: Path) -> None:
    """A run is continued by another model, at a lower step."""
    saved(tmp_path, 9)
    told(tmp_path)
    saved(tmp_path, 2)
    saved(tmp_path, 2, "critic")
    write_hint(tmp_path / "global_step_2", set())
    text = (tmp_path / "MERGE.txt").read_text()
    assert "STEP is global_step_2, or another" in text
    assert "unshard merge STEP --role critic" in text
    assert "unshard verify merged/STEP --against STEP" in text


def test_a_pipe_of_this_name_is_not_waited_for(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    os.mkfifo(tmp_path / "MERGE.txt")
    with pytest.raises(OSError, match=r"not a regular file.*MERGE\.txt"):
        write_hint(tmp_path, set())


def test_nothing_is_written_before_a_step_is_complete_and_the_next_save_tries_again(
    tmp_path: Path,
) -> None:
    known = set[Path]()
    write_hint(tmp_path, known)
    place = saved(tmp_path, 1)
    moved = rank_path(place, 2, 1).rename(tmp_path / "later")
    write_hint(tmp_path, known)
    assert not (tmp_path / "MERGE.txt").exists()
    moved.rename(rank_path(place, 2, 1))
    write_hint(tmp_path, known)
    file = tmp_path / "MERGE.txt"
    file.unlink()
    saved(tmp_path, 2)
    write_hint(tmp_path, known)  # once per process
    assert not file.exists()


def test_a_run_in_a_store_gets_no_file_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unshard.api.hinting.read_checkpoint", pytest.fail)
    write_hint("s3://bucket/run")


def test_the_file_is_no_checkpoint_and_no_part_of_one(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    before = merges(tmp_path)
    told(tmp_path)
    assert merges(tmp_path) == before
