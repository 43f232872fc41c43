"""The client of our own protocol, `/api/v1`: jobs, logs, results and events, with our errors.

UnshardError
├── ServerAwayError     no answer of an evaluation server: try again later
├── EvaluationError     the server failed
└── UsageError
    └── RefusedError    the server refused the request; has the status of the answer
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack
from urllib.parse import quote

import httpx

from unshard.errors import UnshardError, UsageError
from unshard.evaluate.client.lmms import Answer, LmmsClient, given, names_of
from unshard.evaluate.jobs import ArgumentFields, EvaluationError
from unshard.evaluate.values import Scalar

_PREFIX = "/api/v1"
_AWAY = frozenset({408, 425, 429, 502, 503, 504})
_NO_TOKEN = 401
_NOT_ALLOWED = frozenset({401, 403})
_SHOWN = 300
_MOST_JOBS = 100
_LARGEST_PAGE = 1000  # jobs


class ServerAwayError(UnshardError):
    """The evaluation server does not answer now."""


class RefusedError(UsageError):
    """The evaluation server refused a request.

    Attributes:
        status: the status of the HTTP answer.
    """

    status = 400


class EvalClient(LmmsClient):
    """A client of an evaluation server, also a replacement of lmms-eval's client.

    See `lmms.LmmsClient` for its arguments and attributes, and for the methods of lmms-eval's
    client, which raise httpx's errors. All methods of our protocol raise:
        ServerAwayError: the server does not answer, or a gateway answers in its place.
        RefusedError: the request is invalid, or not allowed.
        EvaluationError: the server failed.
    """

    def submit(
        self,
        checkpoint: str,
        step: int | None,
        profile: str,
        tasks: str | Sequence[str],
        *,
        weights: str = "model",
        run: str | None = None,
        pin: str | None = None,
        directory: str | None = None,
        again: bool | str = False,
        **arguments: Unpack[ArgumentFields],
    ) -> Answer:
        """Submit a job and return it; the same request again returns the same job.

        Args:
            checkpoint: its path on the server.
            step: the training step; None if it is not known.
            profile: the name of an evaluator in the server's configuration.
            tasks: the tasks to evaluate, as a list or a comma-separated text.
            weights: "model" or "ema".
            run: the name of the training run; None: the name of its directory.
            pin: the linked checkpoint, if the client has pinned it; None: the server pins it.
            directory: of the run, if the checkpoint is outside (a base model).
            again: evaluate a completed job again; a second request with the same text returns the
                same job.
            arguments: for the evaluator, as `Arguments` describes them.
        """
        body: dict[str, object] = {
            "checkpoint": checkpoint,
            "step": step,
            "profile": profile,
            "tasks": names_of(tasks),
            "weights": weights,
            "run": run,
            "pin": pin,
            "directory": directory,
            "again": again or None,
            **arguments,
        }
        return self.submit_body(given(body))

    def submit_body(self, body: Mapping[str, object]) -> Answer:
        """Submit a job by the fields of a request; see `submit`."""
        return self._call("POST", "/jobs", body=body)

    def job(self, job_id: str) -> Answer:
        """Return a job."""
        return self._call("GET", f"/jobs/{_quote_part(job_id)}")

    def jobs(
        self,
        *,
        status: str | None = None,
        run: str | None = None,
        step: int | None = None,
        profile: str | None = None,
        weights: str | None = None,
        limit: int | None = None,
    ) -> list[Answer]:
        """Return the matching jobs, the newest first, at most `limit` (100)."""
        query = {"status": status, "run": run, "step": step, "profile": profile}
        return self._list("jobs", {**query, "weights": weights}, "before", limit or _MOST_JOBS)

    def results(
        self,
        *,
        run: str | None = None,
        step: int | None = None,
        profile: str | None = None,
        hidden: bool = False,
    ) -> list[Answer]:
        """Return the matching results, one per metric, in the order of runs and steps.

        `run` is a run's label, id, name or directory; `hidden` adds hidden results.
        """
        query = {"run": run, "step": step, "profile": profile, "hidden": hidden or None}
        return sorted(self._list("results", query, "after", None), key=_sort_key)

    def profiles(self, name: str | None = None) -> list[Answer]:
        """Return all profiles, or the profile that a submission with this name would get."""
        return self._list("profiles", {"name": name}, "after", None)

    def problems(self) -> list[str]:
        """Return the reasons why the server does not accept jobs now, a sentence for each."""
        try:
            answer = self.client.get(f"{self.base_url}/health")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _away(self.base_url, error) from error
        problems, parts = _read_object(answer).get("problems"), ("message", "found", "hint")
        return [
            "; ".join(str(problem[part]) for part in parts if problem.get(part))
            for problem in (problems if isinstance(problems, list) else [])
            if isinstance(problem, dict)
        ]

    def cancel(self, job_id: str) -> Answer:
        """Cancel a job, queued or running; return it with its new status."""
        return self._call("DELETE", f"/jobs/{_quote_part(job_id)}")

    def hide(self, job_id: str, reason: str) -> Answer:
        """Leave a job's results out of curves and tables; return the job."""
        return self._call("POST", f"/jobs/{_quote_part(job_id)}/hide", body={"reason": reason})

    def show(self, job_id: str) -> Answer:
        """Show a job's hidden results again; return the job."""
        return self._call("POST", f"/jobs/{_quote_part(job_id)}/show")

    def see_run(self, directory: str) -> Answer:
        """Update the server's record of a run's directory, which may have moved; return the run."""
        return self._call("POST", "/runs", body={"directory": directory})

    def retry(self, job_id: str) -> Answer:
        """Queue an ended job again; return it, or the new job if it was completed."""
        return self._call("POST", f"/jobs/{_quote_part(job_id)}/retry")

    def drain(self) -> Answer:
        """Stop starting jobs, and end when none runs; return the counts `running` and `queued`."""
        return self._call("POST", "/drain")

    def log(self, job_id: str, offset: int = 0) -> Answer:
        """Return the evaluator's log from a byte on: `text`, `offset` of the next part, `ended`."""
        return self._call("GET", f"/jobs/{_quote_part(job_id)}/log", query={"offset": offset})

    def events(self, since: int = 0) -> Iterator[Answer]:
        """Yield changes of jobs after the event `since`, as they happen, until the server ends."""
        url = f"{self.base_url}{_PREFIX}/events"
        own = self.client.timeout
        timeout = httpx.Timeout(connect=own.connect, read=None, write=own.write, pool=own.pool)
        try:
            with self.client.stream("GET", url, params={"since": since}, timeout=timeout) as answer:
                if answer.is_error:
                    answer.read()
                    _raise_for(answer)
                yield from _parse_events(answer.iter_lines())
        except (httpx.TransportError, httpx.StreamError) as error:
            raise _away(url, error) from error

    def _list(
        self, name: str, query: Mapping[str, Scalar | None], cursor: str, most: int | None
    ) -> list[Answer]:
        """Return a list from all pages: `next` of an answer is the `cursor` of the next page."""
        listed: list[Answer] = []
        params = dict(query)
        while True:
            params["limit"] = None if most is None else min(most - len(listed), _LARGEST_PAGE)
            answer = self._call("GET", f"/{name}", query=params)
            page, after = answer.get(name), answer.get("next")
            if not isinstance(page, list):
                raise EvaluationError(f"{self.base_url}: answer without {name}", found=str(page))
            listed += page
            if not isinstance(after, int | str) or not page or len(listed) == most:
                return listed
            params[cursor] = after

    def _call(
        self,
        method: str,
        endpoint: str,
        *,
        query: Mapping[str, Scalar | None] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> Answer:
        url = f"{self.base_url}{_PREFIX}{endpoint}"
        try:
            answer = self.client.request(method, url, params=given(query or {}), json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _away(self.base_url, error) from error
        if answer.is_error:
            _raise_for(answer)
        return _read_object(answer)


def _sort_key(result: Answer) -> tuple[str, bool, int]:
    """Return run and step of a result; results without a step come first."""
    step = result.get("step")
    return str(result.get("run")), isinstance(step, int), step if isinstance(step, int) else 0


def _quote_part(text: str) -> str:
    """Return a text as one part of a path, whatever it contains."""
    return quote(text, safe="") if text.strip(".") else "-"


def _read_object(answer: httpx.Response) -> Answer:
    try:
        fields = answer.json()
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ServerAwayError(
            f"{answer.url}: not an evaluation server of unshard",
            expected="a JSON object of an evaluation server",
            found=f"{answer.status_code} {answer.text[:_SHOWN]}",
        )
    return fields


def _raise_for(answer: httpx.Response) -> None:
    """Raise our error for an answer with an error status."""
    try:
        fields = answer.json()["error"]
        details = {key: str(fields.get(key) or "") for key in ("expected", "found", "hint")}
        message, is_ours = str(fields["message"]), True
    except (ValueError, KeyError, TypeError, AttributeError):
        details = {"found": answer.text[:_SHOWN]}
        message, is_ours = f"status {answer.status_code}", answer.status_code in _NOT_ALLOWED
    if answer.status_code == _NO_TOKEN and not details.get("hint"):
        details["hint"] = "name the file of the server's token: --token-file, or `token_file`"
    subject = f"{answer.request.method} {answer.request.url.path}: {message}"
    if answer.status_code in _AWAY or not (is_ours or answer.is_server_error):
        raise ServerAwayError(subject, **details)  # a gateway without its server answers 404, too
    if answer.is_server_error:
        raise EvaluationError(subject, **details)
    error = RefusedError(subject, **details)
    error.status = answer.status_code
    raise error


def _parse_events(lines: Iterator[str]) -> Iterator[Answer]:
    """Yield the objects of a stream of server-sent events."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield json.loads("\n".join(data))
            data = []


def _away(url: str, error: Exception) -> ServerAwayError:
    return ServerAwayError(
        f"{url}: no answer",
        found=f"{type(error).__name__}: {error}",
        hint="start the server with `unshard eval serve`, or check its URL and any proxy",
    )
