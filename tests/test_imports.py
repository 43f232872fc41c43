"""What the command and the package import: nothing heavy before there is work to do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import unshard

HEAVY = (
    *("torch", "numpy", "rich", "tqdm", "huggingface_hub"),
    *("ml_dtypes", "safetensors", "transformers"),
)
RUN = "from unshard.cli.main import main"


def modules_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import unshard",
        "import unshard; unshard.UnshardError; dir(unshard)",
        f"{RUN}\ntry: main(['--help'])\nexcept SystemExit: pass",
        f"{RUN}\ntry: main(['merge', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_help_and_import_load_nothing_heavy(code: str) -> None:
    loaded = modules_after(code)
    assert "unshard" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_a_merge_imports_no_torch_even_where_it_is_installed(tmp_path: object) -> None:
    code = f"import unshard; unshard.merge('examples/checkpoint', {str(tmp_path) + '/out'!r})"
    loaded = modules_after(code)
    assert "numpy" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "rich", "tqdm"})  # no bar is drawn


def test_only_the_command_changes_how_garbage_is_collected() -> None:
    """The process of whoever imports the package is theirs."""
    code = (
        "import gc; own = gc.get_threshold()\n"
        "import unshard.api; assert gc.get_threshold() == own\n"
        "from unshard.cli.running import run; assert gc.get_threshold() == own\n"
        "run(lambda: print(gc.get_threshold() > own))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_an_older_python_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a source tree or PYTHONPATH, where pip's own check has never run."""
    package = Path(unshard.__file__)
    tree = ast.parse(package.read_text(encoding="utf-8"), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", (3, 10, 14, "final", 0))
    with pytest.raises(
        ImportError, match=r"Python 3\.11 or later, and this is Python 3\.10"
    ) as old:
        exec(compile(tree, str(package), "exec"), {"__name__": "older"})  # noqa: S102 (our own file)
    assert "uv tool install --python 3.12 ." in str(old.value)
    assert "\n" not in str(old.value)


def test_everything_public_is_there() -> None:
    for name in unshard.__all__:
        assert getattr(unshard, name) is not None
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = unshard.no_such_thing
