"""A model's answers to the questions of a task, and the differences between two jobs.

The samples of lm-eval and lmms-eval have an object in each line. Files may be large, so they are
read twice, first without keeping texts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, get_args

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from unshard.evaluate.jobs import Filters, Job, Status
from unshard.evaluate.server.evaluators.documents import as_finite
from unshard.evaluate.server.http.answers import BoundedText, find_job
from unshard.evaluate.server.http.page.routes import Views
from unshard.evaluate.server.http.page.runs import PageNumber, as_query
from unshard.evaluate.server.queue.job_files import list_samples, open_file
from unshard.evaluate.server.service import Service

router = APIRouter(include_in_schema=False)

_SHOWN = 20
_MOST = 20_000  # questions
_MOST_LINE = 4 << 20  # bytes
_MOST_TEXT = 4000  # characters; the question is the end of a prompt with examples
_OTHERS = 200
_ODD = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_OWN_KEYS = frozenset({"doc_id", "idx"})

Key = tuple[str, str, str]
"""The filter, `doc_id`, and the digest of the question."""

Change = Literal["lost", "gained", "changed", "same"]
CHANGES: tuple[Change, ...] = get_args(Change)


class ModelAnswer(NamedTuple):
    """An answer to a question; jobs have the same `key` for the same question."""

    key: Key
    question: str
    answer: str
    target: str
    scores: Mapping[str, float]


def read_answers(service: Service, job: Job, name: str) -> Iterator[ModelAnswer | None]:
    """Yield the answers in a file of samples, up to a bound; None for each other line."""
    file = open_file(service.work_dir, job, name)
    if file is None:
        return
    with file:
        for number, line in enumerate(islice(_lines(file), _MOST)):
            try:
                answer = _as_answer(json.loads(line), number)
            # Evaluators' code may write anything, in any depth and of any size.
            except _ODD:
                answer = None
            yield answer


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of a line that is too long, its begin."""
    while line := file.readline(_MOST_LINE):
        yield line
        while len(line) == _MOST_LINE and not line.endswith(b"\n"):
            line = file.readline(_MOST_LINE)


def _as_answer(sample: Mapping[str, object], number: int) -> ModelAnswer:
    metrics = sample.get("metrics")
    names = metrics if isinstance(metrics, list) else sample.keys() - _OWN_KEYS
    scores = {str(key): score for key in names if (score := _score(sample.get(key))) is not None}
    place = (str(sample.get("doc_id", number)), str(sample.get("doc_hash", "")))
    prompts = list(_texts(sample.get("arguments"))) or [_write(sample["doc"])]
    return ModelAnswer(
        (str(sample.get("filter", "")), *place),
        prompts[0][-_MOST_TEXT:],
        _answer_of(sample)[:_MOST_TEXT],
        _write(sample.get("target", ""))[:_MOST_TEXT],
        dict(sorted(scores.items())),
    )


def _answer_of(sample: Mapping[str, object]) -> str:
    """Return the text of an answer; of multiple choices, the one with the highest likelihood."""
    responses = sample.get("filtered_resps", sample.get("resps"))
    answers: list[Any] = responses if isinstance(responses, list) else [responses]
    are_pairs = answers and all(isinstance(one, list) and len(one) == 2 for one in answers)
    try:  # pairs of a likelihood, and whether the model would have written the text
        likelihoods = [float(one[0]) for one in answers] if are_pairs else []
    except (ValueError, TypeError):
        likelihoods = []
    if not likelihoods:
        return "\n".join(map(_write, answers))
    if len(likelihoods) == 1:
        return str(answers[0][1])
    arguments: Any = sample["arguments"]
    choices = list(arguments.values()) if isinstance(arguments, dict) else arguments
    return [*_texts(choices[likelihoods.index(max(likelihoods))])][-1].strip()


def _score(value: object) -> float | None:
    value = value.get("score") if isinstance(value, dict) else value
    return as_finite(int(value) if isinstance(value, bool) else value)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a document, in their order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _write(value: object) -> str:
    value = "" if value is None else value
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _change_of(first: ModelAnswer, second: ModelAnswer) -> Change:
    """Return whether a score of 0 or 1 has risen or fallen, or else whether the text has changed.

    If no score is 0 or 1 in both, the first score counts if the text has changed.
    """
    is_same = first.answer == second.answer
    pairs = [(one, second.scores[key]) for key, one in first.scores.items() if key in second.scores]
    binary = [pair for pair in pairs if {*pair} <= {0.0, 1.0}]
    for before, after in binary or ([] if is_same else pairs[:1]):
        if before != after:
            return "gained" if after > before else "lost"
    return "same" if is_same else "changed"


