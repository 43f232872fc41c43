"""Attacks on a real server: who may ask, what for, and how much."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from evaluation.runs import checkpoint
from evaluation.servers import Fields, Live, cli, live
from unshard.errors import UsageError
from unshard.evaluate.pins.pin import Quota, pin_checkpoint
from unshard.evaluate.server.http.security import rules_for
from unshard.evaluate.server.http.users import LASTS_S, cookie_name, make_session, shows_session
from waiting import LIMIT_S
from waiting import wait_until as until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("eval-security")]  # two servers for all
TOKEN = "correct-horse-battery-staple"  # noqa: S105  (of the test)
ANY = "0.0.0.0"  # noqa: S104  (what is attacked)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """On loopback, as it is by default; one root is a link."""
    directory = tmp_path_factory.mktemp("server")
    real = directory / "real"
    (directory / "linked").symlink_to(real)
    with live(directory, roots=[str(directory / "root"), str(directory / "linked")]) as started:
        checkpoint(started.root / "run", 5)
        checkpoint(real / "run", 6)
        checkpoint(directory / "outside", 7)
        yield started


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """On every address, with a token, and a network that needs none."""
    directory = tmp_path_factory.mktemp("guarded")
    file = directory / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    options = ("--host", ANY, "--token-file", str(file), "--allow-unauthenticated", "192.0.2.0/24")
    with live(directory, *options) as started:
        yield started


def submit(server: Live, **changed: object) -> httpx.Response:
    body = {"checkpoint": str(server.root / "run" / "checkpoint-5"), "profile": "script"}
    return server.call("POST", "/api/v1/jobs", json={**body, "tasks": ["score"], **changed})


def evaluate(server: Live, **changed: object) -> httpx.Response:
    path = str(server.root / "run" / "checkpoint-5")
    body: Fields = {"model": "script", "tasks": ["score"], "model_args": {"pretrained": path}}
    return server.call("POST", "/evaluate", json={**body, **changed})


def raw(server: Live, request: bytes) -> bytes:
    """Send bytes as they are, and return the first of the answer."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(request)
        return connection.recv(4096)


# Who may ask.


