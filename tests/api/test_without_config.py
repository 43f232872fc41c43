"""A checkpoint without a config.json: an output that does not load is written on purpose only."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from command import unshard as command
from hub_server import Hub, standing_in
from ranks import assert_same, merged, save_ranks, snapshot, some_tensors
from unshard import CheckpointError, IncompleteError, NoConfigError, OutputError, UsageError
from unshard.api.merging import merge_steps
from unshard.api.options import MergeOptions
from unshard.progress import ignore

pytestmark = [
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # by huggingface_hub
]
WHERE = "{0}/global_step_2/actor, {0}/global_step_2, huggingface/ in them, the run {0}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with standing_in(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps."""
    for step in (1, 2):
        save_ranks(tmp_path / "run" / f"global_step_{step}" / "actor", some_tensors(step), 2)
    return tmp_path / "run"


def virtual(run: Path, _: Path, **options: Any) -> None:
    with unshard.virtual(run, **options) as files:
        assert "config.json" not in files


Call = Callable[..., object]
CALLS: dict[str, Call] = {
    "merge": unshard.merge,
    "a dry run": lambda run, out, **more: unshard.merge(run, out, dry_run=True, **more),
    "average": unshard.average,
    "all steps": unshard.merge_all,
    "push": lambda run, _, **more: unshard.push(run, "someone/model", **more),
    "virtual": virtual,
}


@pytest.mark.parametrize("call", CALLS)
def test_what_does_not_load_is_written_on_purpose_only(
    hub: Hub, run: Path, tmp_path: Path, call: str
) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(NoConfigError, match=r"no config\.json was found") as raised:
        CALLS[call](run, tmp_path / "out")
    assert raised.value.exit_code == CheckpointError.exit_code == 3
    assert not isinstance(raised.value, IncompleteError)  # such a step would be passed over
    said = str(raised.value)
    assert "base=…" in said
    assert "config=…" in said
    assert "for the weights alone: config='none'" in said
    assert said.count(f"no config.json was found in or next to {run}/global_step_2/actor:") == 1
    if call != "all steps":
        assert raised.value.expected == "config.json in " + WHERE.format(run)
    assert snapshot(tmp_path) == before
    assert not hub.repos.get("someone/model", None) or not hub.repos["someone/model"].files
    CALLS[call](run, tmp_path / "weights", config="none")
    CALLS[call](run, tmp_path / "training", names="training")


@pytest.mark.parametrize(
    "arguments",
    [["merge", "{run}", "{out}"], ["merge", "{run}", "{out}", "--dry-run"],
     ["merge", "{run}", "{out}", "--all-steps"], ["average", "{run}", "--output", "{out}"],
     ["merge", "{run}", "{out}", "--step", "1", "--dtype", "bf16"]],
    ids=" ".join,
)  # fmt: skip
def test_the_command_ends_with_one_message_and_a_line_to_paste(
    run: Path, tmp_path: Path, arguments: list[str]
) -> None:
    given = [one.format(run=run, out=tmp_path / "out") for one in arguments]
    done = command(*given)
    assert done.returncode == 3
    assert not (tmp_path / "out").exists()
    assert "names are kept" not in done.stderr
    if "--all-steps" not in given:
        assert done.stderr.count("config.json was found") == 1
        assert f"  use:      unshard {' '.join(given)} --base MODEL" in done.stderr
        error = json.loads(command(*given, "--json").stdout)["error"]
        assert (error["type"], error["code"]) == ("NoConfigError", 3)
        assert "--config none" in error["hint"]
    assert command(*given, "--config", "none").returncode == 0


def test_weights_alone_are_whole_and_say_so(run: Path, tmp_path: Path) -> None:
    report = unshard.merge(run, tmp_path / "out", config="none")
    assert not report.loadable
    assert report.companions == ()
    assert not any("was found" in one for one in report.warnings)
    assert_same(merged(tmp_path / "out"), some_tensors(2))
    assert unshard.verify(tmp_path / "out", run).equal


