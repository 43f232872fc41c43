"""What the command and the package import: nothing heavy before there is work to do."""

import ast
import importlib
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
        "import unshard; unshard.UnshardError; from unshard import compat, evaluate, signals",
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


def test_a_merge_of_rank_files_imports_what_it_needs(tmp_path: Path) -> None:
    """Each module takes a thousandth of a second of every command."""
    actor = Path("examples/checkpoint/global_step_10/actor")
    arguments = ["unshard", "merge", str(actor), str(tmp_path / "out"), "--quiet"]
    loaded = modules_after(
        f"import sys; sys.argv = {arguments}\nfrom unshard.__main__ import main\n"
        "try: main()\nexcept SystemExit as end: assert end.code == 0"
    )
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert sum(name.partition(".")[0] == "unshard" for name in loaded) <= 130
    slow = {"numpy.ma", "huggingface_hub", "pydantic", "socket", "tempfile", "importlib.metadata"}
    assert loaded.isdisjoint(slow)


def test_numpy_of_a_command_has_one_thread_and_no_child_inherits_that() -> None:
    code = (
        "import os; from unshard.cli.running import import_numpy; import_numpy()\n"
        "print(len(os.listdir('/proc/self/task')), 'OPENBLAS_NUM_THREADS' in os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"


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
    with pytest.raises(ImportError, match=r"Python 3\.11 or later; this is Python 3\.10") as old:
        exec(compile(tree, str(package), "exec"), {"__name__": "older"})  # noqa: S102 (our own file)
    assert "uv tool install --python 3.12 ." in str(old.value)
    assert "\n" not in str(old.value)


def test_everything_public_is_there() -> None:
    names = importlib.import_module("unshard").__all__
    assert names == dir(unshard)
    assert {"MergeOptions", "UnshardError", "__version__", "inspect", "merge"} <= {*names}
    assert {"Path", "api", "merging", "merge_with", "raise_all"}.isdisjoint(names)
    imported: dict[str, object] = {}
    exec("from unshard import *", imported)  # noqa: S102 (our own names)
    assert {*names} == imported.keys() - {"__builtins__"}


@pytest.mark.parametrize("package", ["unshard", "unshard.evaluate", "unshard.merger"])
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    module = importlib.import_module(package)
    for name in ("no_such_thing", "NoSuchError", "Path", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute '{name}'"):
            getattr(module, name)


TYPED = """
import unshard, unshard.evaluate as evaluate, unshard.merger as merger
from unshard import Report, UnshardError, __version__, merge, merge_all
from unshard.evaluate import EvalClient
from unshard.merger import FSDP2Merger

report: Report = merge("run", "out", dtype="bf16", names="hub", lora="fuse", verify="full")
reports: list[Report] = unshard.merge_all("run", weights="ema", quantize=None, overwrite="all")
client: evaluate.EvalClient = EvalClient(__version__)
merged: type[merger.CheckpointMerger] = FSDP2Merger
assert issubclass(UnshardError, Exception)

unshard.no_such_thing  # E
unshard.merge_with  # E
unshard.raise_all  # E
evaluate.no_such_thing  # E
evaluate.httpx  # E
merger.no_such_thing  # E
merger.merge_options  # E
merge("run", dtype="float99")  # E
merge("run", names="hugging face")  # E
merge("run", lora="fused")  # E
merge("run", verify="ful")  # E
merge("run", overwrite="any")  # E
merge_all("run", weights="EMA")  # E
report.no_such_thing  # E
client.no_such_thing  # E
"""


def test_type_checkers_know_the_names_and_what_options_may_be(tmp_path: Path) -> None:
    """mypy stands for all of them; it does not read torch or numpy, which takes a minute."""
    (tmp_path / "typed.py").write_text(TYPED)
    ours = "follow_imports = skip\n[mypy-unshard.*]\nfollow_imports = silent\n"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\n{ours}")
    command = [sys.executable, "-m", "mypy", "typed.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    wrong = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    expected = [at for at, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# E")]
    assert wrong == expected, done.stdout + done.stderr
