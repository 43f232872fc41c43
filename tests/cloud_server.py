"""Small servers that speak what obstore asks of Azure and of Google, on loopback.

moto has S3 only. These do what the documents of both services say of the few requests there are:
conditions, the forms of entity tags, listings in pages, uploads in parts. Signatures are not
checked.
"""

import hashlib
import json
import re
import threading
import urllib.parse
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import ClassVar
from xml.sax.saxutils import escape

import pytest

from unshard.stores import buckets

__all__ = ["SECRET", "Cloud", "serving_cloud"]

CONTAINER, SECRET = "shards", b64encode(b"the secret of nobody").decode()
PAGE = 3
DATE = formatdate(0, usegmt=True)


@dataclass
class Cloud:
    """A container on a server.

    Attributes:
        scheme: "az" or "gs".
        objects: what is stored, by key, with a number that changes with every put, and its tag.
        parts: what was uploaded in parts and is not an object yet, by upload and part.
        written: the keys of successful puts, in their order.
        fault: returns the status to answer a request with, or None; it is given method and key.
    """

    scheme: str
    objects: dict[str, tuple[bytes, int, str]] = field(default_factory=dict)
    parts: dict[str, dict[str, bytes]] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    fault: Callable[[str, str], int | None] = lambda _method, _key: None
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def url(self, folder: str) -> str:
        return f"{self.scheme}://{CONTAINER}/{folder}"

    def upload(self, directory: Path, folder: str) -> str:
        """Put every file below a directory into a folder; return its address."""
        for path in directory.rglob("*"):
            if path.is_file():
                self.put(f"{folder}/{path.relative_to(directory)}", path.read_bytes())
        return self.url(folder)

    def put(self, key: str, data: bytes) -> None:
        number, digest = next(self.numbers), digest_of(data)
        tag = f'"0x{number:015X}"' if self.scheme == "az" else f'"{digest}"'
        self.objects[key] = data, number, tag

    def files(self, folder: str) -> dict[str, bytes]:
        start = f"{folder}/"
        found = {key: one[0] for key, one in self.objects.items() if key.startswith(start)}
        return {key.removeprefix(start): data for key, data in found.items()}


def digest_of(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    """What both have in common: gets, conditions, single puts."""

    protocol_version = "HTTP/1.1"
    cloud: Cloud
    lock: threading.Lock
    key: str
    query: dict[str, str]
    body: bytes
    exists: ClassVar = (409, "BlobAlreadyExists")

    def log_message(self, *_: object) -> None:
        pass

    def parse_request(self) -> bool:
        """Parse a request, and answer it: all methods are in `answer`."""
        if not super().parse_request():
            return False
        url = urllib.parse.urlsplit(self.path)
        self.key = urllib.parse.unquote(url.path).partition(f"/{CONTAINER}")[2].strip("/")
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status = self.cloud.fault(self.command, self.key)
        with self.lock:
            if status is not None:
                self.send(status, self.error("Fault"))
            else:
                self.answer()
        return False

    def answer(self) -> None:
        raise NotImplementedError

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, code: str) -> bytes:
        return f"<Error><Code>{code}</Code><Message>{SECRET}</Message></Error>".encode()

    def get(self) -> None:
        """Answer with an object, or with a range of it."""
        if self.key not in self.cloud.objects:
            self.send(404, self.error("BlobNotFound"))
            return
        (data, number, tag), status = self.cloud.objects[self.key], 200
        if self.headers.get("If-Match", tag) != tag:
            self.send(412, self.error("ConditionNotMet"))
            return
        more = {"ETag": tag, "Last_Modified": DATE, "x_goog_generation": str(number)}
        given = self.headers.get("x-ms-range") or self.headers.get("Range")
        if given:
            first, last = map(int, given.removeprefix("bytes=").split("-"))
            last = min(last, len(data) - 1)
            more["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        self.send(status, data, length=str(len(data)), **more)

    def store(self, data: bytes, status: int, body: bytes = b"") -> None:
        """Make an object, if the request's condition allows it."""
        _, number, tag = self.cloud.objects.get(self.key, (b"", 0, "none"))
        given = self.headers.get("x-goog-if-generation-match", str(number))
        if number and (self.headers.get("If-None-Match") == "*" or given == "0"):
            self.send(self.exists[0], self.error(self.exists[1]))
        elif self.headers.get("If-Match", tag) != tag or given != str(number):
            self.send(412, self.error("ConditionNotMet"))
        else:
            self.cloud.put(self.key, data)
            self.cloud.written.append(self.key)
            _, number, tag = self.cloud.objects[self.key]
            body = body.replace(b"TAG", escape(tag).encode())
            self.send(status, body, ETag=tag, Last_Modified=DATE, x_goog_generation=str(number))

    def delete(self, status: int) -> None:
        if self.cloud.objects.pop(self.key, None) is None:
            self.send(404, self.error("BlobNotFound"))
        else:
            self.send(status)

    def listed(self, token: str) -> tuple[list[str], list[str], str]:
        """Return a page of a listing: keys, prefixes, and where the next one begins."""
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        found = set()
        for key in self.cloud.objects:
            if key.startswith(prefix):
                head, cut, _ = key[len(prefix) :].partition(delimiter or "\0")
                found.add(prefix + head + cut.replace("\0", ""))
        names = [name for name in sorted(found) if name >= token]
        page, more = names[:PAGE], names[PAGE:]
        folders = [name for name in page if delimiter and name.endswith(delimiter)]
        return [name for name in page if name not in folders], folders, more[0] if more else ""


class _Azure(_Handler):
    def answer(self) -> None:
        match self.command, self.query.get("comp"):
            case "GET", "list":
                self.list()
            case "GET" | "HEAD", _:
                self.get()
            case "PUT", "block":
                self.cloud.parts.setdefault(self.key, {})[self.query["blockid"]] = self.body
                self.send(201)
            case "PUT", "blocklist":
                parts = self.cloud.parts.pop(self.key, {})
                names = re.findall(r"<Uncommitted>([^<]*)<", self.body.decode())
                self.store(b"".join(parts[name] for name in names), 201)
            case "PUT", None:
                assert self.headers["x-ms-blob-type"] == "BlockBlob"
                self.store(self.body, 201)
            case "POST", "batch":
                self.delete_many()
            case _:
                self.send(400, self.error("InvalidQueryParameterValue"))

    def delete_many(self) -> None:
        """Delete blobs, each of which is a request in the body of this one."""
        lines = []
        for number, path in enumerate(re.findall(rb"DELETE (\S+) HTTP/1.1", self.body)):
            key = urllib.parse.unquote(path.decode()).partition(f"/{CONTAINER}/")[2]
            found = self.cloud.objects.pop(key, None)
            status = "404 The specified blob does not exist." if found is None else "202 Accepted"
            lines += ["--answers", "Content-Type: application/http", f"Content-ID: {number}", ""]
            lines += [f"HTTP/1.1 {status}", "x-ms-error-code: BlobNotFound"][: 1 + (found is None)]
            lines += ["x-ms-version: 2023-11-03", "", ""]
        body = "\r\n".join([*lines, "--answers--", ""]).encode()
        self.send(202, body, Content_Type="multipart/mixed; boundary=answers")

    def list(self) -> None:
        keys, folders, marker = self.listed(self.query.get("marker", ""))
        blobs = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{DATE}</Last-Modified>"
            f"<Etag>{self.cloud.objects[key][2].strip(chr(34))}</Etag>"
            f"<Content-Length>{len(self.cloud.objects[key][0])}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for key in keys
        )
        blobs += "".join(f"<BlobPrefix><Name>{escape(one)}</Name></BlobPrefix>" for one in folders)
        self.send(
            200,
            f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{escape(marker)}</NextMarker>"
            "</EnumerationResults>".encode(),
        )


