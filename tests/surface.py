"""The public surface as lines of text, one fact a line, so that a change of it is a short diff."""

import argparse
import inspect
import os
import re
import sqlite3
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType

import pytest
from fastapi import FastAPI

from command_tree import commands_of
from unshard import errors
from unshard.cli.main import app

__all__ = [
    "of_commands",
    "of_database",
    "of_drop_in",
    "of_errors",
    "of_files",
    "of_http",
    "of_module",
    "of_record",
]

# Special methods that a caller uses by syntax: `with`, `[]`, `len()`, `in`.
SYNTAX = {
    *("__call__", "__contains__", "__enter__", "__exit__", "__aenter__", "__aexit__"),
    *("__getitem__", "__iter__", "__len__"),
}
# Callers get these and never make them, so their constructors are ours.
GIVEN = {"Comparison", "Inspection", "LazyTensor", "Loaded", "OpenCheckpoint", "Report"}
# Callers make these and only hand them over, so their members are ours.
MADE = {"MergeOptions"}
# What `*rest` and `**rest` are called, no caller sees.
STARS: dict[object, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
RANDOM = re.compile(r"\d{20}-[0-9a-f]{8}|[0-9a-f]{16}")

Schema = Mapping[str, typing.Any]


def of_module(module: ModuleType) -> list[str]:
    """Return the names of a module, the parameters of its functions, the members of its classes."""
    lines = []
    for name in module.__all__:
        full, value = f"{module.__name__}.{name}", getattr(module, name)
        lines += [full, *(of_class(full, value) if inspect.isclass(value) else called(full, value))]
    return lines


def of_class(full: str, one: type) -> Iterator[str]:
    """Yield the parameters and the public members of a class, inherited from ours too."""
    if one.__name__ not in GIVEN:
        yield from called(full, one)
    if one.__name__ in MADE:
        return
    ours = [base for base in one.__mro__ if base.__module__.startswith("unshard")]
    members = dict[str, object]()
    for base in reversed(ours):
        members |= vars(base)
    if is_dataclass(one):
        members = dict.fromkeys(field.name for field in fields(one)) | members
    for name in sorted(members):
        if not name.startswith("_") or name in SYNTAX:
            member = members[name]
            yield f"{full}.{name}"
            if isinstance(member, classmethod | staticmethod):
                member = member.__func__
            if inspect.isfunction(member):
                yield from called(f"{full}.{name}", member)


def called(full: str, function: object) -> Iterator[str]:
    """Yield a line for each parameter: those by position in order, then those by name only.

    A parameter that may be left out ends in `=`.
    """
    if not callable(function) or (isinstance(function, type) and issubclass(function, Exception)):
        return
    only_named = set[str]()
    for name, one in inspect.signature(function).parameters.items():
        optional = "" if one.default is one.empty else "="
        if one.kind is one.KEYWORD_ONLY:
            only_named.add(f"{name}{optional}")
        elif one.kind is one.VAR_KEYWORD and typing.get_args(one.annotation):
            (options,) = typing.get_args(one.annotation)
            only_named |= {f"{name}=" for name in options.__optional_keys__}
            only_named |= options.__required_keys__
        elif name not in ("self", "cls"):
            yield f"{full}({STARS.get(one.kind, name)}{optional})"
    yield from (f"{full}(*, {name})" for name in sorted(only_named))


def of_commands() -> list[str]:
    """Return every command of `unshard` with its arguments and flags."""
    return list(of_command("unshard", app))


def of_command(name: str, command: typing.Any) -> Iterator[str]:
    context = command.context_class(command)
    yield name
    for one in command.params:
        if one.param_type_name == "argument":
            shown = " ".join(one.get_usage_pieces(context))
        else:
            help_record = one.get_help_record(context)
            shown = "/".join(one.opts) if help_record is None else help_record[0]
        variable = f" (or ${one.envvar})" if one.envvar else ""
        needed = " (required)" if one.required else ""
        yield f"{name} {shown}{variable}{needed}"
    for inner, each in sorted(commands_of(command).items()):
        yield from of_command(f"{name} {inner}", each)


class Parsed(Exception):  # noqa: N818  (no error: it carries what was looked for)
    """The parser of a program that was about to parse its arguments."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def of_drop_in(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments and flags of a program that uses argparse."""

    def parse_args(self: argparse.ArgumentParser, *_: object) -> typing.NoReturn:
        raise Parsed(self)

    with monkeypatch.context() as patched, pytest.raises(Parsed) as found:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        module.main()
    return list(of_parser(f"python -m {module.__name__}", found.value.parser))


def of_parser(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield name
    inner = dict[str, argparse.ArgumentParser]()
    for one in parser._actions:
        if isinstance(one, argparse._SubParsersAction):
            inner |= one.choices
            continue
        flags = "/".join(one.option_strings) or one.dest
        choices = f" {{{','.join(one.choices)}}}" if one.choices else ""
        takes = "" if one.nargs == 0 else choices or f" {getattr(one.type, '__name__', 'str')}"
        needed = " (required)" if one.required else ""
        yield f"{name} {flags}{takes}{needed}"
    for operation, each in sorted(inner.items()):
        yield from of_parser(f"{name} {operation}", each)


def of_errors() -> list[str]:
    """Return every error with the one that it is a kind of, and its exit code."""
    found = (one for _, one in inspect.getmembers(errors, inspect.isclass))
    classes = [one for one in found if one.__module__ == errors.__name__]
    return [
        f"{one.__name__}({', '.join(base.__name__ for base in one.__bases__)})"
        f" {getattr(one, 'exit_code', '')}".rstrip()
        for one in classes
    ]


def of_http(served: FastAPI) -> list[str]:
    """Return every route with its parameters, bodies and answers, then every body's fields."""
    description = served.openapi()
    lines = []
    for path, methods in sorted(description["paths"].items()):
        for method, route in sorted(methods.items()):
            name = f"{method.upper()} {path}"
            lines.append(name)
            for one in route.get("parameters", []):
                needed = "" if one["required"] else "="
                lines.append(f"{name} {one['in']}: {one['name']}{needed} {typed(one['schema'])}")
            if "requestBody" in route:
                lines.append(f"{name} body: {contents(route['requestBody'])}")
            for status, answer in sorted(route["responses"].items()):
                lines.append(f"{name} {status}: {contents(answer)}")
    for name, schema in sorted(description["components"]["schemas"].items()):
        required = schema.get("required", ())
        lines.append(f"{name} {typed(schema)}" if "enum" in schema else name)
        for field, kind in sorted(schema.get("properties", {}).items()):
            lines.append(f"{name}.{field}{'' if field in required else '='} {typed(kind)}")
    return lines


def contents(body: Schema) -> str:
    """Return the media types of a body, and what each is."""
    found = body.get("content", {}).items()
    return ", ".join(f"{media} {typed(one['schema'])}" for media, one in found)


def typed(schema: Schema) -> str:
    """Return the type of a value of JSON: `string`, `JobView[]`, `integer|null`, `a|b`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return "|".join(map(typed, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return "|".join(f"'{one}'" for one in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"{typed(schema['items'])}[]"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"{{string: {typed(schema['additionalProperties'])}}}"
    return str(schema.get("type", "any"))


def of_files(directory: Path, documents: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the paths below a directory, `*` for what is random, and the keys of documents."""
    lines = set()
    for place, folders, files in os.walk(directory):  # which passes over what vanishes meanwhile
        folders[:] = [name for name in folders if not name.endswith(".partial")]
        names = [*(f"{name}/" for name in folders), *files]
        within = Path(place).relative_to(directory.parent).as_posix()
        lines |= {RANDOM.sub("*", f"{within}/{name}") for name in names if name[0] != "."}
    for name, keys in documents.items():
        lines |= {f"{RANDOM.sub('*', name)}: {key}" for key in keys}
    return lines


def of_record(record: Schema) -> list[str]:
    """Return the keys of a document of JSON, `output.files.*` for the names of files."""
    return list(keys_in(record, ""))


def keys_in(value: Schema, start: str) -> Iterator[str]:
    for key, inner in value.items():
        name = f"{start}{'*' if '.' in key else key}"
        yield name
        if isinstance(inner, dict):
            yield from dict.fromkeys(keys_in(inner, f"{name}."))


def of_database(path: Path) -> list[str]:
    """Return the tables of a database of SQLite with their columns, and its indexes."""
    with closing(sqlite3.connect(path)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        lines = [f"user_version {version}"]
        named = "SELECT name FROM sqlite_master WHERE type = ? AND name NOT LIKE 'sqlite_%'"
        tables = [row[0] for row in connection.execute(named, ["table"])]
        for table in sorted(tables):
            lines += [f"table {table}", *of_table(connection, table)]
        found = connection.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        )
        lines += sorted(" ".join(row[0].split()) for row in found)
    return lines


def of_table(connection: sqlite3.Connection, table: str) -> Sequence[str]:
    rows = connection.execute("SELECT * FROM pragma_table_info(?)", [table])
    return [
        f"{table}.{name} {kind}{' NOT NULL' if not_null else ''}{' KEY' if key else ''}"
        for _, name, kind, not_null, _default, key in sorted(rows, key=lambda row: str(row[1]))
    ]