@pytest.mark.parametrize("host", [ANY, "::", "192.0.2.1", "example.org"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(UsageError, match="other machines can reach it"):
        rules_for(host, None)


def test_the_server_does_not_start_for_others_without_a_token(tmp_path: Path) -> None:
    done = cli("", "serve", "--host", ANY, "--port", "0", "--work-dir", str(tmp_path / "work"))
    assert done.returncode == 2
    assert "other machines can reach it" in done.stderr
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    with pytest.raises(UsageError, match="others may read it"):
        rules_for(ANY, file)


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("short")
    file.chmod(0o600)
    with pytest.raises(UsageError, match="at least 16"):
        rules_for(ANY, file)


def test_a_network_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="allow-unauthenticated"):
        rules_for(ANY, None, ("10.0.0.0/8x",))


@pytest.mark.parametrize("path", ["/health", "/api/v1/jobs", "/openapi.json", "/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong-horse-battery-staple"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic ???"},
        {"X-Forwarded-For": "192.0.2.7"},
        {"Forwarded": "for=192.0.2.7"},
    ],
)
def test_nothing_is_answered_without_the_token(
    guarded: Live, path: str, headers: dict[str, str]
) -> None:
    answer = guarded.call("GET", path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert answer.json()["error"]["code"] == 401
    assert TOKEN not in answer.text


def test_the_token_opens_as_bearer_and_as_a_password(guarded: Live) -> None:
    bearer = guarded.call("GET", "/health", headers={"Authorization": f"Bearer {TOKEN}"})
    assert bearer.status_code == 200
    with_user = guarded.url.replace("http://", f"http://user:{TOKEN}@")
    assert httpx.get(f"{with_user}/api/v1/jobs", timeout=LIMIT_S).status_code == 200
    as_user = guarded.url.replace("http://", f"http://{TOKEN}@")
    assert httpx.get(f"{as_user}/health", timeout=LIMIT_S).status_code == 401


def test_a_browser_without_the_token_is_led_to_the_form(guarded: Live) -> None:
    asked = guarded.call("GET", "/view/jobs?run=a", headers={"Accept": "text/html"})
    assert asked.status_code == 303
    assert asked.headers["location"] == "/view/log-in?next=%2Fview%2Fjobs%3Frun%3Da"
    form = guarded.call("GET", asked.headers["location"])
    assert (form.status_code, "<form" in form.text) == (200, True)
    assert guarded.call("GET", "/view/static/page.js").status_code == 200
    own = guarded.call("GET", "/view/jobs", headers={"X-Unshard-Page": "1", "Accept": "text/html"})
    assert own.status_code == 401
    assert "www-authenticate" not in own.headers  # or else the browser asks for a password


def test_the_token_opens_the_page_by_a_cookie_that_does_not_have_it(guarded: Live) -> None:
    wrong = guarded.call("POST", "/view/log-in", json={"token": f"{TOKEN}x"})
    assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
    right = guarded.call("POST", "/view/log-in", json={"token": TOKEN})
    cookie = right.headers["set-cookie"]
    assert "httponly" in cookie.lower()
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    shown = {"Cookie": cookie.partition(";")[0]}
    assert guarded.call("GET", "/", headers=shown).status_code == 200
    assert guarded.call("GET", "/api/v1/jobs", headers=shown).status_code == 200
    evil = {**shown, "Origin": "http://evil.example"}
    assert guarded.call("POST", "/api/v1/jobs", json={}, headers=evil).status_code == 403
    out = guarded.call("POST", "/view/log-out", headers=shown)
    assert "max-age=0" in out.headers["set-cookie"].lower()


def test_a_form_of_another_site_cannot_log_in(guarded: Live) -> None:
    answer = guarded.call("POST", "/view/log-in", data={"token": TOKEN})
    assert answer.status_code == 415


def test_a_cookie_that_is_old_or_forged_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    name, value = cookie_name(TOKEN), make_session(TOKEN)
    assert shows_session(TOKEN, f"other=1; {name}={value}")
    end, _, code = value.partition(".")
    forged = ["", "x", ".", f"{int(end) + 1}.{code}", f"{end}.", make_session(f"{TOKEN}x"), TOKEN]
    assert not any(shows_session(TOKEN, f"{name}={one}") for one in forged)
    assert not shows_session(TOKEN, f"{cookie_name('another token')}={value}")
    assert not shows_session(TOKEN, '"; =;;\x01')
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + LASTS_S + 1)
    assert not shows_session(TOKEN, f"{name}={value}")


def test_no_secret_is_shown(guarded: Live) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for path in ("/openapi.json", "/api/v1/profiles", "/models", "/queue"):
        assert "a-secret-of-the-profile" not in guarded.call("GET", path, headers=headers).text
    text = guarded.log.read_text()
    assert TOKEN not in text
    assert "a-secret-of-the-profile" not in text


def test_the_description_says_how_the_token_is_shown(guarded: Live, server: Live) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    spec = guarded.call("GET", "/openapi.json", headers=headers).json()
    assert spec["security"] == [{"bearer": []}, {"basic": []}]
    schemes = spec["components"]["securitySchemes"]
    assert schemes["basic"] == {"type": "http", "scheme": "basic"}
    assert "security" not in server.call("GET", "/openapi.json").json()


def test_without_a_token_clients_on_loopback_are_free(tmp_path: Path) -> None:
    with live(tmp_path, "--host", ANY, "--allow-unauthenticated", "192.0.2.0/24") as open_to_some:
        assert open_to_some.call("GET", "/health").status_code == 200
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    networks = map(str, rules_for(ANY, token, ("192.0.2.0/24",)).free)
    assert list(networks) == ["192.0.2.0/24"]


# From where.


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "["]
)
def test_another_sites_name_for_this_server_is_refused(server: Live, host: str) -> None:
    answer = server.call("GET", "/api/v1/jobs", headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80"])
def test_its_own_names_are_taken(server: Live, host: str) -> None:
    assert server.call("GET", "/health", headers={"Host": host}).status_code == 200


def test_networks_without_a_token_still_name_the_server() -> None:
    rules = rules_for("192.0.2.1", None, ("192.0.2.0/24",))
    own = {"192.0.2.1", socket.gethostname().lower(), socket.getfqdn().lower()}
    assert own <= rules.hosts
    assert rules_for("127.0.0.1", None, ("192.0.2.0/24",)).free == ()


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://["]
)
def test_a_page_of_another_site_is_refused(server: Live, origin: str) -> None:
    answer = server.call("POST", "/evaluate", json={}, headers={"Origin": origin})
    assert (answer.status_code, "Origin" in answer.json()["detail"]) == (403, True)
    own = server.call("GET", "/health", headers={"Origin": server.url})
    assert own.status_code == 200