class _Google(_Handler):
    exists: ClassVar = (412, "PreconditionFailed")

    def answer(self) -> None:
        upload = self.query.get("uploadId", "")
        match self.command:
            case "GET" if not self.key:
                self.list()
            case "GET" | "HEAD":
                self.get()
            case "POST" if "uploads" in self.query:
                made = f"upload-{next(self.cloud.numbers)}"
                self.cloud.parts[made] = {}
                self.result("InitiateMultipartUploadResult", f"<UploadId>{made}</UploadId>")
            case "PUT" if upload:
                self.cloud.parts[upload][self.query["partNumber"]] = self.body
                self.send(200, ETag=f'"{digest_of(self.body)}"')
            case "POST" if upload:
                parts = self.cloud.parts.pop(upload)
                names = re.findall(r"<PartNumber>(\d+)<", self.body.decode())
                done = b"<CompleteMultipartUploadResult><ETag>TAG</ETag>"
                done += b"</CompleteMultipartUploadResult>"
                self.store(b"".join(parts[name] for name in names), 200, done)
            case "DELETE" if upload:
                del self.cloud.parts[upload]
                self.send(204)
            case "PUT":
                self.store(self.body, 200)
            case "DELETE":
                self.delete(204)
            case _:
                self.send(400, self.error("InvalidArgument"))

    def result(self, name: str, inner: str) -> None:
        self.send(200, f"<{name}>{inner}</{name}>".encode())

    def list(self) -> None:
        keys, folders, token = self.listed(self.query.get("continuation-token", ""))
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>1970-01-01T00:00:00.000Z"
            f"</LastModified><ETag>{escape(self.cloud.objects[key][2])}</ETag>"
            f"<Size>{len(self.cloud.objects[key][0])}</Size></Contents>"
            for key in keys
        )
        for one in folders:
            found += f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
        if token:
            found += f"<NextContinuationToken>{escape(token)}</NextContinuationToken>"
        self.result("ListBucketResult", found)


_HANDLERS = {"az": _Azure, "gs": _Google}


@contextmanager
def serving_cloud(scheme: str, directory: Path) -> Iterator[Cloud]:
    """Run a server of a service; the environment names it, and has keys."""
    cloud = Cloud(scheme)
    kind = type("ThisHandler", (_HANDLERS[scheme],), {"cloud": cloud, "lock": threading.Lock()})
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), kind) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        server.daemon_threads = True
        address = f"http://127.0.0.1:{server.server_port}"
        patch.setattr(buckets, "_buckets", {})
        if scheme == "az":
            patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "nobody")
            patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", SECRET)
            patch.setenv("AZURE_ENDPOINT", address)
            patch.setenv("AZURE_ALLOW_HTTP", "true")
        else:
            account = {"gcs_base_url": address, "disable_oauth": True, "private_key": SECRET}
            account |= {"client_email": "nobody", "private_key_id": "1"}
            (directory / "account.json").write_text(json.dumps(account))
            patch.setenv("GOOGLE_SERVICE_ACCOUNT", str(directory / "account.json"))
            patch.setenv("GOOGLE_ALLOW_HTTP", "true")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield cloud
        finally:
            server.shutdown()
            thread.join()