class AnswersPage(BaseModel):
    """Which answers to show: of a job, and of another, `with`, to compare."""

    job: BoundedText
    other: Annotated[BoundedText, Query(alias="with")] = ""
    task: BoundedText = ""
    show: Change | Literal[""] = ""
    page: PageNumber = 1

    def query(self, **changes: object) -> str:
        """Return the query with changes."""
        return as_query(self, changes)


class _Comparison(NamedTuple):
    """A page of answers, how many there are of each change, and how many lines are left out."""

    pairs: list[tuple[Change, list[ModelAnswer]]]
    changes: dict[Change, int]
    has_more: bool
    left_out: int


def _compare(service: Service, jobs: Sequence[Job], task: str, wanted: AnswersPage) -> _Comparison:
    """Return the answers of a page and the numbers of all."""

    def read(job: Job) -> Iterator[ModelAnswer | None]:
        return read_answers(service, job, list_samples(service.work_dir, job)[task])

    def without_texts(one: ModelAnswer | None) -> ModelAnswer | None:
        return one and one._replace(question="", target="", answer=str(hash(one.answer)))

    read_once = [list(map(without_texts, read(job))) for job in jobs]
    others = {one.key: one for one in read_once[-1] if one}
    counts, changes = dict.fromkeys(CHANGES, 0), dict[Key, Change]()
    for one in filter(None, read_once[0]):
        if (other := others.get(one.key)) is not None:
            change = _change_of(one, other)
            counts[change] += 1
            if wanted.show in ("", change):
                changes[one.key] = change
    start = (wanted.page - 1) * _SHOWN
    shown = dict(islice(changes.items(), start, start + _SHOWN))
    by_job = [{one.key: one for one in read(job) if one and one.key in shown} for job in jobs]
    pairs = [(change, [by_key[key] for by_key in by_job]) for key, change in shown.items()]
    left_out = sum(answers.count(None) for answers in read_once)
    return _Comparison(pairs, counts, len(changes) > start + _SHOWN, left_out)


def _samples_of(service: Service, jobs: Sequence[Job], task: str) -> list[str]:
    """Return the tasks of which all jobs have samples.

    Raises:
        HTTPException: 404: there are none, or not of this task.
    """
    samples = [list_samples(service.work_dir, job) for job in jobs]
    for job, own in zip(jobs, samples, strict=True):
        if not job.status.is_final:
            raise HTTPException(
                404, f"job {job.id} is {job.status}: its answers are shown when it ends"
            )
        if not own:
            raise HTTPException(404, f"job {job.id} has no samples")
        if task and task not in own:
            raise HTTPException(404, f"job {job.id} has no samples of the task {task!r:.200}")
    tasks = [one for one in samples[0] if one in samples[-1]]
    if not tasks:
        raise HTTPException(404, f"jobs {jobs[0].id} and {jobs[-1].id} have no task in common")
    return tasks


@router.get("/view/answers")
def answers(views: Views, wanted: Annotated[AnswersPage, Query()]) -> HTMLResponse:
    """Show the answers of a job, or their differences from another job's."""
    service = views.service
    own = find_job(service, wanted.job)
    jobs = [own, *([find_job(service, wanted.other)] if wanted.other else [])]
    jobs.sort(key=lambda job: (job.request.step or 0, job.created_at))
    tasks = _samples_of(service, jobs, wanted.task)
    task = wanted.task or tasks[0]
    weights, profile = own.request.weights, own.request.profile
    filters = Filters(Status.COMPLETED, own.run.id, weights=weights, profile=profile)
    newest = islice(service.store.newest(filters), _OTHERS)
    others = {job.id: job for job in (*jobs, *newest) if job.id != own.id}
    runs = list(dict.fromkeys(one.run.label for one in jobs))
    return views.show(
        "answers.html",
        f"Answers: {task}" + (f", {' and '.join(runs)}" if len(runs) > 1 else ""),
        wanted=wanted,
        own=own,
        jobs=jobs,
        runs=runs,
        others=list(others.values()),
        task=task,
        tasks=tasks,
        most=_MOST,
        **_compare(service, jobs, task, wanted)._asdict(),
    )
