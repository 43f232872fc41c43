"""How a command begins and ends: signals while it imports, streams that fail, no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ranks import save_ranks

ROOT = Path(__file__).parent.parent.parent
CONVERT = ("-m", "unshard.compat.convert_checkpoint_simple")

# Runs the command again and again, in forks; the signal arrives at an ever later import.
IMPORTING = """
import json, os, signal, sys
from unshard.__main__ import main
from unshard import signals

class At:
    def __init__(self, step):
        self.left = step

    def find_spec(self, name, path=None, target=None):
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
for step in json.loads(sys.argv.pop(1)):
    child = os.fork()
    if not child:
        sys.meta_path.insert(0, At(step))
        main()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(step, code, file=sys.stderr)
"""

# Prints what is imported when a command sets its first signal handler, and ends.
FIRST_HANDLER = """
import os, runpy, signal, sys

def handle(*_):
    print(*sys.modules, flush=True)
    os._exit(0)

signal.signal = handle
name = sys.argv[1]
if name.endswith(".py"):
    exec(open(name).read(), {"__name__": "__main__", "__file__": name})
else:
    runpy._run_module_as_main(name)
"""

# Is sent a signal when the interpreter has ended so far that it handles none any more.
LATE = """
import os, signal

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

late = Late()
from unshard.__main__ import main
main()
"""


def run(
    *command: str, encoding: str = "utf-8", shell: str = '"$@"'
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, *command],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    save_ranks(tmp_path / "global_step_1" / "actor", {"w": torch.zeros(4, 4)}, 2)
    config = tmp_path / "global_step_1" / "actor" / "huggingface"
    config.mkdir()
    (config / "config.json").write_text('{"model_type": "unheard_of"}')
    return tmp_path / "global_step_1"


def test_ctrl_c_while_modules_are_imported_is_one_line(verl: Path, tmp_path: Path) -> None:
    steps = "[1, 2, 5, 12, 30, 70, 120, 180, 250, 320, 400]"
    done = run("-c", IMPORTING, steps, "merge", str(verl), str(tmp_path / "out"), "--quiet")
    lines = done.stderr.decode().splitlines()
    ends = [line.split() for line in lines if not line.startswith("interrupted")]
    interrupted = [step for step, code in ends if code == "130"]
    assert len(interrupted) >= 8
    assert {code for _, code in ends} <= {"130", "0", "5"}  # later there is nothing to import
    assert lines.count("interrupted: no partial output left") == len(interrupted)
    assert {path.name for path in tmp_path.iterdir()} <= {"global_step_1", "out"}


@pytest.mark.parametrize(
    "command",
    [
        "unshard",
        "unshard.merger",
        "unshard.compat.convert_checkpoint_simple",
        "unshard.compat.convert_fsdp_to_hf",
        "unshard.compat.merge_fsdp",
        "unshard.compat.verl",
        "unshard.compat.zero_to_fp32",
        "scripts/convert_checkpoint_simple.py",
        "scripts/convert_fsdp_to_hf.py",
        "tools/merge_fsdp.py",
    ],
)
def test_signals_are_handled_before_anything_else_is_imported(command: str) -> None:
    name = str(ROOT / command) if command.endswith(".py") else command
    loaded = set(run("-c", FIRST_HANDLER, name).stdout.decode().split())
    package = {name for name in loaded if name.startswith("unshard")}
    assert "unshard.signals" in package
    parents = {"unshard.compat", "unshard.merger", command}
    assert package <= {"unshard", "unshard.signals", "unshard.__main__"} | parents
    assert loaded.isdisjoint({"argparse", "json", "typing"})


def test_a_signal_while_the_interpreter_ends_changes_nothing(verl: Path, tmp_path: Path) -> None:
    done = run("-c", LATE, "merge", str(verl), str(tmp_path / "out"), "--quiet")
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_any_encoding_of_stdout_will_do(verl: Path, tmp_path: Path, encoding: str) -> None:
    done = run(*CONVERT, str(verl), "--output", str(tmp_path / "o"), encoding=encoding)
    assert done.returncode == 0, done.stderr
    assert rb"\u2713 Detected world_size=2" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ('"$@" > /dev/full', 70),
        ('"$@" >&-', 0),
        ('"$@" 2>&-', 0),
        ('"$@" 2> /dev/full', 0),
        ('set -o pipefail; "$@" | true', 0),
    ],
)
def test_what_cannot_be_printed_does_not_stop_the_work(
    verl: Path, tmp_path: Path, shell: str, code: int
) -> None:
    for number, command in enumerate([("-m", "unshard", "merge"), CONVERT]):
        out = tmp_path / f"out_{number}"
        arguments = [str(out)] if number == 0 else ["--output", str(out)]
        done = run(*command, str(verl), *arguments, shell=shell)
        assert done.returncode == (min(code, 1) if number else code), done.stderr
        assert b"Traceback" not in done.stderr
        assert b"Exception" not in done.stderr
        assert (out / "model.safetensors").exists()
        assert (b"standard output cannot be written: No space left" in done.stderr) == (code > 1)


# A library that prints in a thread of its own while a command works.
CHATTERING = """
import json, threading
from unshard.__main__ import main

dumps = json.dumps
def dump_loudly(*given, **more):
    thread = threading.Thread(target=print, args=("a node has died",))
    thread.start()
    thread.join()
    return dumps(*given, **more)
json.dumps = dump_loudly
main()
"""


def test_what_a_library_prints_in_a_thread_is_not_in_the_json(verl: Path) -> None:
    done = run("-c", CHATTERING, "inspect", str(verl), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 2
    assert b"a node has died" in done.stderr


@pytest.mark.parametrize(
    "script",
    [
        "tools/merge_fsdp.py",
        "scripts/convert_checkpoint_simple.py",
        "scripts/convert_fsdp_to_hf.py",
    ],
)
def test_a_script_without_unshard_says_how_to_install_it(script: str) -> None:
    done = run("-I", "-S", str(ROOT / script))
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("unshard is not installed; to install it: ")
    assert line.endswith(f" -m pip install {ROOT}")


@pytest.mark.parametrize("command", [("unshard", "env"), CONVERT[1:]])
def test_a_current_directory_that_was_deleted_is_reported(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    gone = f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && "
    arguments = ["."] if command == CONVERT[1:] else []
    done = run("-m", *command, *arguments, shell=gone + '"$@"')
    assert done.returncode == (1 if command == CONVERT[1:] else 2)
    assert b"the current directory has been deleted\n  hint:     cd to another" in done.stderr
    assert b"Traceback" not in done.stderr


def test_absolute_paths_need_no_current_directory(verl: Path, tmp_path: Path) -> None:
    gone = f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && "
    done = run("-m", "unshard", "merge", str(verl), str(tmp_path / "out"), shell=gone + '"$@"')
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
