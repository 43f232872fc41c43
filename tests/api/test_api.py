"""The main path through the Python API."""

import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, merged, rank_path, save_ranks, snapshot, some_tensors
from unshard import ConversionError, IncompleteError, MergeOptions, OutputError, UsageError
from unshard.cli.commands import average as average_command
from unshard.cli.commands import inspect as inspect_command
from unshard.cli.commands import merge as merge_command
from unshard.cli.commands import verify as verify_command
from unshard.keywords import MergeKeywords, ReadKeywords, VerifyKeywords
from unshard.progress import Advanced, Event, Stage, Warned

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    step = tmp_path / "run" / "global_step_7"
    save_ranks(step / "actor", some_tensors(), 3)
    return step


def test_the_output_goes_next_to_the_step_by_default(checkpoint: Path) -> None:
    before = snapshot(checkpoint)
    report = unshard.merge(checkpoint, config="none")
    assert report.output == str(checkpoint.parent / "merged" / "global_step_7")
    assert_same(merged(Path(report.output)), some_tensors())
    assert snapshot(checkpoint) == before


def test_the_highest_complete_step_is_taken_and_the_others_are_named(checkpoint: Path) -> None:
    run = checkpoint.parent
    save_ranks(run / "global_step_9" / "actor", some_tensors(9), 3)
    rank_path(run / "global_step_9" / "actor", 3, 1).unlink()
    save_ranks(run / "global_step_10" / "actor", some_tensors(10), 3)
    rank_path(run / "global_step_10" / "actor", 3, 2).write_bytes(b"")
    report = unshard.merge(run, config="none")
    assert report.step == 7
    assert_same(merged(Path(report.output)), some_tensors())
    passed_over = [warning for warning in report.warnings if "passed over" in warning]
    assert len(passed_over) == 2
    assert "global_step_10" in passed_over[0]
    assert "global_step_9" in passed_over[1]


def test_an_incomplete_step_that_was_asked_for_is_an_error(checkpoint: Path) -> None:
    run = checkpoint.parent
    save_ranks(run / "global_step_9" / "actor", some_tensors(9), 3)
    rank_path(run / "global_step_9" / "actor", 3, 1).unlink()
    for path, step in ((run, 9), (run / "global_step_9", None)):
        with pytest.raises(IncompleteError, match="rank 1"):
            unshard.merge(path, step=step)


def test_a_run_without_a_complete_step_names_them_all(tmp_path: Path) -> None:
    for step in (1, 2):
        save_ranks(tmp_path / f"global_step_{step}" / "actor", some_tensors(), 2)
        rank_path(tmp_path / f"global_step_{step}" / "actor", 2, 0).unlink()
    with pytest.raises(IncompleteError, match=r"no step is complete \(2 problems\)"):
        unshard.merge(tmp_path)


def test_the_record_says_what_was_made_from_what_and_nothing_else(checkpoint: Path) -> None:
    report = unshard.merge(checkpoint, dtype="bfloat16", config="none")
    text = (Path(report.output) / "unshard.json").read_text()
    record = json.loads(text)
    assert record["source"]["name"] == "global_step_7"
    assert record["source"]["world_size"] == 3
    assert set(record["source"]["files"]) == {rank_path(checkpoint, 3, r).name for r in range(3)}
    assert record["options"] == {"dtype": "bfloat16", "names": "hub"}
    assert record["output"]["tensors"] == 3
    assert str(checkpoint.parent) not in text


def test_the_same_merge_writes_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    contents = []
    settings: list[tuple[int, str | int]] = [(1, "64MB"), (3, "400KB"), (8, 131072)]
    for number, (workers, memory) in enumerate(settings):
        output = tmp_path / f"out{number}"
        unshard.merge(
            checkpoint, output, workers=workers, memory=memory, max_shard_size=300, config="none"
        )
        contents.append({path.name: path.read_bytes() for path in output.iterdir()})
    assert contents[0] == contents[1] == contents[2]
    assert len(contents[0]) == 3 + 1 + 1  # three files, index, record


