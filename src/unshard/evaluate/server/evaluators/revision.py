"""Digests of local files and versions of installed evaluators, for a profile's revision.

Every job needs its profile's revision, so files are read, and interpreters are run, only when
something has changed since.
"""

import hashlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from unshard.evaluate.server.processes.launching import run_python

_MOST_FILES = 10_000
_MOST_BYTES = 16 << 20  # of a file; larger files are data, and count by their size
_MOST_TOGETHER = 1 << 30  # of a directory
_COARSE_NS = 2 * 10**9  # a later change may have the same time
_MOST_KNOWN = 100_000
_PROBE_S = 30.0
_AGAIN_S = 60.0  # then an interpreter that did not answer is run again
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
# Secrets, and variables for places and logging.
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
    """Return whether a variable may change a number; paths, addresses and secrets do not."""
    is_path = value.startswith(("/", "~", ".")) or "://" in value
    return not is_path and not _NO_SETTING.fullmatch(name)


def digests_of(files: Mapping[str, Path]) -> dict[str, list[list[str]]]:
    """Return names and digests of files, and of files below directories, without their paths."""
    return {name: sorted(_digests(path)) for name, path in files.items()}


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
    """Return the digest of a file's content, and the bytes read; for a large file only its size.

    The first line of a script is left out, because it names an interpreter.
    """
    try:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev)
        if status.st_size > most_bytes:
            return f"{status.st_size} bytes", 0
        cached = _contents.get(path)
        if cached is not None and cached[0] == stamp:
            return cached[1], status.st_size
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
    """Return the version of a module in an interpreter, None if it is not installed.

    And, as text, the versions of the interpreter, the module, and other packages that matter. The
    interpreter is run again after something was installed in the directory of the module.
    """
    key = (python, module, *sorted(environment.items()))
    with _asking:
        cached = _versions.get(key)
        if cached is None or cached[0] != _stamp(python, cached[2]):
            before = None if cached is None else cached[1]
            versions, packages = _ask(python, module, environment)
            # No answer, as of a busy machine, is not another version.
            cached = _versions[key] = _stamp(python, packages), versions or before, packages
    return cached[1] or (None, "")


def _stamp(python: str, packages: Path | None) -> object:
    """Return a value that changes when another version may be installed."""
    if packages is None:
        return time.monotonic() // _AGAIN_S
    try:
        return packages.stat().st_mtime_ns, Path(python).stat().st_mtime_ns if "/" in python else 0
    except OSError:
        return None


def _ask(
    python: str, module: str, environment: Mapping[str, str]
) -> tuple[tuple[str, str], Path] | tuple[None, None]:
    try:
        # In the root directory, which has no modules that could be imported.
        process = run_python([python, "-c", _PROBE, module], environment, os.sep, _PROBE_S)
        process.check_returncode()
        version, versions, packages = process.stdout.decode().strip().splitlines()[-3:]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    return (version, versions), Path(packages)
