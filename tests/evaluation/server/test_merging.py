import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from evaluation.running import (
    hanging_worker,
    largest_file,
    leave_staging,
    request,
    script_profile,
    wait_until,
    whole_model,
)
from megatron_cases import truth_of, unpack
from ranks import assert_same, merged, save_ranks, snapshot, some_tensors
from unshard.evaluate.jobs import EvaluationError, Job, Status
from unshard.evaluate.process import Process
from unshard.evaluate.server.attempts import merging
from unshard.evaluate.server.attempts.merge_worker import MergeOrder, _answer
from unshard.evaluate.server.attempts.merging import (
    CheckpointGoneError,
    CrashedError,
    GivenUpError,
    Merger,
    PassingError,
)
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.processes.table import is_alive, kill_group
from zero_files import save_zero, zero_model

pytestmark = pytest.mark.slow

SCRIPT, HASTY = script_profile(), script_profile(timeout=0.0)


def job(checkpoint: Path, weights: str = "model", pin: str | None = None) -> Job:
    asked = request(checkpoint, weights=weights)
    return Job("job", asked, Status.RUNNING, 0.0, pin=pin)


@pytest.fixture
def merger(tmp_path: Path) -> Merger:
    return Merger(tmp_path / "merged", at_once=1)


def prepare(merger: Merger, what: Job, directory: Path, profile: Profile = SCRIPT) -> Path:
    attempt = directory / "attempt"
    attempt.mkdir(exist_ok=True)
    return prepare_in(merger, what, attempt, profile=profile)


def prepare_in(
    merger: Merger,
    what: Job,
    attempt: Path,
    is_given_up: Callable[[], bool] = lambda: False,
    *,
    profile: Profile = SCRIPT,
) -> Path:
    return merger.prepare(what, profile, directory=attempt, is_given_up=is_given_up)


def test_a_sharded_checkpoint_is_merged_and_not_touched(tmp_path: Path, merger: Merger) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    before = snapshot(checkpoint)
    model = prepare(merger, job(checkpoint), tmp_path)
    assert model == tmp_path / "merged" / "job" == merger.model_of(job(checkpoint))
    assert_same(merged(model), some_tensors())
    assert snapshot(checkpoint) == before
    assert merger.list_kept() == ["job"]
    assert (tmp_path / "attempt" / "merge.log").read_text() == ""  # the worker ended well
    merger.remove("job")
    assert merger.list_kept() == []


def test_checkpoints_of_deepspeed_and_megatron_are_merged_too(
    tmp_path: Path, merger: Merger
) -> None:
    tensors = {name: one for name, one in some_tensors().items() if one.dtype == torch.float32}
    zero = zero_model(tensors, order=list(tensors))
    deepspeed = save_zero(tmp_path / "checkpoint-3" / "global_step3", zero, world=2, stage=3)
    (deepspeed.parent / "latest").write_text("global_step3")
    (deepspeed.parent / "config.json").write_text('{"model_type": "x"}')
    assert_same(merged(prepare(merger, job(deepspeed.parent), tmp_path)), zero.truth)
    merger.remove("job")
    megatron = unpack(tmp_path / "megatron") / "llama_tp2_pp2"
    model = prepare(merger, job(megatron), tmp_path)
    assert_same(merged(model), truth_of(megatron, "hub"))
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"


def test_the_ema_weights_are_merged_where_they_are_asked_for(
    tmp_path: Path, merger: Merger
) -> None:
    step = tmp_path / "checkpoint-5"
    save_ranks(step / "pytorch_model_fsdp_0", some_tensors(0), 2)
    save_ranks(step / "pytorch_ema_model_fsdp_0", some_tensors(1), 2)
    assert_same(merged(prepare(merger, job(step, "ema"), tmp_path)), some_tensors(1))


def test_a_whole_model_is_taken_as_it_is(tmp_path: Path, merger: Merger) -> None:
    model = whole_model(tmp_path / "model")
    assert prepare(merger, job(model), tmp_path) == model
    assert merger.list_kept() == []


def test_whole_weights_next_to_shards_or_without_a_config_are_merged(
    tmp_path: Path, merger: Merger
) -> None:
    both = whole_model(tmp_path / "both")
    save_ranks(both, some_tensors(), 2)
    assert_same(merged(prepare(merger, job(both), tmp_path)), some_tensors())
    bare = whole_model(tmp_path / "bare")
    (bare / "config.json").unlink()
    assert prepare(merger, job(bare), tmp_path) == tmp_path / "merged" / "job"


