"""Tokens and passwords are read, checked, and shown by no error and no log line."""

import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from evaluation.servers import Stub, free_port, serving
from unshard.errors import UnshardError, UsageError
from unshard.evaluate.client.lmms import AsyncEvalClient, LmmsClient
from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.credentials import read_token, split_url, without_password
from unshard.evaluate.server.http.security import rules_for
from unshard.evaluate.trainer.config import EvalConfig

SECRET = "s3cr3t-of-this-test"  # noqa: S105
BAD = {
    f"{SECRET}\nsecond line": "several lines",
    f"{SECRET}\x1b[2J": "not printable",
    f"{SECRET}\xe4": "not printable",
    " \n": "nothing",
}


def token_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "token"
    file.write_bytes(text.encode())
    file.chmod(0o600)
    return file


def reading(file: Path) -> list[Callable[[], object]]:
    config = {"server_url": "http://s", "profile": "p", "tasks": ["t"], "token_file": str(file)}
    return [
        lambda: read_token(file, what="--token-file F"),
        EvalConfig.from_dict(config).token,
        lambda: rules_for("127.0.0.1", file),
    ]


def test_the_line_break_at_the_end_of_a_file_is_not_part_of_the_token(tmp_path: Path) -> None:
    file = token_file(tmp_path, f" {SECRET}\r\n")
    assert [read() for read in reading(file)[:2]] == [SECRET, SECRET]
    assert rules_for("127.0.0.1", file).users[0].token == SECRET


@pytest.mark.parametrize("text", BAD)
def test_a_file_without_a_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    file = token_file(tmp_path, text)
    for read in reading(file):
        with pytest.raises(UsageError, match=r"(not|neither) a token") as caught:
            read()
        assert BAD[text] in caught.value.found or "line 1 is not a user" in caught.value.found
        assert SECRET not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "none", what="--token-file F")


@pytest.mark.parametrize("text", [text for text in BAD if text.strip()])
@pytest.mark.parametrize("kind", [EvalClient, LmmsClient, AsyncEvalClient])
def test_a_client_refuses_what_cannot_be_a_header_without_showing_it(
    kind: type[EvalClient | LmmsClient | AsyncEvalClient], text: str
) -> None:
    with pytest.raises(UsageError, match="not a token") as caught:
        kind("http://127.0.0.1:9", token=text)
    assert SECRET not in repr(caught.value) + str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"http://any:{SECRET}/x@host:80",
        f"http://any:{SECRET}@host:80x",
        f"any:{SECRET}@host:80",
        f"http://any:{SECRET}\n@host",
        f"http://any:12/34{SECRET}@host:8000",
        f"http://any:12?34{SECRET}@host:8000",
        f"http://any:12#34{SECRET}@host:8000",
        f"http://any:{SECRET}@",
    ],
)
def test_a_url_that_is_wrong_is_shown_without_its_password(url: str) -> None:
    for read in (
        lambda: EvalClient(url),
        lambda: EvalConfig.from_dict({"server_url": url, "profile": "p", "tasks": ["t"]}),
    ):
        with pytest.raises(UsageError) as caught:
            read()
        assert SECRET not in repr(caught.value) + str(caught.value)
        assert "***@" in caught.value.found


def test_user_and_password_are_taken_out_of_a_url_and_decoded() -> None:
    assert split_url("http://u:p%2F@h:1/x", what="") == ("http://h:1/x", ("u", "p/"))
    assert split_url("https://[::1]:1", what="") == ("https://[::1]:1", None)
    assert without_password("http://host:1/x") == "http://host:1/x"
    shown = repr(EvalConfig(f"http://any:{SECRET}@h", "p", ("t",)))
    assert SECRET not in shown


def test_neither_errors_nor_logs_show_a_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, logger="httpx")  # trackio sets WARNING
    errors: list[Exception] = []
    with serving(Stub()) as stub:
        stub.token = "another"  # noqa: S105
        for port in (stub.port, free_port()):
            with EvalClient(f"http://any:{SECRET}@127.0.0.1:{port}") as client:
                for ask in (
                    client.health,
                    lambda: client.get_job("none"),
                    lambda: client.job("none"),
                    lambda: client.submit("/c", 1, "p", ["t"]),
                    lambda: list(client.events()),
                ):
                    try:
                        ask()
                    except (httpx.HTTPError, UnshardError) as error:
                        errors.append(error)
    assert {type(error).__name__ for error in errors} >= {"HTTPStatusError", "RefusedError"}
    assert len(errors) == 3 + 5
    assert "HTTP Request" in caplog.text
    assert SECRET not in caplog.text + "".join(map(str, errors)) + repr(errors)
