"""An object store for tests: moto's S3 on loopback, and a proxy before it that makes faults.

The keys of the environment are no secrets of anyone, and are looked for in what is printed.
"""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import boto3
import pytest
from moto.server import ThreadedMotoServer

from unshard.stores import buckets

ACCESS_KEY, SECRET_KEY = "AKIAOFNOBODY00000000", "the-secret-of-nobody"
SECRETS = (ACCESS_KEY, SECRET_KEY, "X-Amz", "Signature=")
BUCKET = "shards"


@dataclass(frozen=True)
class Request:
    """What a client asked for: the number counts from 0; key and query are decoded.

    Attributes:
        copied: the ETag and the range of the object that the store is to copy.
        if_match: the ETag that the object must have.
    """

    number: int
    method: str
    key: str
    query: str
    range: tuple[int, int] | None
    copied: tuple[str, tuple[int, int]] | None
    if_match: str

    @property
    def target(self) -> str:
        """Key and query."""
        return f"{self.key}?{self.query}"


@dataclass
class Store:
    """A bucket named `BUCKET` on a server.

    Attributes:
        endpoint: where it is, without the proxy.
        requests: those that came through the proxy, in their order.
        fault: decides what becomes of a request: None (nothing is wrong), a status such as "503",
            "cut" (the connection ends without an answer), "cut after" (the server has done what
            was asked), "kill" (then `kill` is called), "half" (it ends within the body),
            "no etag" (the answer has an empty ETag), or "any" (If-Match is ignored).
        kill: ends the client.
    """

    endpoint: str
    requests: list[Request] = field(default_factory=list)
    fault: Callable[[Request], str | None] = lambda _: None
    kill: Callable[[], None] = lambda: None

    @property
    def s3(self):  # type: ignore[no-untyped-def]  # noqa: ANN201 (boto3 has no types)
        """A client of boto3."""
        return boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1")

    def upload(self, directory: Path, prefix: str) -> str:
        """Put every file below a directory under a prefix; return the address."""
        client = self.s3
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(directory)}"
                client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def files(self, prefix: str) -> dict[str, bytes]:
        """Return what is below a prefix, by the path from there."""
        client = self.s3
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
        keys = [one["Key"] for page in pages for one in page.get("Contents", [])]
        return {
            key[len(prefix) + 1 :]: client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            for key in keys
        }

    def begun_uploads(self) -> list[dict[str, str]]:
        """Return key and number of what was begun in parts and is not finished."""
        begun = self.s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [{"Key": one["Key"], "UploadId": one["UploadId"]} for one in begun]

    def abort_uploads(self) -> int:
        """Abort what was begun in parts and is not finished; return how many there were."""
        begun = self.begun_uploads()
        for one in begun:
            self.s3.abort_multipart_upload(Bucket=BUCKET, **one)
        return len(begun)

    def forget_requests(self) -> None:
        self.requests.clear()
        self.fault = lambda _: None


@contextmanager
def serving() -> Iterator[Store]:
    """Run a server and the proxy before it; the environment names the proxy, and has keys."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_buckets", {})  # a client knows only the server it was made for
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ALLOW_HTTP", "true")
        host, port = server.get_host_and_port()
        store = Store(f"http://{host}:{port}")
        try:
            store.s3.create_bucket(Bucket=BUCKET)
            with _proxy(store, (host, port)) as own:
                patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{own}")
                yield store
        finally:
            server.stop()


@contextmanager
def _proxy(store: Store, server: tuple[str, int]) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                client, _ = listener.accept()
                threading.Thread(target=_talk, args=(client, store, server), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _talk(client: socket.socket, store: Store, server: tuple[str, int]) -> None:
    """Answer the requests of one connection, each by another one to the server."""
    with closing(client), suppress(OSError):
        received = client.makefile("rb")
        while head := _head(received):
            request = _request(head, store)
            body = received.read(int(_field(head, b"content-length") or 0))
            fault = store.fault(request)
            if fault == "cut":
                return
            if fault is not None and fault.isdecimal():
                client.sendall(f"HTTP/1.1 {fault} Fault\r\nContent-Length: 0\r\n\r\n".encode())
                continue
            with closing(socket.create_connection(server)) as upstream:
                dropped = b"if-match" if fault == "any" else b"-"
                upstream.sendall(_closing(head, dropped) + body)
                answer = upstream.makefile("rb")
                back = _head(answer)
                size = 0 if request.method == "HEAD" else int(_field(back, b"content-length") or 0)
                data = answer.read(size)
            if fault == "kill":
                store.kill()
            if fault in ("cut after", "kill"):
                return
            if fault == "half":
                client.sendall(back + data[: len(data) // 2])
                return
            if fault == "no etag":
                whole, length = len(data), b"content-length: %d\r\n"
                data = re.sub(rb"<ETag>[^<]*</ETag>", b"<ETag></ETag>", data)
                back = re.sub(length % whole, length % len(data), back, flags=re.IGNORECASE)
            client.sendall(_kept_open(back) + data)


def _head(stream: object) -> bytes:
    lines = []
    while (line := stream.readline()) not in (b"\r\n", b""):  # type: ignore[attr-defined]
        lines.append(line)
    return b"".join(lines) + b"\r\n" if lines else b""


def _field(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


def _closing(head: bytes, dropped: bytes) -> bytes:
    first, _, rest = head.partition(b"\r\n")
    without = (b"connection:", dropped + b":")
    lines = [one for one in rest.split(b"\r\n") if not one.lower().startswith(without)]
    return b"\r\n".join([first, b"Connection: close", *lines])


def _kept_open(head: bytes) -> bytes:
    lines = [one for one in head.split(b"\r\n") if not one.lower().startswith(b"connection:")]
    return b"\r\n".join(lines)


def _request(head: bytes, store: Store) -> Request:
    method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
    url = urlsplit(target)
    copied = None
    if (span := _span(head, b"x-amz-copy-source-range")) is not None:
        copied = (_field(head, b"x-amz-copy-source-if-match") or b"").decode(), span
    key = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
    number, query = len(store.requests), unquote(url.query)
    condition = (_field(head, b"if-match") or b"").decode()
    request = Request(number, method, key, query, _span(head, b"range"), copied, condition)
    store.requests.append(request)
    return request


def _span(head: bytes, name: bytes) -> tuple[int, int] | None:
    given = _field(head, name)
    if given is None:
        return None
    first, _, last = given.decode().removeprefix("bytes=").partition("-")
    return int(first), int(last)
