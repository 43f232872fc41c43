"""lmms-engine 0.1.4's merger is replaced, in whichever order it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmms_engine", reason="pip install --no-deps lmms_engine")

INSTALL = "from unshard.integrations.lmms_engine import install\ninstall()\n"
OURS = "from unshard.merger import FSDP2Merger as Ours\n"
# What their own module imports of the models that lmms-engine has.
MODELS = """
import sys
from types import ModuleType
sys.modules["lmms_engine.models"] = ModuleType("lmms_engine.models")
sys.modules["lmms_engine.mapping_func"] = ModuleType("lmms_engine.mapping_func")
sys.modules["lmms_engine.mapping_func"].create_model_from_pretrained = None
"""


def run(code: str) -> str:
    """Run code in a new interpreter; return what it prints."""
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert not child.returncode, child.stderr
    return child.stdout


@pytest.mark.parametrize(
    "line",
    [
        "from lmms_engine.merger.fsdp2 import FSDP2Merger",  # as its RL trainers, at each sync
        "from lmms_engine.merger import FSDP2Merger",
        "import lmms_engine.merger.fsdp2; FSDP2Merger = lmms_engine.merger.fsdp2.FSDP2Merger",
        "from lmms_engine.merger import fsdp2; FSDP2Merger = fsdp2.FSDP2Merger",
    ],
)
def test_a_later_import_gets_ours_without_their_models(line: str) -> None:
    needed = "import sys\nsys.modules.update(dict.fromkeys(('httpx', 'pydantic', 'torch')))\n"
    check = """
import sys
from lmms_engine.merger import CheckpointMerger
assert FSDP2Merger is Ours
assert isinstance(FSDP2Merger(), CheckpointMerger)
assert "lmms_engine.models" not in sys.modules
from lmms_engine.merger.fsdp2 import STATE_DICT_DIRNAME_MAP, CheckpointType
assert sorted(STATE_DICT_DIRNAME_MAP) == ["ema", "regular"]
"""
    run(needed + INSTALL + line + "\n" + INSTALL + OURS + check)  # twice: it changes nothing


def test_what_was_imported_before_is_replaced_where_it_is() -> None:
    before = """
user = ModuleType("user")
exec("from lmms_engine.merger import FSDP2Merger, FSDP2Merger as Named", vars(user))
sys.modules["user"] = user
class Own(user.Named): pass
"""
    check = """
import lmms_engine.merger.fsdp2
modules = (user, lmms_engine.merger, lmms_engine.merger.fsdp2)
assert all(one.FSDP2Merger is Ours for one in modules)
assert user.Named is Ours
assert lmms_engine.merger.fsdp2.STATE_DICT_DIRNAME_MAP  # the module stays
assert Own.__base__.__module__ == "lmms_engine.merger.fsdp2"
"""
    run(MODELS + before + INSTALL + INSTALL + OURS + check)


def test_without_lmms_engine_nothing_is_changed() -> None:
    code = """
import sys
sys.modules["lmms_engine"] = None
from unshard.integrations.lmms_engine import install
try:
    install()
except ImportError as error:
    print(error.name)
assert "lmms_engine.merger.fsdp2" not in sys.modules
"""
    assert run(code) == "lmms_engine\n"


def test_a_version_without_a_merger_is_told_and_nothing_is_changed(tmp_path: Path) -> None:
    (tmp_path / "lmms_engine").mkdir()
    (tmp_path / "lmms_engine" / "__init__.py").touch()
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from unshard.integrations.lmms_engine import install
try:
    install()
except ImportError as error:
    print(error)
assert "lmms_engine.merger.fsdp2" not in sys.modules
"""
    assert run(code) == "this version of lmms-engine has no merger\n"


@pytest.mark.parametrize(
    ("before", "module"),
    [("", "unshard.merger.fsdp2"), ("sys.modules[MERGER] = None", "no merger")],
)
def test_the_launcher_trains_with_our_merger_or_without_any(
    tmp_path: Path, before: str, module: str
) -> None:
    pytest.importorskip("lmms_engine.eval.backends", reason="pip install --no-deps lmms_engine")
    launch = tmp_path / "launch"
    launch.mkdir()
    (launch / "__init__.py").touch()
    (launch / "cli.py").write_text(
        "try:\n    from lmms_engine.merger.fsdp2 import FSDP2Merger\n"
        "except ImportError:\n    print('no merger')\nelse:\n    print(FSDP2Merger.__module__)\n"
    )
    code = f"""
import lmms_engine, runpy, sys
MERGER = "lmms_engine.merger"
{before}
lmms_engine.__path__.insert(0, {str(tmp_path)!r})  # its own command needs a GPU's packages
runpy.run_module("unshard.evaluate.lmms_engine", run_name="__main__", alter_sys=True)
"""
    assert run(code) == f"{module}\n"
