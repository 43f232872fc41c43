"""Advice that can be followed: every front names options that it has, or a line that has them."""

import argparse
import ast
import copy
import inspect
import json
import pickle
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import unshard
from command_tree import commands_of
from ranks import rank_path, save_ranks, some_tensors
from unshard import CheckpointError, ConversionError, MergeOptions, UnshardError
from unshard.cli.main import app
from unshard.cli.main import main as command_line
from unshard.cli.running import front_of
from unshard.compat import (
    convert_checkpoint_simple,
    convert_fsdp_to_hf,
    merge_fsdp,
    verl,
    verl_omni,
)
from unshard.errors import UsageError, front_of_errors, printable, raise_all
from unshard.fronts import (
    MERGE_OPTIONS,
    OTHER_OPTIONS,
    PYTHON,
    Call,
    Command,
    Front,
    Mention,
    Python,
    Text,
    additions,
    marked,
    render,
    reword_warning,
)
from unshard.merger import FSDP2Merger
from unshard.merger import __main__ as merger
from unshard.progress import Event, Warned

pytestmark = [
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.xdist_group("sources"),  # they are parsed once
]

SOURCE = Path(unshard.__file__).parent


class Wrapped(torch.Tensor):
    """A tensor of a class that nobody knows."""


# Options of `vllm serve`, which messages of its command and its plugin name.
VLLM = {
    *("--load-format", "--model-loader-extra-config", "--worker-extension-cls", "--model"),
    *("--served-model-name", "--skip-tokenizer-init", "--tokenizer"),
}
# Options of SGLang's server, which messages of its command and its plugin name.
SGLANG = {
    *("--load-format", "--speculative-draft-load-format", "--model-loader-extra-config"),
    *("--model-path", "--tokenizer-path", "--skip-tokenizer-init"),
}
DROP_INS: Mapping[str, tuple[Callable[[], None], list[str]]] = {
    "convert_checkpoint_simple": (convert_checkpoint_simple.main, ["{run}", "--output", "{out}"]),
    "convert_fsdp_to_hf": (
        convert_fsdp_to_hf.main,
        ["--checkpoint_path", "{run}", "--output_path", "{out}"],
    ),
    "merge_fsdp": (merge_fsdp.main, ["--input_dir", "{run}", "--output_dir", "{out}"]),
    "merger": (merger.main, ["--checkpoint_path", "{run}", "--output_path", "{out}"]),
    "verl": (
        verl.main,
        ["merge", "--backend", "fsdp", "--local_dir", "{run}", "--target_dir", "{out}"],
    ),
}


# What is written: all messages


@cache
def texts() -> dict[str, str]:
    """Return every text of the source that names an option, but for those that define options."""
    return {
        f"{path.relative_to(SOURCE)}:{line}": text
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "fronts.py"
        for line, text in strings(ast.parse(path.read_text(encoding="utf-8")))
        if " " in text.strip() and (any(mentions(text)) or unmarked(text))
    }


def unmarked(text: str) -> set[str]:
    """Return the options in a text that are not marked, but for those of lines to paste."""
    return set(re.findall(r"(?<![\w/.⟦+-])--([a-z][a-z0-9-]*)(?!\w)", re.sub("`[^`]*`", "", text)))


def mentions(text: str) -> Iterator[Mention]:
    """Yield the options that a text marks, in order."""
    text = text if isinstance(text, Text) else Text(text)
    yield from (part for part in text.parts if isinstance(part, Mention))


def reword(text: str, front: Front) -> str:
    return render(Text(text), front)[0]


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))  # a docstring
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(inner) for inner in ast.walk(node) if inner is not node}
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", "")
            if name in {"add_argument", "Option", "Argument"}:
                skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(map(part, node.values))


