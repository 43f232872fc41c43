"""Write the locked lists of packages in tests/requirements: exact versions, with hashes.

`make lock` runs it, with uv next to this Python. An environment of the tests is torch, which is
installed first because its build depends on the machine, and one or two of these lists.
"""

import re
import subprocess
import sys
import tempfile
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
    """Write all lists; those that are alone first, because others depend on them."""
    lock("test", "pyproject.toml", "--extra", "test", without=rf"{TORCH_AND_CUDA}|triton==")
    without = f"{TORCH_AND_CUDA}|{BESIDE_TORCH}"
    lock("vllm", "pyproject.toml", "tests/requirements/vllm.in", without=without)
    lock("ray", "tests/requirements/ray.in", "--constraint", "tests/requirements/test.txt")
    for name in ("trainers", "lmms", "sglang", "verl", "fuzz"):
        lock(name, f"tests/requirements/{name}.in", "--no-deps")


def lock(name: str, *arguments: str, without: str = "$") -> None:
    """Write the list of one environment.

    Args:
        name: of the list.
        arguments: of uv: from what it is made.
        without: a pattern of the packages to leave out.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
    command += ["--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
    with tempfile.TemporaryDirectory() as directory:
        torch, made = Path(directory, "torch.txt"), Path(directory, "made.txt")
        torch.write_text(TORCH)  # whatever vLLM asks for
        command += ["--override", str(torch), "--output-file", str(made), *arguments]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        entries = re.split(r"(?m)^(?=\S)", made.read_text())
    kept = [one for one in entries if one and not re.match(without, one)]
    sources = " and ".join(one for one in arguments if one.endswith((".in", ".toml")))
    (LISTS / f"{name}.txt").write_text(HEADER.format(sources=sources) + "".join(kept))


if __name__ == "__main__":
    main()
