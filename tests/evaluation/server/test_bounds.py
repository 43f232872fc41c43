"""What a server needs is bounded: unread answers, requests that never end, long lists."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from evaluation.servers import Fields, Live, in_thread, live
from unshard.evaluate.client.v1 import EvalClient, ServerAwayError
from unshard.evaluate.jobs import Request
from unshard.evaluate.server.http import connections, security
from unshard.evaluate.server.http.connections import Bounds, give_up_silent_readers
from unshard.evaluate.server.http.security import Guard, rules_for
from unshard.evaluate.server.store.store import Store
from waiting import LIMIT_S
from waiting import wait_until as until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("eval-bounds")]  # one server for all

JOBS, NUMBERS = 24, 10_000
CLIENTS, ANSWERS = 60, 6
MOST = 200 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose results would be 60 MB as one answer."""
    directory = tmp_path_factory.mktemp("server")
    with closing(Store(Live(directory).work / "jobs.sqlite")) as store:
        for step in range(JOBS):
            run = "run" if step % 2 else "other"
            request = Request("/none", "script", ("score",), JOBS - step, run)
            job, _ = store.submit(request, pin=None)
            store.claim(step, job.id)
            store.complete(job.id, {f"score/{n:060d}": n / 7 for n in range(NUMBERS)}, None)
    with live(directory) as started:
        yield started


def peak(server: Live) -> int:
    """Return the most bytes that a server had in memory."""
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def connected(url: str, request: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)
    connection.sendall(request)
    return connection


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


POST = b"POST /evaluate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ENDLESS = POST + b"Content-Length: 100000\r\n\r\n"


def is_open(connection: socket.socket) -> bool:
    """Send a byte, and return whether the server takes it."""
    try:
        connection.sendall(b"x")
    except OSError:
        return False
    return True


def test_answers_that_are_not_read_cost_a_bounded_memory(server: Live) -> None:
    """And neither those clients nor one that never ends its request keep their connections."""
    with EvalClient(server.url) as client:
        job = client.jobs(limit=1)[0]["id"]
    paths = ("/api/v1/results", "/api/v1/jobs?limit=1000", f"/api/v1/jobs/{job}", f"/jobs/{job}")
    before = peak(server)
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(server.url, ENDLESS)) for _ in range(2)]
        for number in range(CLIENTS):
            asked = get(paths[number % len(paths)]) * ANSWERS
            slow.append(stack.enter_context(connected(server.url, asked)))
        until(lambda: sum(map(is_open, slow)) == 0, "the end of all connections")
    assert server.call("GET", "/health").status_code == 200
    assert peak(server) - before < MOST


def test_a_stream_of_events_ends_with_the_server(tmp_path: Path) -> None:
    """In an orderly way, and before the server would cancel it."""
    with ThreadPoolExecutor() as pool, live(tmp_path) as server:
        followed = pool.submit(httpx.get, f"{server.url}/api/v1/events", timeout=LIMIT_S)
        until(lambda: server.call("GET", "/health").status_code == 200, "the server")
        time.sleep(1)
        assert not followed.done()
        began = time.monotonic()
        server.stop()
        assert followed.result().text.startswith(": alive")
        assert time.monotonic() - began < 3
        assert "Traceback" not in server.told()
        assert "Cancel" not in server.told()


def test_one_client_that_follows_the_events_too_often_is_refused(server: Live) -> None:
    """It would otherwise take all connections, and nobody could ask for the server's health."""
    with ExitStack() as stack:
        opened, lines = list[socket.socket](), list[bytes]()
        for _ in range(600):
            opened.append(
                stack.enter_context(connected(server.url, get(f"/api/v1/events?since={2**53}")))
            )
            with suppress(ConnectionResetError):
                lines.append(opened[-1].makefile("rb").readline())
        assert server.call("GET", "/health").status_code == 200
        streams = [one for one, line in zip(opened, lines, strict=True) if b" 200 " in line]
        assert len(streams) == 64
        assert [line for line in lines if b" 429 " not in line] == lines[:64]
        streams[0].close()

        def is_let_in() -> bool:
            with httpx.stream("GET", f"{server.url}/api/v1/events", timeout=LIMIT_S) as answer:
                return answer.status_code == 200

        until(is_let_in, "place for another stream")


def test_a_list_of_results_has_pages(server: Live) -> None:
    """Of about a megabyte each, or as many numbers as the client asks for."""
    first = server.v1("GET", "/results?limit=3")
    assert isinstance(first["results"], list)
    assert [one["metric"] for one in first["results"]] == [f"{n:060d}" for n in range(3)]
    assert first["next"] == first["results"][-1]["number"]
    second = server.v1("GET", f"/results?after={first['next']}")
    assert isinstance(second["results"], list)
    assert second["results"][0]["metric"] == f"{3:060d}"
    assert 1_000 < len(second["results"]) < NUMBERS
    size = len(server.call("GET", "/api/v1/results").content)
    assert 1_000_000 < size < 1_200_000


