"""The command `unshard` on a Ray cluster, whose nodes can be held at their work."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from evaluation.ray_nodes import PYTHON, Nodes
from evaluation.running import child_environment
from waiting import LIMIT_S, wait_until

__all__ = ["begin", "begun", "ended", "ran", "wait_for_nodes"]

# The command `unshard`. On a node each attempt at a file, or at a part of a comparison, waits where
# HOLD says, until there is a file "go": before it begins, or in the middle of its bytes. With HOLD
# "verify" those wait that verify an output, in their middle. Each process that verifies leaves a
# note. PATCH is Python.
HELD = """
import os, time
from pathlib import Path
import unshard
from unshard.__main__ import main
from unshard.engines.ray import cluster, jobs
from unshard.progress import Advanced

class Held:
    kind, events, middle = jobs._Making, 1, "middle"

    def __init__(self, *given):
        self.task, self.control = self.kind(*given), Path(os.environ["CONTROL"])
        self.where = os.environ.get("HOLD", "")

    def wait(self, attempt, listener):
        import ray

        note = f"{os.getpid()} {ray.get_runtime_context().get_node_id()}"
        (self.control / f"begun-{attempt}.tmp").write_text(note)
        (self.control / f"begun-{attempt}.tmp").rename(self.control / f"begun-{attempt}")
        while not (self.control / "go").exists():
            listener(Advanced(0))
            time.sleep(0.01)

    def do(self, number, attempt, listener):
        if self.where == "before":
            self.wait(attempt, listener)
        waited = []

        def told(event):
            waited.append(True)
            if self.where == self.middle and len(waited) == self.events:
                self.wait(attempt, listener)
            listener(event)

        return self.task.do(number, attempt, told)

class HeldUpload(Held):
    kind, events = jobs._Uploading, 2  # a part is on its way then

class HeldMeasuring(Held):
    kind = jobs._Measuring

class HeldVerifying(Held):
    kind, middle = jobs._Verifying, "verify"

    def do(self, number, attempt, listener):
        (self.control / f"verified-{os.getpid()}").touch()
        return super().do(number, attempt, listener)

jobs._Making, jobs._Uploading = Held, HeldUpload
jobs._Measuring, jobs._Verifying = HeldMeasuring, HeldVerifying
exec(os.environ.get("PATCH", ""))
main()
"""


def begin(
    cluster: Nodes, control: Path, *arguments: str | Path, **variables: str
) -> "subprocess.Popen[str]":
    script = control / "held.py"
    script.write_text(HELD)
    told = {"RAY_ADDRESS": cluster.address, "CONTROL": str(control), "LC_ALL": "C.UTF-8"}
    return subprocess.Popen(
        [PYTHON, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=control,
        env=child_environment() | told | variables,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    out, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, out + errors


def ran(cluster: Nodes, control: Path, *arguments: str | Path, **variables: str) -> tuple[int, str]:
    return ended(begin(cluster, control, *arguments, **variables))


def begun(control: Path) -> Mapping[str, list[int]]:
    """Return the processes that have begun an attempt, by their nodes."""
    found: dict[str, list[int]] = {}
    for note in control.glob("begun-*[0-9]"):
        pid, node = note.read_text().split()
        found.setdefault(node, []).append(int(pid))
    return found


def wait_for_nodes(process: "subprocess.Popen[str]", control: Path, count: int) -> None:
    def at_work() -> bool:
        assert process.poll() is None, ended(process)
        return len(begun(control)) >= count

    wait_until(at_work, f"an attempt on each of {count} nodes")
