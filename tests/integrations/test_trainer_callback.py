"""What the callback of transformers' Trainer writes into a run, and the follower that it starts."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from following import RECORD, outputs_in
from oracle.writers.trainer import Sentences
from ranks import contents, snapshot
from tiny_models import tiny_model, tiny_tokenizer, with_adapter
from trainer_child import plain_arguments
from unshard.api.following.followed import FollowState
from unshard.integrations.transformers import UnshardCallback, write_companions
from unshard.write.dirfd import closing, try_lock
from waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers and peft say

TESTS = Path(__file__).parents[1]
CONFIG = "config.json"


def train(
    run: Path,
    *callbacks: TrainerCallback,
    steps: int = 1,
    model: Any = None,
    tokenizer: Any = None,
    resume: bool = False,
    **more: Any,
) -> Trainer:
    trainer = Trainer(
        model or tiny_model(),
        plain_arguments(run, steps, **more),
        train_dataset=Sentences(),
        callbacks=[*callbacks],
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return our warnings."""
    ours = (one for one in caplog.records if one.name.startswith("unshard."))
    return [one.getMessage() for one in ours if one.levelno >= logging.WARNING]


def log_of(run: Path) -> str:
    return (run / "_unshard" / "follow.log").read_text()


def followers(pid: int) -> list[int]:
    """Return the processes that a process has started and that follow a run."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with suppress(OSError):
                if b"--follow" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(child))
    return found


def own_files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}


class Doing(TrainerCallback):
    """Does something when training begins, after the callbacks before it, or when it ends."""

    def __init__(self, what: Callable[[], object], *, at_end: bool = False) -> None:
        self.what, self.at_end = what, at_end

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        del args, state, control
        if not self.at_end:
            self.what()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        del args, state, control
        if self.at_end:
            self.what()


def test_what_is_written_at_the_beginning_is_what_the_trainer_saves(tmp_path: Path) -> None:
    run, seen = tmp_path / "run", dict[str, bytes]()
    look = Doing(lambda: seen.update(own_files(run)))
    train(run, UnshardCallback(), look, tokenizer=tiny_tokenizer())
    assert seen.keys() == {
        CONFIG,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    saved = own_files(run / "checkpoint-1")
    fields, theirs = json.loads(seen.pop(CONFIG)), json.loads(saved[CONFIG])
    assert theirs == fields | {"dtype": "float32"}  # which the weights say themselves
    assert theirs["architectures"] == ["Qwen2ForCausalLM"]
    assert seen == {name: saved[name] for name in seen}


def test_of_an_adapter_it_is_its_own_config_and_the_one_of_the_base(tmp_path: Path) -> None:
    train(tmp_path / "run", UnshardCallback(), model=with_adapter(tiny_model()))
    found = own_files(tmp_path / "run")
    files = {CONFIG, "generation_config.json", "adapter_config.json"}
    assert found.keys() == files  # no tokenizer was given
    assert json.loads(found["adapter_config.json"])["peft_type"] == "LORA"
    assert json.loads(found[CONFIG])["architectures"] == ["Qwen2ForCausalLM"]
    assert not (tmp_path / "run" / "checkpoint-1" / CONFIG).exists()


def test_a_config_of_another_model_is_told_and_a_tokenizer_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, own = tmp_path / "run", tiny_model().config
    tiny_model(rms_norm_eps=0.1, num_hidden_layers=1).config.save_pretrained(run)
    before = (run / CONFIG).read_bytes()
    train(run, UnshardCallback(), tokenizer=tiny_tokenizer(), save_strategy="no")
    (warning,) = told(caplog)
    start = f"{run}/config.json differs from the config of the trained model: "
    assert warning.startswith(start)
    keys = warning.removeprefix(start).partition(". ")[0].split(", ")
    assert "rms_norm_eps" in keys
    assert not {"vocab_size", "model_type", "architectures"} & set(keys)
    assert (run / CONFIG).read_bytes() == before
    assert (run / "tokenizer.json").is_file()
    caplog.clear()
    own.save_pretrained(run)
    train(run, UnshardCallback(), save_strategy="no")
    assert told(caplog) == []  # the same model
    write_companions(run, torch.nn.Linear(1, 1), None)
    assert told(caplog) == []  # one that has no config


def test_no_file_is_replaced_and_nothing_changes_when_training_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "tokenizer_config.json").write_text("mine")
    train(run, UnshardCallback(), tokenizer=tiny_tokenizer())
    assert (run / "tokenizer_config.json").read_text() == "mine"
    assert json.loads((run / CONFIG).read_text())["model_type"] == "qwen2"
    before = snapshot(run)
    train(run, UnshardCallback(), steps=2, tokenizer=tiny_tokenizer(), resume=True)
    after = snapshot(run)
    assert {name: after[name] for name in before} == before
    assert (run / "checkpoint-2").is_dir()


def test_what_cannot_be_saved_is_told_and_the_rest_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers loads a generation config such as Llama 2 had, and refuses to save it."""
    model = tiny_model()
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.5
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(tmp_path)
    train(tmp_path / "run", UnshardCallback(), model=model, save_strategy="no")
    assert own_files(tmp_path / "run").keys() == {CONFIG}
    (warning,) = told(caplog)
    assert warning.startswith(f"GenerationConfig is not written into {tmp_path}/run: ValueError")