def test_the_client_reads_all_pages_by_run_and_step(server: Live) -> None:
    with EvalClient(server.url) as client:
        found = client.results(run="run")
        everything = client.results()
    steps = list(dict.fromkeys(one["step"] for one in found))
    assert steps == sorted(range(1, JOBS, 2))
    assert len({(one["step"], one["metric"]) for one in found}) == len(found)
    assert len(found) * 2 == len(everything) == JOBS * NUMBERS


def test_a_list_of_jobs_has_pages(server: Live) -> None:
    def listed(query: str) -> tuple[list[Fields], object]:
        answer = server.v1("GET", f"/jobs?limit=1000{query}")
        assert isinstance(answer["jobs"], list)
        return answer["jobs"], answer["next"]

    jobs, place = listed("")
    assert len(jobs) < JOBS
    assert place == jobs[-1]["id"]
    more, _ = listed(f"&before={place}")
    assert more[0]["step"] == int(str(jobs[-1]["step"])) + 1
    with EvalClient(server.url) as client:
        assert [job["step"] for job in client.jobs()] == list(range(1, JOBS + 1))
        assert [job["step"] for job in client.jobs(limit=3)] == [1, 2, 3]
        assert [job["step"] for job in client.jobs(run="run", limit=2000)] == list(
            range(1, JOBS + 1, 2)
        )


# The same connections, with a server of this process.

LARGE = 16 << 20  # more than the kernel takes


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, *, silent_s: float) -> Iterator[str]:
    """Answer everything with a large text."""
    monkeypatch.setattr(connections, "_SILENT_S", silent_s)
    monkeypatch.setattr(security, "_BODY_S", silent_s)
    app = Bounds(
        Guard(PlainTextResponse("x" * LARGE), rules_for("127.0.0.1", None), PlainTextResponse)
    )
    with in_thread(app, prepare=give_up_silent_readers) as port:
        yield f"http://127.0.0.1:{port}"


def received(connection: socket.socket) -> int:
    """Read until the server ends the connection, and return how many bytes came."""
    count = 0
    try:
        while part := connection.recv(1 << 20):
            count += len(part)
    except ConnectionError:
        pass
    return count


def test_a_body_that_trickles_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, silent_s=0.5) as url, connected(url, ENDLESS) as trickling:
        until(lambda: not is_open(trickling), "the end of a request that does not end")


def test_a_client_whose_body_does_not_come_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, silent_s=0.5) as url, connected(url, ENDLESS) as silent:
        text = silent.makefile("rb").read()  # to the end of the connection
    assert text.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not come in time" in text


def test_an_answer_that_is_read_slowly_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes in all; one that is not read is given up."""
    last = get("/").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with serving(monkeypatch, silent_s=5) as url, connected(url, last) as slow:
        count = 0
        with connected(url, get("/")) as stuck:
            while is_open(stuck):
                count += len(slow.recv(1 << 14))
                time.sleep(0.01)  # slowly
            assert received(stuck) < LARGE
        assert count + received(slow) > LARGE


def test_large_answers_wait_for_the_slow_readers_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While too much waits to be read, further clients come back; then there is room again."""
    monkeypatch.setattr(connections, "_UNREAD", 2 * LARGE)
    with serving(monkeypatch, silent_s=4) as url, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connected(url, get("/"))).recv(10)  # and no more
        refused = httpx.get(url, timeout=LIMIT_S)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "30")
        assert "too many answers wait to be read" in refused.text
        until(lambda: httpx.get(url, timeout=LIMIT_S).status_code == 200, "room again")
        assert httpx.get(url, timeout=LIMIT_S).text == "x" * LARGE


def test_a_server_that_ends_asks_those_who_wait_to_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waiting: list[str] = []

    async def slow(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a part", "more_body": True})
        waiting.append(scope["path"])
        await asyncio.sleep(LIMIT_S)

    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        with in_thread(Bounds(slow), timeout_graceful_shutdown=1) as port:
            url = f"http://127.0.0.1:{port}"
            client = stack.enter_context(EvalClient(url, timeout=LIMIT_S))
            asked = pool.submit(client.job, "5")
            begun = pool.submit(httpx.get, f"{url}/begun", timeout=LIMIT_S)
            until(lambda: len(waiting) == 2, "two requests")
        with pytest.raises(ServerAwayError, match="the server is stopping"):
            asked.result()
        with pytest.raises(httpx.TransportError):
            begun.result()
    assert "Traceback" not in caplog.text
