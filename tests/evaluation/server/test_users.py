"""Users of one server: what each role may do, by every route and on the page."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route, Router

from evaluation.runs import checkpoint
from evaluation.servers import Still, still
from unshard.errors import UsageError
from unshard.evaluate.jobs import Status
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.http.security import rules_for
from unshard.evaluate.server.http.users import Role
from unshard.evaluate.server.server_yaml import is_root_path

NAMES = {"vera": "viewer", "alice": "owner", "bob": "owner", "oscar": "operator"}
SAFE = {"GET", "HEAD"}
SESSION = {"/view/log-in", "/view/log-out"}
HTML = {"Accept": "text/html"}


def token_of(name: str) -> str:
    return f"{name}-and-a-long-secret"


def bearer(name: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token_of(name)}", **more}


def token_file(directory: Path, text: str) -> Path:
    file = directory / "token"
    file.write_text(text)
    file.chmod(0o600)
    return file


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Still]:
    lines = [f"{name}  {role} {token_of(name)}" for name, role in NAMES.items()]
    file = token_file(tmp_path, "\n".join(["# of the group", "", *lines]))
    root = tmp_path / "root"
    checkpoint(root / "run", 5)
    checkpoint(root / "run", 6)
    with still(root, token_file=file, script=CommandProfile(command=("true",))) as server:
        yield server


def submit(server: Still, name: str, step: int = 5) -> str:
    place = server.service.config.roots[0] / "run" / f"checkpoint-{step}"
    body = {"checkpoint": str(place), "profile": "script", "tasks": ["score"]}
    answer = server.client.post("/api/v1/jobs", json=body, headers=bearer(name))
    assert answer.status_code in {200, 201}, answer.text
    return str(answer.json()["id"])


def state_of(server: Still) -> tuple[list[str], list[str]]:
    """Return the whole database, and every file below the root but for the database's."""
    root = server.service.config.roots[0]
    found = [str(one) for one in root.rglob("*") if "jobs.sqlite" not in one.name]
    return list(server.service.store.connection.iterdump()), sorted(found)


def routes_of(router: Router) -> Iterator[Route]:
    for one in router.routes:
        if isinstance(one, Route):
            yield one
        else:  # a router that FastAPI has included
            yield from routes_of(one.original_router)  # type: ignore[attr-defined]  # its own class


def ask_every_route(server: Still, job_id: str, name: str) -> Iterator[tuple[str, str, int]]:
    """Send a request to every route, by every method; yield method, path and status."""
    root = server.service.config.roots[0]
    body = {
        "reason": "wrong",
        "directory": str(root / "run"),
        "checkpoint_path": str(root / "run" / "checkpoint-5"),
        "model": "script",
        "model_args": {"pretrained": str(root / "run" / "checkpoint-6")},
        "tasks": ["score"],
        "token": token_of(name),
    }
    new = {key: body[key] for key in ("tasks",)} | {
        "checkpoint": str(root / "run" / "checkpoint-6"),
        "profile": "script",
    }
    wanted = {"/api/v1/jobs": new, "/api/v1/runs": {"directory": body["directory"]}}
    wanted["/api/v1/jobs/{job_id}/hide"] = {"reason": "wrong"}
    for route in routes_of(server.app.router):
        path = route.path.replace("{job_id}", job_id).replace("{name:path}", "a/b")
        path = path.replace("{name}", "page.js")
        if path == "/api/v1/events":
            path += "?since=999999"
        for method in sorted(route.methods or ()):
            sent = None if method in SAFE else wanted.get(route.path, body)
            with server.client.stream(
                method, path, json=sent, headers=bearer(name), follow_redirects=False
            ) as answer:
                yield method, route.path, answer.status_code


def test_a_viewer_changes_nothing_by_any_route(served: Still) -> None:
    job_id = submit(served, "alice")
    served.service.stopping.set()  # streams of events end at once
    before = state_of(served)
    asked = list(ask_every_route(served, job_id, "vera"))
    assert state_of(served) == before
    assert not served.service.scheduler.is_draining
    changing = [(path, status) for method, path, status in asked if method not in SAFE]
    assert len(changing) >= 12
    for path, status in changing:
        assert status == (204 if path in SESSION else 403), path
    refused = [path for method, path, status in asked if method in SAFE and status in {401, 403}]
    assert refused == []
    # An operator's same requests are served, so they would have changed something.
    for method, path, status in ask_every_route(served, job_id, "oscar"):
        assert method in SAFE or status not in {401, 403, 405, 422}, (method, path)
    assert state_of(served) != before
    assert served.service.scheduler.is_draining


