from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.running import script_profile
from unshard.evaluate.jobs import Job, Request, Settings, Status
from unshard.evaluate.server.attempts.merging import link_best, link_of
from unshard.evaluate.server.queue.outcomes import find_best, find_removable


def job(name: str, at: float, step: int | None = None, **metrics: float) -> Job:
    found = {f"task/{key}": value for key, value in metrics.items()}
    request = Request("ckpt", "script", ("task",), step)
    return Job(name, request, Status.COMPLETED, 0.0, completed_at=at, metrics=found)


DONE = [job("a", 1, acc=0.5, loss=2), job("b", 2, acc=0.7, loss=3), job("c", 3, acc=0.7)]


@pytest.mark.parametrize(
    ("keep", "metric", "gone"),
    [
        ("none", None, ["c"]),
        ("all", None, []),
        ("best", "task/acc", ["a", "c"]),
        ("best", "-task/loss", ["b", "c"]),
        ("best", "task/other", ["a", "b", "c"]),
        ("best", None, ["c"]),
    ],
)
def test_what_stays_is_what_the_profile_says(
    keep: str, metric: str | None, gone: list[str]
) -> None:
    assert find_removable(DONE[2], script_profile(keep=keep, best_metric=metric), DONE) == gone


def test_each_setting_keeps_its_best_and_what_is_hidden_is_none() -> None:
    smoke = replace(job("smoke", 4, acc=0.9), settings=Settings({"limit": 20}))
    hidden = replace(job("hidden", 5, acc=0.8), hidden="wrong prompt")
    profile = script_profile(keep="best", best_metric="task/acc")
    assert find_removable(DONE[2], profile, [*DONE, smoke, hidden]) == [
        "a",
        "c",
    ]  # it may be shown again


def test_of_equals_the_lowest_step_is_the_best() -> None:
    equals = [job("a", 1, 30, acc=0.5), job("b", 2, 10, acc=0.5), job("c", 3, 20, acc=0.5)]
    best = find_best("task/acc", equals)
    assert best is not None
    assert best.id == "b"


def test_the_link_leads_to_the_best_model_and_goes_with_it(tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    for name in ("0a", "0b"):
        (merged / name).mkdir(parents=True)
    link = link_of(merged, "my run", "lm-eval", "ema")
    assert link == tmp_path / "best" / "my run" / "lm-eval-ema"
    for name in ("0a", "0b", "0b"):
        link_best(link, merged, name)
        assert (link.resolve(), link.readlink().is_absolute()) == (merged / name, False)
    assert [path.name for path in link.parent.iterdir()] == [link.name]
    (merged / "0b").rmdir()
    link_best(link, merged, "0b")
    assert not link.is_symlink()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_not_our_link_is_left_and_reported(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    merged = tmp_path / "merged"
    (merged / "0a").mkdir(parents=True)
    link = link_of(merged, "run", "p", "model")
    link.mkdir(parents=True)
    if kind != "directory":
        link.rmdir()
    if kind == "file":
        link.write_text("mine")
    if kind == "link":
        link.symlink_to("/etc")
    before = link.lstat()
    for job_id in ("0a", None):
        link_best(link, merged, job_id)
    assert link.lstat() == before
    assert "it is left as it is" in caplog.text


@pytest.mark.parametrize("run", ["..", ".", "", "a/../../b", "a\0b", ".hidden", "r" * 5000])
def test_no_name_of_a_run_leads_elsewhere(tmp_path: Path, run: str) -> None:
    merged = tmp_path / "merged"
    (merged / "0a").mkdir(parents=True)
    link = link_of(merged, run, "p:q/r", "model")
    link_best(link, merged, "0a")
    assert link.parent.parent == tmp_path / "best"
    assert link.resolve() == merged / "0a"
