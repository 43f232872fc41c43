"""What can change a number besides a profile's keys: local files, and the installed evaluator.

A profile's revision is asked for with every job, so contents are read, and interpreters are asked,
only when something has changed since.
"""

import hashlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from unshard.evaluate.server.processes.launching import evaluator_environment

_MOST_FILES = 10_000
_MOST_BYTES = 16 << 20  # of a file; larger ones are data, and count by their size
_MOST_TOGETHER = 1 << 30  # of a directory
_COARSE_NS = 2 * 10**9  # a later change may have the same time
_MOST_KNOWN = 100_000
_PROBE_S = 30.0
_AGAIN_S = 60.0  # then an interpreter that did not answer is asked again
_PROBE = """
import platform, sys
from importlib.metadata import distribution, version
all = [f"Python {platform.python_version()}"]
for name in (sys.argv[1], "torch", "transformers", "vllm", "datasets"):
    try:
        all.append(f"{name} {version(name)}")
    except ImportError:
        pass
found = distribution(sys.argv[1])
print(found.version, ", ".join(all), found.locate_file(""), sep="\\n")
"""
# Secrets, and variables that say where something is, or how it is logged.
_NO_SETTING = re.compile(
    r"(?:HF|HUGGINGFACE|TRANSFORMERS|WANDB|CUDA|NCCL|PYTHON|XDG|AWS)_?.*"
    r"|.*(?:TOKEN|SECRET|PASSWORD|KEY|CREDENTIALS|PROXY|PARALLELISM)",
    re.IGNORECASE,
)
_NOT_TASKS = re.compile(r"\..*|__pycache__|.*\.pyc|README.*|LICENSE.*|.*~")

_Stamp = tuple[int, ...]

_contents: dict[Path, tuple[_Stamp, str]] = {}
_versions: dict[object, tuple[object, tuple[str, str] | None, Path | None]] = {}
_asking = threading.Lock()


def is_setting(name: str, value: str) -> bool:
    """Return whether an environment variable may change a number, such as a judge's name.

    A path or an address does not, and neither does a secret.
    """
    is_place = value.startswith(("/", "~", ".")) or "://" in value
    return not is_place and not _NO_SETTING.fullmatch(name)


def digests_of(files: Mapping[str, Path]) -> dict[str, list[list[str]]]:
    """Return names and digests of files, and of those below directories; not where they are."""
    return {what: sorted(_digests(path)) for what, path in files.items()}


def _digests(path: Path) -> Iterator[list[str]]:
    if not os.path.isdir(path):  # noqa: PTH112  (false where `Path.is_dir` would raise)
        yield ["", _digest(path, _MOST_BYTES)[0]]
        return
    count, room = 0, _MOST_TOGETHER
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not _NOT_TASKS.fullmatch(name))
        for name in sorted(names):
            if _NOT_TASKS.fullmatch(name):
                continue
            if (count := count + 1) > _MOST_FILES:
                return
            file = Path(folder, name)
            digest, size = _digest(file, min(room, _MOST_BYTES))
            room -= size
            yield [str(file.relative_to(path)), digest]


def _digest(path: Path, most_bytes: int) -> tuple[str, int]:
    """Return the digest of a file's content, and how many bytes count; of a large one, its size.

    The first line of a script does not count: it names an interpreter.
    """
    try:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev)
        if status.st_size > most_bytes:
            return f"{status.st_size} bytes", 0
        known = _contents.get(path)
        if known is not None and known[0] == stamp:
            return known[1], status.st_size
        content = path.read_bytes()
    except OSError as error:
        return type(error).__name__, 0
    script = content.partition(b"\n")[2] if content.startswith(b"#!") else content
    digest = hashlib.sha256(script).hexdigest()
    if len(_contents) > _MOST_KNOWN:
        _contents.clear()
    if time.time_ns() - status.st_mtime_ns > _COARSE_NS:
        _contents[path] = stamp, digest
    return digest, status.st_size


def installed_versions(
    python: str, module: str, environment: Mapping[str, str]
) -> tuple[str | None, str]:
    """Return the version of a module that an interpreter would import, None if it has none.

    And the version of the interpreter, with those of other packages that matter.

    The interpreter is asked again after something was installed where the module is.
    """
    key = (python, module, *sorted(environment.items()))
    with _asking:
        known = _versions.get(key)
        if known is None or known[0] != _stamp(python, known[2]):
            before = None if known is None else known[1]
            found, place = _ask(python, module, environment)
            # A busy machine is not another version.
            known = _versions[key] = _stamp(python, place), found or before, place
    return known[1] or (None, "")


def _stamp(python: str, place: Path | None) -> object:
    """Return what changes when another version may be installed."""
    if place is None:
        return time.monotonic() // _AGAIN_S
    try:
        return place.stat().st_mtime_ns, Path(python).stat().st_mtime_ns if "/" in python else 0
    except OSError:
        return None


def _ask(
    python: str, module: str, environment: Mapping[str, str]
) -> tuple[tuple[str, str], Path] | tuple[None, None]:
    directory = os.sep  # where nothing is that could be imported
    try:
        done = subprocess.run(  # noqa: S603  (the server's configuration names the interpreter)
            [python, "-c", _PROBE, module],
            cwd=directory,
            env=evaluator_environment(environment, program=python, gpus=(), directory=directory),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=True,
        )
        version, versions, place = done.stdout.strip().splitlines()[-3:]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    return (version, versions), Path(place)