def test_a_checkpoint_without_a_config_is_refused_before_it_is_merged(
    tmp_path: Path, merger: Merger
) -> None:
    """An evaluator could not load it; a command may want the weights alone."""
    checkpoint = save_ranks(tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0", some_tensors(), 2)
    with pytest.raises(EvaluationError, match=r"no config\.json was found") as caught:
        prepare(merger, job(checkpoint), tmp_path, LmEvalProfile())
    assert type(caught.value) is EvaluationError
    said = caught.value.text
    assert "unshard merge" not in said  # what is to be done, is done on the server
    assert said.endswith(
        "set `config` of the profile, in the server's YAML, to that file or its directory"
    )
    assert merger.list_kept() == []
    assert_same(merged(prepare(merger, job(checkpoint), tmp_path)), some_tensors())


def test_only_a_profile_that_needs_a_config_looks_for_the_base_that_training_recorded(
    tmp_path: Path, merger: Merger
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "base"}')
    checkpoint = save_ranks(tmp_path / "run" / "global_step_1", some_tensors(), 2)
    settings = json.dumps({"base_model": str(tmp_path / "base")})  # as axolotl's YAML
    (tmp_path / "run" / "config.yaml").write_text(settings)
    model = prepare(merger, job(checkpoint), tmp_path)
    assert not (model / "config.json").exists()
    model = prepare(merger, job(checkpoint), tmp_path, LmEvalProfile())
    assert json.loads((model / "config.json").read_bytes())["model_type"] == "base"


def test_the_config_of_the_profile_is_for_checkpoints_that_have_none(
    tmp_path: Path, merger: Merger
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "config.json").write_text('{"model_type": "given"}')
    (given / "tokenizer.json").write_text("{}")
    checkpoint = save_ranks(tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0", some_tensors(), 2)
    for place, files in ((given, {"tokenizer.json"}), (given / "config.json", set[str]())):
        model = prepare(merger, job(checkpoint), tmp_path, LmEvalProfile(config=place))
        assert json.loads((model / "config.json").read_bytes())["model_type"] == "given"
        assert {path.name for path in model.glob("tokenizer*")} == files
    (checkpoint.parent / "config.json").write_text('{"model_type": "own"}')
    model = prepare(merger, job(checkpoint), tmp_path, LmEvalProfile(config=given))
    assert json.loads((model / "config.json").read_bytes())["model_type"] == "own"
    assert not (model / "tokenizer.json").exists()


def test_a_pin_comes_before_the_checkpoint(tmp_path: Path, merger: Merger) -> None:
    pin = save_ranks(tmp_path / "pin", some_tensors(3), 2)
    pinned = job(tmp_path / "gone", pin=str(pin))
    assert_same(merged(prepare(merger, pinned, tmp_path)), some_tensors(3))
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(4), 2)
    unpinned = job(checkpoint, pin=str(tmp_path / "unpinned"))
    assert_same(merged(prepare(merger, unpinned, tmp_path)), some_tensors(4))


def test_a_checkpoint_that_is_gone_is_told_from_a_bad_one(tmp_path: Path, merger: Merger) -> None:
    with pytest.raises(CheckpointGoneError, match="does not exist"):
        prepare(merger, job(tmp_path / "nothing"), tmp_path)
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    (checkpoint / "model_world_size_2_rank_1.pt").write_bytes(b"")
    with pytest.raises(EvaluationError, match="rank_1") as caught:
        prepare(merger, job(checkpoint), tmp_path)
    assert type(caught.value) is EvaluationError
    assert merger.list_kept() == []


def test_a_checkpoint_that_goes_during_the_merge_is_gone(tmp_path: Path, merger: Merger) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    (checkpoint / "model_world_size_2_rank_1.pt").unlink()

    def rotated() -> bool:
        shutil.rmtree(checkpoint, ignore_errors=True)
        return False

    (tmp_path / "attempt").mkdir()
    with pytest.raises(CheckpointGoneError):
        prepare_in(merger, job(checkpoint), tmp_path / "attempt", rotated)


def test_a_disk_without_space_may_pass(tmp_path: Path, merger: Merger) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", {"big": torch.zeros(500_000)}, 2)
    with largest_file(100_000), pytest.raises(PassingError, match="cannot be written"):
        prepare(merger, job(checkpoint), tmp_path)
    assert merger.list_kept() == []
    assert prepare(merger, job(checkpoint), tmp_path).is_dir()


def test_a_disk_without_space_for_a_single_message_may_pass(tmp_path: Path, merger: Merger) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    with largest_file(0), pytest.raises(PassingError, match="ended with code 75"):
        prepare(merger, job(checkpoint), tmp_path)


@pytest.mark.parametrize(
    ("end", "kind"),
    [("kill -9 $$", PassingError), ("exit 75", PassingError), ("exit 1", CrashedError)],
)
def test_a_worker_that_is_killed_may_pass_and_one_that_crashes_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, kind: type[EvaluationError]
) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    merger = Merger(tmp_path / "merged", at_once=1)
    worker = tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\nread line\n{end}\n")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    with pytest.raises(kind) as caught:
        prepare(merger, job(checkpoint), tmp_path)
    assert type(caught.value) is kind