def test_a_config_that_is_found_is_used_all_the_same(run: Path, tmp_path: Path) -> None:
    (run / "config.json").write_text('{"model_type": "x"}')
    assert unshard.merge(run, tmp_path / "out", config="none").loadable


def test_a_file_that_is_called_none_is_a_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("none").write_text('{"model_type": "x"}')
    assert not unshard.merge(run, "a", config="none").loadable
    assert unshard.merge(run, "b", config=Path("none")).loadable
    done = command("merge", run, "c", "--config", "./none")
    assert done.returncode == 0, done.stderr
    assert Path("c", "config.json").is_file()
    with pytest.raises(UsageError, match="no such file"):
        unshard.merge(run, "d", config="None")


def test_a_step_without_a_config_has_failed_and_was_not_passed_over(run: Path) -> None:
    results = merge_steps(run, None, MergeOptions(), ignore)
    assert [one.has_failed for one in results] == [True, True]
    assert not (run / "merged").exists()


def test_an_adapter_by_itself_needs_no_config(tmp_path: Path) -> None:
    tensors = {
        "base_model.model.model.q_proj.lora_A.default.weight": torch.rand(2, 4),
        "base_model.model.model.q_proj.lora_B.default.weight": torch.rand(4, 2),
    }
    save_ranks(tmp_path / "run" / "global_step_1", tensors, 2)
    report = unshard.merge(tmp_path / "run", tmp_path / "out", lora="adapter", lora_alpha=4.0)
    assert report.loadable
    with pytest.raises(unshard.ConversionError, match="has a LoRA adapter only"):
        unshard.merge(tmp_path / "run", tmp_path / "fused", lora_alpha=4.0)


def test_inspect_describes_it_and_says_what_a_merge_needs(run: Path) -> None:
    done = command("inspect", run)
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if "config.json" in line]
    assert len(lines) == 1
    assert lines[0].startswith("merge writes  nothing: no config.json was found")
    assert "give it with --base MODEL or --config FILE" in done.stdout
    found = unshard.inspect(run)
    assert len(found.tensors) == 3
    assert "give it with base=… or config=…" in found.warnings[-1]


def test_a_base_without_a_config_does_not_give_one(run: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    unshard.merge(run, base, config="none")
    with pytest.raises(NoConfigError) as raised:
        unshard.merge(run, tmp_path / "out", base=base)
    assert "base=" not in raised.value.hint
    assert unshard.merge(run, tmp_path / "out", base=base, config="none").names_checked == "base"


@pytest.mark.parametrize("options", [{}, {"role": "all"}])
def test_an_output_of_weights_alone_is_not_what_was_asked_for(
    run: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    unshard.merge_all(run, out, config="none", **options)
    assert all(
        one.reused for one in unshard.merge_all(run, out, config="none", reuse=True, **options)
    )
    with pytest.raises(NoConfigError):
        unshard.merge_all(run, out, reuse=True, **options)
    (run / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(OutputError, match="exists already"):
        unshard.merge_all(run, out, reuse=True, **options)
    again = unshard.merge_all(run, out, reuse=True, overwrite=True, **options)
    assert len(again) == 2
    assert all((Path(one.output) / "config.json").is_file() for one in again)
    assert all(one.reused for one in unshard.merge_all(run, out, reuse=True, **options))


def test_names_of_training_are_asked_for(run: Path, tmp_path: Path) -> None:
    unshard.merge_all(run, tmp_path / "out", names="training")
    again = unshard.merge_all(run, tmp_path / "out", names="training", reuse=True)
    assert [one.reused for one in again] == [True, True]


@pytest.mark.parametrize("place", ["--config=none", "--config=FILE"])
def test_verify_takes_weights_alone(run: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "FILE").write_text('{"model_type": "llama"}')
    out = unshard.merge(run, tmp_path / "out", config="none").output
    option = place.replace("FILE", str(tmp_path / "FILE"))
    ended = command("verify", out, "--against", str(run), option)
    assert ended.returncode == 0, ended.stderr
