"""The page about migrating: a drop-in and the command next to it write the same weights."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import some_tensors
from zero_files import ZeroModel, save_zero

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
KEPT, *_ = re.split(r"^## verl$", PAGE, flags=re.MULTILINE)
DROP_INS = {
    theirs.split()[-1].split("/")[-1]: ours
    for theirs, ours in re.findall(r"^\| .*`(.*)` \| `(.*)` \|$", KEPT, re.MULTILINE)
}
ROWS = [
    (theirs, ours)
    for theirs, ours in re.findall(r"^\| `([^`…]+)` \| `(unshard [^`…]+)` \|$", PAGE, re.MULTILINE)
    if theirs.split()[0] in DROP_INS
]


def checkpoint(directory: Path, tool: str) -> None:
    """Write a run with one step, `RUN/STEP`, as the trainer of the tool saves it."""
    verl = tool.startswith(("verl", "convert"))
    step = directory / "RUN" / ("global_step_10" if verl else "checkpoint-10")
    example = ROOT / "examples" / "checkpoint" / "global_step_10"
    if tool == "zero_to_fp32.py":
        save_zero(step / "global_step7", ZeroModel([some_tensors()]), world=2, stage=2)
        (step / "latest").write_text("global_step7")
    elif verl:
        shutil.copytree(example, step)
    else:
        shutil.copytree(example / "actor", step / "pytorch_model_fsdp_0")
        shutil.copytree(example / "actor" / "huggingface", step, dirs_exist_ok=True)
    (directory / "STEP").symlink_to(step)


def run(line: list[str], directory: Path) -> None:
    """Run a line where the names of its paths are those of the page."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        line, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def weights(directory: Path) -> bytes:
    (file,) = (
        path for path in directory.glob("**/model.safetensors") if path.parent.name != "MODEL"
    )
    return file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[row[0][:40] for row in ROWS])
def test_the_line_to_type_does_the_same(theirs: str, ours: str, tmp_path: Path) -> None:
    tool, *arguments = theirs.split()
    drop_in = shlex.split(DROP_INS[tool])
    if drop_in[0] != "python":
        drop_in = ["python", str(ROOT / drop_in[0])]
    lines = ([sys.executable, *drop_in[1:], *arguments], [sys.executable, "-m", *shlex.split(ours)])
    for number, line in enumerate(lines):
        place = tmp_path / str(number)
        place.mkdir()
        checkpoint(place, tool)
        needed = "OUT" if "verify" in ours else "MODEL"
        if needed in ours:
            run([sys.executable, "-m", "unshard", "merge", "RUN", needed], place)
        run(line, place)
    assert weights(tmp_path / "0") == weights(tmp_path / "1")


def test_every_drop_in_has_a_line() -> None:
    assert len(DROP_INS) == 8
    elsewhere = {"FSDP2Merger", "verl_omni.model_merger"}  # which need other checkpoints
    assert {theirs.split()[0] for theirs, _ in ROWS} == DROP_INS.keys() - elsewhere