def test_who_waits_for_a_turn_or_merges_can_be_given_up(tmp_path: Path, merger: Merger) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    (tmp_path / "attempt").mkdir()
    merger._turns.acquire()
    with pytest.raises(GivenUpError):
        prepare_in(merger, job(checkpoint), tmp_path / "attempt", lambda: True)
    merger._turns.release()
    with pytest.raises(GivenUpError):
        prepare_in(merger, job(checkpoint), tmp_path / "attempt", lambda: True)
    assert prepare(merger, job(checkpoint), tmp_path).is_dir()


def test_a_merge_ends_in_time_and_leaves_nothing(tmp_path: Path, merger: Merger) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    (tmp_path / "attempt").mkdir()
    left = leave_staging(tmp_path / "merged")
    with pytest.raises(CrashedError, match="more than 0 s"):
        prepare_in(merger, job(checkpoint), tmp_path / "attempt", profile=HASTY)
    assert not left.exists()
    assert list((tmp_path / "merged").iterdir()) == []


def test_a_merge_that_is_complete_when_it_is_given_up_leaves_nothing(
    tmp_path: Path, merger: Merger, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = job(save_ranks(tmp_path / "ckpt", some_tensors(), 2))
    (tmp_path / "attempt").mkdir()
    output = merger.merged(checkpoint.id)
    worker = tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\nread line\nmkdir -p '{output}'\nexec sleep 1000\n")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    with pytest.raises(GivenUpError):
        prepare_in(merger, checkpoint, tmp_path / "attempt", output.is_dir)
    assert list((tmp_path / "merged").iterdir()) == []


def test_a_worker_that_cannot_be_ended_is_not_waited_for(
    tmp_path: Path, merger: Merger, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    (tmp_path / "attempt").mkdir()
    left: list[Process] = []

    def fails(process: Process, *, grace_s: float) -> bool:
        left.append(process)
        return grace_s < 0

    monkeypatch.setattr(merging, "kill_group", fails)
    monkeypatch.setattr(sys, "executable", str(hanging_worker(tmp_path)))
    with pytest.raises(CrashedError, match="more than 0 s"):
        prepare_in(merger, job(checkpoint), tmp_path / "attempt", profile=HASTY)
    assert is_alive(left[0])
    assert kill_group(left[0], grace_s=0)


def test_a_whole_model_on_a_disk_that_does_not_answer_is_bounded(
    tmp_path: Path, merger: Merger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the worker touches the disk of the checkpoint: it hangs, and the server goes on."""
    model = job(whole_model(tmp_path / "model"))
    (tmp_path / "attempt").mkdir()
    monkeypatch.setattr(sys, "executable", str(hanging_worker(tmp_path)))
    with pytest.raises(GivenUpError):
        prepare_in(merger, model, tmp_path / "attempt", lambda: True)
    with pytest.raises(CrashedError, match="more than 0 s"):
        prepare_in(merger, model, tmp_path / "attempt", profile=HASTY)


def test_merges_take_turns(tmp_path: Path, merger: Merger) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    found: list[Path] = []

    def one(number: int) -> None:
        what = replace(job(checkpoint), id=f"job-{number}")
        directory = tmp_path / str(number)
        directory.mkdir()
        found.append(prepare_in(merger, what, directory))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(found) == 2, "two merges")
    for thread in threads:
        thread.join()
    assert sorted(merger.list_kept()) == ["job-0", "job-1"]


def test_shards_that_may_not_be_read_are_not_tried_again() -> None:
    """As another user, where root runs the tests: root reads everything."""
    with TemporaryDirectory() as place:  # pytest's own directories are closed to other users
        root = Path(place)
        root.chmod(0o777)
        checkpoint = save_ranks(root / "ckpt", some_tensors(), 2)
        (checkpoint / "model_world_size_2_rank_1.pt").chmod(0o000)
        order = MergeOrder(str(checkpoint), str(root / "out"), {})
        own = os.geteuid()
        try:
            if own == 0:
                os.seteuid(12345)
            answer = _answer(order)
        finally:
            os.seteuid(own)
        assert answer["may_pass"] is False
        assert "rank_1.pt" in str(answer["error"])
        assert "ermission denied" in str(answer["error"])
