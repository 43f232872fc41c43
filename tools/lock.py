"""Write the locked lists of packages in tests/requirements: exact versions, with hashes.

`make lock` runs it, with uv next to this Python. An environment of the tests has one or two of
these lists, and sees the packages of others (see the Makefile). torch is installed first, because
its build depends on the machine.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "requirements"
TORCH = "torch==2.13.0"
HEADER = "# Made by `make lock`; change {sources} instead.\n"

# torch is there already; what it brings on a machine with a GPU is not needed.
TORCH_AND_CUDA = r"(torch|nvidia-.*|cuda-.*)=="
# Builds for CUDA, whose operators do not load next to a torch for CPUs.
BESIDE_TORCH = r"(torchaudio|torchcodec|torchvision)=="


def main() -> None:
    """Write all lists, each after those of the environments that its own one sees."""
    without = rf"{TORCH_AND_CUDA}|triton=="
    lock("test", "pyproject.toml", "--extra", "test", without=without)
    lock("eval", "tests/requirements/eval.in", without=without, sees=("test",))
    lock("ray", "tests/requirements/ray.in", sees=("test", "eval"))
    lock("release", "tests/requirements/release.in")
    # vLLM asks for other versions of some packages: its environment has them first in its path.
    own = "pyproject.toml", "tests/requirements/vllm.in"
    without = f"{TORCH_AND_CUDA}|{BESIDE_TORCH}"
    lock("vllm", *own, without=without, sees=("test", "eval"), other_versions=True)
    for name in ("trainers", "lmms", "sglang", "verl", "fuzz"):
        lock(name, f"tests/requirements/{name}.in", "--no-deps")


def lock(
    name: str,
    *arguments: str,
    without: str = "$",
    sees: Sequence[str] = (),
    other_versions: bool = False,
) -> None:
    """Write the list of one environment.

    Args:
        name: of the list.
        arguments: of uv: from what it is made.
        without: a pattern of the packages to leave out.
        sees: the lists of the environments whose packages this one sees; it does not repeat them.
        other_versions: whether it may have other versions of these packages.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
    command += ["--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
    command += [] if other_versions else [f"--constraint={LISTS / one}.txt" for one in sees]
    with tempfile.TemporaryDirectory() as directory:
        torch, made = Path(directory, "torch.txt"), Path(directory, "made.txt")
        torch.write_text(TORCH)  # whatever vLLM asks for
        command += ["--override", str(torch), "--output-file", str(made), *arguments]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        entries = entries_in(made)
    seen = {wanted(entry) for one in sees for entry in entries_in(LISTS / f"{one}.txt")}
    # What is seen only on some machines (a marker) is not there on all.
    kept = [
        one
        for one in entries
        if not re.match(without, one)
        and seen.isdisjoint({wanted(one), wanted(one).partition(";")[0].strip()})
    ]
    sources = " and ".join(one for one in arguments if one.endswith((".in", ".toml")))
    (LISTS / f"{name}.txt").write_text(HEADER.format(sources=sources) + "".join(kept))


def entries_in(path: Path) -> list[str]:
    """Return the entries of a list, each with the lines of its hashes."""
    return re.split(r"(?m)^(?=[^\s#])", path.read_text())[1:]


def wanted(entry: str) -> str:
    """Return name and version of an entry, with the machines that it is for, without its hashes."""
    return entry.partition("\\\n")[0].strip()


if __name__ == "__main__":
    main()