# How much, and in what form.


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/evaluate", "/merge"])
def test_a_large_body_is_refused(server: Live, path: str) -> None:
    large = b'{"a": "' + b"x" * (2 << 20) + b'"}'
    headers = {"Content-Type": "application/json"}
    stated = server.call("POST", path, content=large, headers=headers)
    chunked = server.call("POST", path, content=iter([large[:1000], large[1000:]]), headers=headers)
    assert [stated.status_code, chunked.status_code] == [413, 413]
    assert stated.json()["error"]["code"] == 413


def test_a_huge_length_is_refused_before_anything_is_sent(server: Live) -> None:
    head = b"POST /evaluate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = raw(server, head + b"Content-Length: 99999999999\r\n\r\n")
    assert b" 413 " in answer.partition(b"\r\n")[0]


def test_connections_without_a_request_keep_no_client_out(guarded: Live) -> None:
    """Each costs a file descriptor until its client, or a proxy, closes it."""
    port = int(guarded.url.rpartition(":")[2])
    body = b"POST /evaluate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1"
    assert guarded.process is not None
    descriptors = Path(f"/proc/{guarded.process.pid}/fd")
    before = len(list(descriptors.iterdir()))
    with ExitStack() as stack:
        for number in range(700):
            one = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
            )
            one.sendall((b"", b"GET / HTTP/1.1\r\nX: ", body)[number % 3])
            answer = guarded.call("GET", "/health") if number % 100 == 99 else None
            assert answer is None or answer.status_code == 401
    until(lambda: len(list(descriptors.iterdir())) < before + 10, "the end of all connections")
    assert "Too many open files" not in guarded.log.read_text()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_a_form_can_send_is_refused(server: Live, kind: str) -> None:
    for content in (b'{"model": "script"}', iter([b'{"model": "script"}'])):
        headers = {"Content-Type": kind}
        answer = server.call("POST", "/evaluate", content=content, headers=headers)
        assert answer.status_code == 415


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 900_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"checkpoint": ' + b"9" * 100_000 + b"}",
        b'{"checkpoint": "/x", "profile": "script", "tasks": ["a"], "\\ud800": 1}',
        b'{"checkpoint": "/\\ud800", "profile": "script", "tasks": ["a"]}',
        b'{"checkpoint": "/\\u0000", "profile": "script", "tasks": ["a"]}',
        b'{"checkpoint": "/x", "profile": "script", "tasks": ["a"], "limit": NaN}',
        b'{"checkpoint": "/x", "profile": "script", "tasks": ["a"], "step": 1e400}',
        b'{"checkpoint": "/x", "profile": "script", "tasks": ["a"], "step": -1}',
        b'{"checkpoint": "/x", "profile": "script", "tasks": []}',
        b"\xff\xfe",
        b"null",
        b"",
    ],
)
def test_odd_json_is_the_clients_fault(server: Live, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    ours = server.call("POST", "/api/v1/jobs", content=body, headers=headers)
    assert ours.status_code == 400, ours.text
    assert ours.json()["error"]["message"]
    theirs = server.call("POST", "/evaluate", content=body, headers=headers)
    assert theirs.status_code in {400, 422}
    assert isinstance(theirs.json()["detail"], str)


@pytest.mark.parametrize(
    "changed",
    [
        {"step": 10**30},
        {"num_gpus": 5},
        {"num_gpus": -1},
        {"limit": 1e300},
        {"batch_size": 0},
        {"num_fewshot": 2**60},
        {"run": "../run"},
        {"run": "-x"},
        {"weights": "other"},
    ],
)
def test_numbers_and_names_have_bounds(server: Live, changed: Fields) -> None:
    assert submit(server, **changed).status_code == 400


@pytest.mark.parametrize("path", ["/jobs/{}", "/api/v1/jobs/{}", "/api/v1/jobs/{}/log"])
@pytest.mark.parametrize(
    "name", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "%00", "a%2fb", "%ff", "x" * 999]
)
def test_a_jobs_name_is_not_a_path(server: Live, path: str, name: str) -> None:
    answer = raw(server, f"GET {path.format(name)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert b" 404 " in answer.partition(b"\r\n")[0]


@pytest.mark.parametrize("offset", ["-1", str(10**30), "x", "1.5"])
def test_an_odd_offset_is_refused(server: Live, offset: str) -> None:
    answer = server.call("GET", f"/api/v1/jobs/none/log?offset={offset}")
    assert answer.status_code == 400


def test_an_offset_beyond_the_end_begins_again(server: Live) -> None:
    """It belongs to the longer log of an earlier attempt."""
    job = server.ended(server.submit(server.root / "run" / "checkpoint-5", "beyond"))
    part, whole = (server.v1("GET", f"/jobs/{job['id']}/log?offset={n}") for n in (2**53, 0))
    assert part == whole
    assert part["text"] != ""


# What for.


def outside(server: Live) -> list[str]:
    place = server.directory / "outside" / "checkpoint-7"
    link = server.root / "run" / "link-out"
    if not link.is_symlink():
        link.symlink_to(place)
    around = server.root / "run" / ".." / ".." / "outside" / "checkpoint-7"
    return [str(place), str(link), str(around), "/", "/etc/passwd", "relative", "~/x", "", "/x\ny"]


@pytest.mark.parametrize("number", range(9))
def test_a_checkpoint_outside_the_roots_is_refused(server: Live, number: int) -> None:
    path = outside(server)[number]
    answers = [
        submit(server, checkpoint=path),
        evaluate(server, model_args={"pretrained": path}),
        evaluate(server, lmms_engine_kwargs={"model_path": path}),
        server.call("POST", "/merge", json={"checkpoint_path": path}),
    ]
    assert [answer.status_code for answer in answers] == [400] * 4
    assert not (server.directory / "outside" / "_unshard").exists()


@pytest.mark.parametrize(
    "what", ["file", "file and a link to nowhere", "folder", "config", "step", "pin"]
)
def test_links_inside_a_checkpoint_do_not_lead_out(server: Live, what: str) -> None:
    outside = server.directory / "outside" / "checkpoint-7"
    folder = outside / "pytorch_model_fsdp_0"
    place = checkpoint(server.root / f"links {what}", 8)
    own = place / "pytorch_model_fsdp_0"
    more: Fields = {}
    match what:
        case "file" | "file and a link to nowhere":
            if what != "file":
                (place / "a.json").symlink_to("nowhere")
            name = "model_world_size_2_rank_0.pt"
            (own / name).unlink()
            (own / name).symlink_to(folder / name)
        case "folder":
            own.rename(place.parent / "aside")
            own.symlink_to(folder)
        case "config":
            (place.parent / "tokenizer.json").symlink_to(outside / "config.json")
        case "step":
            (place.parent / "checkpoint-9").symlink_to(outside)
            place = place.parent
        case _:
            pin = pin_checkpoint(place, quota=Quota(8, None)).path
            (pin / "model.safetensors").symlink_to(outside / "config.json")
            more = {"pin": str(pin)}
    asked = {"checkpoint": str(place), "tasks": ["links"], **more}
    answers = [submit(server, **asked)]
    if what != "pin":
        answers += [
            evaluate(server, model_args={"pretrained": str(place)}),
            server.call("POST", "/merge", json={"checkpoint_path": str(place)}),
        ]
    for answer in answers:
        assert (answer.status_code, "may read" in answer.text) == (400, True)


def test_a_root_that_is_a_link_is_a_root(server: Live) -> None:
    job = submit(server, checkpoint=str(server.directory / "linked" / "run" / "checkpoint-6"))
    assert job.status_code == 201
    assert server.ended(job.json())["step"] == 6


@pytest.mark.parametrize(
    "pin",
    [
        "{outside}/checkpoint-7",
        "{root}/run/checkpoint-5",
        "{root}/run/_unshard/pins/../../checkpoint-5",
        "{outside}/_unshard/pins/x/checkpoint-7",
        "_unshard/pins/x/y",
    ],
)
def test_a_pin_is_one_below_the_roots(server: Live, pin: str) -> None:
    path = pin.format(root=server.root, outside=server.directory / "outside")
    answer = submit(server, pin=path, tasks=["with-a-pin"])
    assert answer.status_code == 400
    assert (server.root / "run" / "checkpoint-5").is_dir()


def test_where_results_and_merged_weights_go_is_not_for_clients(server: Live) -> None:
    target = server.root / "run" / "chosen"
    answer = evaluate(server, output_dir=str(target), tasks=["elsewhere"])
    job = server.ended({"id": answer.json()["job_id"]})
    found = server.call("GET", f"/jobs/{job['id']}").json()["result"]
    (results,) = [one["results"] for one in found.values() if "results" in one]
    assert Path(results).is_relative_to(server.work)
    assert not target.exists()
    for output in (str(server.root / "run" / "checkpoint-5"), str(server.root / ".."), "/etc/x"):
        path = str(server.root / "run" / "checkpoint-5")
        asked = {"checkpoint_path": path, "output_path": output}
        merged = server.call("POST", "/merge", json=asked)
        place = server.root / "run" / "_unshard" / "merged" / "checkpoint-5"
        assert merged.json()["merged_path"] == str(place)
    assert not list((server.root / "run" / "checkpoint-5").glob("*.safetensors"))


@pytest.mark.parametrize(
    "task",
    ["tasks/x.yaml", "x.yaml", "/etc/x", "--help", "-c", "../x", "a,b", "a b", "", "a\nb", "{x}"],
)
def test_a_task_is_a_name(server: Live, task: str) -> None:
    assert submit(server, tasks=[task]).status_code == 400
    assert evaluate(server, tasks=[task]).status_code == 400


@pytest.mark.parametrize(
    "pair",
    [
        {"x": "1,trust_remote_code=True"},
        {"x": "a=b"},
        {"x": "a\nb"},
        {"trust_remote_code": True},
        {"x,y": 1},
        {"--x": 1},
        {"peft": "name"},
        {"weights_only": False},
        {"max_pixels": ".."},
        {"x": "/etc/passwd"},
        {"x": "'"},
        {"x": [1]},
        {"x": {"y": 1}},
        {"x": 1e400},
    ],
)
def test_an_argument_is_one_plain_value(server: Live, pair: Fields) -> None:
    path = str(server.root / "run" / "checkpoint-5")
    ours = submit(server, profile="lmms-eval", model_args=pair) if _is_json(pair) else None
    assert ours is None or ours.status_code == 400
    if _is_json(pair):
        theirs = evaluate(server, model="qwen2_vl", model_args={"pretrained": path, **pair})
        assert theirs.status_code in {400, 422}


def _is_json(pair: Fields) -> bool:
    return pair.get("x") != float("inf")


@pytest.mark.parametrize(
    "profile",
    [
        *("none", "", "lmms-eval:", "lmms-eval:--help", "lmms-eval:../y", "lmms-eval:a:b"),
        *("script:hf", "lmms-eval:x y", "../script", "lmms-eval:x,y=1", "lmms-eval:" + "x" * 4000),
    ],
)
def test_a_profile_is_one_of_the_servers(server: Live, profile: str) -> None:
    answer = submit(server, profile=profile)
    assert answer.status_code == 400
    assert len(answer.text) < 2000
    model = profile.partition(":")[2]
    if model:
        assert evaluate(server, model=model).status_code == 400


@pytest.mark.parametrize("model", ["qwen3_vl", "qwen3_5", "minicpm_v", "dummy", "openai", "sglang"])
def test_a_type_of_model_that_may_run_a_checkpoints_code_is_refused(
    server: Live, model: str
) -> None:
    answers = [evaluate(server, model=model), submit(server, profile=f"lmms-eval:{model}")]
    for answer in answers:
        assert answer.status_code == 400
        assert "`allowed_models`" in answer.text


def test_the_work_directory_is_its_users_own(server: Live, tmp_path: Path) -> None:
    assert server.work.stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "thing").touch()
    done = cli("", "serve", "--port", "0", "--work-dir", str(shared))
    assert (done.returncode, "other users may read it" in done.stderr) == (2, True)
    assert shared.stat().st_mode & 0o777 == 0o755
    if os.geteuid() == 0:
        foreign = tmp_path / "foreign"
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 12345, -1)
        done = cli("", "serve", "--port", "0", "--work-dir", str(foreign))
        assert (done.returncode, "belongs to another user" in done.stderr) == (2, True)


def test_the_server_made_no_mistake(server: Live, guarded: Live) -> None:
    """Nothing above ended in a stack trace."""
    for one in (server, guarded):
        assert "Traceback" not in one.log.read_text()
