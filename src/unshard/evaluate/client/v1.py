"""Our own protocol, under `/api/v1`: jobs, their logs, results and events, with errors of our tree.

UnshardError
├── ServerAwayError     no answer, or not one of an evaluation server: try again later
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
    """A client of an evaluation server, which takes the place of lmms-eval's client, too.

    Args:
        base_url: where the server listens; `http://user:password@host:port` works, too.
        timeout: seconds for a request; None for no limit.
        token: sent with every request, if there is one.

    Attributes:
        base_url: of the server, without a user, a password or a slash at its end.
        client: the connection, which authenticates each request.

    Raises:
        UsageError: the URL or the token cannot be one. No error shows token or password.

    All methods of our protocol raise:
        ServerAwayError: the server does not answer, or a gateway answers in its place.
        RefusedError: the request makes no sense to the server, or it is not allowed.
        EvaluationError: the server failed.
    The methods that are those of lmms-eval's client raise httpx's errors: see `lmms.LmmsClient`.
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
            checkpoint: its path, as the server knows it.
            step: the training step; None if it is not known.
            profile: the evaluator that the server is configured with.
            tasks: names of the tasks to evaluate; a text is one, or several with commas.
            weights: "model" or "ema".
            run: the name of the training run; None: that of the run's directory.
            pin: the linked checkpoint, if the client has pinned it; None: the server pins it.
            directory: of the run, where the checkpoint is not in it (a base model).
            again: whether to evaluate again what has been evaluated; with a text, the same text
                again returns the same job.
            arguments: those of the evaluator, as `Arguments` describes them.
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
        """Submit a job as the protocol writes it; see `submit`."""
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
        """Return the matching jobs, the newest first; `limit` is the largest number (100)."""
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

        `run` is a run's label, id, name or directory. Those that are `hidden` are left out, unless
        they are asked for.
        """
        query = {"run": run, "step": step, "profile": profile, "hidden": hidden or None}
        return sorted(self._list("results", query, "after", None), key=_sort_key)

    def profiles(self, name: str | None = None) -> list[Answer]:
        """Return the profiles, or the one that a submission's `profile` of this name means."""
        return self._list("profiles", {"name": name}, "after", None)

    def problems(self) -> list[str]:
        """Return why the server does not accept jobs now: a sentence per reason, if any."""
        try:
            answer = self.client.get(f"{self.base_url}/health")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _away(self.base_url, error) from error
        found, parts = _read_object(answer).get("problems"), ("message", "found", "hint")
        return [
            "; ".join(str(one[part]) for part in parts if one.get(part))
            for one in (found if isinstance(found, list) else [])
            if isinstance(one, dict)
        ]

    def cancel(self, job_id: str) -> Answer:
        """Cancel a job, queued or running; return it with its new status."""
        return self._call("DELETE", f"/jobs/{_quote_part(job_id)}")

    def hide(self, job_id: str, reason: str) -> Answer:
        """Leave a job's results out of curves and tables; return it."""
        return self._call("POST", f"/jobs/{_quote_part(job_id)}/hide", body={"reason": reason})

    def show(self, job_id: str) -> Answer:
        """Show a job's results again; return it."""
        return self._call("POST", f"/jobs/{_quote_part(job_id)}/show")

    def see_run(self, directory: str) -> Answer:
        """Have the server look at a run's directory, which may have been moved; return the run."""
        return self._call("POST", "/runs", body={"directory": directory})

    def retry(self, job_id: str) -> Answer:
        """Queue a job again that has ended; return it, or the one that evaluates again."""
        return self._call("POST", f"/jobs/{_quote_part(job_id)}/retry")

    def drain(self) -> Answer:
        """Have the server begin no more jobs, and end; return how many are `running`, `queued`."""
        return self._call("POST", "/drain")

    def log(self, job_id: str, offset: int = 0) -> Answer:
        """Return the evaluator's log from a byte on: `text`, `offset` of the next part, `ended`."""
        return self._call("GET", f"/jobs/{_quote_part(job_id)}/log", query={"offset": offset})

    def events(self, since: int = 0) -> Iterator[Answer]:
        """Yield changes of jobs after the event `since`, as they happen, until no more are sent."""
        url = f"{self.base_url}{_PREFIX}/events"
        was = self.client.timeout
        timeout = httpx.Timeout(connect=was.connect, read=None, write=was.write, pool=was.pool)
        try:
            with self.client.stream("GET", url, params={"since": since}, timeout=timeout) as answer:
                if answer.is_error:
                    answer.read()
                    _raise_for(answer)
                yield from _parse_events(answer.iter_lines())
        except (httpx.TransportError, httpx.StreamError) as error:
            raise _away(url, error) from error

    def _list(
        self, what: str, query: Mapping[str, Scalar | None], cursor: str, most: int | None
    ) -> list[Answer]:
        """Return a list page by page: `next` of an answer is the `cursor` of the next page."""
        listed: list[Answer] = []
        asked = dict(query)
        while True:
            asked["limit"] = None if most is None else min(most - len(listed), _LARGEST_PAGE)
            answer = self._call("GET", f"/{what}", query=asked)
            found, after = answer.get(what), answer.get("next")
            if not isinstance(found, list):
                raise EvaluationError(f"{self.base_url}: answer without {what}", found=str(found))
            listed += found
            if not isinstance(after, int | str) or not found or len(listed) == most:
                return listed
            asked[cursor] = after

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
    """Return what results are sorted by; those without a step come first."""
    step = result.get("step")
    return str(result.get("run")), isinstance(step, int), step if isinstance(step, int) else 0


def _quote_part(text: str) -> str:
    """Return a text as one part of a path, whatever it contains."""
    return quote(text, safe="") if text.strip(".") else "-"


def _read_object(answer: httpx.Response) -> Answer:
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerAwayError(
            f"{answer.url}: not an evaluation server of unshard",
            expected="a JSON object of an evaluation server",
            found=f"{answer.status_code} {answer.text[:_SHOWN]}",
        )
    return found


def _raise_for(answer: httpx.Response) -> None:
    """Raise what the error of an answer means here."""
    try:
        fields = answer.json()["error"]
        stated = {key: str(fields.get(key) or "") for key in ("expected", "found", "hint")}
        message, is_ours = str(fields["message"]), True
    except (ValueError, KeyError, TypeError, AttributeError):
        stated = {"found": answer.text[:_SHOWN]}
        message, is_ours = f"status {answer.status_code}", answer.status_code in _NOT_ALLOWED
    if answer.status_code == _NO_TOKEN and not stated.get("hint"):
        stated["hint"] = "name the file of the server's token: --token-file, or `token_file`"
    where = f"{answer.request.method} {answer.request.url.path}: {message}"
    if answer.status_code in _AWAY or not (is_ours or answer.is_server_error):
        raise ServerAwayError(where, **stated)  # a gateway without its server answers 404, too
    if answer.is_server_error:
        raise EvaluationError(where, **stated)
    error = RefusedError(where, **stated)
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
        hint="is the server running (`unshard eval serve`)? or is a proxy in the way?",
    )
