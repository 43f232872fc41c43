"""`reuse`: an output that was made already is used, and one that is being made is waited for."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from adapters import adapted
from hub_server import Hub, standing_in
from optimizers import like, save_optimizer
from ranks import assert_same, contents, merged, rank_path, save_ranks, snapshot, some_tensors
from trainers import dcp_under
from unshard import OutputError, Report
from unshard.cli.main import main
from unshard.keywords import MergeKeywords
from unshard.progress import Chosen, Event, Stage, ignore

pytestmark = pytest.mark.filterwarnings(
    "ignore::unshard.UnshardWarning", "ignore:Use 'content=:DeprecationWarning"
)

RECORD = "unshard.json"
Options = dict[str, Any]


def reuse(checkpoint: Path, output: Path, **options: Any) -> Report:
    return unshard.merge(checkpoint, output, reuse=True, listener=ignore, **options)


def written(output: Path) -> dict[str, bytes]:
    """What an output contains, but for its record."""
    return {name: text for name, text in contents(output).items() if name != RECORD}


def state_of(directory: Path) -> tuple[object, ...]:
    """Everything below a directory, with times: what changes if anything is written there."""
    folders = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    return snapshot(directory), [(str(one), one.stat().st_mtime_ns) for one in folders]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A step of a run with optimizer, scheduler and an adapter; the run has another one."""
    for step in (1, 2):
        for role in ("actor", "critic"):
            place = tmp_path / f"run/global_step_{step}/{role}"
            adapted(place, alpha=8.0 * step)
            (place / "model.txt").write_text(role)
            config = {"model_type": "llama", "vocab_size": 13, "torch_dtype": "float16"}
            (place / "config.json").write_text(json.dumps(config | {"step": step, "of": role}))
            for rank in range(2):
                extra = {"lr_scheduler": {"last_epoch": step}}
                torch.save(extra, place / f"extra_state_world_size_2_rank_{rank}.pt")
    return tmp_path / "run/global_step_2"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A checkpoint without an adapter, with the state of its optimizer."""
    place = save_ranks(tmp_path / "whole", some_tensors(), 2)
    save_optimizer(place, {"exp_avg": like(some_tensors(), 1)}, 2)
    (place / "config.json").write_text('{"model_type": "llama"}')
    (place / "tokenizer.json").write_text("{}")
    for rank in range(2):
        state = {"lr_scheduler": {"last_epoch": 5}}
        torch.save(state, place / f"extra_state_world_size_2_rank_{rank}.pt")
    return place


def test_an_output_is_used_again_and_nothing_is_written(checkpoint: Path, tmp_path: Path) -> None:
    first = reuse(checkpoint, tmp_path / "a/out")
    assert not first.reused
    assert first.bytes_written
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"out"}
    before = state_of(tmp_path)
    heard: list[Event] = []
    again = unshard.merge(checkpoint, tmp_path / "a/out", reuse=True, listener=heard.append)
    assert again.reused
    assert (again.bytes_read, again.bytes_written) == (0, 0)
    assert again.files == first.files
    assert (
        Chosen(f"using {tmp_path / 'a/out'}, which was made from this checkpoint already") in heard
    )
    assert state_of(tmp_path) == before


def test_what_a_plain_merge_made_is_used(checkpoint: Path, tmp_path: Path) -> None:
    unshard.merge(checkpoint, tmp_path / "out", dtype="float16", listener=ignore)
    assert reuse(checkpoint, tmp_path / "out", dtype="float16").reused


def test_the_command_says_that_an_output_is_used(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["merge", str(checkpoint), str(tmp_path / "out"), "--reuse"]

    def told(*more: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*line, *more])
        assert not ended.value.code
        return capsys.readouterr().out.partition("names not checked")[0]

    assert "saved to" in told()
    source = f"{tmp_path / 'out'}, which was made from {checkpoint / 'actor'} already\n"
    assert told() == f"used {source}"
    assert told("--dry-run") == f"would use {source}"
    assert json.loads(told("--json"))["reused"] is True


def test_another_output_is_an_error_that_says_what_it_is(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reuse(checkpoint, out)
    before = snapshot(tmp_path)
    with pytest.raises(OutputError, match="exists already") as other_options:
        reuse(checkpoint, out, dtype="float16")
    assert 'other options: {"dtype": "keep"' in other_options.value.found
    assert "overwrite=True" in str(other_options.value)
    with pytest.raises(OutputError, match="exists already") as other_step:
        reuse(checkpoint.with_name("global_step_1"), out)
    assert other_step.value.found == "an output made from global_step_2 (actor)"
    with pytest.raises(OutputError, match="exists already"):
        reuse(checkpoint, out, dtype="float16", dry_run=True)
    assert snapshot(tmp_path) == before
    for is_reused in (False, True):
        report = reuse(checkpoint, out, dtype="float16", overwrite=True)
        assert report.reused is is_reused
        assert merged(out)["model.norm.weight"].dtype == torch.float16


def saved_again(place: Path) -> None:
    tensors = some_tensors(7)
    sizes = [rank_path(place, 2, rank).stat().st_size for rank in range(2)]
    save_ranks(place, tensors, 2)
    assert [rank_path(place, 2, rank).stat().st_size for rank in range(2)] == sizes


def other_config(place: Path) -> None:
    text = (place / "config.json").read_text()
    (place / "config.json").write_text(text.replace("llama", "qwen2"))


def other_tokenizer(place: Path) -> None:
    (place / "tokenizer.json").write_text("[]")


def other_state(place: Path) -> None:
    torch.save({"lr_scheduler": {"last_epoch": 6}}, place / "extra_state_world_size_2_rank_1.pt")


@pytest.mark.parametrize("change", [saved_again, other_config, other_tokenizer, other_state])
def test_a_checkpoint_that_was_saved_again_is_another(
    whole: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    reuse(whole, tmp_path / "out")
    change(whole)
    with pytest.raises(OutputError, match="exists already") as raised:
        reuse(whole, tmp_path / "out")
    assert "saved again" in raised.value.found
    assert not reuse(whole, tmp_path / "out", overwrite=True).reused
    unshard.merge(whole, tmp_path / "new", listener=ignore)
    assert contents(tmp_path / "out") == contents(tmp_path / "new")


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors", RECORD, "config.json"])
def test_an_output_that_is_not_whole_is_not_used(whole: Path, tmp_path: Path, file: str) -> None:
    reuse(whole, tmp_path / "out")
    (tmp_path / "out" / file).unlink()
    with pytest.raises(OutputError, match="exists already"):
        reuse(whole, tmp_path / "out")
    assert not reuse(whole, tmp_path / "out", overwrite="all").reused
    assert (tmp_path / "out" / file).exists()


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_config.json"])
def test_an_output_with_other_weights_next_to_it_is_not_used(
    whole: Path, tmp_path: Path, name: str
) -> None:
    """transformers would load them instead, or together with it."""
    sharded = {"max_shard_size": "300B"}
    reuse(whole, tmp_path / "out", **sharded)
    (tmp_path / "out" / name).write_text("{}")
    for options in ({}, {"dry_run": True}):
        with pytest.raises(OutputError, match="exists already") as raised:
            reuse(whole, tmp_path / "out", **sharded, **options)
        assert "other weights next to it" in raised.value.found
    with pytest.raises(OutputError, match=f"files that unshard did not write.* {name}"):
        reuse(whole, tmp_path / "out", **sharded, overwrite=True)
    assert not reuse(whole, tmp_path / "out", **sharded, overwrite="all").reused
    assert not (tmp_path / "out" / name).exists()
    (tmp_path / "out/other.json").write_text("{}")
    assert reuse(whole, tmp_path / "out", **sharded).reused


def test_an_adapter_that_was_written_in_place_is_used(checkpoint: Path) -> None:
    """The checkpoint's own adapter_config.json stays, which the record does not list."""
    actor = checkpoint / "actor"
    unshard.merge(actor, checkpoint.parent / "adapter", lora="adapter", listener=ignore)
    shutil.copy(checkpoint.parent / "adapter/adapter_config.json", actor)
    for is_reused in (False, True):
        options: Options = {"lora": "adapter", "overwrite": not is_reused}
        assert reuse(actor, actor, **options).reused is is_reused


