"""What the documents show is what the program prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = (
    *("merge", "inspect", "verify", "average", "eval", "eval serve", "eval submit"),
    *("eval status", "eval cancel", "eval logs", "eval results", "eval watch", "eval export"),
)


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "unshard", *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"},
    )
    return done.stdout


def help_page() -> str:
    parts = ["# The command line\n", "Generated from `unshard --help`; a test keeps it true.\n"]
    for command in COMMANDS:
        text = run(*command.split(), "--help").strip().replace("python -m unshard", "unshard")
        parts.append(f"## unshard {command}\n\n```\n{text}\n```\n")
    parts.append(EXIT_CODES)
    return "\n".join(parts)


EXIT_CODES = """## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | compared and different |
| 2 | usage |
| 3 | the checkpoint: unknown, incomplete, corrupt, unsafe, not mergeable |
| 4 | names or dtypes cannot be resolved |
| 5 | the output: exists, no space, not writable |
| 130 | interrupted |

With `--json` stdout holds one JSON object: the report, or `{"error": {"type", "code", "message",
"expected", "found", "hint"}}`. Everything for people goes to stderr.
"""


def test_the_command_line_page_is_what_help_prints() -> None:
    page = ROOT / "docs" / "command-line.md"
    if os.environ.get("UNSHARD_WRITE_DOCS"):
        page.write_text(help_page(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == help_page()


def test_the_readmes_inspection_is_what_inspect_prints() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"\$ unshard inspect (\S+)\n(.*?)\n\n", readme, re.DOTALL)
    assert shown is not None
    printed = run("inspect", shown[1]).strip().replace(f"{ROOT}/", "")
    assert shown[2] == printed


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_between_documents_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target


def test_architecture_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for path in (ROOT / "src" / "unshard").rglob("*.py"):
        if not path.name.startswith("_"):
            assert f"`{path.stem}`" in text or f"`{path.name}`" in text, path


def test_every_row_of_the_formats_table_names_a_test_that_is_there() -> None:
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    rows = [line for line in page.split("## Which torch")[0].splitlines() if line.startswith("| ")]
    for row in rows[1:]:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert tests, row
        assert all((ROOT / test).is_file() for test in tests), row
    assert len(rows) > 10