@pytest.mark.parametrize("place", ["run", "state"])
def test_a_run_that_cannot_be_written_to_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """A file is in the way: root could write into a directory that is read-only."""
    run = tmp_path / "run"

    def be_in_the_way() -> None:
        if place == "run":
            with suppress(OSError):
                run.rmdir()
            run.write_text("")
        else:
            run.mkdir(exist_ok=True)
            (run / "_unshard").write_text("")

    ours = UnshardCallback(follow=["out"])
    trainer = train(run, Doing(be_in_the_way), ours, steps=2, save_strategy="no")
    assert trainer.state.global_step == 2
    warnings = [one.partition(":")[0] for one in told(caplog)]
    files = [f"{one} is not written into {run}" for one in ("GenerationConfig", "Qwen2Config")]
    assert warnings == files * (place == "run") + ["no step is merged during training"]


def test_one_checkpoint_is_kept_and_the_last_is_merged_when_training_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, out, seen = tmp_path / "run", tmp_path / "my models", list[bool]()
    last = Doing(lambda: seen.append((out / "checkpoint-3" / RECORD).is_file()), at_end=True)
    train(run, UnshardCallback(f"'{out}' --newest"), last, steps=3, save_total_limit=1)
    assert seen == [True]
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-3"]
    assert "checkpoint-3" in outputs_in(out)
    assert contents(out / "checkpoint-3")[CONFIG]
    assert followers(os.getpid()) == []
    assert told(caplog) == []


def test_a_step_that_is_not_merged_is_told_while_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, out, seen = tmp_path / "run", tmp_path / "out", list[list[str]]()
    train(run)

    def spoil() -> None:
        (run / "checkpoint-1" / "model.safetensors").write_bytes(b"spoilt")

    failed = Doing(lambda: wait_until(lambda: ": failed: " in log_of(run)))
    last = Doing(lambda: seen.append(told(caplog)), at_end=True)
    train(run, Doing(spoil), UnshardCallback(out), failed, last, steps=2)
    assert seen[0][0].startswith("no step is merged during training: UnshardError: a step ")


@pytest.mark.slow
def test_a_training_that_goes_on_merges_no_step_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    callback = UnshardCallback([str(out)])
    train(run, callback, steps=2)
    train(run, callback, steps=4, resume=True)
    steps = {f"checkpoint-{step}" for step in range(1, 5)}
    assert outputs_in(out).keys() == steps
    merged = re.findall(r"^saved to .*/(.*)$", log_of(run), re.MULTILINE)
    assert sorted(merged) == sorted(steps)
    assert told(caplog) == []


