"""What the documents show is what the program prints."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest

import unshard
from command_tree import commands_of
from unshard import errors, keywords
from unshard.cli.main import app, main
from unshard.cli.parser.examples import EXAMPLES
from unshard.errors import how_to_install
from unshard.read.beside import base_name

ROOT = Path(__file__).parent.parent
PREFACE = """# The command line

Each command's `--help` prints the same text. For `merge` and `average`, `-h` prints only the most
used options.
"""


def help_page() -> str:
    """Return the page: lists, whose lines a phone can break, not the columns of a terminal."""
    group = app
    context = group.context_class(group, info_name="unshard", **group.context_settings)
    return "\n".join([PREFACE, *sections_of(context), EXIT_CODES])


def sections_of(parent: Any) -> Iterator[str]:
    """Yield a section for each command of a group, and for those of a group in it."""
    for name, command in commands_of(parent.command).items():
        context = command.context_class(command, info_name=name, parent=parent)
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        parts = [f"## {context.command_path}", cleandoc(command.help), f"Usage: `{usage}`"]
        inner = commands_of(command)
        if inner:
            rows = [(one, each.help.partition("\n")[0]) for one, each in inner.items()]
            lists = {"Commands": rows}
        else:
            start = f"{context.command_path} "
            lines = [line for line in EXAMPLES.splitlines() if f"{line} ".startswith(start)]
            parts.append("\n".join(["```sh", *lines, "```"]))
            lists = command.sections(context)
        for title, rows in lists.items():
            shown = [f"- `{one}`: {plain(text)}" for one, text in rows if one != "-h, --help"]
            parts += [f"**{title}**", "\n".join(shown)] if shown else []
        yield "\n\n".join(parts) + "\n"
        if inner:
            yield from sections_of(context)


def plain(text: str) -> str:
    """Return a text for Markdown: nothing is a tag, emphasis or `[text] [link]`; `code` is."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("] [", r"] \["))
    parts[::2] = [one.replace("<", "&lt;").replace("*", r"\*") for one in parts[::2]]
    return "".join(parts)


EXIT_CODES = """## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | compared and different; an evaluation or its server failed |
| 2 | usage |
| 3 | the checkpoint: unknown, incomplete, corrupt, unsafe, not mergeable |
| 4 | names or dtypes cannot be resolved |
| 5 | the output: exists, no space, not writable |
| 6 | an object store does not answer, or refuses a request |
| 70 | no memory, no room for standard output, or a defect of unshard |
| 130 | interrupted (Ctrl-C); 143 after SIGTERM, 129 after SIGHUP |

With `--json` stdout has one JSON object: the report, or `{"error": {"type", "code", "message",
"expected", "found", "hint"}}`. Everything for people goes to stderr.
"""


def test_the_command_line_page_is_what_help_prints() -> None:
    page = ROOT / "docs" / "command-line.md"
    if os.environ.get("UNSHARD_WRITE_DOCS"):
        page.write_text(help_page(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == help_page()


def test_the_command_line_page_has_the_exit_code_of_every_error() -> None:
    codes = {one.exit_code for one in vars(errors).values() if hasattr(one, "exit_code")}
    assert codes <= {int(code) for code in re.findall(r"^\| (\d+) \|", EXIT_CODES, re.MULTILINE)}


def test_every_command_that_a_page_shows_has_the_options_it_is_shown_with() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)  # the examples, which the rest is for
    sections = re.split(r"^## unshard (.*)$", page, flags=re.MULTILINE)
    options = dict(zip(sections[1::2], sections[2::2], strict=True))
    shown = re.compile(r"(?:^(?:\$ )?|`)unshard ((?:eval )?[a-z]+)\b([^`\n#]*)", re.MULTILINE)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [
        (one.name, command, option)
        for one in pages
        for command, rest in shown.findall(one.read_text(encoding="utf-8"))
        for option in re.findall(r"--[a-z][\w-]*", rest)
    ]
    assert len(found) > 80
    theirs = {"vllm", "sglang"}  # take the options of another program, too
    known = {name: section + "--help" for name, section in options.items()}
    unknown = [one for one in found if one[2] not in known[one[1]] and one[1] not in theirs]
    assert unknown == []


def test_no_two_commands_of_a_guide_write_to_the_same_output() -> None:
    """A reader may paste them one after the other, and nothing is replaced without a word."""
    shown = re.compile(r"^(?:    |\$ )?unshard (?:merge|average|reshard) (.*)$", re.MULTILINE)
    outputs: list[tuple[str, str]] = []
    folders = (ROOT / "docs" / one for one in ("guides", "trainers"))
    for page in (page for folder in folders for page in folder.glob("*.md")):
        for line in shown.findall(page.read_text(encoding="utf-8")):
            words = shlex.split(line, comments=True)
            options = [at for at, word in enumerate(words) if word[0] == "-"]
            paths = words[: options[0]] if options else words
            named = [words[at + 1] for at in options if words[at] == "-o"]
            if named or len(paths) > 1:
                outputs.append((page.name, named[0] if named else paths[-1]))
    assert len(outputs) > 25
    assert [one for one in sorted(set(outputs)) if outputs.count(one) > 1] == []


def test_every_function_and_its_options_are_on_a_page_of_the_api() -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    lists = re.findall(r"members: \[(.*)\]", "\n".join(pages))
    members = {name for one in lists for name in one.split(", ")}
    functions = {name for name in dir(unshard) if name.islower() and name[0] != "_"}
    options = {name for name in vars(keywords) if name.endswith("Keywords")}
    assert functions >= {"merge", "reshard"}
    assert functions | options <= members


def shown_in(page: str) -> list[tuple[str, str]]:
    """Return the commands in a document whose output is shown, each with its output."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    parts = [part for block in blocks for part in block.split("$ ")[1:]]
    commands = [part.strip().split("\n", 1) for part in parts]
    return [(command[0], command[1]) for command in commands if len(command) == 2]


def timeless(text: str) -> str:
    """Return a report without its time and memory."""
    text = re.sub(r"[\d.]+ s, peak memory [\d.]+ \w+", "SPEED", text)
    return text.replace(f"{ROOT}/", "")


@pytest.mark.slow
def test_a_first_session_prints_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    (command, output), loaded = shown_in("README.md")
    name, *arguments = command.split()
    assert name == "unshard"
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 0
    assert timeless(printed.err + printed.out).strip() == timeless(output)
    python, *arguments = shlex.split(loaded[0])
    assert python == "python"
    shown = subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    assert shown.stdout.decode().strip() == loaded[1]


def test_the_readmes_python_runs_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    run = [sys.executable, "-c", code]
    shown = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert shown == "51 496508 ()\n(66,)\n"
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def merge_line_of(text: str) -> tuple[Path, set[str]]:
    """Return the checkpoint and the options of the first `unshard merge` in a text."""
    found = re.search(r"unshard merge (\S+) \S+([^\n`]*)", text)
    assert found is not None, text
    return Path(found[1]), set(re.findall(r"--[a-z-]+", found[2]))


def test_the_readmes_line_of_a_trainer_is_that_of_its_page() -> None:
    """That line is run on trees of the real trainers: `tests/oracle/test_pages_of_trainers.py`."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## By trainer")[2]
    rows = re.findall(r"^\| \[[^\]]+\]\((docs/trainers/\S+\.md)\).*$", table, re.MULTILINE)
    pages = {str(one.relative_to(ROOT)) for one in (ROOT / "docs" / "trainers").iterdir()}
    assert set(rows) == pages
    lines = [line for line in table.splitlines() if "](docs/trainers/" in line]
    for page, line in zip(rows, lines, strict=True):
        text = (ROOT / page).read_text(encoding="utf-8").partition("## Merge")[2]
        (short, options), (whole, more) = merge_line_of(line), merge_line_of(text)
        assert whole.parts[-len(short.parts) :] == short.parts, page
        assert options <= more <= options | {"--dtype"}, page


def test_the_figures_beside_other_tools_are_those_that_were_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from peers import report

    recorded = json.loads((ROOT / "benchmarks" / "peers" / "results.json").read_bytes())
    assert report.PAGE.read_text(encoding="utf-8") == report.page(recorded)
    shown = report.SECTION.read_text(encoding="utf-8")
    assert shown == report.section(shown, recorded)


def test_no_line_pretends_that_the_project_is_on_an_index() -> None:
    """Installing by name would be refused, or would install something else."""
    by_name = re.compile(
        r"\b((pipx?|tool|uvx)\s+(install\s+)?(-\S+\s+)*|pip install [^`;,]*[\"' ])"
        r"[\"'\\]*unshard\b(?!/)"
    )
    assert by_name.search("""pip install -U 'unshard[eval]'""")
    assert by_name.search("""pip install lm_eval "unshard[torch]\"""")
    assert not by_name.search(how_to_install("torch", "torch"))
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    pages += [*(ROOT / "scripts").glob("*.py"), *(ROOT / "tools").glob("*.py")]
    pages.remove(ROOT / "CHANGELOG.md")  # tells of what was
    assert len(pages) > 200
    found = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in pages
        for line in page.read_text(encoding="utf-8").splitlines()
        if by_name.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_between_documents_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target


def test_architecture_names_every_folder_and_no_other() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "unshard"
    folders = {path.parent.relative_to(source).as_posix() for path in source.rglob("__init__.py")}
    named = {name.rstrip("/") for name in re.findall(r"`([a-z_/]+/)`", text)}
    bare = {name.removeprefix("evaluate/") for name in folders - {"."}}
    assert named - {"_unshard", "output"} >= bare - {"merger"}
    assert named <= folders | bare | {"_unshard", "output"}


def test_every_promise_of_the_replaced_tools_names_a_test_that_is_there() -> None:
    page = (ROOT / "tests" / "compat" / "promises.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0].removeprefix("| ")) for row in rows] == list(range(1, 75))
    for _, promise, here, _why, test in rows:
        assert promise
        assert here in {"same", "better", "different"}, promise
        path, _, name = test.removesuffix(" |").strip("`").partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}, test


def test_the_page_on_bases_has_every_key_by_which_one_is_found() -> None:
    page = (ROOT / "docs" / "guides" / "base.md").read_text(encoding="utf-8")
    keys = {key for row in base_name._SETTINGS for key in row.keys.split()}
    assert len(keys) > 15
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_every_row_of_the_formats_table_names_a_test_that_is_there() -> None:
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    rows = [line for line in page.split("## Which torch")[0].splitlines() if line.startswith("| ")]
    for row in rows[1:]:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert tests, row
        assert all((ROOT / test).is_file() for test in tests), row
    assert len(rows) > 10


def constants(path: Path) -> str:
    """Return the literal text of a module, with `…` for each value that a message has in it.

    Marks of options are left out, as when a message is shown.
    """
    texts = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return re.sub("[⟦⟧]", "", "\n".join(texts))


def test_every_error_quoted_on_the_troubleshooting_page_is_one_that_the_program_has() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    source = "\n".join(map(constants, (ROOT / "src" / "unshard").rglob("*.py")))
    assert len(headings) >= 40
    assert [one for one in headings if one not in source] == []


def test_every_message_in_the_table_of_failures_is_one_that_the_evaluation_has() -> None:
    page = (ROOT / "docs" / "evaluation" / "failures.md").read_text(encoding="utf-8")
    table = page.partition("## Messages")[2].partition("\n## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    modules = (ROOT / "src" / "unshard" / "evaluate").rglob("*.py")
    source = re.sub("%[sd]", "…", "\n".join(map(constants, modules)))  # of the log
    assert len(messages) >= 20
    assert len(messages) == table.count("\n| `")
    assert [one for one in messages if one.removesuffix("…") not in source] == []
