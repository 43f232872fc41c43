"""Keys that no path can have, and web servers that fall silent, end in an error that says so."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import boto3
import pytest

import unshard
from bucket_server import ACCESS_KEY, BUCKET, SECRET_KEY, Store
from unshard import StoreError
from unshard.stores import buckets
from waiting import LIMIT_S


@pytest.mark.parametrize("key", ["run//x", "run/../x", "run/./y"])
def test_a_key_that_no_path_can_have_is_named(store: Store, key: str) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=store.endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    try:
        with pytest.raises(StoreError, match="remove or rename it") as error:
            unshard.inspect(f"s3://{BUCKET}/run")
    finally:
        client.delete_object(Bucket=BUCKET, Key=key)
    assert key[:-1] in str(error.value)


@pytest.fixture(params=["nothing", "half a head", "half a body"])
def silent(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, list[socket.socket]]]:
    """Serve what falls silent after a part of an answer; yield its address, and who connected."""
    monkeypatch.setattr(buckets, "_buckets", {})
    monkeypatch.setattr(buckets, "_SILENT", "200ms")
    monkeypatch.setattr(buckets, "_REQUEST_RETRIES", 1)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nContent-Type: application/x\r\n"
    said = {"nothing": b"", "half a head": head}
    held: list[socket.socket] = []

    def answer(listening: socket.socket) -> None:
        with suppress(OSError):  # closed at the end
            while True:
                connection, _ = listening.accept()
                held.append(connection)
                asked = connection.recv(1 << 16)
                if request.param != "half a body":
                    connection.sendall(said[request.param])
                elif part := re.search(rb"bytes=(\d+-)(\d+)", asked):
                    end = min(int(part[2]), 99)
                    form = b"HTTP/1.1 206 P\r\nContent-Length: %d\r\nContent-Range: bytes %s%d/100"
                    span = (end + 1 - int(part[1][:-1]), part[1], end)
                    connection.sendall(form % span + b"\r\n\r\nabc")
                else:
                    connection.sendall(head + b"\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, args=(listening,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", held
        listening.shutdown(socket.SHUT_RDWR)
    for connection in held:
        with closing(connection):
            pass


def test_a_web_server_that_falls_silent_is_an_error(
    silent: tuple[str, list[socket.socket]],
) -> None:
    address, connected = silent
    raised: list[Exception] = []

    def inspect() -> None:
        try:
            unshard.inspect(f"{address}/run/model.safetensors")
        except StoreError as error:
            raised.append(error)

    thread = threading.Thread(target=inspect, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert [type(one) for one in raised] == [StoreError]
    assert "did not answer in time" in str(raised[0])
    assert len(connected) <= 3  # it is not asked anew as after a cut: the time for it is over
