"""`unshard env`: the facts about the machine that a bug report needs."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Annotated

from unshard import __version__
from unshard.cli.options import Json
from unshard.cli.parser.parameters import argument
from unshard.console import human_size

_PACKAGES = (
    *("numpy", "ml_dtypes", "safetensors", "huggingface_hub", "click", "rich"),
    *("torch", "transformers", "peft", "zstandard"),
)


def env(
    directory: Annotated[Path, argument("DIR", "Directory whose file system is tested.")] = Path(),
    as_json: Json = False,
) -> None:
    """Print versions and the machine's features, for bug reports."""
    has_affinity = hasattr(os, "sched_getaffinity")
    facts = {
        "unshard": f"{__version__} ({Path(__file__).parent.parent})",
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1),
        "memory": human_size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        **{name: _find_version(name) for name in _PACKAGES},
        **_try_file_system(directory),
    }
    if as_json:
        print(json.dumps(facts))
        return
    for name, text in facts.items():
        print(f"{name:<16} {text}")


def _find_version(package: str) -> str:
    """Return a package's version, without importing it."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _try_file_system(directory: Path) -> dict[str, str]:
    """Try the features that a merge uses, in a temporary directory."""
    import tempfile

    facts = {"directory": str(directory.resolve())}
    try:
        with tempfile.TemporaryDirectory(prefix="_unshard-", dir=directory) as scratch:
            for name, works in _FEATURES.items():
                try:
                    facts[name] = "yes" if works(Path(scratch)) else "no"
                except OSError as error:
                    facts[name] = f"no: {error.strerror}"
    except OSError as error:
        facts["directory"] += f": {error.strerror}"
    return facts


def _copies(scratch: Path) -> bool:
    """Return whether the kernel copies between files (copy_file_range)."""
    if not hasattr(os, "copy_file_range"):
        return False
    with (scratch / "source").open("wb+") as source, (scratch / "target").open("wb") as target:
        source.write(b"bytes")
        source.flush()
        return os.copy_file_range(source.fileno(), target.fileno(), 5, 0, 0) == 5


def _exchanges(scratch: Path) -> bool:
    """Return whether two directories can be swapped atomically (renameat2)."""
    from unshard.write.dirfd import closing, exchange

    for name in ("first", "second"):
        (scratch / name).mkdir()
    with closing(os.open(scratch, os.O_RDONLY)) as fd:
        return exchange(fd, "first", fd, "second")


def _links(scratch: Path) -> bool:
    """Return whether hard links can be made."""
    (scratch / "file").touch()
    os.link(scratch / "file", scratch / "link")
    return True


_FEATURES = {"copy_file_range": _copies, "renameat2": _exchanges, "hard links": _links}
