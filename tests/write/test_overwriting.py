"""What an overwrite may take away: never the sources, never a state of another step left behind."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unshard
from ranks import assert_same, merged, save_ranks, snapshot, some_tensors
from unshard import ConversionError, MergeOptions, OutputError
from unshard.cli.main import main
from unshard.merger import FSDP2Merger
from unshard.progress import Event, Stage

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

STATE = {"extra_state_merged.pt", "lr_scheduler_state.json"}


def with_state(step_dir: Path, epoch: int, seed: int) -> Path:
    """Save a step of verl with its scheduler."""
    actor = save_ranks(step_dir / "actor", some_tensors(seed), 2)
    for rank in range(2):
        state = {"lr_scheduler": {"last_epoch": epoch}, "rng": {"cpu": torch.get_rng_state()}}
        torch.save(state, actor / f"extra_state_world_size_2_rank_{rank}.pt")
    return step_dir


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A model as a trainer without shards leaves it."""
    directory = tmp_path / "run" / "checkpoint-5"
    directory.mkdir(parents=True)
    save_file(some_tensors(), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text("{}")
    return directory


def test_a_model_is_never_merged_into_itself(whole: Path) -> None:
    before = snapshot(whole)
    with pytest.raises(OutputError, match="contains the weights that are merged"):
        unshard.merge(whole, whole, overwrite=True, dtype="bfloat16")
    with pytest.raises(OutputError, match=r"model\.safetensors"):
        unshard.merge(whole, whole, overwrite=True, dry_run=True)
    with pytest.raises(OutputError):
        FSDP2Merger().merge(whole)
    assert snapshot(whole) == before


def test_an_average_does_not_take_the_place_of_its_sources(whole: Path, tmp_path: Path) -> None:
    other = save_ranks(tmp_path / "other", some_tensors(1), 2)
    before = snapshot(whole)
    with pytest.raises(OutputError, match="would be lost"):
        unshard.average([whole, other], whole, options=MergeOptions(overwrite=True), config="none")
    assert snapshot(whole) == before


def test_through_a_link_it_is_still_itself(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(whole)
    before = snapshot(whole)
    with pytest.raises(OutputError):
        unshard.merge(whole, tmp_path / "link", overwrite=True)
    assert snapshot(whole) == before


@pytest.mark.parametrize("place", ["apart", "in place"])
def test_the_state_of_another_step_does_not_stay(tmp_path: Path, place: str) -> None:
    run = tmp_path / "run"
    first, second = (with_state(run / f"global_step_{n}", n, n) for n in (10, 20))
    out = run if place == "in place" else tmp_path / "out"
    unshard.merge(first, out, overwrite=True, config="none")
    assert names(out) >= STATE
    assert torch.load(out / "extra_state_merged.pt")["lr_scheduler"]["last_epoch"] == 10
    unshard.merge(second, out, overwrite=True, config="none")
    assert torch.load(out / "extra_state_merged.pt")["lr_scheduler"]["last_epoch"] == 20
    recorded = json.loads((out / "unshard.json").read_text())["output"]["training_state"]
    assert set(recorded) == STATE
    unshard.merge(first, out, overwrite=True, extra_state=False, config="none")
    assert not names(out) & STATE
    assert_same(merged(out), some_tensors(10))


def test_an_average_leaves_no_state_of_a_merge(tmp_path: Path) -> None:
    steps = [with_state(tmp_path / f"global_step_{n}", n, n) for n in (10, 20)]
    unshard.merge(steps[0], tmp_path / "out", config="none")
    unshard.average(steps, tmp_path / "out", options=MergeOptions(overwrite=True), config="none")
    assert not names(tmp_path / "out") & STATE


def test_a_state_that_another_program_put_there_stays(tmp_path: Path) -> None:
    step = with_state(tmp_path / "global_step_10", 10, 10)
    unshard.merge(step, tmp_path / "out", extra_state=False, config="none")
    (tmp_path / "out" / "extra_state_merged.pt").write_text("mine")
    unshard.merge(step, tmp_path / "out", extra_state=False, overwrite=True, config="none")
    assert (tmp_path / "out" / "extra_state_merged.pt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_config_that_was_asked_for_takes_the_place_of_the_old(tmp_path: Path, kind: str) -> None:
    step = save_ranks(tmp_path / "global_step_1" / "actor", some_tensors(), 2).parent
    for name in ("config.json", "tokenizer.json"):
        (step / name).write_text('{"mine": "old"}')
    given = tmp_path / "given"
    given.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (given / name).write_text('{"mine": "new"}')
    config = given / "config.json" if kind == "file" else given
    unshard.merge(step, step, overwrite=True, config=config)
    assert json.loads((step / "config.json").read_text())["mine"] == "new"
    kept = json.loads((step / "tokenizer.json").read_text())["mine"]
    assert kept == ("old" if kind == "file" else "new")
    unshard.merge(step, step, overwrite=True, config="none")  # without it, what is there stays
    assert json.loads((step / "config.json").read_text())["mine"] == "new"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A step of a run, with its config."""
    step = save_ranks(tmp_path / "run" / "checkpoint-7", some_tensors(), 2)
    (step / "config.json").write_text("{}")
    return step


def adapter(directory: Path) -> set[str]:
    (directory / "adapter_config.json").write_text("{}")
    save_file(some_tensors(3), directory / "adapter_model.safetensors", {"format": "pt"})
    return {"adapter_config.json", "adapter_model.safetensors"}


def base_model(directory: Path) -> set[str]:
    """Write a model as transformers saves it, and as it was saved before safetensors."""
    before = names(directory)
    for number, (name, tensor) in enumerate(some_tensors(4).items()):
        save_file({name: tensor}, directory / f"model-{number + 1:05}-of-00009.safetensors")
    (directory / "model.safetensors.index.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"weights")
    return names(directory) - before


def a_state(directory: Path) -> set[str]:
    (directory / "model.fp16.safetensors").write_bytes(b"mine")
    (directory / "unshard.json").write_text('{"output": {"files": {"model.fp16.safetensors": 4}}}')
    return {"model.fp16.safetensors", "unshard.json"}


def a_link(directory: Path) -> set[str]:
    save_file(some_tensors(), directory.parent / "blob", {"format": "pt"})
    (directory / "model.safetensors").symlink_to("../blob")
    return {"model.safetensors"}


STRANGERS = [adapter, base_model, a_state, a_link]


@pytest.mark.parametrize("put", STRANGERS)
@pytest.mark.parametrize("place", ["in place", "apart"])
def test_what_unshard_did_not_write_is_not_replaced(
    shards: Path, tmp_path: Path, put: Callable[[Path], set[str]], place: str
) -> None:
    out = shards if place == "in place" else tmp_path / "out"
    out.mkdir(exist_ok=True)
    others = put(out)
    before = snapshot(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(OutputError, match="files that unshard did not write") as error:
            unshard.merge(shards, out, overwrite=True, lora="ignore", dry_run=dry_run)
        assert all(name in str(error.value) for name in others)
        assert "move them away" in error.value.hint
    # The class has no option to leave out an adapter that is next to the shards.
    is_beside = put is adapter and out == shards
    what = "next to them" if is_beside else "files that unshard did not write"
    with pytest.raises(ConversionError if is_beside else OutputError, match=what):
        FSDP2Merger().merge(shards, out)
    assert snapshot(tmp_path) == before
    unshard.merge(shards, out, overwrite="all", lora="ignore")
    assert_same(merged(out), some_tensors())
    assert not (names(out) & others) - {"model.safetensors", "unshard.json"}
    unshard.merge(shards, out, overwrite=True)  # now it is ours


@pytest.mark.parametrize("place", ["in place", "apart"])
def test_an_adapter_that_appears_meanwhile_is_not_removed(
    shards: Path, tmp_path: Path, place: str
) -> None:
    out = shards if place == "in place" else tmp_path / "out"
    unshard.merge(shards, out, overwrite=True)
    before = merged(out)

    def saves(event: Event) -> None:
        if event == Stage("committing"):
            adapter(out)

    with pytest.raises(OutputError, match=r"adapter_config\.json, adapter_model\.safetensors"):
        unshard.merge(shards, out, overwrite=True, dtype="float16", listener=saves)
    assert_same(merged(out), before)
    assert (out / "adapter_model.safetensors").exists()


def test_a_file_of_ours_that_was_edited_is_not_replaced(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    unshard.merge(shards, out)
    (out / "config.json").write_text('{"rope_scaling": null}')
    (out / "notes.txt").write_text("mine")
    before = snapshot(out)
    with pytest.raises(OutputError, match=r"changed since: config\.json\n"):
        unshard.merge(shards, out, overwrite=True)
    assert snapshot(out) == before
    unshard.merge(shards, out, overwrite="all")
    assert (out / "notes.txt").read_text() == "mine"


def older(out: Path, version: str) -> None:
    """Make the record what versions wrote that listed weights only."""
    record = json.loads((out / "unshard.json").read_text())
    del record["output"]["companions"]
    (out / "unshard.json").write_text(json.dumps(record | {"unshard": version}))


@pytest.mark.parametrize("place", ["in place", "apart"])
@pytest.mark.parametrize("size", ["100B", "5GB"])
def test_an_output_of_an_older_version_is_replaced(
    shards: Path, tmp_path: Path, place: str, size: str
) -> None:
    out = shards if place == "in place" else tmp_path / "out"
    unshard.merge(shards, out, overwrite=True, max_shard_size=size)
    older(out, "0.1.0")
    unshard.merge(shards, out, overwrite=True, dtype="bfloat16")
    assert {tensor.dtype for tensor in merged(out).values() if tensor.is_floating_point()} == {
        torch.bfloat16
    }
    (out / "pytorch_model.bin").write_bytes(b"mine")
    with pytest.raises(OutputError, match=r"pytorch_model\.bin"):
        unshard.merge(shards, out, overwrite=True)


@pytest.mark.parametrize("files", [1, 2])
def test_what_another_tool_merged_in_place_from_the_same_weights_is_replaced(
    shards: Path, files: int
) -> None:
    """As the tools do that unshard replaces: bfloat16, by safetensors' own writer."""
    cast = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in some_tensors().items()
    }
    order = list(cast)
    for number in range(files):
        part = {name: cast[name] for name in order[number::files]}
        name = f"model-{number + 1:05}-of-{files:05}" if files > 1 else "model"
        save_file(part, shards / f"{name}.safetensors", {"format": "pt"})
    if files > 1:
        (shards / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    FSDP2Merger().merge(shards)
    assert_same(merged(shards), cast)
    assert names(shards) & {"model-00001-of-00002.safetensors"} == set()


@pytest.mark.parametrize("what", ["value", "dtype", "name"])
def test_weights_that_another_tool_merged_from_others_are_not(shards: Path, what: str) -> None:
    tensors = some_tensors()
    last = list(tensors)[-1]
    if what == "value":
        changed = tensors[last].clone()
        changed.view(torch.uint8).flatten()[-1] ^= 1
        tensors[last] = changed
    elif what == "dtype":
        tensors = {name: tensor.double() for name, tensor in tensors.items()}
    else:
        tensors["more"] = torch.zeros(1)
    save_file(tensors, shards / "model.safetensors", {"format": "pt"})
    before = snapshot(shards)
    with pytest.raises(OutputError, match=r"did not write.*: model\.safetensors\n"):
        unshard.merge(shards, shards, overwrite=True)
    assert snapshot(shards) == before


def test_the_record_in_a_checkpoint_lists_only_what_was_put_there(shards: Path) -> None:
    (shards / "tokenizer.json").write_text("{}")
    unshard.merge(shards, shards, overwrite=True, max_shard_size="100B")
    first = json.loads((shards / "unshard.json").read_text())["output"]
    assert list(first["companions"]) == ["model.safetensors.index.json"]
    (shards / "tokenizer.json").rename(shards / "config.json")
    unshard.merge(shards, shards, overwrite=True, config=shards / "config.json")
    for _ in range(2):
        listed = json.loads((shards / "unshard.json").read_text())["output"]["companions"]
        assert listed == {"config.json": (shards / "config.json").stat().st_size}
        unshard.merge(shards, shards, overwrite=True)


def test_the_command_line_takes_overwrite_with_and_without_all(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    adapter(out)
    with pytest.raises(SystemExit) as ended:
        main(["merge", "--overwrite", str(shards), str(out)])
    assert ended.value.code == 5
    assert "--overwrite=all" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(shards), str(out), "--overwrite=al"])
    assert ended.value.code == 2
    for flag in ("--overwrite=all", "--overwrite"):
        with pytest.raises(SystemExit) as ended:
            main(["merge", str(shards), str(out), flag])
        assert ended.value.code == 0


@pytest.mark.parametrize("earlier", ["nothing", "an output", "from below"])
def test_the_current_directory_is_not_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: str
) -> None:
    step = with_state(tmp_path / "run" / "global_step_3", 3, 0)
    here = tmp_path / "out"
    (here / "notes").mkdir(parents=True) if earlier == "from below" else here.mkdir()
    if earlier != "nothing":
        older = with_state(tmp_path / "run" / "global_step_2", 2, 1)
        config = tmp_path / "config.json"
        config.write_text('{"model_type": "old"}')
        unshard.merge(older, here, config=config, overwrite=True)
    monkeypatch.chdir(here / "notes" if earlier == "from below" else here)
    unshard.merge(
        step,
        "." if earlier != "from below" else "..",
        overwrite=earlier != "nothing",
        config="none",
    )
    assert Path.cwd().is_relative_to(here)
    assert_same(merged(Path("." if earlier != "from below" else "..")), some_tensors(0))
    assert unshard.verify(here, step).equal
    expected = unshard.merge(step, tmp_path / "expected", config="none")
    assert names(here) - {"notes", "config.json"} == names(Path(expected.output))
    assert names(here.parent) == {"run", "out", "expected", "config.json"} & names(here.parent)


LEFT = {"model.safetensors", "unshard.json"}
COMPANIONS = ("config.json", "tokenizer.json", "tokenizer_config.json")


def merge_with_config(run: Path, out: Path) -> None:
    """Merge a run with a config and a tokenizer; then the run has neither any more."""
    for name in COMPANIONS:
        (run / name).write_text('{"model_type": "llama"}')
    unshard.merge(run, out)
    for name in COMPANIONS:
        (run / name).unlink()


@pytest.mark.parametrize("overwrite", [True, "all"])
@pytest.mark.parametrize("place", ["apart", "entered"])
def test_weights_alone_do_not_get_the_config_of_an_earlier_merge(
    tmp_path: Path, overwrite: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = save_ranks(tmp_path / "run", some_tensors(), 2), tmp_path / "out"
    merge_with_config(run, out)
    (out / "notes.txt").write_text("mine")
    if place == "entered":
        monkeypatch.chdir(out)
    report = unshard.merge(run, out, overwrite=overwrite, config="none")
    assert names(out) == LEFT | {"notes.txt"}
    assert not any("keeps its config.json" in note for note in report.warnings)
    assert_same(merged(out), some_tensors())
    assert set(json.loads((out / "unshard.json").read_text())["output"]["companions"]) == set()


@pytest.mark.parametrize("edit", ["longer", "of the same size", "by another program"])
def test_a_config_that_was_edited_stays_beside_weights_alone(tmp_path: Path, edit: str) -> None:
    run, out = save_ranks(tmp_path / "run", some_tensors(), 2), tmp_path / "out"
    merge_with_config(run, out)
    config = out / "config.json"
    if edit == "by another program":
        (out / "unshard.json").unlink()
        (out / "model.safetensors").unlink()
    text = config.read_text().replace("llama", "qwen3" if edit == "of the same size" else "mixtral")
    config.unlink()
    config.write_text(text)
    later = time.time() + 1
    os.utime(config, (later, later))
    report = unshard.merge(run, out, overwrite=True, config="none")
    assert config.read_text() == text
    kept = {"tokenizer.json", "tokenizer_config.json"} if edit == "by another program" else set()
    assert names(out) == LEFT | {"config.json"} | kept
    assert sum("keeps its config.json" in note for note in report.warnings) == 1


def test_companions_stay_beside_an_output_with_a_config(tmp_path: Path) -> None:
    run, out = save_ranks(tmp_path / "run", some_tensors(), 2), tmp_path / "out"
    merge_with_config(run, out)
    (run / "config.json").write_text('{"model_type": "llama"}')
    unshard.merge(run, out, overwrite=True)
    assert names(out) == LEFT | {*COMPANIONS}


@pytest.mark.parametrize("options", [{"names": "training"}, {"config": "none"}])
def test_a_checkpoint_keeps_the_config_that_a_merge_in_place_gave_it(
    tmp_path: Path, options: Any
) -> None:
    run = save_ranks(tmp_path / "run", some_tensors(), 2)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    unshard.merge(run, run, overwrite=True, config=tmp_path / "config.json")
    unshard.merge(run, run, overwrite=True, **options)
    assert json.loads((run / "config.json").read_text())["model_type"] == "llama"