def part(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "missing"  # --allow-{kind}


@cache
def options_of(*path: str) -> set[str]:
    """Return the options of a command of ours, as its parser has them."""
    command: Any = app
    for name in path:
        command = commands_of(command)[name]
    named = [[*parameter.opts, *parameter.secondary_opts] for parameter in command.params]
    return {option for options in named for option in options}


def options_of_drop_in(main: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the options of a drop-in, as its parser has them."""
    parsers: list[argparse.ArgumentParser] = []
    add = argparse.ArgumentParser.add_argument
    found: set[str] = set()

    def noted(self: argparse.ArgumentParser, *names: str, **more: object) -> argparse.Action:
        found.update(names)
        return add(self, *names, **more)  # type: ignore[arg-type]  # as it was called

    def stop(self: argparse.ArgumentParser, *_: object) -> None:
        parsers.append(self)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "add_argument", noted)
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(SystemExit):
            main()
    assert parsers
    return found


def parses(line: str) -> bool:
    """Return whether a line of `unshard` names options that its command has."""
    program, command, *rest = shlex.split(line)
    assert program == "unshard"
    named = {word.partition("=")[0] for word in rest if word.startswith("--")}
    return named <= options_of(command)


def test_the_walk_finds_the_messages() -> None:
    found = texts()
    assert len(found) > 60
    for option in ("lora-alpha", "base", "config", "assume-dim0", "ep-size", "overwrite"):
        assert any(one.option == option for text in found.values() for one in mentions(text))


def test_all_options_of_a_merge_are_known_and_are_flags_or_not_as_its_parser_says() -> None:
    merge = {parameter.opts[0]: parameter for parameter in _merge_parameters()}
    assert {f"--{option}" for option in MERGE_OPTIONS} <= merge.keys()
    for option, placeholder in MERGE_OPTIONS.items():
        parameter = merge[f"--{option}"]
        may_be_bare = (parameter.metavar or "").startswith("[")  # --overwrite, or --overwrite=all
        assert (parameter.is_flag or may_be_bare) is (placeholder == ""), option
    given = {one.name for one in fields(MergeOptions)} - {"allow_globals", "extra_state"}
    assert {name.replace("_", "-") for name in given} <= MERGE_OPTIONS.keys()


def _merge_parameters() -> list[click.Option]:
    command = commands_of(app)["merge"]
    return [one for one in command.params if one.opts[0].startswith("--")]


def test_a_message_names_options_of_merge_or_of_the_command_that_prints_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluating = set.union(
        *(
            options_of("eval", name)
            for name in ("serve", "submit", "status", "cancel", "logs", "results", "watch")
        ),
        *(options_of("eval", name) for name in ("export", "doctor")),
    )
    own = {
        "__init__": {"--python"},  # of uv
        "evaluate/": evaluating,
        "cli/evaluate": evaluating,
        "verify": options_of("verify"),
        "averag": options_of("average"),
        "reshard": options_of("reshard"),
        "read/optimizer/reader": {"--to"},  # of reshard, which alone keeps the keys of the files
        "cli/commands": set.union(
            *map(options_of, ("merge", "average", "verify", "inspect", "reshard"))
        ),
        "cli/comparing": options_of("delta"),
        "cli/engines": VLLM | SGLANG,
        "cli/options": {"--help"},
        "plugins/vllm": VLLM,
        "plugins/serving": VLLM | SGLANG,  # of both engines
        "plugins/sglang": SGLANG,
        "read/megatron": {"--ckpt-convert-format"},  # of Megatron
        "write/hub": {"--include", "--revision"},  # of `hf upload`
        "compat/commands": {"--output"},  # of one script; the other's test is below
        "compat/verl": options_of_drop_in(verl.main, monkeypatch),
        "compat/verl_omni": options_of_drop_in(verl_omni.main, monkeypatch),
        "compat/merge_fsdp": options_of_drop_in(merge_fsdp.main, monkeypatch),
    }
    known = {*MERGE_OPTIONS, *OTHER_OPTIONS, "missing"}  # an option that is not a literal
    for place, text in texts().items():
        if place.startswith(
            "cli/parser/examples"
        ):  # of all commands, each with its own parser in a test
            continue
        also = set[str]().union(*(options for part, options in own.items() if part in place))
        strangers = unmarked(text) - known
        assert {f"--{one}" for one in strangers} <= also, place
        if not place.startswith(("cli/", "evaluate/")):  # whose commands have what they name
            others = also if place.startswith(("compat/", "write/hub")) else set[str]()
            named = {f"--{one}" for one in unmarked(text)} - others
            assert named.isdisjoint(f"--{one}" for one in known - {"missing"}), place
        assert {one.option for one in mentions(text)} <= known, place


@pytest.mark.parametrize(
    "name", ["merge", "inspect", "verify", "average", "submit", "watch", "export", "serve"]
)
def test_a_command_of_ours_names_options_that_it_has(name: str) -> None:
    group = commands_of(app)
    path = [name] if name in group else ["eval", name]
    command = group[name] if name in group else commands_of(group["eval"])[name]
    front = front_of(inspect.unwrap(command.callback), {})
    for place, text in texts().items():
        check(front, text, options_of(*path), place)


def check(front: Front, text: str, options: set[str], place: str) -> None:
    """Every option of merge in a text is one that the front has, or in a line to use instead."""
    for mention in mentions(text):
        if mention.option not in MERGE_OPTIONS:
            continue
        written = front.name(mention)
        if written is None:
            assert parses(front.line([mention])), place
            if mention.option == "push-to-hub" and mention.value is not None:
                assert front.line([mention]) not in reword_warning(Text(text), front), place
            elif not any(one.is_added for one in mentions(text)):  # which have a line of their own
                assert front.line([mention]) in reword_warning(Text(text), front), place
        else:
            assert re.split("[ =]", written)[0] in options, place
            assert written in reword(text, front), place


def test_python_names_parameters_that_its_functions_have() -> None:
    functions = (unshard.merge, unshard.average, unshard.verify, unshard.merge_all, unshard.follow)
    known = {name for one in functions for name in inspect.signature(one).parameters}
    for place, text in texts().items():
        rendered = reword(text, PYTHON)
        for mention in mentions(text):
            written = PYTHON.name(mention)
            if written is not None and not written.startswith("unshard."):
                assert written.partition("=")[0] in known, place
                assert written in rendered, place
        if any(mentions(text)):
            assert unmarked(rendered).isdisjoint(MERGE_OPTIONS), place


@pytest.mark.parametrize("name", DROP_INS)
def test_a_drop_in_names_options_that_it_has_or_a_line_to_use(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, _ = DROP_INS[name]
    front = provoked(name, tmp_path, monkeypatch).front
    options = options_of_drop_in(main, monkeypatch)
    for place, text in texts().items():
        check(front, text, options, place)


# What is printed


def lora_without_alpha(run: Path) -> Path:
    """A LoRA checkpoint of verl whose adapter says nothing of its alpha."""
    tensors = {f"base_model.model.{name}": one for name, one in some_tensors().items()}
    head = tensors.pop("base_model.model.lm_head.weight")
    tensors |= {
        "base_model.model.lm_head.base_layer.weight": head,
        "base_model.model.lm_head.lora_A.default.weight": torch.ones(2, 6),
        "base_model.model.lm_head.lora_B.default.weight": torch.ones(13, 2),
    }
    save_ranks(run / "actor", tensors, 2)
    (run / "actor" / "config.json").write_text('{"model_type": "llama"}')
    return run


def provoked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UnshardError:
    """Return the error of a drop-in for an adapter without alpha; its paths have a space."""
    main, arguments = DROP_INS[name]
    run = lora_without_alpha(tmp_path / "my run" / "global_step_7")
    if name == "verl":
        run = run / "actor"
    given = [one.format(run=run, out=tmp_path / "my out") for one in arguments]
    monkeypatch.setattr(sys, "argv", [name, *given])
    with pytest.raises(ConversionError) as caught:
        main()
    return caught.value


@pytest.mark.parametrize("name", DROP_INS)
def test_the_line_that_a_drop_in_prints_can_be_pasted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    message = str(provoked(name, tmp_path, monkeypatch))
    match = re.search(r"^  use:      (unshard merge .* --lora-alpha N)$", message, re.MULTILINE)
    assert match is not None, message
    with pytest.raises(SystemExit) as end:
        command_line(shlex.split(match[1].replace("--lora-alpha N", "--lora-alpha 2"))[1:])
    assert end.value.code == 0, capfd.readouterr().err
    assert (tmp_path / "my out" / "model.safetensors").is_file()


def test_the_class_of_the_merger_speaks_python(tmp_path: Path) -> None:
    run = lora_without_alpha(tmp_path / "checkpoint-3")
    with pytest.raises(ConversionError) as caught:
        FSDP2Merger().merge(run, tmp_path / "out")
    call = str(caught.value).partition("  use:      ")[2]
    assert call.startswith("unshard.merge(")
    report = eval(call.replace("lora_alpha=...", "lora_alpha=2.0"))  # noqa: S307 (our own line)
    assert report.dtypes == {"bfloat16": 3}


def test_a_model_that_cannot_be_read_is_blamed_on_the_flag_that_named_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    save_ranks(run / "checkpoint-3" / "pytorch_model_fsdp_0", some_tensors(), 2)
    arguments = ["--input_dir", str(run), "--model_name_or_class", "./no such model"]
    monkeypatch.setattr(sys, "argv", ["merge_fsdp.py", *arguments])
    with pytest.raises(ConversionError) as caught:
        merge_fsdp.main()
    message = str(caught.value)
    assert message.startswith("--model_name_or_class './no such model': no such directory")
    assert "or leave --model_name_or_class out if the checkpoint has a config.json" in message
    assert "--base" not in message


def test_a_command_that_lacks_an_option_names_the_line_of_merge(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_ranks(tmp_path / "global_step_3", some_tensors(), 2)
    with pytest.raises(SystemExit):
        command_line(["inspect", str(tmp_path / "global_step_3")])
    shown = capfd.readouterr().out
    assert re.search(
        rf"use +unshard merge {tmp_path / 'global_step_3'} OUTPUT --base MODEL\n", shown
    )


def test_json_of_the_command_line_keeps_its_own_notation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = lora_without_alpha(tmp_path / "global_step_7")
    with pytest.raises(SystemExit) as end:
        command_line(["merge", str(run), str(tmp_path / "out"), "--json"])
    printed = capfd.readouterr()
    assert end.value.code == 4
    assert "--lora-alpha N" in printed.out
    assert "--lora-alpha N" in printed.err
    assert "lora_alpha=" not in printed.out + printed.err


def test_warnings_of_the_api_speak_python_wherever_they_are_read(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    (tmp_path / "ckpt" / "config.json").write_text('{"dtype": "bfloat16"}')
    events: list[Event] = []
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", listener=events.append)
    heard = tuple(event.message for event in events if isinstance(event, Warned))
    assert heard == report.warnings
    assert any("dtype='config'" in warning for warning in report.warnings)
    assert any("--dtype config" in note for note in report.notes)
    assert unshard.inspect(tmp_path / "ckpt").warnings == report.warnings


def wrong(option: str) -> Any:
    """Return an option with a value that type checkers would refuse."""
    return {option: "x"}


@pytest.mark.parametrize(
    ("call", "subject"),
    [
        (lambda ckpt, out: unshard.merge(ckpt, out, **wrong("lora")), "lora='x'"),
        (lambda ckpt, out: unshard.merge(ckpt, out, lora="both", config="none"), "lora='both'"),
        (lambda ckpt, out: unshard.average([ckpt, ckpt], out, **wrong("lora")), "lora='x'"),
        (lambda ckpt, out: unshard.average([ckpt, ckpt], out, ema_decay=3), "ema_decay=3"),
        (lambda ckpt, _: unshard.verify(ckpt, ckpt, memory="1KB"), "memory='1KB'"),
        (lambda ckpt, _: unshard.inspect(ckpt, **wrong("weights")), "weights='x'"),
        (lambda ckpt, _: unshard.open_checkpoint(ckpt, **wrong("weights")), "weights='x'"),
        (lambda ckpt, _: unshard.load_into(torch.nn.Linear(2, 2), ckpt, ep_size=1), "ep_size=1"),
    ],
)
def test_every_function_names_the_parameter_that_its_caller_gave(
    tmp_path: Path, call: Callable[[Path, Path], object], subject: str
) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    with pytest.raises(UnshardError) as caught:
        call(tmp_path / "ckpt", tmp_path / "out")
    assert str(caught.value).startswith(f"{subject}: ")
    assert "--" not in str(caught.value)


def test_a_hint_names_a_parameter_to_a_python_caller(tmp_path: Path) -> None:
    run = lora_without_alpha(tmp_path / "global_step_7")
    calls: tuple[Callable[[], object], ...] = (
        lambda: unshard.merge(run, tmp_path / "out"),
        lambda: unshard.average([run, run], tmp_path / "out"),
    )
    for call in calls:
        with pytest.raises(UnshardError) as caught:
            call()
        assert "lora_alpha=…" in str(caught.value)
        assert "--" not in str(caught.value)


def test_problems_that_are_raised_together_are_reported_once_in_the_words_of_the_front(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        save_ranks(tmp_path / f"global_step_{step}" / "actor", some_tensors(), 2)
        rank_path(tmp_path / f"global_step_{step}" / "actor", 2, 0).unlink()
    with pytest.raises(UnshardError) as caught, front_of_errors(Command({"step": "--wanted"})):
        unshard.merge(tmp_path)
    assert pickle.loads(pickle.dumps(caught.value)).text == caught.value.text


# The notation


@pytest.mark.parametrize(
    ("text", "python", "drop_in"),
    [
        ("give it: ⟦--lora-alpha N⟧", "give it: lora_alpha=…", "give it: --lora-alpha N"),
        ("say ⟦--overwrite⟧, or not", "say overwrite=True, or not", "say --overwrite, or not"),
        ("⟦--base a/b⟧: not there", "base='a/b': not there", "--model a/b: not there"),
        ("⟦--base '/a b'⟧: not there", "base='/a b': not there", "--model '/a b': not there"),
        ("⟦--base 'it'\"'\"'s'⟧: no", "base=\"it's\": no", "--model 'it'\"'\"'s': no"),
        ("what ⟦--base⟧ names", "what base=… names", "what --model names"),
        ("⟦--base A⟧: not there", "base='A': not there", "--model A: not there"),
        ("⟦--memory '1 KB'⟧: no", "memory='1 KB': no", "--memory '1 KB': no"),
        ("⟦--step 3⟧: gone", "step=3: gone", "--step 3: gone"),
        ("⟦--role actor|critic⟧", "role='actor' or 'critic'", "--role actor|critic"),
        ("to cast: ⟦--dtype config⟧", "to cast: dtype='config'", "to cast: --dtype config"),
        ("or ⟦--no-extra-state⟧", "or extra_state=False", "or --no-extra-state"),
        ("(⟦--allow-global a.B⟧)", "(allow_globals=['a.B'])", "(--allow-global a.B)"),
        ("⟦--allow-global a.B⟧: no", "allow_globals=['a.B']: no", "--allow-global a.B: no"),
        ("⟦--overwrite=all⟧", "overwrite='all'", "--overwrite=all"),
        ("run `hf upload --private`", "run `hf upload --private`", "run `hf upload --private`"),
        ("a--base /x/--base.y --", "a--base /x/--base.y --", "a--base /x/--base.y --"),
        ("give ⟦+--lora-alpha N⟧", "give lora_alpha=…", "give --lora-alpha N"),
        ("⟦--token-file X⟧ and --jobs", "--token-file X and --jobs", "--token-file X and --jobs"),
        ("⟦--⟧ ⟦--A b⟧ ⟦ ⟧", "⟦--⟧ ⟦--A b⟧ ⟦ ⟧", "⟦--⟧ ⟦--A b⟧ ⟦ ⟧"),
    ],
)  # fmt: skip
def test_a_text_has_options_as_the_front_writes_them(text: str, python: str, drop_in: str) -> None:
    assert reword(text, PYTHON) == python
    assert reword(text, Command({"base": "--model"})) == drop_in
    plain = re.sub(r"⟦\+?(--[a-z].*?)⟧", r"\1", text)
    assert reword(text, Command()) == Text(text) == plain
    assert reword_warning(plain, PYTHON) == plain  # nothing looks for options in a sentence


def test_options_stay_data_in_sums_copies_and_problems_that_are_raised_together() -> None:
    text = "give " + Text("⟦--base MODEL⟧") + " or " + Text("⟦--step N⟧")
    for same in (text, pickle.loads(pickle.dumps(text)), copy.deepcopy(text)):
        assert same == "give --base MODEL or --step N"
        assert reword_warning(same, PYTHON) == "give base=… or step=…"
    problems = [UsageError(f"tensor {n}: odd", hint="⟦--exclude REGEX⟧") for n in (1, 2)]
    problems += [UsageError("\x1b⟦--role a⟧", expected="⟦--role b⟧", found="⟦--role c⟧")]
    with pytest.raises(UsageError) as caught:
        raise_all(UsageError, "⟦--step 1⟧ fails", problems)
    named = ["step", "exclude", "role", "role", "role"]
    assert [one.option for one in mentions(caught.value.text)] == named
    for written in (caught.value.text, str(caught.value)):
        assert not set("⟦⟧\x1b") & set(written)
    assert "--" not in str(caught.value)
    assert marked(pickle.loads(pickle.dumps(caught.value)).text) == marked(caught.value.text)


@pytest.mark.parametrize(
    ("text", "command", "python"),
    [
        ("⟦+--step 4⟧", "--step 4 --also '/n 1'", "'out', step=4, also=['/n 1'], listener=heard)"),
        (
            "⟦+--base MODEL⟧; ⟦+--role critic|actor⟧",
            "--step 3 --also '/n 1' --base MODEL --role critic",
            "'out', step=3, also=['/n 1'], listener=heard, base=..., role='critic')",
        ),
        (
            "⟦+--also DIR⟧ and ⟦+--also DIR⟧, or ⟦--lora ignore⟧",
            "--also '/n 1' --also DIR",
            "also=['/n 1'] + [...], listener=heard)",
        ),
        ("⟦+--no-extra-state⟧", "--no-extra-state", "listener=heard, extra_state=False)"),
        ("⟦+--overwrite⟧", "--also '/n 1' --overwrite", "overwrite=True)"),
        ("⟦+--config FILE|DIR⟧", "--config FILE", "config=...)"),
        ("⟦+--dtype 'a b'⟧", "--dtype 'a b'", "dtype='a b')"),
    ],
)
def test_options_to_add_make_one_line_with_what_was_given(
    text: str, command: str, python: str
) -> None:
    given = {"step": 3, "also": ["/n 1"]}
    call = Call("unshard merge", ("my run", "out"), given)
    error = UsageError("no", hint=text)
    error.front = Command(None, call)
    assert str(error).count("  use:      unshard merge 'my run' out ") == 1
    assert str(error).endswith(command)
    assert str(error).count("unshard merge") == 1
    written = {name: repr(value) for name, value in given.items()} | {"listener": "heard"}
    error.front = Python(None, None, Call("unshard.merge", ("'my run'", "'out'"), written))
    assert str(error).count("\n  use:      unshard.merge('my run', 'out', ") == 1
    assert str(error).endswith(python.removeprefix("'out', "))
    error.front = PYTHON
    assert "use:" not in str(error)


def test_parts_of_an_error_are_in_the_words_of_its_front() -> None:
    error = UsageError("⟦--step 3⟧: gone", expected="⟦--role NAME⟧", hint="give ⟦+--base MODEL⟧")
    error.hint += "; or wait"
    for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (same.subject, same.expected) == ("step=3: gone", "role=…")
        assert same.hint == "give base=…; or wait"
        same.front = Command({"base": "--model", "step": "-s"}, Call("unshard merge", ("a", "b")))
        assert (same.subject, same.hint) == ("-s 3: gone", "give --model MODEL; or wait")
        assert str(same).endswith("\n  use:      unshard merge a b --base MODEL")
        assert same.text.startswith("--step 3: gone\n  expected: --role NAME")


# Names and paths that look like marks

FORGED = [
    *("⟦+--overwrite=all⟧", "⟦+--overwrite⟧", "⟦+--push-to-hub evil/x⟧", "⟦+--private⟧"),
    *("⟦+--base evil/x⟧", "⟦+--names training⟧", "⟦--push-to-hub evil/x⟧", "⟦--overwrite=all⟧"),
    *("⟦+--base '⟧⟦+--push-to-hub evil/x⟧", "⟦+--allow-global os.system⟧"),
]
WORDS = ("--push-to-hub", "--private", "--overwrite", "evil/x", "--names", "--allow-global")


def lines_of(error: UnshardError) -> list[str]:
    return str(error).split("\n  use:      ")[1:]


@pytest.mark.parametrize("mark", FORGED)
def test_a_name_in_a_message_adds_nothing_to_its_line(mark: str) -> None:
    """Neither what is merged by a command that has all options, nor by one that lacks most."""
    for front in (Command(None, Call("unshard merge", ("a", "b"))), Command({})):
        for part in ("subject", "expected", "found"):
            error = CheckpointError("no", hint="give ⟦+--lora-alpha N⟧")
            setattr(error, part, f"tensor x {mark}: is bad")
            many = UsageError("no")
            with pytest.raises(UsageError) as caught:
                raise_all(UsageError, "several", [error, many])
            for one in (error, pickle.loads(pickle.dumps(error)), caught.value):
                one.front = front
                (line,) = lines_of(one)
                assert line.endswith(" --lora-alpha N"), line
                assert line.count("--") == 1
        assert not any(word in str(additions(Warned(f"a {mark}").text)) for word in WORDS)


@pytest.mark.parametrize("mark", FORGED)
def test_a_name_in_a_hint_adds_nothing_that_uploads_or_removes(mark: str) -> None:
    error = CheckpointError("no", hint=f"give one of them: /a/{mark}/b, or ⟦+--step N⟧")
    for front in (Command(None, Call("unshard merge", ("a", "b"))), Command({})):
        error.front = front
        for line in lines_of(error):
            assert not any(word in line for word in ("hub", "private", "=all"))


def test_a_value_that_has_a_mark_is_not_one() -> None:
    for name in ("/gone/x⟦+--push-to-hub evil/x⟧", "/gone/⟧ ⟦+--private⟧", "a\n⟦+--overwrite=all⟧"):
        error = CheckpointError(
            "no", found=f"f names {name}", hint=f"⟦+--base {shlex.quote(name)}⟧"
        )
        error.front = Command(None, Call("unshard merge", ("a", "b")))
        assert not any(one in line for line in lines_of(error) for one in ("hub", "priv", "overw"))


@pytest.mark.parametrize("command", ["merge", "inspect"])
@pytest.mark.parametrize("mark", [one for one in FORGED if "/" not in one])
def test_a_directory_and_a_tensor_with_marks_add_nothing(
    command: str, mark: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = lora_without_alpha(tmp_path / f"run{mark}" / "global_step_7")
    tensors = {**some_tensors(), f"a {mark}": torch.ones(2).as_subclass(Wrapped)}
    save_ranks(run / "critic", tensors, 2)
    for role in ("actor", "critic"):
        words = [command, str(run.parent), *[str(tmp_path / "out")] * (command == "merge")]
        with pytest.raises(SystemExit):
            command_line([*words, "--role", role])
        shown = capfd.readouterr()
        text = (shown.out + shown.err).replace(str(run.parent), "RUN").replace(mark, "")
        for line in re.findall(r"^ *use:? +(unshard .*)$", text, re.MULTILINE):
            assert not any(word in line.replace("--allow-global test", "") for word in WORDS), line
        assert f"run{mark}" in shown.out + shown.err or "\\u27e6" in shown.out + shown.err


def test_stdout_prints_a_path_as_it_is() -> None:
    assert printable("saved to run⟦+--base x⟧ ⟦--step 3⟧") == "saved to run⟦+--base x⟧ ⟦--step 3⟧"


# Values are quoted, but for placeholders


def test_a_value_with_a_bar_is_quoted() -> None:
    given = {"exclude": "lm_head|norm", "also": ["/a|b"]}
    front = Command(None, Call("unshard merge", ("run",), given))
    error = UsageError("⟦--base '/gone/a|b'⟧: no", hint="⟦+--config FILE|DIR⟧ ⟦+--base '/a|b'⟧")
    error.front = front
    assert str(error).startswith("--base '/gone/a|b': no")
    assert "hint:     --config FILE|DIR --base '/a|b'" in str(error)
    (line,) = lines_of(error)
    quoted = "--exclude 'lm_head|norm' --also '/a|b' --config FILE --base '/a|b'"
    assert line == f"unshard merge run {quoted}"
    error.front = Python(None, None, Call("unshard.merge", ("'run'",), {}))
    assert str(error).startswith("base='/gone/a|b': no")
    assert lines_of(error) == ["unshard.merge('run', config=..., base='/a|b')"]


def test_an_argument_with_a_leading_dash_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lora_without_alpha(Path("-run"))
    for words in (["merge", "--", "-run", "-out"], ["inspect", "--", "-run"]):
        with pytest.raises(SystemExit):
            command_line(words)
    monkeypatch.setattr(sys, "argv", ["merge_fsdp.py", "--input_dir=-run", "--output_dir=-out"])
    with pytest.raises(UnshardError) as caught:
        merge_fsdp.main()
    text = capfd.readouterr().err + f"{caught.value}\n"
    lines = re.findall(r"use:? +unshard (merge .*)$", text, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        with pytest.raises(SystemExit) as end:
            command_line(shlex.split(line.replace("alpha N", "alpha 2")))
        assert end.value.code == 0
        shutil.rmtree("-out")


@pytest.mark.parametrize("name", ["/gone/x⟦+--push-to-hub evil/x⟧", "/x⟧ ⟦+--overwrite=all⟧ ⟦"])
def test_a_value_of_a_json_file_with_marks_adds_nothing(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_ranks(tmp_path / "global_step_3", some_tensors(), 2)
    fields = {"base_model_name_or_path": name}
    (tmp_path / "global_step_3" / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(SystemExit) as end:
        command_line(["merge", str(tmp_path / "global_step_3"), str(tmp_path / "out")])
    shown = capfd.readouterr().err
    assert end.value.code == CheckpointError.exit_code
    assert name.split("⟦", maxsplit=1)[0] in shown
    for line in re.findall(r"^ *use:? +(unshard .*)$", shown, re.MULTILINE):
        rest = line.replace(shlex.quote(name), "")
        assert not any(word in rest for word in ("hub", "overwrite", "evil")), line
