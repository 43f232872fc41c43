"""Talk to an evaluation server: lmms-eval's protocol as its own client speaks it, and ours.

`EvalClient` and `AsyncEvalClient` have the constructor, methods and return values of
`lmms_eval.entrypoints` (0.7.3), and take `lmms_engine_kwargs`, which lmms-engine passes and no
released client accepts. These methods raise what the originals raise: httpx's errors. Nothing is
printed; `verbose` logs.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, Self

import httpx

from unshard.evaluate.client.v1 import Answer, V1Client
from unshard.evaluate.credentials import check_token, split_url

__all__ = ["AsyncEvalClient", "EvalClient"]

_DEFAULT_URL = "http://localhost:8000"

log = logging.getLogger(__name__)


class EvalClient(V1Client):
    """A client of an evaluation server.

    Args:
        base_url: where it listens; `http://user:password@host:port` works, too.
        timeout: seconds for a request; None for no limit.
        token: sent with every request, if there is one.

    Raises:
        UsageError: the URL or the token cannot be one. No error shows token or password.

    The methods of our own protocol (`submit`, `job`, `jobs`, `results`, `cancel`, `log`, `events`)
    raise errors of `unshard.errors`.
    """

    def __init__(
        self,
        base_url: str = _DEFAULT_URL,
        timeout: float | None = None,
        token: str | None = None,
    ) -> None:
        self.base_url, user = split_url(base_url.rstrip("/"), what="base_url")
        self.client = httpx.Client(timeout=timeout, headers=_headers(token), auth=user)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def health(self) -> Answer:
        """Return how the server is."""
        return self._request("GET", "/health")

    def is_healthy(self) -> bool:
        """Tell whether the server answers that it is healthy."""
        try:
            return self.health().get("status") == "healthy"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return False

    def list_tasks(self) -> list[str]:
        """Return the tasks that the server knows."""
        return _names(self._request("GET", "/tasks"), "tasks")

    def list_models(self) -> list[str]:
        """Return the types of models that the server knows."""
        return _names(self._request("GET", "/models"), "models")

    def evaluate(
        self,
        model: str,
        tasks: Sequence[str],
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
            "tasks": list(tasks),
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
        return self._request("POST", "/evaluate", _given(payload))

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
            if _is_over(job, job_id, level=logging.INFO if verbose else logging.DEBUG):
                return job
            _check_time(job_id, start, timeout)
            time.sleep(poll_interval)

    def get_queue_status(self) -> Answer:
        """Return the queue: its size, the job that is running, the ids that wait."""
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
        response = self.client.request(method, f"{self.base_url}{endpoint}", json=payload)
        return _answer(response)


class AsyncEvalClient:
    """The client of lmms-eval's protocol for asyncio."""

    def __init__(
        self,
        base_url: str = _DEFAULT_URL,
        timeout: float | None = None,
        token: str | None = None,
    ) -> None:
        self.base_url, user = split_url(base_url.rstrip("/"), what="base_url")
        self.client = httpx.AsyncClient(timeout=timeout, headers=_headers(token), auth=user)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    async def health(self) -> Answer:
        """Return how the server is."""
        return await self._request("GET", "/health")

    async def evaluate(self, model: str, tasks: Sequence[str], **arguments: object) -> Answer:
        """Submit a job; the arguments are those of `EvalClient.evaluate`."""
        payload = {"model": model, "tasks": list(tasks), **arguments}
        return await self._request("POST", "/evaluate", _given(payload))

    async def get_job(self, job_id: str) -> Answer:
        """Return a job."""
        return await self._request("GET", f"/jobs/{job_id}")

    async def cancel_job(self, job_id: str) -> Answer:
        """Cancel a job."""
        return await self._request("DELETE", f"/jobs/{job_id}")

    async def wait_for_job(
        self,
        job_id: str,
        poll_interval: float = 5.0,
        timeout: float | None = None,  # noqa: ASYNC109  (lmms-eval's signature)
        verbose: bool = True,
    ) -> Answer:
        """Wait until a job is completed and return it; see `EvalClient.wait_for_job`."""
        start = time.monotonic()
        while True:
            job = await self.get_job(job_id)
            if _is_over(job, job_id, level=logging.INFO if verbose else logging.DEBUG):
                return job
            _check_time(job_id, start, timeout)
            await asyncio.sleep(poll_interval)

    async def get_queue_status(self) -> Answer:
        """Return the queue."""
        return await self._request("GET", "/queue")

    async def _request(
        self, method: str, endpoint: str, payload: Mapping[str, object] | None = None
    ) -> Answer:
        url = f"{self.base_url}{endpoint}"
        return _answer(await self.client.request(method, url, json=payload))


def _headers(token: str | None) -> dict[str, str]:
    if not token:
        return {}
    token = token.strip()  # the line break at the end of a file
    check_token(token, what="token")
    return {"Authorization": f"Bearer {token}"}


def _given(payload: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in payload.items() if value is not None}


def _answer(response: httpx.Response) -> Answer:
    response.raise_for_status()
    answer: Answer = response.json()
    return answer


def _names(answer: Answer, key: str) -> list[str]:
    found = answer.get(key, [])
    return [str(name) for name in found] if isinstance(found, list) else []


def _is_over(job: Answer, job_id: str, *, level: int) -> bool:
    status = job.get("status")
    log.log(level, "job %s: %s, position %s", job_id, status, job.get("position_in_queue"))
    if status in {"failed", "cancelled", "expired"}:
        raise RuntimeError(f"Job {status}: {job.get('error') or 'Unknown error'}")
    return status == "completed"


def _check_time(job_id: str, start: float, timeout: float | None) -> None:
    if timeout and time.monotonic() - start > timeout:
        raise TimeoutError(f"Timeout waiting for job {job_id}")
