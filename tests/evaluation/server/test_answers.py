"""The answers of a job, and of two, question by question."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from evaluation.running import script_profile
from evaluation.servers import Still, still
from unshard.evaluate.jobs import Job, Request
from unshard.evaluate.server.http.page import answers
from unshard.evaluate.server.http.page.answers import read_answers
from unshard.evaluate.server.queue.job_files import list_samples

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m"
TIME = "2026-11-28T06-05-30.625750"
Sample = Mapping[str, object]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Still]:
    with still(tmp_path, script=script_profile(gpus=0)) as made:
        yield made


def complete(
    server: Still, step: int, files: Mapping[str, Sequence[Sample | str]], run: str = "run"
) -> Job:
    """Add a job that has these samples; a text is a line as it is."""
    store = server.service.store
    job, _ = store.submit(Request("/x", "script", ("task",), step, run), pin=None)
    claimed = store.claim(time.time(), job.id)
    assert claimed is not None
    output = server.service.scheduler.directory_of(claimed) / "output"
    output.mkdir(parents=True)
    for name, samples in files.items():
        lines = [one if isinstance(one, str) else json.dumps(one) for one in samples]
        (output / name).write_text("\n".join(lines))
    store.complete(job.id, {"task/acc": 0.5}, None)
    found = store.get(job.id)
    assert found is not None
    return found


def generated(number: int, text: str, score: float, **more: object) -> Sample:
    """Return a sample of lm-eval, as it writes what a model wrote."""
    return {
        "doc_id": number,
        "doc": {"question": "?"},
        "target": f"target {number}",
        "arguments": {"gen_args_0": {"arg_0": f"question {number}", "arg_1": {"until": ["\n"]}}},
        "resps": [[text]],
        "filtered_resps": [text],
        "filter": "none",
        "metrics": ["exact_match"],
        "doc_hash": f"hash {number}",
        "exact_match": score,
        **more,
    }


def chosen(number: int, likely: Sequence[float], score: int) -> Sample:
    """Return a sample of lm-eval with a choice for each likelihood."""
    asked = {
        f"gen_args_{place}": {"arg_0": "Which?", "arg_1": f" choice {place}"}
        for place in range(len(likely))
    }
    given = [[str(one), "False"] for one in likely]
    return {
        **generated(number, "", 0),
        "arguments": asked,
        "filtered_resps": given,
        "metrics": ["acc"],
        "acc": score,
    }


def test_what_both_evaluators_write_is_read(server: Still) -> None:
    lmms = {"doc_id": 3, "target": ["a", "b"], "filtered_resps": ["seen"], "doc_hash": "h"}
    lmms |= {"arguments": [["Look: <image>", {"max_new_tokens": 4}]], "mme": {"score": 1.0}}
    job = complete(
        server,
        1,
        {
            f"samples_gen_{TIME}.jsonl": [
                generated(0, "42", 1),
                "{",
                "[]",
                '{"doc_id": NaN}',
                chosen(1, [-3.5, -0.25, -9], 1),
                chosen(2, [-3.5], 0),
            ],
            "20260101_120000_samples_mme.jsonl": [lmms],
        },
    )
    samples = list_samples(server.service.work_dir, job)
    assert set(samples) == {"gen", "mme"}
    first, *odd, choice, only = read_answers(server.service, job, samples["gen"])
    assert odd == [None] * 3
    assert first is not None
    assert choice is not None
    assert only is not None
    assert first[1:] == ("question 0", "42", "target 0", {"exact_match": 1.0})
    assert choice[1:] == ("Which?", "choice 1", "target 1", {"acc": 1.0})
    assert only.answer == "False"
    (seen,) = read_answers(server.service, job, samples["mme"])
    assert seen is not None
    assert seen[1:] == ("Look: <image>", "seen", '["a", "b"]', {"mme": 1.0})


def test_two_steps_are_compared_question_by_question(server: Still) -> None:
    before = [generated(0, "a", 1), generated(1, "b", 0), generated(2, "c", 0)]
    before += [generated(3, "d", 1), generated(4, "e", 1), chosen(6, [-1, -2], 1)]
    after = [generated(3, "d", 1), generated(0, "x", 0), generated(1, f"y {HOSTILE}", 1)]
    after += [generated(2, "z", 0), generated(5, "new", 1), chosen(6, [-1.5, -9], 1)]
    after.append(generated(4, "e", 1, doc_hash="another question"))
    early = complete(server, 10, {f"samples_gen_{TIME}.jsonl": before})
    late = complete(server, 20, {f"samples_gen_{TIME}.jsonl": after})
    assert f'href="/view/answers?job={late.id}"' in server.client.get(f"/view/jobs/{late.id}").text
    for one, other in ((early, late), (late, early)):  # the earlier step is always first
        address = f"/view/answers?job={one.id}&with={other.id}"
        text = server.client.get(address).text
        counted = "5 questions in both jobs. From <bdi>step 10</bdi> to <bdi>step 20</bdi>:"
        assert f"{counted} 1 lost, 1 gained, 1 changed, 2 same" in " ".join(text.split())
        assert "new" not in text
        assert "<img" not in text
        assert r"y &lt;img src=x onerror=alert(1)&gt;\x1b[31m" in text
        lost = server.client.get(f"{address}&show=lost").text
        assert (lost.count("<section"), "question 0<" in lost, "question 1<" in lost) == (
            1,
            True,
            False,
        )
        assert lost.index(">a</pre>") < lost.index(">x</pre>")
        assert "There is no such question" in server.client.get(f"{address}&page=2").text
    assert server.client.get(f"/view/answers?job={early.id}&task=none").status_code == 404
    itself = server.client.get(f"/view/answers?job={early.id}&with={early.id}").text
    assert "0 lost, 0 gained, 0 changed, 6 same" in " ".join(itself.split())


def test_a_large_file_is_shown_page_by_page(server: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    job = complete(server, 1, {"samples_t.jsonl": [generated(n, "x", 0) for n in range(50)]})
    monkeypatch.setattr(answers, "_MOST", 45)
    first, last = (
        server.client.get(f"/view/answers?job={job.id}&page={page}").text for page in (1, 3)
    )
    assert (first.count("<section"), last.count("<section")) == (20, 5)
    assert "(the first 45)" in first
    assert ('rel="next"' in first, 'rel="next"' in last) == (True, False)


def test_lines_that_are_no_samples_are_left_out_and_counted(
    server: Still, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_MOST_LINE", 1 << 16)
    deep = f'{{"arguments": {"[" * 900}{"]" * 900}, "doc_id": 1}}'
    lines: list[Sample | str] = [
        generated(0, "a", 1),
        {**generated(1, "b", 1), "doc_id": "", "doc_hash": "", "target": None},
        json.dumps(generated(2, "c", 0)).replace('"exact_match": 0', f'"exact_match": {"9" * 400}'),
        deep,
        "[" * 20_000,
        "{}",
        generated(3, "long " * (1 << 18), 1),
        generated(4, "\ud800", 1),
    ]
    job = complete(server, 1, {"samples_t.jsonl": lines})
    page = server.client.get(f"/view/answers?job={job.id}")
    assert page.status_code == 200
    assert "4 lines of the files left out" in page.text
    assert ": 4 questions" in page.text
    assert r"\ud800" in page.text
    assert page.text.count("Target:") == 3
    assert "null" not in page.text


def test_answers_of_two_runs_name_both(server: Still) -> None:
    one, other = (
        complete(server, 5, {"samples_t.jsonl": [generated(0, "a", 1)]}, run)
        for run in ("first", "second")
    )
    page = server.client.get(f"/view/answers?job={one.id}&with={other.id}").text
    assert "<h1><bdi>Answers: t, first and second</bdi></h1>" in page
    assert "1 question in both jobs. From <bdi>first, step 5</bdi> to" in page
    assert page.count("second, step 5") == 4  # numbers, list of jobs, answer and its label


def test_a_job_without_answers_says_why(server: Still) -> None:
    none, own = complete(server, 1, {}), complete(server, 2, {"samples_t.jsonl": []})
    other = complete(server, 3, {"samples_u.jsonl": []})
    waits, _ = server.service.store.submit(Request("/x", "script", ("t",), 9, "run"), pin=None)
    for address, why in (
        (f"job={none.id}", f"job {none.id} has no samples"),
        (f"job={waits.id}", "is queued: its answers are shown when it ends"),
        (f"job={own.id}&task=x", f"job {own.id} has no samples of the task 'x'"),
        (f"job={own.id}&with={other.id}", "have no task in common"),
        ("job=", "no job is named"),
    ):
        answer = server.client.get(f"/view/answers?{address}")
        assert (answer.status_code, why in answer.json()["detail"]) == (404, True), answer.text