def test_several_files_come_with_an_index(checkpoint: Path, tmp_path: Path) -> None:
    report = unshard.merge(checkpoint, tmp_path / "out", max_shard_size="320B", config="none")
    assert list(report.files) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 162, "total_size": 648}
    assert index["weight_map"].keys() == some_tensors().keys()
    assert_same(merged(tmp_path / "out"), some_tensors())


def test_a_cast_touches_floating_point_only(tmp_path: Path) -> None:
    tensors = {
        "w": torch.rand(5, 4),
        "half": torch.rand(3).half(),
        "double": torch.rand(2).double(),
    }
    plain = {"ids": torch.arange(3), "flag": torch.tensor([True, False])}
    save_ranks(tmp_path / "ckpt", tensors, 2, plain=[plain] * 2)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype="bfloat16", config="none")
    assert_same(merged(tmp_path / "out"), {n: t.bfloat16() for n, t in tensors.items()} | plain)
    assert report.dtypes == {"bfloat16": 3, "int64": 1, "bool": 1}


def with_config(checkpoint: Path, **fields: object) -> None:
    (checkpoint / "actor" / "huggingface").mkdir()
    (checkpoint / "actor" / "huggingface" / "config.json").write_text(json.dumps(fields))


def test_keep_keeps_and_hints_where_the_config_names_another_dtype(checkpoint: Path) -> None:
    with_config(checkpoint, dtype="bfloat16")
    report = unshard.merge(checkpoint)
    assert any("dtype='config'" in warning for warning in report.warnings)
    config = json.loads((Path(report.output) / "config.json").read_text())
    assert config["dtype"] == "float32"


def test_dtype_config_casts_to_what_the_config_names(checkpoint: Path) -> None:
    with_config(checkpoint, text_config={"torch_dtype": "torch.float16"})
    report = unshard.merge(checkpoint, dtype="config")
    assert_same(merged(Path(report.output)), {n: t.half() for n, t in some_tensors().items()})


@pytest.mark.parametrize("fields", [None, {"hidden_size": 3}, {"dtype": "int8"}])
def test_dtype_config_without_a_usable_config_is_a_conversion_error(
    checkpoint: Path, fields: dict[str, object] | None
) -> None:
    if fields is not None:
        with_config(checkpoint, **fields)
    with pytest.raises(ConversionError, match="dtype='config'"):
        unshard.merge(checkpoint, dtype="config", config="none")


def test_a_config_can_be_given(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps({"dtype": "float16", "architectures": ["FSDPQwen2ForCausalLM"]}))
    report = unshard.merge(checkpoint, config=path, dtype="config")
    config = json.loads((Path(report.output) / "config.json").read_text())
    assert config == {"dtype": "float16", "architectures": ["Qwen2ForCausalLM"]}


def test_a_dry_run_plans_and_writes_nothing(checkpoint: Path) -> None:
    before = snapshot(checkpoint.parent)
    report = unshard.merge(checkpoint, dry_run=True, config="none")
    assert report.dry_run
    assert report.bytes_read == 648
    assert report.operations == {"Gather": 3}
    assert snapshot(checkpoint.parent) == before
    assert not Path(report.output).exists()


def test_an_existing_output_is_refused_also_in_a_dry_run(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    for dry_run in (True, False):
        with pytest.raises(OutputError, match="exists already"):
            unshard.merge(checkpoint, tmp_path / "out", dry_run=dry_run, config="none")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "int8"),
        ("weights", "adam"),
        ("workers", 0),
        ("memory", "1KB"),
        ("memory", "much"),
        ("max_shard_size", "-5GB"),
    ],
)
def test_an_option_that_makes_no_sense_is_a_usage_error(
    checkpoint: Path, option: str, value: str | int
) -> None:
    with pytest.raises(UsageError, match=str(value)):
        unshard.merge(checkpoint, config="none", **{option: value})  # type: ignore[arg-type]


