"""A number has its settings, its run and its branch: none is mixed with another's."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from evaluation.running import whole_model
from evaluation.runs import checkpoint
from evaluation.servers import Fields, Live, cli, started
from unshard.evaluate.pins.pin import Quota, pin_checkpoint
from unshard.evaluate.run_folder import RUN
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("eval-meaning")]

# Its number shows the arguments that it got.
SCRIPT = """
import json, os, sys
model, output, _, tasks, step, _, limit, shots, _ = sys.argv[1:]
if "waits" in tasks:
    import time
    time.sleep(600)
value = int(step or 0) + (0.5 if limit else 0) + int(shots or 0) / 100
with open(os.path.join(output, "results.json"), "w") as file:
    json.dump({task: {"acc": value} for task in tasks.split(",")}, file)
"""


def configure(server: Live, **changed: object) -> None:
    server.configure(SCRIPT)
    path = server.directory / "server.yaml"
    config = yaml.safe_load(path.read_text())
    profile = config["profiles"]["script"]
    profile["command"] += ["{limit}", "{num_fewshot}", "{batch_size}"]
    config["profiles"] = {"script": profile | changed}
    path.write_text(yaml.safe_dump(config))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    made = Live(tmp_path)
    configure(made)
    made.start()
    yield made
    made.stop()


def lines(server: Live, run: str) -> dict[tuple[str, str], dict[int, float]]:
    """Return the points of each line that the page plots, by run and what is said of settings."""
    answer = server.call("GET", "/view/plots.json", params={"run": run}).json()
    return {
        (one["run"], one["settings"]): dict(zip(one["steps"], one["values"], strict=True))
        for plot in answer["plots"]
        for one in plot["series"]
    }


def values(server: Live, **wanted: object) -> list[float]:
    answer = server.call("GET", "/api/v1/results", params=wanted).json()
    return [one["value"] for one in answer["results"]]


def evaluated(server: Live, place: Path, *tasks: str, **more: object) -> Fields:
    return server.ended(server.submit(place, *tasks, **more))


def test_a_smoke_test_makes_a_line_of_its_own(server: Live) -> None:
    run = server.root / "run"
    places = {step: checkpoint(run, step) for step in (10, 20)}
    for place in places.values():
        evaluated(server, place)
    job = evaluated(server, places[10], limit=20)
    evaluated(server, places[10], limit=20, batch_size=4)  # records it, and is of the same line
    assert lines(server, "run") == {
        ("run", ""): {10: 10.0, 20: 20.0},
        ("run", "limit=20"): {10: 10.5},
    }
    assert job["arguments"] == {"limit": 20}
    assert job["measured_with"]["arguments"] == {"limit": 20}  # type: ignore[index]
    rows = json.loads(cli(server.url, "results", "--json").stdout)["results"]
    assert [(one["value"], one["arguments"]) for one in rows] == [
        (10.0, {}),
        (10.5, {"limit": 20}),
        (10.5, {"limit": 20, "batch_size": 4}),
        (20.0, {}),
    ]
    assert len({one["settings"] for one in rows}) == 2
    table = cli(server.url, "compare", "run").stdout
    assert len([line for line in table.splitlines() if "score" in line]) == 2
    assert "limit=20" in table
    best = json.loads(
        cli(server.url, "results", "--best", "score/acc", "--higher-is-better", "--json").stdout
    )
    assert [one["value"] for one in best["results"] if one["best"]] == [10.5, 20.0]


def test_watch_takes_no_job_that_was_submitted_with_other_arguments(server: Live) -> None:
    run = server.root / "run"
    place = checkpoint(run, 10)
    evaluated(server, place, limit=5)
    watched = ("watch", str(run), "--tasks", "score", "--profile", "script", "--once")
    assert cli(server.url, *watched).returncode == 0
    server.all_ended(2)
    assert sorted(values(server)) == [10.0, 10.5]
    shown = cli(server.url, *watched)
    assert "10.5" not in shown.stdout
    written = (run / "_unshard" / "results.jsonl").read_text()
    assert '"unshard_eval/score/acc": 10.0' in written
    assert "10.5" not in written
    assert len(server.v1("GET", "/jobs")["jobs"]) == 2  # type: ignore[arg-type]


def test_two_directories_of_one_name_are_two_runs(server: Live) -> None:
    for name, step in (("a", 10), ("b", 10), ("b", 20)):
        evaluated(server, checkpoint(server.root / name / "output", step))
    assert lines(server, "output") == {
        ("output (a)", ""): {10: 10.0},
        ("output (b)", ""): {10: 10.0, 20: 20.0},
    }
    assert server.v1("GET", "/runs")["runs"] == ["output (a)", "output (b)"]
    assert values(server, run="output (b)") == [10.0, 20.0]
    assert values(server, run=str(server.root / "a" / "output")) == [10.0]
    table = cli(server.url, "compare", "output").stdout
    assert "output (a)" in table
    assert "output (b)" in table


def test_max_lag_counts_the_steps_of_each_run(tmp_path: Path) -> None:
    server = Live(tmp_path)
    configure(server, max_lag=1)
    with started(server, "--config", str(server.directory / "server.yaml"), "--gpus", "1"):
        busy = server.submit(checkpoint(server.root / "busy", 1), "waits")
        jobs = {
            (name, step): server.submit(checkpoint(server.root / name / "output", step))
            for name, step in (("a", 10), ("b", 10), ("a", 20))
        }
        states = {key: server.job(job)["status"] for key, job in jobs.items()}
        assert states == {("a", 10): "superseded", ("b", 10): "queued", ("a", 20): "queued"}
        server.v1("DELETE", f"/jobs/{busy['id']}")
        server.ended(jobs["b", 10])


@pytest.mark.parametrize("how", ["moved", "renamed", "copied", "linked"])
def test_a_run_is_known_wherever_it_is_moved_and_a_copy_is_another(server: Live, how: str) -> None:
    run = server.root / "run"
    first = evaluated(server, checkpoint(run, 10))
    place = server.root / ("elsewhere/run" if how == "moved" else "other")
    place.parent.mkdir(exist_ok=True)
    if how == "copied":
        shutil.copytree(run, place)
    elif how == "linked":  # as cp -al does: the files have the same inodes
        shutil.copytree(run, place, copy_function=os.link)
    else:
        run.rename(place)
    second = evaluated(server, checkpoint(place, 20))
    is_same = how in {"moved", "renamed"}
    assert (second["run_id"] == first["run_id"]) is is_same
    name = str(second["run_label"])
    assert values(server, run=name) == ([10.0, 20.0] if is_same else [20.0])
    again = server.submit(place / "checkpoint-10")
    assert (again["id"] == first["id"]) is is_same


def test_a_run_that_was_moved_to_another_disk_is_adopted(server: Live) -> None:
    run, moved = server.root / "run", server.root / "disk2" / "run"
    first = evaluated(server, checkpoint(run, 10))
    moved.parent.mkdir()
    shutil.copytree(run, moved)
    refused = cli(server.url, "adopt", str(moved))
    assert refused.returncode != 0
    assert "is still there" in refused.stderr
    assert str(run) in refused.stderr
    shutil.rmtree(run)
    between = evaluated(server, checkpoint(moved, 20))
    assert between["run_id"] != first["run_id"]
    done = cli(server.url, "adopt", str(moved))
    assert done.returncode == 0, done.stderr
    evaluated(server, checkpoint(moved, 30))
    assert lines(server, "run") == {("run", ""): {10: 10.0, 20: 20.0, 30: 30.0}}
    assert cli(server.url, "adopt", str(server.root)).returncode != 0


def test_a_run_that_cannot_be_written_is_known_by_its_path(server: Live) -> None:
    run = server.root / "run"
    place = checkpoint(run, 10)
    (run / "_unshard").write_text("a file, where the directory would be")
    first = evaluated(server, place)
    second = evaluated(server, checkpoint(run, 20))
    assert first["run_id"] == second["run_id"]
    shutil.copytree(run, server.root / "copy")
    assert evaluated(server, server.root / "copy" / "checkpoint-20")["run_id"] != first["run_id"]


def test_a_base_model_is_of_the_run_that_it_is_submitted_for(server: Live) -> None:
    base = whole_model(server.root / "models" / "base")
    for name in ("a", "b"):
        place = checkpoint(server.root / name / "output", 10)
        done = cli(
            *(server.url, "submit", str(place), "--tasks", "score", "--profile", "script"),
            *("--base", str(base), "--wait"),
        )
        assert done.returncode == 0, done.stderr
    assert set(lines(server, "output")) == {("output (a)", ""), ("output (b)", "")}
    assert all(set(points) == {0, 10} for points in lines(server, "output").values())
    refused = server.call(
        "POST",
        "/api/v1/jobs",
        json={
            "checkpoint": str(base),
            "profile": "script",
            "tasks": ["other"],
            "step": 0,
            "run": "output",
        },
    )
    assert refused.status_code == 400
    assert "several training runs" in refused.text


def test_what_is_completed_is_evaluated_again_on_demand(server: Live) -> None:
    place = checkpoint(server.root / "run", 10)
    first = evaluated(server, place)
    assert server.submit(place)["id"] == first["id"]
    again = evaluated(server, place, again=True)
    retried = server.ended(server.v1("POST", f"/jobs/{again['id']}/retry"))
    assert len({first["id"], again["id"], retried["id"]}) == 3
    assert server.submit(place)["id"] == retried["id"]
    once = server.submit(place, again="nightly")
    assert server.submit(place, again="nightly")["id"] == once["id"]
    server.ended(once)
    assert lines(server, "run") == {("run", ""): {10: 10.0}}


def test_a_changed_profile_is_another_revision(server: Live) -> None:
    run = server.root / "run"
    place = checkpoint(run, 10)
    first = evaluated(server, place)
    server.stop()
    configure(server, timeout=1000.0, retries=3, order="newest", keep="all")
    server.start()
    assert evaluated(server, place, again=True)["measured_with"] == first["measured_with"]
    server.stop()
    script = server.directory / "script.py"
    configure(server)
    script.write_text(SCRIPT.replace("int(step or 0)", "1000 + int(step or 0)"))
    server.start()
    watched = ("watch", str(run), "--tasks", "score", "--profile", "script", "--once")
    kept = cli(server.url, *watched)
    assert "has changed" in kept.stderr
    assert "--again" in kept.stderr
    assert len(server.all_ended(2)) == 2
    assert cli(server.url, *watched, "--again").returncode == 0
    server.all_ended(3)
    assert cli(server.url, *watched, "--again").returncode == 0
    assert len(server.all_ended(3)) == 3
    points = lines(server, "run")
    assert sorted(points.values(), key=str) == [{10: 10.0}, {10: 1010.0}]
    assert all("revision" in settings for _, settings in points)


def test_results_are_hidden_with_a_reason_and_shown_again(server: Live) -> None:
    run = server.root / "run"
    jobs = [evaluated(server, checkpoint(run, step)) for step in (10, 20)]
    job = str(jobs[1]["id"])
    assert cli(server.url, "hide", job, "--reason", "wrong prompt").returncode == 0
    assert lines(server, "run") == {("run", ""): {10: 10.0}}
    assert values(server) == [10.0]
    hidden = cli(server.url, "results", "--hidden").stdout
    assert "wrong prompt" in hidden
    assert server.job(jobs[1])["hidden"] == "wrong prompt"
    assert cli(server.url, "show", job).returncode == 0
    assert values(server) == [10.0, 20.0]
    assert server.job(jobs[1])["was_hidden"] == "wrong prompt"


@pytest.mark.parametrize("restarts_at", [20, 15])
def test_what_training_went_back_from_is_left_out(
    server: Live, tmp_path: Path, restarts_at: int
) -> None:
    """It was saved again as the same step, or as one that was never saved before."""
    run = server.root / "run"
    for step in (10, 20, 30, 40):
        evaluated(server, checkpoint(run, step))
    time.sleep(0.05)
    if restarts_at == 20:
        shutil.rmtree(run / "checkpoint-20")
    place = checkpoint(run, restarts_at)
    pin = pin_checkpoint(place, quota=Quota()).path  # as trainers and `watch` do
    anew = evaluated(server, place, pin=str(pin)) if restarts_at == 15 else evaluated(server, place)
    kept = {10: 10.0, restarts_at: float(restarts_at)}
    assert lines(server, "run") == {("run", ""): kept}
    jobs = server.call("GET", "/api/v1/jobs").json()["jobs"]
    left = [job for job in jobs if job["hidden"]]
    assert {job["step"] for job in left} == {20, 30, 40}
    assert all("went back" in str(job["hidden"]) for job in left)
    server.submit(run / "checkpoint-40")  # an old checkpoint that is still there
    assert lines(server, "run") == {("run", ""): kept}
    done = cli(
        *(server.url, "export", "--to", "jsonl", "--run", "run"),
        *("--directory", str(tmp_path / "exported")),
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "exported" / "run.jsonl").read_text()
    assert {json.loads(line)["step"] for line in text.splitlines()} == set(kept)
    shutil.rmtree(run / "checkpoint-40")
    evaluated(server, checkpoint(run, 40))
    assert lines(server, "run") == {("run", ""): kept | {40: 40.0}}
    assert anew["hidden"] is None


def test_an_old_checkpoint_that_somebody_submits_is_no_restart(server: Live) -> None:
    """It was copied, restored or converted, so its files are newer than those of later steps."""
    run = server.root / "run"
    for step in (10, 20, 30):
        evaluated(server, checkpoint(run, step))
    whole_model(run / "export")
    evaluated(server, run / "export", step=10, run="run")
    evaluated(server, run / "checkpoint-10", limit=3)
    evaluated(server, checkpoint(run, 15))
    assert lines(server, "run")["run", ""] == {10: 10.0, 15: 15.0, 20: 20.0, 30: 30.0}


def test_further_tasks_of_a_branch_that_was_left_are_hidden_like_the_others(server: Live) -> None:
    run = server.root / "run"
    jobs = {step: evaluated(server, checkpoint(run, step)) for step in (10, 20, 30)}
    shutil.rmtree(run / "checkpoint-10")
    evaluated(server, checkpoint(run, 10))
    assert evaluated(server, run / "checkpoint-30", "more")["hidden"]
    cli(server.url, "show", str(jobs[20]["id"]))
    shutil.rmtree(run / "checkpoint-10")
    evaluated(server, checkpoint(run, 10))
    assert server.job(jobs[20])["hidden"] is None  # somebody has decided
    cli(server.url, "hide", str(jobs[20]["id"]), "--reason", "for another reason")
    assert server.job(jobs[20])["hidden"] == "for another reason"


def test_a_profile_that_changes_during_a_job_is_what_it_began_with(server: Live) -> None:
    place = checkpoint(server.root / "run", 10)
    first = evaluated(server, place)
    job = server.submit(place, "waits")
    wait_until(lambda: server.job(job)["phase"] == "evaluating", "its evaluator")
    running = server.job(job)["measured_with"]
    (server.directory / "script.py").write_text("# another prompt\n" + SCRIPT)
    later = evaluated(server, place, "later")
    assert running == first["measured_with"] == server.job(job)["measured_with"]
    assert later["measured_with"] != running
    server.v1("DELETE", f"/jobs/{job['id']}")


def test_watch_knows_a_run_by_links_and_after_a_move(server: Live) -> None:
    run = server.root / "run"
    evaluated(server, checkpoint(run, 10))
    link = server.directory / "linked"
    link.symlink_to(run)
    moved = server.root / "moved"
    for place in (link, moved):
        if place == moved:
            run.rename(moved)
        done = cli(
            *(server.url, "watch", str(place), "--tasks", "score", "--profile", "script", "--once")
        )
        assert "submitted (" not in done.stdout, done.stdout
        assert "submitted before" in done.stderr
    assert len(server.v1("GET", "/jobs")["jobs"]) == 1  # type: ignore[arg-type]


def test_a_backlog_that_is_submitted_in_any_order_is_no_restart(server: Live) -> None:
    run = server.root / "run"
    places = {step: checkpoint(run, step) for step in (10, 20, 30)}
    for step in (30, 10, 20):
        evaluated(server, places[step])
    assert lines(server, "run") == {("run", ""): {10: 10.0, 20: 20.0, 30: 30.0}}
    assert (run / "_unshard" / RUN).is_file()


def test_each_run_keeps_its_best_model_and_a_smoke_test_takes_none(tmp_path: Path) -> None:
    server = Live(tmp_path)
    configure(server, keep="best", best_metric="score/acc")
    with started(server):
        places = [checkpoint(server.root / name / "output", 10) for name in ("a", "b")]
        jobs = [evaluated(server, place) for place in places]
        names = ["output", f"output-{str(jobs[1]['run_id'])[:8]}"]
        links = [server.work / "best" / name / "script" for name in names]
        assert [link.resolve().name for link in links] == [str(job["id"]) for job in jobs]
        evaluated(server, places[0], limit=20)  # its value is higher
        assert links[0].resolve().name == jobs[0]["id"]
        better = evaluated(server, checkpoint(server.root / "a" / "output", 20))
        assert links[0].resolve().name == better["id"]
        assert links[1].resolve().name == jobs[1]["id"]
        cli(server.url, "hide", str(better["id"]), "--reason", "wrong")
        last = evaluated(server, checkpoint(server.root / "a" / "output", 15))
        assert links[0].resolve().name == last["id"]
