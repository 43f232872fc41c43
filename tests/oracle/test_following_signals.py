"""SIGTERM, a second SIGTERM and Ctrl-C, while a follower merges or waits for a command."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from following import Follower, assert_whole, following, outputs_in
from ranks import merged, save_ranks
from waiting import wait_until

STEPS = 6
PARTIAL = "_unshard-partial-*"
SLOW = ("--config=none", "--verify=full", "--workers=1", "--memory=8MB", "--dtype=float32")
INTERRUPTED, ENDED = 128 + signal.SIGINT, 128 + signal.SIGTERM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose steps take a while each; all are one step, linked."""
    run = tmp_path_factory.mktemp("large")
    weight = torch.ones(12000, 12000, dtype=torch.bfloat16)
    first = save_ranks(run / "global_step_1" / "actor", {"model.norm.weight": weight}, 2)
    for step in range(2, STEPS + 1):
        place = run / f"global_step_{step}" / "actor"
        place.mkdir(parents=True)
        for file in first.iterdir():
            os.link(file, place / file.name)
    (run / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    return run


def stop_in_a_merge(follower: Follower, outputs: Path) -> set[str]:
    """Stop the process while it makes an output; return the names of those that it has made."""
    while True:
        wait_until(lambda: list(outputs.glob(PARTIAL)), "a merge is under way")
        os.kill(follower.process.pid, signal.SIGSTOP)
        wait_until(lambda: state(follower) == "T", "the process has stopped")
        if list(outputs.glob(f"{PARTIAL}/output")):
            return {path.name for path in outputs.glob("global_step_*")}
        os.kill(follower.process.pid, signal.SIGCONT)


def state(follower: Follower) -> str:
    return Path(f"/proc/{follower.process.pid}/stat").read_text().rpartition(") ")[2][0]


def signalled(follower: Follower, number: signal.Signals, *, again: bool = False) -> int:
    """Send a stopped process a signal, have it go on, and return its exit code."""
    os.kill(follower.process.pid, number)
    os.kill(follower.process.pid, signal.SIGCONT)
    while again and follower.process.poll() is None:
        time.sleep(0.002)
        follower.process.send_signal(number)
    return follower.process.wait()


def assert_done(follower: Follower, outputs: Path, names: set[str]) -> None:
    """All of these are whole and reported, and nothing else is there."""
    found = outputs_in(outputs)
    assert found.keys() == names
    for output in found.values():
        assert_whole(output)
    assert {Path(str(one["output"])).name for one in follower.steps()} == names
    steps = json.loads((outputs / "_unshard" / "followed.json").read_bytes())["steps"]
    assert {name for name, one in steps.items() if one["state"] == "done"} == names


def records(outputs: Path) -> dict[str, int]:
    return {
        name: (path / "unshard.json").stat().st_ino for name, path in outputs_in(outputs).items()
    }


def test_sigterm_ends_it_after_the_step(large: Path, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    with following(large, outputs, *SLOW) as follower:
        before = stop_in_a_merge(follower, outputs)
        assert signalled(follower, signal.SIGTERM) == 0, follower.log.read_text()
    assert_done(follower, outputs, {*before, f"global_step_{len(before) + 1}"})


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, ENDED), (signal.SIGINT, INTERRUPTED)]
)
def test_a_merge_is_ended_at_once(
    large: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    outputs = tmp_path / "outputs"
    with following(large, outputs, *SLOW) as follower:
        before = stop_in_a_merge(follower, outputs)
        assert signalled(follower, number, again=number == signal.SIGTERM) == code
    assert {path.name for path in outputs.glob("global_step_*")} == before
    for output in outputs.glob("global_step_*"):
        assert_whole(output)
    step = len(before) + 1
    old = {name: (outputs / name / "unshard.json").stat().st_ino for name in before}
    with following(large, outputs, *SLOW, f"--until={STEPS}") as again:
        wait_until((outputs / f"global_step_{step}").exists, f"step {step} is made")
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait() == 0, again.log.read_text()
    assert records(outputs).items() >= old.items()
    assert_done(
        again, outputs, {f"global_step_{one + 1}" for one in range(len(outputs_in(outputs)))}
    )


def test_a_command_is_part_of_its_step(large: Path, tmp_path: Path) -> None:
    outputs, started, gate = (tmp_path / name for name in ("outputs", "started", "gate"))
    script = f"echo $0 >> {started}; while [ ! -e {gate} ]; do sleep 0.01; done"
    options = ("--config=none", "--exec", f"sh -c '{script}' {{step}}")
    with following(large, outputs, *options) as follower:
        wait_until(started.exists, "the command runs")
        follower.process.send_signal(signal.SIGTERM)
        while follower.process.poll() is None:  # two that come at once are one
            follower.process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        assert follower.process.wait() == ENDED
    assert outputs_in(outputs).keys() == {"global_step_1"}
    assert follower.steps() == []
    old = records(outputs)
    with following(large, outputs, *options) as again:
        wait_until(lambda: started.read_text().split() == ["1", "1"], "the command runs again")
        again.process.send_signal(signal.SIGTERM)
        gate.touch()
        assert again.process.wait() == 0, again.log.read_text()
    assert records(outputs) == old
    assert_done(again, outputs, {"global_step_1"})


def test_a_step_that_is_saved_again_in_a_merge_is_merged_again(large: Path, tmp_path: Path) -> None:
    """The trainer goes back just then; nothing is made of both versions."""
    run, outputs = tmp_path / "run", tmp_path / "outputs"
    shutil.copytree(large / "global_step_1", run / "global_step_1")
    with following(run, outputs, *SLOW, "--until=1") as follower:
        stop_in_a_merge(follower, outputs)
        newer = {"model.norm.weight": torch.zeros(12000, 12000, dtype=torch.bfloat16)}
        save_ranks(run / "global_step_1" / "actor", newer, 2)
        os.kill(follower.process.pid, signal.SIGCONT)
        assert follower.process.wait() == 0, follower.log.read_text()
    assert ["files" in one for one in follower.steps()] == [False, True]
    (made,) = merged(outputs_in(outputs)["global_step_1"]).values()
    assert not made.count_nonzero()
