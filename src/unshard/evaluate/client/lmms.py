"""Clients of an evaluation server for lmms-eval's protocol, with the API of lmms-eval's own.

`LmmsClient` and `AsyncEvalClient` have the constructor, methods and return values of `EvalClient`
and `AsyncEvalClient` in `lmms_eval.entrypoints` (0.7.3), and take `lmms_engine_kwargs`, which
lmms-engine passes and no released client accepts. Their methods raise httpx's errors, as the
originals do. They print nothing; `verbose` logs.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Concatenate, Literal, ParamSpec, Self, TypeVar, cast

import httpx

from unshard.evaluate.credentials import check_token, split_url
from unshard.evaluate.values import split_names

DEFAULT_URL = "http://localhost:8000"

Answer = dict[str, object]

log = logging.getLogger(__name__)

_Value = TypeVar("_Value")
_Parameters = ParamSpec("_Parameters")


def _parse_server(
    url: str, token: str | None
) -> tuple[str, dict[str, str], tuple[str, str] | None]:
    """Return the address of a server, and headers, user and password to authenticate requests."""
    base_url, user = split_url(url.rstrip("/"), what="base_url")
    headers = {}
    if token:
        token = token.strip()  # the line break at the end of a file
        check_token(token, what="token")
        headers["Authorization"] = f"Bearer {token}"
    return base_url, headers, user


class LmmsClient:
    """The client of lmms-eval's protocol.

    Args:
        base_url: the address of the server; `http://user:password@host:port` works, too.
        timeout: seconds for a request; None for no limit.
        token: sent with every request, if there is one.

    Attributes:
        base_url: of the server, without user, password and trailing slash.
        client: the connection, which authenticates each request.

    Raises:
        UsageError: the URL or the token is invalid. No error shows token or password.
    """

    def __init__(
        self, base_url: str = DEFAULT_URL, timeout: float | None = None, token: str | None = None
    ) -> None:
        self.base_url, headers, user = _parse_server(base_url, token)
        self.client = httpx.Client(timeout=timeout, headers=headers, auth=user)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def health(self) -> Answer:
        """Return the state of the server."""
        return self._request("GET", "/health")

    def is_healthy(self) -> bool:
        """Return whether the server reports that it is healthy."""
        try:
            return self._request("GET", "/health").get("status") == "healthy"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return False

    def list_tasks(self) -> list[str]:
        """Return the server's tasks."""
        return _read_names(self._request("GET", "/tasks"), "tasks")

    def list_models(self) -> list[str]:
        """Return the server's types of models."""
        return _read_names(self._request("GET", "/models"), "models")

    def evaluate(
        self,
        model: str,
        tasks: str | Sequence[str],
        model_args: Mapping[str, object] | None = None,
        num_fewshot: int | None = None,
        batch_size: int | str | None = None,
        device: str | None = None,
        limit: float | None = None,
        gen_kwargs: str | None = None,
        log_samples: bool = True,
        predict_only: bool = False,
        num_gpus: int = 1,
        output_dir: str | None = None,
        lmms_engine_kwargs: Mapping[str, object] | None = None,
    ) -> Answer:
        """Submit a job; return `job_id`, `status`, `position_in_queue`, `message`.

        Arguments are those of lmms-eval's server; `lmms_engine_kwargs` names the checkpoint to
        merge: `model_path`, `checkpoint_type`, `output_path`.
        """
        payload = {
            "model": model,
            "tasks": names_of(tasks),
            "model_args": model_args,
            "num_fewshot": num_fewshot,
            "batch_size": batch_size,
            "device": device,
            "limit": limit,
            "gen_kwargs": gen_kwargs,
            "log_samples": log_samples,
            "predict_only": predict_only,
            "num_gpus": num_gpus,
            "output_dir": output_dir,
            "lmms_engine_kwargs": lmms_engine_kwargs,
        }
        return self._request("POST", "/evaluate", given(payload))

    def get_job(self, job_id: str) -> Answer:
        """Return a job: `status`, `result`, `error` and more."""
        return self._request("GET", f"/jobs/{job_id}")

    def cancel_job(self, job_id: str) -> Answer:
        """Cancel a job."""
        return self._request("DELETE", f"/jobs/{job_id}")

    def wait_for_job(
        self,
        job_id: str,
        poll_interval: float = 5.0,
        timeout: float | None = None,
        verbose: bool = True,
    ) -> Answer:
        """Wait until a job is completed and return it.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
            RuntimeError: it failed, was cancelled, or its checkpoint is gone.
        """
        start = time.monotonic()
        while True:
            job = self.get_job(job_id)
            if _completed(job, job_id, start=start, timeout=timeout, verbose=verbose):
                return job
            time.sleep(poll_interval)

    def get_queue_status(self) -> Answer:
        """Return the queue: its size, the running job, the ids of waiting jobs."""
        return self._request("GET", "/queue")

    def merge_checkpoint(
        self,
        checkpoint_path: str,
        output_path: str | None = None,
        checkpoint_type: Literal["regular", "ema"] = "regular",
    ) -> Answer:
        """Merge a checkpoint on the server; return `success`, `message`, `merged_path`."""
        payload = {
            "checkpoint_path": checkpoint_path,
            "output_path": output_path,
            "checkpoint_type": checkpoint_type,
        }
        return self._request("POST", "/merge", payload)

    def _request(
        self, method: str, endpoint: str, payload: Mapping[str, object] | None = None
    ) -> Answer:
        url = f"{self.base_url}{endpoint}"
        return _read_answer(self.client.request(method, url, json=payload))