def test_adapters_are_not_written_out_as_if_they_were_fused(tmp_path: Path) -> None:
    lora = {"base_model.model.q.lora_A.default.weight": torch.rand(2, 4)}
    save_ranks(tmp_path / "ckpt", lora, 2)
    with pytest.raises(ConversionError, match=r"lora_A[\s\S]*lora_B"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")


def test_progress_counts_every_byte(checkpoint: Path) -> None:
    events: list[Event] = []
    unshard.merge(checkpoint, listener=events.append, config="none")
    stages = [event for event in events if isinstance(event, Stage)]
    assert [stage.name for stage in stages] == ["reading", "writing", "verifying", "committing"]
    advanced = sum(event.written_bytes for event in events if isinstance(event, Advanced))
    assert advanced == stages[1].total_bytes == 648
    assert any(isinstance(event, Warned) for event in events)


def test_inspect_says_what_is_there_and_what_a_merge_would_do(checkpoint: Path) -> None:
    with_config(checkpoint, dtype="bfloat16")
    before = snapshot(checkpoint.parent)
    found = unshard.inspect(checkpoint)
    assert (found.format, found.writer, found.step) == ("FSDP rank files", "verl", 7)
    assert (found.world_size, found.role, found.weights) == (3, "actor", "model")
    assert found.meshes == {"fsdp=3": 3}
    assert found.placements == {"Shard(0)": 3}
    assert (found.parameters, found.size_bytes) == (162, 648)
    assert found.config_dtype == "bfloat16"
    assert found.companions == ("config.json",)
    assert "merged/global_step_7: 1 file, 648 bytes" in found.would_write
    assert found.tensors[0].shape == (13, 6)
    assert snapshot(checkpoint.parent) == before


def test_inspect_sees_tied_weights_ema_and_missing_replicas(tmp_path: Path) -> None:
    shared = torch.rand(6, 2)
    step = tmp_path / "checkpoint-3"
    save_ranks(step / "pytorch_model_fsdp_0", {}, 2, plain=[{"a": shared, "b": shared}] * 2)
    save_ranks(step / "pytorch_ema_model_fsdp_0", some_tensors(), 2)
    rank_path(step / "pytorch_model_fsdp_0", 2, 1).unlink()
    found = unshard.inspect(step)
    assert found.writer == "lmms-engine"
    assert found.shared == (("a", "b"),)
    assert found.has_ema
    assert found.missing == ("model_world_size_2_rank_1.pt",)


def test_inspect_describes_adapters_although_merge_refuses_them(tmp_path: Path) -> None:
    lora = {"base_model.model.q.lora_A.default.weight": torch.rand(2, 4)}
    found = unshard.inspect(save_ranks(tmp_path / "ckpt", lora, 2))
    assert found.lora_tensors == 1
    assert found.would_write.startswith("nothing: ")


def test_an_earlier_output_is_replaced_and_a_checkpoint_merged_into_itself(
    checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    unshard.merge(checkpoint, output, max_shard_size=300, config="none")
    (output / "notes.txt").write_text("mine")
    for target in (output, checkpoint, checkpoint, checkpoint / "actor"):
        before = snapshot(checkpoint / "actor")
        mtime = target.stat().st_mtime_ns
        unshard.merge(checkpoint, target, overwrite=True, dtype="bfloat16", config="none")
        assert_same(merged(target), {n: t.bfloat16() for n, t in some_tensors().items()})
        assert len(list(target.glob("model*.safetensors*"))) == 1
        after = snapshot(checkpoint / "actor")
        assert {name: after[name] for name in before} == before
        if target != output:
            assert target.stat().st_mtime_ns == mtime
    assert (output / "notes.txt").read_text() == "mine"


# what is not a path


@pytest.mark.parametrize("option", ["base", "config", "also"])
def test_an_empty_path_is_not_the_current_directory(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(checkpoint)
    calls: list[Callable[[], object]] = [
        lambda: unshard.merge("", tmp_path / "out"),
        lambda: unshard.merge(checkpoint, ""),
        lambda: unshard.merge_all("", tmp_path / "out"),
        lambda: unshard.average(["", checkpoint], tmp_path / "out"),
        lambda: unshard.average([checkpoint, checkpoint], ""),
        lambda: unshard.inspect(""),
        lambda: unshard.open_checkpoint(""),
        lambda: unshard.load_state_dict(""),
        lambda: unshard.verify("", checkpoint),
        lambda: unshard.verify(checkpoint, ""),
        lambda: unshard.MergeOptions(**{option: [""] if option == "also" else ""}),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(UsageError, match="is an empty path"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "merged.pt"])
def test_the_name_of_a_file_is_not_an_output(checkpoint: Path, tmp_path: Path, name: str) -> None:
    for dry_run in (True, False):
        with pytest.raises(UsageError, match="the output is a directory") as caught:
            unshard.merge(checkpoint, tmp_path / name, dry_run=dry_run)
        assert f"give {tmp_path / name.partition('.')[0]};" in caught.value.hint
    with pytest.raises(UsageError, match="the output is a directory"):
        unshard.average([checkpoint, checkpoint], tmp_path / name)
    (tmp_path / "odd.pt").mkdir()
    unshard.merge(checkpoint, tmp_path / "odd.pt", config="none")


# options as keywords


@pytest.mark.parametrize(
    "function", [unshard.merge, unshard.average, unshard.verify, unshard.open_checkpoint]
)
def test_a_function_shows_its_options_with_their_defaults(function: Callable[..., object]) -> None:
    shown = inspect.signature(function).parameters
    assert all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in shown.values())
    assert (shown["assume_dim0"].default, shown["step"].default) == (False, None)


def test_the_command_line_has_the_options_of_the_functions() -> None:
    spelled = {"allow_globals": "allow_global", "extra_state": "no_extra_state"}
    without = {"step", "lora", "lora_alpha", "extra_state", "optimizer"}
    has: list[tuple[Callable[..., None], set[str]]] = [
        (merge_command, {*MergeKeywords.__annotations__}),
        (inspect_command, {*ReadKeywords.__annotations__}),
        (verify_command, {*VerifyKeywords.__annotations__}),
        (average_command, {*MergeKeywords.__annotations__} - without),
    ]
    for command, keywords in has:
        wanted = {spelled.get(one, one) for one in keywords}
        assert wanted <= inspect.signature(command).parameters.keys()
    assert MergeKeywords.__annotations__.keys() == {one.name for one in fields(MergeOptions)}


@pytest.mark.parametrize("option", ["dtype", "overwrite"])
def test_an_option_of_another_function_is_refused_not_ignored(
    checkpoint: Path, option: str
) -> None:
    given: dict[str, object] = {option: "bfloat16"}
    with pytest.raises(TypeError, match=rf"open_checkpoint\(\) .*unexpected.*{option}"):
        unshard.open_checkpoint(checkpoint, **given)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=rf"inspect\(\) .*unexpected.*{option}"):
        unshard.inspect(checkpoint, **given)  # type: ignore[arg-type]


def test_an_average_takes_the_options_of_a_merge(checkpoint: Path, tmp_path: Path) -> None:
    both = [checkpoint, checkpoint]
    report = unshard.average(
        both, tmp_path / "out", dtype="bfloat16", max_shard_size=300, config="none"
    )
    assert report.dtypes == {"bfloat16": 3}
    assert len(report.files) > 1


# how things show themselves


def test_what_is_returned_shows_itself_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    report = unshard.merge(checkpoint, tmp_path / "out", config="none")
    size = f"{report.bytes_written:,}"
    assert repr(report) == (
        f"<Report: saved 3 tensors in 1 file ({size} bytes) to '{tmp_path / 'out'}', "
        f"from 3 ranks, {len(report.warnings)} warning{'s' * (len(report.warnings) != 1)}>"
    )
    found = unshard.inspect(checkpoint)
    assert repr(found) == (
        f"<Inspection of '{checkpoint / 'actor'}': FSDP rank files, step 7, 3 ranks, 3 tensors, "
        f"{found.parameters:,} parameters, {found.size_bytes:,} bytes>"
    )
    same = unshard.verify(tmp_path / "out", checkpoint)
    assert repr(same) == "<Comparison: the same, 3 tensors compared>"
    assert repr(unshard.MergeOptions()) == "MergeOptions()"
    options = unshard.MergeOptions(dtype=torch.bfloat16, also=["x"])
    assert repr(options) == "MergeOptions(dtype='bfloat16', also=['x'])"
    assert eval(repr(options), {"MergeOptions": unshard.MergeOptions}) == options  # noqa: S307
