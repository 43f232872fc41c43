"""A stand-in of the Hugging Face Hub: the HTTP interface that makes and fills a repository.

Spoken as huggingface_hub speaks it without Xet: create, validate, preupload, Git LFS batch and
upload (also in parts), commit, the tree of files and what is known of each. Sources:
huggingface_hub's `hf_api`, `_commit_api` and `lfs` modules, and the Git LFS batch protocol.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest

TOKEN = "hf_stand_in"  # noqa: S105 (of no one)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """What the stand-in holds; `failing` maps a part of a path to the status that it gets.

    A branch is a repository of its own here: OWNER/NAME@BRANCH.

    `role` is that of its one token: write, read or fineGrained. Files in `ignored` are accepted and
    not committed. Large files are uploaded in parts of `part_bytes`, if that is not 0.
    """

    address: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    failing: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    role: str = "write"
    ignored: set[str] = field(default_factory=set)
    part_bytes: int = 0
    heads: dict[str, str] = field(default_factory=dict)  # which repository has a commit

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        """Return status and JSON for a request."""
        for part, status in self.failing.items():
            if part in path:
                return status, {"error": f"made to fail with {status}"}
        if method == "PUT":
            self.blobs[path.removeprefix("/blob/")] = body
            return 200, {}
        if path.startswith("/joined/"):
            oid, parts = path.removeprefix("/joined/"), json.loads(body)["parts"]
            self.blobs[oid] = b"".join(self.blobs.pop(f"{oid}/{n + 1}") for n in range(len(parts)))
            return 200, {}
        route, _, query = path.partition("?")
        if route == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([\w-]+)/?(.*)", route):
            folder, is_deep = unquote(match[3]), "recursive=true" in query.lower()
            repo, start = (
                self.repos.get(self._at(match[1], match[2]), Repo(private=False)),
                f"{folder}/" if folder else "",
            )
            found = _tree(repo, start, is_deep=is_deep)
            return (404, {"error": "EntryNotFound"}) if folder and not found else (200, found)
        return self._api(route, body)

    def _api(self, route: str, body: bytes) -> tuple[int, object]:
        if route == "/api/whoami-v2":
            orgs = [{"name": "their-org", "roleInOrg": "write"}]
            token = {"accessToken": {"role": self.role}}
            return 200, {"type": "user", "name": "someone", "orgs": orgs, "auth": token}
        if route == "/api/repos/create":
            return self._create(json.loads(body))
        if re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", route):
            return self._batch(json.loads(body))
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([\w-]+)/([\w-]+))?", route)
        if match is None or match[1] not in self.repos:
            return 404, {"error": route}
        name = self._at(match[1], match[3] or "main")
        if match[2] == "branch":
            return self._branch(match[1], name)
        return self._about(self.repos[name], name, match[2], body)

    def _at(self, name: str, revision: str) -> str:
        """Return what has a revision: a branch, or the branch of a commit."""
        if re.fullmatch("[0-9a-f]{40}", revision):
            return self.heads.get(revision, name)
        return name if revision == "main" else f"{name}@{revision}"

    def _branch(self, name: str, branch: str) -> tuple[int, object]:
        """Make a branch, which begins with the files of the main one."""
        if branch in self.repos:
            return 409, {"error": "Reference already exists"}
        main = self.repos[name]
        self.repos[branch] = Repo(main.private, dict(main.files))
        return 200, {}

    def _about(self, repo: Repo, name: str, what: str | None, body: bytes) -> tuple[int, object]:
        match what:
            case None | "revision":
                siblings = [{"rfilename": path} for path in repo.files]
                facts = {"id": name, "sha": COMMIT, "private": repo.private, "siblings": siblings}
                return 200, facts
            case "paths-info":
                asked = parse_qs(body.decode())["paths"]
                return 200, [
                    _path_info(path, repo.files[path]) for path in asked if path in repo.files
                ]
            case "preupload":
                asked = json.loads(body)["files"]
                return 200, {"files": [_preuploaded(file) for file in asked]}
            case "commit":
                return self._commit(repo, name, [json.loads(line) for line in body.splitlines()])
            case _:
                return 404, {"error": what}

    def resolve(self, path: str) -> bytes | None:
        """Return the content of the file that a download asks for."""
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/([^?]+)(?:\?.*)?", unquote(path))
        repo = self.repos.get(match[1]) if match else None
        return None if match is None or repo is None else repo.files.get(match[2])

    def _create(self, fields: Mapping[str, object]) -> tuple[int, object]:
        name = f"{fields.get('organization') or 'someone'}/{fields['name']}"
        status = 409 if name in self.repos else 200
        # Older versions of huggingface_hub send `private`, which the hub takes as well.
        is_private = fields.get("visibility") == "private" or bool(fields.get("private"))
        self.repos.setdefault(name, Repo(is_private))
        return status, {"url": f"{self.address}/{name}"}

    def _batch(self, fields: Mapping[str, list[dict[str, str]]]) -> tuple[int, object]:
        upload = [
            {**one, "actions": {"upload": self._upload(one["oid"], int(one["size"]))}}
            for one in fields["objects"]
        ]
        return 200, {"transfer": "basic", "objects": upload}

    def _upload(self, oid: str, size: int) -> dict[str, object]:
        href, step = f"{self.address}/blob/{oid}", self.part_bytes
        if not step:
            return {"href": href}
        parts = {str(n + 1): f"{href}/{n + 1}" for n in range(-(-size // step))}
        return {
            "href": f"{self.address}/joined/{oid}",
            "header": {"chunk_size": str(step), **parts},
        }

    def _commit(self, repo: Repo, name: str, lines: list[dict[str, object]]) -> tuple[int, object]:
        """Change a repository all at once, as the hub does: others see the old or the new files."""
        files, summaries = dict(repo.files), list[str]()
        for line in lines:
            match line:
                case {"key": "header", "value": {"summary": str(summary)}}:
                    summaries.append(summary)
                case {"value": {"path": str(path)}} if path in self.ignored:
                    pass
                case {"key": "file", "value": {"path": str(path), "content": str(content)}}:
                    files[path] = base64.b64decode(content)
                case {"key": "lfsFile", "value": {"path": str(path), "oid": str(oid)}}:
                    assert hashlib.sha256(self.blobs[oid]).hexdigest() == oid
                    files[path] = self.blobs[oid]
                case {"key": "deletedFile", "value": {"path": str(path)}}:
                    del files[path]
                case _:
                    raise AssertionError(line)
        repo.files = files
        repo.commits += summaries
        text = f"{name} {len(repo.commits)}"
        oid = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 (as git's)
        self.heads[oid] = name
        return 200, {"commitUrl": f"{self.address}/{name}/commit/{oid}", "commitOid": oid}


def _tree(repo: Repo, start: str, *, is_deep: bool) -> list[dict[str, object]]:
    """Return the files below a folder, or what is directly in it."""
    below = {
        path[len(start) :]: data for path, data in repo.files.items() if path[: len(start)] == start
    }
    found: list[dict[str, object]] = [
        {"type": "file", "path": start + path, "size": len(data), "oid": "0" * 40}
        for path, data in below.items()
        if is_deep or "/" not in path
    ]
    folders = sorted({path.partition("/")[0] for path in below if "/" in path})
    if not is_deep:
        found += [{"type": "directory", "path": start + one, "oid": "1" * 40} for one in folders]
    return found


def _is_large(path: object) -> bool:
    return str(path).endswith((".safetensors", ".bin"))


def _path_info(path: str, data: bytes) -> dict[str, object]:
    info = {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return info | ({"lfs": lfs} if _is_large(path) else {})


def _preuploaded(file: Mapping[str, object]) -> dict[str, object]:
    mode = "lfs" if _is_large(file["path"]) else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


class _Server(ThreadingHTTPServer):
    def handle_error(self, *given: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # of a client that has died
            super().handle_error(*given)


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub on this machine for as long as the context lasts."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            if len(body) < size:  # its sender has died
                self.close_connection = True
                return
            hub.requests.append(f"{self.command} {self.path}")
            told = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            of_storage = self.command == "PUT" or self.path.startswith("/joined/")
            if not told and not of_storage:
                status, answer = 401, {"error": "Invalid credentials"}
            else:
                status, answer = hub.answer(self.command, self.path, body)  # type: ignore[assignment]
            data = json.dumps(answer).encode()
            self.send_response(status)
            if answer == {"error": "EntryNotFound"}:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", '"of a part"')
            self.end_headers()
            self.wfile.write(data)

        def _download(self) -> None:
            data = hub.resolve(self.path)
            if data is None:
                if "/resolve/" not in self.path:
                    self._answer()
                else:
                    hub.requests.append(f"{self.command} {self.path}")
                    self.send_response(404)
                    self.send_header("X-Error-Code", "EntryNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                return
            hub.requests.append(f"{self.command} {self.path}")
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            part = data[int(asked[1]) : int(asked[2]) + 1] if asked else data
            self.send_response(206 if asked else 200)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(part)

        do_GET = do_HEAD = _download  # noqa: N815 (names of http.server)
        do_POST = do_PUT = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def standing_in(patch: pytest.MonkeyPatch, directory: Path) -> Iterator[Hub]:
    """Serve a hub, and make huggingface_hub use it, without Xet and without waiting.

    There is no token but that in HF_TOKEN; `directory` is empty.
    """
    from huggingface_hub import constants

    with serving() as hub:
        patch.setattr(constants, "ENDPOINT", hub.address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(
            "https://huggingface.co", hub.address
        )
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_TOKEN_PATH", str(directory / "no-token"))
        patch.setattr(time, "sleep", lambda _: None)
        patch.setenv("HF_TOKEN", TOKEN)
        yield hub