def _awaited(
    request: Callable[Concatenate[LmmsClient, _Parameters], Answer],
) -> Callable[Concatenate["AsyncEvalClient", _Parameters], Coroutine[None, None, Answer]]:
    """Return a method of `LmmsClient` for both: its `_request` returns a coroutine here."""
    return cast("Callable[..., Coroutine[None, None, Answer]]", request)


class AsyncEvalClient:
    """The client of lmms-eval's protocol for asyncio; its methods are those of `LmmsClient`."""

    def __init__(
        self, base_url: str = DEFAULT_URL, timeout: float | None = None, token: str | None = None
    ) -> None:
        self.base_url, headers, user = _parse_server(base_url, token)
        self.client = httpx.AsyncClient(timeout=timeout, headers=headers, auth=user)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    health = _awaited(LmmsClient.health)
    get_job = _awaited(LmmsClient.get_job)
    cancel_job = _awaited(LmmsClient.cancel_job)
    get_queue_status = _awaited(LmmsClient.get_queue_status)

    async def evaluate(self, model: str, tasks: str | Sequence[str], **arguments: object) -> Answer:
        """Submit a job; the arguments are those of `LmmsClient.evaluate`."""
        payload = {"model": model, "tasks": names_of(tasks), **arguments}
        return await self._request("POST", "/evaluate", given(payload))

    async def wait_for_job(
        self,
        job_id: str,
        poll_interval: float = 5.0,
        timeout: float | None = None,  # noqa: ASYNC109  (lmms-eval's signature)
        verbose: bool = True,
    ) -> Answer:
        """Wait until a job is completed and return it; see `LmmsClient.wait_for_job`."""
        start = time.monotonic()
        while True:
            job = await self.get_job(job_id)
            if _completed(job, job_id, start=start, timeout=timeout, verbose=verbose):
                return job
            await asyncio.sleep(poll_interval)

    async def _request(
        self, method: str, endpoint: str, payload: Mapping[str, object] | None = None
    ) -> Answer:
        url = f"{self.base_url}{endpoint}"
        return _read_answer(await self.client.request(method, url, json=payload))


def given(payload: Mapping[str, _Value | None]) -> dict[str, _Value]:
    """Return the fields of a payload that have a value."""
    return {name: value for name, value in payload.items() if value is not None}


def names_of(tasks: str | Sequence[str]) -> list[str]:
    """Split a comma-separated text; copy any other sequence."""
    return split_names(tasks) if isinstance(tasks, str) else list(tasks)


def _read_answer(response: httpx.Response) -> Answer:
    response.raise_for_status()
    answer: Answer = response.json()
    return answer


def _read_names(answer: Answer, key: str) -> list[str]:
    names = answer.get(key, [])
    return [str(name) for name in names] if isinstance(names, list) else []


def _completed(
    job: Answer, job_id: str, *, start: float, timeout: float | None, verbose: bool
) -> bool:
    """Return whether a job is completed; raise if it ended otherwise, or takes too long."""
    status, level = job.get("status"), logging.INFO if verbose else logging.DEBUG
    log.log(level, "job %s: %s, position %s", job_id, status, job.get("position_in_queue"))
    if status in {"failed", "cancelled", "expired"}:
        raise RuntimeError(f"Job {status}: {job.get('error') or 'Unknown error'}")
    if status != "completed" and timeout and time.monotonic() - start > timeout:
        raise TimeoutError(f"Timeout waiting for job {job_id}")
    return status == "completed"
