"""The reference pages of the evaluation are made from the code, and are up to date."""

import ast
import dataclasses
import inspect
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError

from unshard.errors import UsageError
from unshard.evaluate.jobs import Arguments
from unshard.evaluate.pins.pin import Quota
from unshard.evaluate.server.config.keys import OnResult
from unshard.evaluate.server.evaluators.harness import HarnessKeys
from unshard.evaluate.server.evaluators.profiles import KINDS
from unshard.evaluate.server.evaluators.work import OwnArguments, Profile
from unshard.evaluate.server.http import lmms, v1
from unshard.evaluate.server.server_yaml import ServerConfig
from unshard.evaluate.trainer import config
from unshard.evaluate.trainer.config import EvalConfig

PAGES = Path(__file__).parents[2] / "docs" / "evaluation"
Row = tuple[str, ...]
WRONG = object()  # a value that no key accepts
NEEDED = "must be given"
COMPUTED = {
    (ServerConfig, "roots"): "the current directory",
    (ServerConfig, "gpus"): "every NVIDIA GPU, or those of `CUDA_VISIBLE_DEVICES`",
    (ServerConfig, "work_directory"): "`unshard-eval`",
    (ServerConfig, "profiles"): "`lm-eval`, `lmms-eval`, `command`",
    (OnResult, "command"): NEEDED,
    (Profile, "kind"): NEEDED,
    (Profile, "gpus"): "1, or 0 on a server without GPUs",
    (HarnessKeys, "interpreter"): "the server's Python",
    (HarnessKeys, "model"): "by kind",
    (KINDS["lmms-eval"], "include_paths"): "none",
    (KINDS["lmms-eval"], "allowed_models"): "types that run no code of a checkpoint",
}
"""Defaults that depend on the machine, or are filled in after a key has been read."""


# --- server.yaml and the client's YAML ---


def docs_of(cls: type) -> dict[str, str]:
    """Return what describes each attribute: the string below it, or its entry in "Attributes"."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    described = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(value))):
                described[name] = value
    listed = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"\n(?=    \S)", listed):
        names, _, text = entry.partition(": ")
        described |= dict.fromkeys((name.strip() for name in names.split(",")), text)
    return {key: " ".join(text.split()) for key, text in described.items() if key}


def meaning(text: str) -> str:
    """Return a docstring in the words of YAML."""
    text = re.sub(r"\bNone:", "`null`:", text)
    text = re.sub(r"(?<!`)\{(\w+)\}", r"`{\1}`", text).removesuffix(".")
    return f"{text[:1].upper()}{text[1:]}."


def expected(read: Callable[[], object]) -> str:
    """Return what a key accepts, in the words of the error about a wrong value."""
    with pytest.raises((ValidationError, UsageError)) as caught:
        read()
    error = caught.value
    if isinstance(error, ValidationError):
        (problem,) = (one for one in error.errors() if one["input"] is WRONG)
        text = problem.get("ctx", {}).get("expected") or problem["msg"]
    else:
        assert isinstance(error, UsageError)
        text = error.expected
    if re.search(r"dictionary|instance of", text):
        return "a mapping"
    return "a path" if "valid path" in text else re.sub(r"(?<!`)(\{+\w*\}*|\}\})", r"`\1`", text)


def default(value: object) -> str:
    if isinstance(value, Path | BaseModel) or value in (None, (), {}, ""):
        return "none"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        limits = dataclasses.asdict(value).items()
        return ", ".join(f"{key} {'no limit' if n is None else n}" for key, n in limits)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def keys_of(
    cls: type[BaseModel], read: type[BaseModel], given: Mapping[str, object] | None = None
) -> Iterator[Row]:
    """Yield a row for each key that `cls` itself declares; `read` is the class that checks it."""
    described = docs_of(cls)
    skipped = {"num_gpus", "kind"} if given is None else {"num_gpus"}
    for key in inspect.get_annotations(cls):
        if key not in cls.model_fields or key in skipped:
            continue
        values = {**(given or {}), key: WRONG}
        accepted = expected(lambda of=values: read.model_validate(of, context=PAGES / "x"))  # type: ignore[misc]
        field = cls.model_fields[key]
        value = COMPUTED.get((cls, key)) or (NEEDED if field.is_required() else "")
        text = described.get(key) or docs_of(HarnessKeys)[key]
        yield key, accepted, value or default(field.get_default()), meaning(text)


def kind_keys() -> Iterator[Row]:
    """Yield the keys of every profile."""
    command = {"kind": "command", "command": ["true"]}
    for key, accepted, *rest in keys_of(Profile, KINDS["command"], command):
        yield key, ", ".join(KINDS) if key == "kind" else accepted, *rest


def quota_keys() -> Iterator[Row]:
    own = ServerConfig().pin_quota
    for key, text in docs_of(Quota).items():
        read = expected(lambda key=key: ServerConfig.model_validate({"pin_quota": {key: WRONG}}))  # type: ignore[misc]
        value = getattr(own, key)
        yield key, read, "no limit" if value is None else default(value), meaning(text)


def argument_keys() -> Iterator[Row]:
    yield from keys_of(Arguments, OwnArguments)
    yield from keys_of(OwnArguments, OwnArguments)


def client_keys() -> Iterator[Row]:
    described = docs_of(EvalConfig) | docs_of(Arguments)
    needed = {"server_url": "http://server:8000", "profile": "size", "tasks": ["size"]}
    made = EvalConfig.from_dict(needed)
    for field in dataclasses.fields(EvalConfig):
        read = expected(lambda key=field.name: EvalConfig.from_dict({**needed, key: WRONG}))  # type: ignore[misc]
        value = NEEDED if field.name in needed else default(getattr(made, field.name))
        if field.name in Arguments.model_fields and field.name != "model_args":
            value = "the profile's"
        yield field.name, read, value, meaning(described[field.name])
    yield "model", "text", "none", "lmms-engine's name for `profile`, or for a type of model."
    for key in config._UNUSED:
        yield key, "anything", "none", "A key of lmms-engine; accepted, but the server decides."


def table(head: str, rows: Iterator[Row]) -> str:
    names = head.split(", ")
    lines = [names, ["---"] * len(names)]
    lines += [[f"`{key}`", *(cell.replace("|", "\\|") for cell in rest)] for key, *rest in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def narrow(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield rows with fewer columns, for narrow screens."""
    for key, accepted, value, text in rows:
        yield key, text, f"{accepted}<br>{value if value == NEEDED else f'default: {value}'}"