def test_owners_change_their_own_jobs_and_operators_all(
    served: Still, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    own, others = submit(served, "alice"), submit(served, "bob", 6)
    for changed, path in (("POST", "retry"), ("POST", "hide"), ("POST", "show"), ("DELETE", "")):
        address = f"/api/v1/jobs/{others}/{path}".removesuffix("/")
        body = {"reason": "x"} if path == "hide" else None
        answer = served.client.request(changed, address, json=body, headers=bearer("alice"))
        assert answer.status_code == 403
        assert "belongs to bob" in answer.json()["error"]["message"]
    assert served.client.delete(f"/jobs/{others}", headers=bearer("alice")).status_code == 403
    assert served.client.post("/api/v1/drain", headers=bearer("alice")).status_code == 403
    for job_id, name in ((own, "alice"), (others, "oscar")):
        answer = served.client.delete(f"/api/v1/jobs/{job_id}", headers=bearer(name))
        assert (answer.status_code, answer.json()["status"]) == (200, Status.CANCELLED)
    assert [served.service.store.get(one).request.user for one in (own, others)] == ["alice", "bob"]  # type: ignore[union-attr]
    told = [record.getMessage() for record in caplog.records]
    assert any(f"job {own[:8]} run/5 of alice: accepted" in one for one in told)
    assert any(f"job {others[:8]} run/6 of bob: cancelled by oscar" in one for one in told)
    assert not any(token_of(name) in "\n".join(told) for name in NAMES)


def test_the_page_offers_what_a_user_may_do(served: Still) -> None:
    job_id = submit(served, "alice")
    views = ("/", "/view/queue", "/view/jobs", "/view/runs?run=run", f"/view/jobs/{job_id}")
    for name in NAMES:
        texts = [served.client.get(one, headers=bearer(name, **HTML)).text for one in views]
        may = name in {"alice", "oscar"}
        assert [f'data-job="{job_id}"' in text for text in texts] == [False, *[may] * 4]
        assert all(('href="/view/submit"' in text) is (name != "vera") for text in texts)
        assert "by <bdi>alice</bdi>" in texts[-1]
    form = served.client.get("/view/submit", headers=bearer("vera", **HTML)).text
    assert "<form" not in form


def test_a_browser_is_of_the_user_who_logged_in_last(served: Still) -> None:
    def log_in(name: str, origin: str = "http://127.0.0.1") -> str:
        served.client.headers["Origin"] = origin
        served.client.headers["Host"] = origin.partition("//")[2]
        answer = served.client.post("/view/log-in", json={"token": token_of(name)})
        assert answer.status_code == 204
        return answer.headers["set-cookie"].lower()

    assert "secure" not in log_in("oscar")
    log_in("vera")
    assert len(served.client.cookies) == 1
    assert served.client.post("/api/v1/drain").status_code == 403
    assert "; secure" in log_in("vera", "https://eval.example.org")


def test_a_clients_network_is_a_viewers_where_users_have_roles(tmp_path: Path) -> None:
    old = rules_for("127.0.0.1", token_file(tmp_path, token_of("one")), ("127.0.0.1/32",))
    assert old.anyone.role is Role.OPERATOR
    assert [(user.name, user.role) for user in old.users] == [("", Role.OPERATOR)]
    spaces = token_file(tmp_path, "a token of five words\n")
    assert rules_for("127.0.0.1", spaces).users[0].token == "a token of five words"  # noqa: S105
    with_roles = token_file(tmp_path, f"vera viewer {token_of('vera')}")
    assert rules_for("127.0.0.1", with_roles, ("127.0.0.1/32",)).anyone.role is Role.VIEWER


@pytest.mark.parametrize(
    "line",
    [
        f"bob admin {token_of('bob')}",
        f"bob{token_of('bob')}",
        f"b/ob owner {token_of('bob')}",
        "bob owner short",
        f"vera owner {token_of('bob')}",
        f"bob owner {token_of('vera')}",
    ],
)
def test_a_file_of_users_that_cannot_be_read_is_not_shown(tmp_path: Path, line: str) -> None:
    file = token_file(tmp_path, f"vera viewer {token_of('vera')}\n{line}\n")
    with pytest.raises(UsageError) as caught:
        rules_for("127.0.0.1", file)
    assert "secret" not in str(caught.value)
    assert "short" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"alice owmer {token_of('alice')}", "line 1 is not a user"),
        ("# name  role      token\n", "no line but comments"),
        (f"# users\nvera viewer {token_of('vera')}\nbob admin {token_of('bob')}", "line 3"),
        (f"vera viewer {token_of('a')}\nVera owner {token_of('b')}", "the same name"),
    ],
)
def test_a_mistake_in_a_file_of_users_makes_nobody_an_operator(
    tmp_path: Path, text: str, found: str
) -> None:
    with pytest.raises(UsageError, match=found):
        rules_for("127.0.0.1", token_file(tmp_path, text))


