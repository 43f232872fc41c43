"""What a user has who installed the wheel and nothing else: `make test-wheel` runs it.

It is no test of pytest, because the environment has only what the wheel asks for. Python runs it
with -I and in another directory, so that nothing of the source tree can be imported.
"""

import re
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
COMMAND = Path(sys.executable).with_name("unshard")


def main() -> None:
    """Check the installation that this Python has; the first difference is an AssertionError."""
    with tempfile.TemporaryDirectory() as directory:
        for check in (installed, merged, page, plugins):
            sys.stdout.write(f"{check(Path(directory))}\n")


def installed(_: Path) -> str:
    """Compare where the package lies and what it calls itself with its metadata."""
    import unshard

    place = Path(unshard.__file__).parent
    assert place.is_relative_to(sys.prefix), f"{place}: not of the environment {sys.prefix}"
    assert version("unshard") == unshard.__version__
    assert find_spec("torch") is None, "torch is installed, so this would show nothing"
    return f"unshard {unshard.__version__} with Python {sys.version.partition(' ')[0]}, no torch"


def merged(directory: Path) -> str:
    """Merge the checkpoint of the demonstration, and compare every tensor."""
    run(COMMAND, "merge", EXAMPLES / "checkpoint", directory / "merged")
    check = [EXAMPLES / "check_result.py", directory / "merged", EXAMPLES / "expected.json"]
    return run(sys.executable, "-I", *check)


def page(directory: Path) -> str:
    """Start the server; its page and every file that the page loads must be those of the wheel."""
    import unshard.evaluate.server.http.page as package

    files = sorted((Path(package.__path__[0]) / "static").iterdir())
    serve = [COMMAND, "eval", "serve", "--port", "0", "--root", directory, "--gpus", "0"]
    with subprocess.Popen(
        [*map(str, serve), "--work-dir", str(directory / "work")],
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
    ) as server:
        assert server.stderr is not None
        try:
            matches = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stderr)
            address = next((match[0] for match in matches if match), "")
            assert address, f"the server exited with {server.wait()} before it listened"
            front = fetch(f"{address}/").decode()
            assert version("unshard") in front
            assert "/view/static/page.css?v=" in front
            for file in files:
                assert fetch(f"{address}/view/static/{file.name}") == file.read_bytes(), file
        finally:
            server.terminate()
    return f"the server's page and its {len(files)} files"


def plugins(_: Path) -> str:
    """Call what vLLM and SGLang call in each of their processes; without them nothing happens."""
    groups = "vllm.general_plugins", "sglang.srt.plugins"
    for group in groups:
        (point,) = entry_points(group=group, name="unshard")
        point.load()()
    return f"the entry points {' and '.join(groups)}"


def run(*command: object) -> str:
    """Run a command to its end; return its last line."""
    done = subprocess.run(
        [*map(str, command)], check=False, text=True, stdout=-1, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.strip().rpartition("\n")[2]


def fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310 (its own server)
        return bytes(answer.read())


if __name__ == "__main__":
    main()