def yaml_tables() -> str:
    lm, lmms_eval, command = KINDS.values()
    sections = {
        "## The server": keys_of(ServerConfig, ServerConfig),
        "### pin_quota": quota_keys(),
        "### on_result": keys_of(OnResult, OnResult, {"command": ["true"]}),
        "## A profile": kind_keys(),
        "### lm-eval and lmms-eval": keys_of(HarnessKeys, lm),
        "### lm-eval": keys_of(lm, lm),
        "### lmms-eval": keys_of(lmms_eval, lmms_eval),
        "### Any command": keys_of(command, command),
        "### arguments": argument_keys(),
        "## The client": client_keys(),
    }
    head = "key, meaning, value"
    return "\n".join(f"{title}\n\n{table(head, narrow(rows))}" for title, rows in sections.items())


# --- HTTP ---


def keys_in(model: Any) -> str:
    """Return the keys of a model, those that must be given in bold."""
    needed, keys = model.get("required", ()), model.get("properties", {})
    bold = [f"**`{name}`**" for name in keys if name in needed]
    return ", ".join([*bold, *(f"`{name}`" for name in keys if name not in needed)])


def name_of(schema: Any) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def route_rows(spec: Any) -> Iterator[Row]:
    for path, methods in spec["paths"].items():
        for method, route in methods.items():
            queries = (one for one in route.get("parameters", ()) if one["in"] == "query")
            bodies = route.get("requestBody", {}).get("content", {}).values()
            models = (spec["components"]["schemas"][name_of(one["schema"])] for one in bodies)
            asked = [*(f"`{one['name']}`" for one in queries), *map(keys_in, models)]
            right = route["responses"].get("201") or route["responses"]["200"]
            kind, answer = list(right["content"].items())[-1]
            text = " ".join(route["description"].split("\n\n")[0].split())
            told = name_of(answer["schema"]) or kind
            yield f"{method.upper()} {path}", text, ", ".join(asked), told


def answer_rows(spec: Any) -> Iterator[Row]:
    """Yield the keys of every model that is an answer, or is in one."""
    models, todo = spec["components"]["schemas"], [row[-1] for row in route_rows(spec)]
    seen = set[str]()
    while todo:
        name = todo.pop(0)
        if name in models and name not in seen:
            seen.add(name)
            keys = models[name].get("properties", {})
            todo += re.findall(r"schemas/(\w+)", json.dumps(keys))
            if keys:
                yield name, ", ".join(f"`{key}`" for key in keys), meaning(text_of(models[name]))


def text_of(model: Any) -> str:
    text = model.get("description", "").replace(" (lmms-eval's protocol)", "")
    return re.sub(r"\s*\n\s*", " ", text)


def route_tables() -> str:
    sections = ""
    for title, router in (("unshard", v1.router), ("lmms-eval", lmms.router)):
        app = FastAPI()
        app.include_router(router)
        spec = app.openapi()
        sections += f"## {title}'s protocol\n\n"
        sections += table("request, does, takes, answer", route_rows(spec)) + "\n"
        sections += table("answer, keys, meaning", answer_rows(spec)) + "\n"
    return sections.rstrip("\n") + "\n"


# --- The pages ---

MARK = "<!-- Generated from the code: UNSHARD_WRITE_DOCS=1 pytest {} -->\n\n".format(
    "tests/evaluation/test_reference_pages.py"
)


@pytest.mark.parametrize(
    ("name", "generated"), [("yaml.md", yaml_tables), ("http-api.md", route_tables)]
)
def test_a_reference_page_is_what_the_code_says(name: str, generated: Callable[[], str]) -> None:
    written, mark, rest = (PAGES / name).read_text("utf-8").partition(MARK)
    assert mark
    if os.environ.get("UNSHARD_WRITE_DOCS"):
        (PAGES / name).write_text(f"{written}{mark}{generated()}", encoding="utf-8")
        rest = generated()
    assert rest == generated()


def test_the_yaml_page_has_every_key_of_every_kind() -> None:
    found = set(re.findall(r"^\| `(\w+)` \|", (PAGES / "yaml.md").read_text("utf-8"), re.MULTILINE))
    models: list[type[BaseModel]] = [ServerConfig, *KINDS.values()]
    keys = {key for one in models for key in one.model_fields}
    keys |= {*OnResult.model_fields, *OwnArguments.model_fields, *docs_of(Quota)}
    assert found == keys | {one.name for one in dataclasses.fields(EvalConfig)} | {
        "model",
        *config._UNUSED,
    }