def test_cookies_of_other_programs_do_not_end_a_session(
    served: Still, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = served.client.post("/view/log-in", json={"token": "not-the-token-of-anyone"})
    assert wrong.status_code == 401
    assert "testclient tried to log in with a wrong token" in caplog.text
    body = {"token": token_of("vera")}
    cookie = served.client.post("/view/log-in", json=body).headers["set-cookie"].partition(";")[0]
    for others in ('prefs={"a":1}', "x", "=;;y=(e)", 'q="'):
        served.client.headers["Cookie"] = f"{others}; {cookie}"
        assert served.client.get("/api/v1/jobs").status_code == 200, others


def test_no_redirect_follows_the_host_of_a_request(served: Still) -> None:
    for address in ("/view/queue/", "/view/log-in/", "/api/v1/jobs/"):
        headers = bearer("vera", Host="evil.example")
        answer = served.client.get(address, headers=headers, follow_redirects=False)
        assert (answer.status_code, answer.headers.get("location")) == (404, None)


@pytest.mark.parametrize("path", ["/a/../b", "/.", "/view", "/view/eval", "/api", "eval", "/a//b"])
def test_a_path_that_a_proxy_cannot_have_the_server_at_is_refused(path: str) -> None:
    assert not is_root_path(path)
    assert all(map(is_root_path, ("", "/group/eval", "/views", "/.eval")))


def test_a_refusal_says_what_to_configure(served: Still, tmp_path: Path) -> None:
    headers = bearer("vera", Origin="https://eval.example.org")
    refusal = served.client.get("/api/v1/jobs", headers=headers).json()["error"]
    assert "proxy_set_header Host" in refusal["hint"]
    with still(tmp_path / "open") as without:
        refusal = without.client.get("/", headers={"Host": "eval.example.org"}).json()["error"]
    assert "--token-file" in refusal["hint"]


@pytest.mark.parametrize("strips", [True, False])
def test_a_proxy_may_have_the_server_below_a_path(tmp_path: Path, *, strips: bool) -> None:
    """Whether it removes the path from addresses, or passes them on as they are."""
    file = token_file(tmp_path, token_of("one"))
    with still(tmp_path / "root", token_file=file, root_path="/group/eval") as served:

        def get(address: str) -> Any:
            assert address.startswith("/group/eval/"), address
            place = address.removeprefix("/group/eval") if strips else address
            return served.client.get(place, headers=HTML, follow_redirects=False)

        asked = get("/group/eval/view/jobs?run=/view/x")
        assert asked.headers["location"].endswith(
            "next=%2Fgroup%2Feval%2Fview%2Fjobs%3Frun%3D%2Fview%2Fx"
        )
        form = get(asked.headers["location"])
        assert form.status_code == 200
        place = "" if strips else "/group/eval"
        body = {"token": token_of("one")}
        cookie = served.client.post(f"{place}/view/log-in", json=body).headers["set-cookie"]
        assert "path=/group/eval/;" in cookie.lower()
        served.client.headers["Cookie"] = cookie.partition(";")[0]
        text = get("/group/eval/view/jobs?run=/view/x").text
        assert 'value="/view/x"' in text  # what a user wrote is no address
        assert 'data-root="/group/eval"' in text
        found = re.findall(r'(?:href|src|action)="(/[^"]*)"', text)
        assert len(found) > 8
        for address in found:
            assert get(address).status_code == 200
        assert "does not exist" in get("/group/eval/view/jobs/0000").text
        assert served.app.openapi()["servers"] == [{"url": "/group/eval"}]