@pytest.mark.slow
def test_the_follower_of_a_second_callback_leaves_the_outputs_to_the_first(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    train(run)  # a step that both find
    two = UnshardCallback([str(out)]), UnshardCallback([str(out)])
    one_is_left = Doing(
        lambda: wait_until(lambda: len(followers(os.getpid())) == 1, "one of two has ended")
    )
    train(run, *two, one_is_left, steps=3, resume=True)
    assert "another process follows a run into this directory" in log_of(run)
    assert outputs_in(out).keys() == {f"checkpoint-{step}" for step in (1, 2, 3)}
    merged = re.findall(r"^saved to .*/(.*)$", log_of(run), re.MULTILINE)
    assert sorted(merged) == sorted(outputs_in(out))
    assert followers(os.getpid()) == []


@pytest.mark.slow
def test_it_is_started_again_if_that_of_an_earlier_training_was_in_the_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    train(run)
    earlier = FollowState(out)

    def let_it_end() -> None:
        taken = "another process follows a run into this directory"
        wait_until(lambda: taken in log_of(run) and not followers(os.getpid()), "it has failed")
        earlier.close()

    merged = Doing(lambda: wait_until((out / "checkpoint-2" / RECORD).is_file), at_end=True)
    ours = UnshardCallback([str(out)])
    train(run, merged, ours, Doing(let_it_end), steps=2, resume=True)
    assert outputs_in(out).keys() == {"checkpoint-1", "checkpoint-2"}
    (warning,) = told(caplog)
    assert warning.endswith(f": exit code 2: see {run}/_unshard/follow.log")


def test_options_that_are_wrong_are_told_once_while_training_and_once_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    ended = Doing(lambda: wait_until(lambda: "--nonsense" in log_of(run)))
    trainer = train(run, UnshardCallback("out --nonsense"), ended, steps=3)
    assert trainer.state.global_step == 3
    warnings = told(caplog)
    assert all(one.endswith(f": exit code 2: see {run}/_unshard/follow.log") for one in warnings)
    starts = [one.partition(":")[0] for one in warnings]
    assert starts[-1] == "not all steps are merged"
    assert starts[:-1] in ([], ["no step is merged during training"])  # seen by then


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    """Yield a command that waits for a file `go` next to it, which comes at the latest now."""
    path = tmp_path / "wait.sh"
    path.write_text('#!/bin/sh\nuntil [ -e "$(dirname "$0")/go" ]; do sleep 0.1; done\n')
    path.chmod(0o755)
    yield path
    (tmp_path / "go").touch()


def test_training_ends_although_a_step_is_not_merged_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, script: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    made = Doing(lambda: wait_until((out / "checkpoint-1" / RECORD).is_file), at_end=True)
    train(run, made, UnshardCallback([str(out), "--exec", str(script)], timeout=0.5))
    (left,) = followers(os.getpid())
    (warning,) = told(caplog)
    assert warning.startswith("not all steps are merged: UnshardError: 0.5 s have passed: see ")
    script.with_name("go").touch()
    _, status = os.waitpid(left, 0)  # nobody else waits for it
    assert os.waitstatus_to_exitcode(status) == 0
    assert outputs_in(out).keys() == {"checkpoint-1"}


@pytest.fixture
def child(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a training in a process of its own, which is killed in the end."""
    words = [str(tmp_path / "run"), str(tmp_path / "out"), "3"]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, TESTS / "trainer_child.py", *words],
        env={**os.environ, "PYTHONPATH": paths},
        stderr=subprocess.DEVNULL,
    )
    yield process
    process.kill()
    process.wait(LIMIT_S)


def is_free(lock: Path) -> bool:
    with closing(os.open(lock, os.O_RDWR)) as fd:
        return try_lock(fd)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of the end of a parent")
def test_a_killed_trainer_takes_its_follower_along_and_the_next_goes_on(
    tmp_path: Path, child: "subprocess.Popen[bytes]"
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    made = out / "checkpoint-1" / RECORD
    wait_until(lambda: made.is_file() or child.poll() is not None, "step 1 is merged")
    (follower,) = followers(child.pid)
    assert os.getpriority(os.PRIO_PROCESS, follower) >= 10
    assert os.getpgid(follower) != os.getpgid(child.pid)
    child.send_signal(signal.SIGKILL)
    child.wait(LIMIT_S)
    wait_until(lambda: not Path(f"/proc/{follower}").exists(), "the follower has ended")
    assert is_free(out / "_unshard" / "follow.lock")
    before = contents(out / "checkpoint-1")
    train(run, UnshardCallback([str(out)]), steps=2, resume=True)
    assert outputs_in(out).keys() == {"checkpoint-1", "checkpoint-2"}
    assert contents(out / "checkpoint-1") == before


def test_the_first_save_leaves_the_lines_to_merge_it(tmp_path: Path) -> None:
    run, seen = tmp_path / "run", list[bool]()
    look = Doing(lambda: seen.append((run / "MERGE.txt").exists()))
    train(run, UnshardCallback(), look, tokenizer=tiny_tokenizer())
    assert seen == [False]
    assert "unshard merge STEP\n" in (run / "MERGE.txt").read_text()


def test_other_ranks_write_no_lines(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run)
    state, control = TrainerState(is_world_process_zero=False), TrainerControl()
    UnshardCallback().on_save(plain_arguments(run, 1), state, control)
    assert not (run / "MERGE.txt").exists()
