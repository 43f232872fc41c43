"""A damaged database, and configurations that YAML reads wrongly, end in one error."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from unshard.errors import UsageError
from unshard.evaluate.server.server_yaml import read_server_yaml
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.trainer.config import EvalConfig


def garbage(path: Path) -> None:
    path.write_bytes(b"no database at all " * 500)


def first_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:4096] = bytes(3996)
    path.write_bytes(data)


def all_tables(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize("damage", [garbage, first_page, all_tables, cut])
def test_a_damaged_database_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "jobs.sqlite"
    Store(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    damage(path)
    with pytest.raises(UsageError, match=r"jobs\.sqlite: is damaged") as error:
        Store(path)
    assert "restore a copy, or move it elsewhere" in error.value.hint


BAD = {
    "brackets": ("[" * 5000, "nested too deeply"),
    "braces": ("a: " + "{a: " * 3000, "nested too deeply"),
    "key": ("server: http://h\nserver: http://other\n", "server is given twice"),
    "inner key": ("a:\n  b: 1\n  c: 2\n  'b': 3\n", "b is given twice"),
    "number": ("a: {1: x, 1: y}\n", "1 is given twice"),
    "boolean": ("a: !!bool x\n", "not what its tag says"),
    "time": ("a: [!!timestamp x]\n", "not what its tag says"),
    "empty number": ("a: {b: !!int ''}\n", "not what its tag says"),
}


@pytest.mark.parametrize("case", BAD)
def test_yaml_that_means_no_one_thing_is_refused(tmp_path: Path, case: str) -> None:
    text, reason = BAD[case]
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_server_yaml(path)
    assert (str(path) in error.value.subject, reason in str(error.value)) == (True, True)
    for source in (path, text + "\n"):
        with pytest.raises(UsageError, match=reason):
            EvalConfig.from_yaml(source)


def test_merged_keys_of_yaml_are_not_given_twice(tmp_path: Path) -> None:
    """An anchor's keys may be replaced, several be merged, and "1" is not 1."""
    path = tmp_path / "server.yaml"
    path.write_text(
        "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {1: x, '1': y}\nd: {<<: *a, <<: *b}\n"
    )
    with pytest.raises(UsageError) as error:
        read_server_yaml(path)
    assert "twice" not in str(error.value)


@pytest.mark.parametrize("key", ["1", "on", "~", "2026-01-01"])
def test_keys_that_are_no_texts_are_as_unknown_as_others(key: str) -> None:
    needed = "server_url: http://h\nprofile: p\ntasks: [t]\n"
    assert EvalConfig.from_yaml(f"{needed}{key}: x\nother: y\n").tasks == ("t",)
    with pytest.raises(UsageError, match="is incomplete"):
        EvalConfig.from_yaml(f"{key}: x\nother: y\n")


def future(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[44:48] = (9).to_bytes(4, "big")  # the format of the schema
    path.write_bytes(data)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [future, directory])
def test_a_database_that_cannot_be_opened_is_named(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "jobs.sqlite"
    Store(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    damage(path)
    with pytest.raises(UsageError, match=r"jobs\.sqlite: cannot be opened"):
        Store(path)


def test_a_pipe_is_no_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "server.yaml")
    for read in (read_server_yaml, EvalConfig.from_yaml):
        with pytest.raises(UsageError, match="not a regular file"):
            read(tmp_path / "server.yaml")
