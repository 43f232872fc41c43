"""Install every tool into an environment of its own, with the packages that its merge imports.

torch comes first and by exact version: it is a CPU build, and what follows would bring another.
A tool whose dependencies would bring gigabytes of CUDA libraries comes without them.
"""

import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENVIRONMENTS", "Environment", "install", "versions"]

FOLDER = Path(__file__).parent.parent.parent / ".venv-peers"
_TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages that are installed together.

    Attributes:
        steps: the arguments of one `pip install` after another.
        reported: the packages whose versions the report names.
    """

    steps: tuple[tuple[str, ...], ...]
    reported: tuple[str, ...]


ENVIRONMENTS = {
    "verl": Environment(
        (
            (_TORCH,),
            ("transformers==5.10.4", "accelerate==1.15.0", "tensordict==0.10.0"),
            ("ray==2.60.0", "codetiming==1.4.0", "hydra-core==1.3.8"),
            ("--no-deps", "verl==0.9.1"),
        ),
        ("verl", "torch", "transformers"),
    ),
    "lmms-engine": Environment(
        (
            (_TORCH,),
            ("transformers==5.8.1", "accelerate==1.15.0", "loguru==0.7.3", "jsonlines==4.0.0"),
            ("peft==0.21.2", "datasets==5.2.0", "librosa==0.11.0", "pillow==13.0.0"),
            ("py-cpuinfo==9.0.0", "pydantic==2.14.3", "pynvml==13.0.1"),
            ("--no-deps", "deepspeed==0.19.8", "hjson==3.1.0", "einops==0.8.2", "msgpack==1.2.4"),
            ("--no-deps", "lmms-engine==0.1.4"),
        ),
        ("lmms-engine", "torch", "transformers"),
    ),
    "huggingface": Environment(
        ((_TORCH,), ("transformers==5.23.0", "accelerate==1.15.0")),
        ("accelerate", "torch", "transformers"),
    ),
    "charts": Environment((("matplotlib==3.11.2",),), ("matplotlib",)),
}


def python_of(name: str) -> Path:
    """Return the interpreter of an environment."""
    return FOLDER / name / "bin" / "python"


def install(name: str) -> str | None:
    """Install an environment unless it is there; return why that is impossible, or None."""
    environment, marker = ENVIRONMENTS[name], FOLDER / name / ".installed"
    wanted = json.dumps(environment.steps)
    if marker.exists() and marker.read_text(encoding="utf-8") == wanted:
        return None
    print(f"installing {name}")
    venv.create(FOLDER / name, with_pip=True, clear=True)
    for step in environment.steps:
        pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", *step]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [one for one in done.stderr.splitlines() if one.startswith("ERROR")]
            return f"pip install {' '.join(step)}: {(errors or ['failed'])[0]}"
    marker.write_text(wanted, encoding="utf-8")
    return None


def versions(name: str) -> dict[str, str]:
    """Return the versions of the packages that the report names."""
    names = ENVIRONMENTS[name].reported
    program = f"import importlib.metadata as m; print(*map(m.version, {names}))"
    command = [str(python_of(name)), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


if __name__ == "__main__":
    sys.exit("\n".join(filter(None, map(install, ENVIRONMENTS))) or 0)