@pytest.mark.parametrize(("verify", "at"), [("light", 20), ("full", -1)])
def test_a_damaged_output_is_not_used_and_made_again_if_it_may_be_replaced(
    whole: Path, tmp_path: Path, verify: str, at: int
) -> None:
    reuse(whole, tmp_path / "out")
    unshard.merge(whole, tmp_path / "right", listener=ignore)
    path = tmp_path / "out/model.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    heard: list[Event] = []
    options: Options = {"verify": verify}
    with pytest.raises(OutputError, match=r"model\.safetensors") as raised:
        unshard.merge(whole, tmp_path / "out", reuse=True, listener=heard.append, **options)
    assert "overwrite=True" in str(raised.value)
    assert not any(isinstance(event, Chosen) and "using" in str(event) for event in heard)
    assert path.read_bytes() == data
    options["overwrite"] = True
    assert not reuse(whole, tmp_path / "out", **options).reused
    assert contents(tmp_path / "out") == contents(tmp_path / "right")
    assert reuse(whole, tmp_path / "out", **options).reused


def test_of_threads_that_find_an_output_damaged_one_makes_it_again(
    whole: Path, tmp_path: Path
) -> None:
    reuse(whole, tmp_path / "out")
    path = tmp_path / "out/model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    have_looked, reports = threading.Barrier(4, timeout=60), list[Report]()

    def merge() -> None:
        is_first = True

        def hear(event: Event) -> None:
            nonlocal is_first
            if is_first and isinstance(event, Stage) and event.name == "verifying":
                is_first = False
                have_looked.wait()

        options: Options = {"verify": "full", "overwrite": True, "listener": hear}
        reports.append(unshard.merge(whole, tmp_path / "out", reuse=True, **options))

    threads = [threading.Thread(target=merge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report.reused for report in reports) == [False, True, True, True]
    assert_same(merged(tmp_path / "out"), some_tensors())


def test_a_compressed_checkpoint_is_known_again(tmp_path: Path) -> None:
    """Its plan is another one once its values can be compared: tied weights are one."""
    tensors = some_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    place = tmp_path / "checkpoint"
    dcp_under("model", compressed=True)(place, tensors)
    options = {"config": "none", "verify": "full"}
    assert not reuse(place, tmp_path / "out", **options).reused
    for verify in ("light", "full"):
        report = reuse(place, tmp_path / "out", config="none", verify=verify)
        assert report.reused
        sizes = {name: (tmp_path / "out" / name).stat().st_size for name in report.files}
        assert sizes == report.files
    with unshard.virtual(place, config="none", listener=ignore) as files:
        assert files[RECORD].read() == (tmp_path / "out" / RECORD).read_bytes()


def test_a_reused_output_is_pushed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standing_in(monkeypatch, tmp_path) as hub:
        assert isinstance(hub, Hub)
        reuse(checkpoint, tmp_path / "out")
        report = reuse(checkpoint, tmp_path / "out", push_to_hub="someone/model")
        assert report.reused
        assert report.url == f"{hub.address}/someone/model"
        files = hub.repos["someone/model"].files
    assert files["model.safetensors"] == (tmp_path / "out/model.safetensors").read_bytes()


def test_every_step_and_every_role_is_used(checkpoint: Path, tmp_path: Path) -> None:
    out, run = tmp_path / "out", checkpoint.parent
    options = MergeKeywords(reuse=True, role="all", config="none")
    reports = unshard.merge_all(run, out, listener=ignore, **options)
    assert [report.reused for report in reports] == [False] * 4
    shutil.rmtree(out / "global_step_1-critic")
    reports = unshard.merge_all(run, out, listener=ignore, **options)
    assert [Path(report.output).name for report in reports if not report.reused] == [
        "global_step_1-critic"
    ]


def test_an_average_is_used(tmp_path: Path) -> None:
    steps = [tmp_path / f"run/global_step_{step}" for step in (1, 2)]
    for step, place in enumerate(steps):
        save_ranks(place, some_tensors(step), 2)

    def average(*coefficients: float, order: int = 1, **options: Any) -> Report:
        kwargs = {"coefficients": coefficients, "listener": ignore, "config": "none", **options}
        return unshard.average(steps[::order], tmp_path / "out", reuse=True, **kwargs)

    assert not average(1, 2).reused
    assert average(1, 2).reused
    for one in ({"order": -1}, {"dtype": "float16"}):
        with pytest.raises(OutputError, match="exists already"):
            average(1, 2, **one)
    with pytest.raises(OutputError, match="exists already"):
        average(1, 3)
    with pytest.raises(OutputError, match=r"made from global_step_1 .*global_step_2"):
        reuse(steps[0], tmp_path / "out", config="none")


def test_the_fingerprint_is_that_of_no_mount(whole: Path, tmp_path: Path) -> None:
    """A disk that is mounted elsewhere has other paths, devices and inodes, and the same times."""
    reuse(whole, tmp_path / "out")
    shutil.copytree(whole, tmp_path / "other/mount/whole")
    (tmp_path / "link").symlink_to(whole)
    for place in (tmp_path / "other/mount/whole", tmp_path / "link", whole / "../whole"):
        assert reuse(place, tmp_path / "out", workers=3, memory="65MB").reused


def test_a_relative_path_is_the_same_checkpoint(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reuse(whole, tmp_path / "out")
    monkeypatch.chdir(whole)
    assert reuse(Path(), tmp_path / "out").reused
    assert reuse(Path("../whole"), Path("../out")).reused


def lmms(tmp_path: Path) -> Path:
    place = tmp_path / "lmms/checkpoint-5"
    save_ranks(place / "pytorch_model_fsdp_0", some_tensors(), 2)
    save_ranks(place / "pytorch_ema_model_fsdp_0", some_tensors(1), 2)
    (place / "config.json").write_text('{"model_type": "llama"}')
    return place


BASE: Options = {"lora": "fuse"}
HALF = BASE | {"dtype": "float16"}
VALUES: dict[str, list[tuple[Options, Options]]] = {
    "weights": [(BASE, {"weights": "model"})],
    "role": [(BASE, {"role": "critic"}), (BASE, {"role": "actor"})],
    "step": [(BASE, {"step": 1}), (BASE, {"step": 2})],
    "also": [({"also": ["{}/b"]}, {"also": ["{}/c"]}), ({"also": ["{}/b"]}, {"also": ["{}/d"]})],
    "ep_size": [(BASE, {"ep_size": None})],
    "assume_dim0": [(BASE, {"assume_dim0": True})],
    "allow_globals": [(BASE, {"allow_globals": ["some.Tensor"]})],
    "names": [(BASE, {"names": "training"})],
    "base": [(BASE, {"base": "{}/base"})],
    "lora_alpha": [(one, {"lora_alpha": 3.0}) for one in (BASE, {"lora": "adapter"})]
    + [(BASE, {"lora_alpha": 16.0})],
    "config": [(BASE, {"config": "{}/other.json"}), (BASE, {"config": "{}/same.json"})],
    "dtype": [(BASE, {"dtype": "float16"}), (BASE, {"dtype": "config"})],
    "keep_fp32": [(HALF, {"keep_fp32": "norm"}), (HALF, {"keep_fp32": "nothing"})],
    "quantize": [(BASE, {"quantize": "fp8-block"})],
    "include": [(BASE, {"include": "norm"}), (BASE, {"include": "."})],
    "exclude": [(BASE, {"exclude": "norm"}), (BASE, {"exclude": "nothing"})],
    "lora": [(BASE, {"lora": one}) for one in ("adapter", "both", None)],
    "allow_missing": [(BASE, {"allow_missing": True})],
    "allow_unexpected": [(BASE, {"allow_unexpected": True})],
    "max_shard_size": [(BASE, {"max_shard_size": "300B"}), (BASE, {"max_shard_size": "1GB"})],
    "extra_state": [(BASE, {"extra_state": False})],
    "optimizer": [({"config": "none"}, {"optimizer": True})],
    "overwrite": [(BASE, {"overwrite": True})],
    "resume": [(BASE, {"resume": True})],
    "reuse": [(BASE, {"reuse": True})],
    "push_to_hub": [(BASE, {"push_to_hub": "a/b"})],
    "private": [(BASE, {"push_to_hub": "a/b", "private": True})],
    "dry_run": [(BASE, {"dry_run": True})],
    "verify": [(BASE, {"verify": "off"})],
    "checksums": [],  # which --reuse excludes
    "workers": [(BASE, {"workers": 5})],
    "memory": [(BASE, {"memory": "70MB"})],
    "engine": [(BASE, {"engine": "ray"})],
}
OF_ITSELF = {"push_to_hub", "private", "dry_run", "reuse", "engine"}
"""Options with which nothing is made here, or nothing else than without them."""


@pytest.fixture
def places(checkpoint: Path, whole: Path, tmp_path: Path) -> Path:
    for node, tensors in enumerate((some_tensors(), some_tensors(), some_tensors(3))):
        for name in ("a", "b") if not node else "cd"[node - 1]:
            save_ranks(tmp_path / name, tensors, 2)
            rank_path(tmp_path / name, 2, int(name == "a")).unlink()
    path = rank_path(tmp_path / "b", 2, 1)
    shutil.copy2(path, tmp_path / "c")
    (tmp_path / "a/config.json").write_text('{"model_type": "llama"}')
    wide = {"model.layers.0.mlp.up_proj.weight": torch.rand(130, 129)}
    save_ranks(tmp_path / "wide", wide | some_tensors(), 2)
    shutil.copy(tmp_path / "a/config.json", tmp_path / "wide")
    config = json.loads((checkpoint / "actor/config.json").read_text())
    (tmp_path / "same.json").write_text(json.dumps(config))
    (tmp_path / "other.json").write_text(json.dumps(config | {"vocab_size": 14}))
    base = tmp_path / "base"
    unshard.merge(whole, base, listener=ignore, extra_state=False)
    (base / "generation_config.json").write_text("{}")
    return tmp_path


def test_every_option_is_known_here() -> None:
    assert VALUES.keys() == MergeKeywords.__annotations__.keys()


@pytest.mark.parametrize("option", VALUES)
def test_another_option_is_noticed_if_it_changes_the_output(
    checkpoint: Path, whole: Path, places: Path, option: str
) -> None:
    """And only then, but for a config that another file gives: files are known by their names."""

    def filled(options: Options) -> Options:
        texts = json.loads(json.dumps(options).replace("{}", str(places)))
        assert isinstance(texts, dict)
        return texts

    special = {"optimizer": whole, "also": places / "a", "quantize": places / "wide"}
    place = special.get(option, checkpoint.parent)
    for number, (first, more) in enumerate(VALUES[option]):
        one, other = places / f"one-{number}", places / f"other-{number}"
        unshard.merge(place, one, listener=ignore, **filled(first))
        options = filled(first | more)
        is_same = option in OF_ITSELF
        if not is_same:
            unshard.merge(place, other, listener=ignore, **options)
            is_same = written(one) == written(other)
        options |= {"dry_run": True}
        options |= {"overwrite": False, "reuse": True}
        is_reused = False
        with suppress(OutputError):  # it exists already
            is_reused = unshard.merge(place, one, listener=ignore, **options).reused
        if option != "config":
            assert is_reused is is_same, options
        assert is_same or not is_reused, options


def test_other_weights_of_a_step_are_another_output(tmp_path: Path) -> None:
    place = lmms(tmp_path)
    reuse(place, tmp_path / "out")
    with pytest.raises(OutputError, match="exists already"):
        reuse(place, tmp_path / "out", weights="ema")


def test_of_threads_that_want_one_output_one_makes_it(whole: Path, tmp_path: Path) -> None:
    reports: list[Report] = []
    threads = [
        threading.Thread(target=lambda: reports.append(reuse(whole, tmp_path / "a/b/out")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report.reused for report in reports) == [False] + [True] * 7
    assert {path.name for path in (tmp_path / "a/b").iterdir()} == {"out"}


def test_an_output_that_a_plain_merge_made_first_is_used(whole: Path, tmp_path: Path) -> None:
    """That does not ask for its turn, and may begin at any time."""
    out = tmp_path / "out"

    def hear(event: Event) -> None:
        if event == Stage("committing"):
            unshard.merge(whole, out, listener=ignore)

    report = unshard.merge(whole, out, reuse=True, listener=hear)
    assert report.reused
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}
    assert_same(merged(out), some_tensors())


def test_an_output_that_another_merge_made_first_is_an_error(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def hear(event: Event) -> None:
        if event == Stage("committing"):
            unshard.merge(whole, out, listener=ignore, dtype="float16")

    with pytest.raises(OutputError) as raised:
        unshard.merge(whole, out, reuse=True, listener=hear)
    assert "other options" in raised.value.found
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}


def test_a_merge_that_fails_leaves_nothing_next_to_its_target(whole: Path, tmp_path: Path) -> None:
    with rank_path(whole, 2, 1).open("r+b") as file:
        file.seek(-200, os.SEEK_END)
    before = state_of(tmp_path)

    def hear(event: Event) -> None:
        if event == Stage("committing"):
            raise OutputError("made to fail")

    with pytest.raises(OutputError, match="made to fail"):
        unshard.merge(whole, tmp_path / "a/b/out", reuse=True, listener=hear)
    assert state_of(tmp_path)[0] == before[0]
    assert not (tmp_path / "a").exists()


def test_a_checkpoint_that_holds_its_output_keeps_its_time(whole: Path, tmp_path: Path) -> None:
    """Trainers rotate checkpoints by it."""
    before = whole.stat().st_mtime_ns
    for is_reused in (False, True):
        assert reuse(whole, whole / "hf").reused is is_reused
        assert whole.stat().st_mtime_ns == before
    assert not [path for path in whole.iterdir() if path.name.startswith("_unshard")]
    assert tmp_path.exists()
