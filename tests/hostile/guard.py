"""Run the real command line on hostile checkpoints, and report whatever else the process does.

A program of its own: `python -m hostile.guard RESULTS KNOWN CASE...`. Every case is a directory
with `run/checkpoint`; everything that a command may touch is inside it. Python's audit events show
processes, sockets, imports, evaluated code, and files elsewhere, whichever thread they happen in.

What commands need anyway, such as files of the system, is learned first, from as many cases as
KNOWN says: good ones, and one that is refused. The modules of unshard are imported before, so that
no import at all is expected afterwards.
"""

import gc
import importlib
import json
import os
import pkgutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import unshard
from unshard import UnshardError
from unshard.__main__ import main as command_line

__all__ = ["CHECKPOINT", "COMMANDS", "Outcome"]

SECONDS = 60  # of the processor, for a command; the process is killed then
LONGEST_MESSAGE = 300_000
CHECKPOINT = Path("run", "checkpoint")  # a search for the run looks into both parents
COMMANDS = ("inspect", "merge", "verify", "open")
BARE = ("--config", "none")

_FORBIDDEN = (
    "subprocess. os.system os.exec os.posix_spawn os.spawn os.fork os.startfile os.kill os.putenv "
    "os.unsetenv pty. socket. ssl. ctypes. pickle. urllib. http. ftplib. smtplib. webbrowser. "
    "code. cpython.run_ builtins.input builtins.breakpoint import exec compile sys.settrace "
    "sys.setprofile"
).split()
# Not even good checkpoints need these.
_NETWORK = ("socket.", "ssl.", "urllib.", "http.", "ftplib.", "smtplib.")
_FILES = (
    "open os.chmod os.chown os.link os.listdir os.mkdir os.remove os.rename os.rmdir os.scandir "
    "os.symlink os.truncate os.utime shutil."
).split()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command.

    Attributes:
        case, command: which.
        code: the exit code; for "open", 0 or that of the error.
        message: what it printed on stderr.
        made: whether there is an output.
        grown: bytes of memory that it took, at its most.
        caught: what it did that it must not do.
    """

    case: str
    command: str
    code: int
    message: str
    made: bool
    grown: int
    caught: list[str]


@dataclass
class Watch:
    """The audit hook. It records while it is on, and learns while it is learning."""

    place: str = ""
    on: bool = False
    learning: bool = True
    caught: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        """Take an audit event."""
        if not self.on:
            return
        if any(event.startswith(name) for name in _FORBIDDEN):
            self._note(
                f"{event} {str(args[-1:] if event.startswith('ctypes.') else args[:1])[:200]}"
            )
        elif any(event.startswith(name) for name in _FILES):
            for path in args[:2]:
                if isinstance(path, (str, bytes)) and not self._is_inside(os.fsdecode(path)):
                    self._note(f"{event} {os.fsdecode(path)[:200]}")

    def _is_inside(self, path: str) -> bool:
        # A relative name is one in a directory that is open already: nothing is read in the
        # current one, which is checked to stay empty.
        if not path.startswith("/"):
            return ".." not in path.split("/")
        whole = os.path.normpath(path)
        return whole == self.place or whole.startswith(self.place + "/")

    def _note(self, what: str) -> None:
        if self.learning:
            self.known.add(what)
        elif what not in self.known:
            self.caught.append(what)


def main() -> None:
    """Run every command on every case; a line of JSON each."""
    results, known, places = Path(sys.argv[1]), int(sys.argv[2]), list(map(Path, sys.argv[3:]))
    watch = Watch()
    report = os.open(results, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _import_all()
    sys.addaudithook(watch)
    for place in places[:known]:
        _run_all(place, watch)
    watch.learning = False
    learnt = watch.known - {"socket.gethostname ()"}  # which asks no other machine
    if used := sorted(what for what in learnt if what.startswith(_NETWORK)):
        sys.exit(f"commands on good local checkpoints use the network: {used}")
    for place in places[known:]:
        os.write(report, json.dumps({"begun": str(place)}).encode() + b"\n")
        for outcome in _run_all(place, watch):
            os.write(report, json.dumps(asdict(outcome)).encode() + b"\n")


def _import_all() -> None:
    for name in "api cli containers convert engines plan read tensors write".split():
        package = importlib.import_module(f"unshard.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith("unshard.cli.evaluate"):
                importlib.import_module(module.name)


def _run_all(place: Path, watch: Watch) -> list[Outcome]:
    return [_run(command, place, watch) for command in COMMANDS]


def _run(command: str, place: Path, watch: Watch) -> Outcome:
    checkpoint, out, messages = place / CHECKPOINT, place / "out" / command, place / "messages"
    out.parent.mkdir(exist_ok=True)
    watch.place, watch.caught = str(place), []
    (place / "empty").mkdir(exist_ok=True)
    os.chdir(place / "empty")
    (place / "temporary").mkdir(exist_ok=True)
    tempfile.tempdir = str(place / "temporary")
    arguments = {
        "inspect": ["inspect", str(checkpoint), "--json"],
        "merge": ["merge", str(checkpoint), str(out), "--verify=full", "--workers=2", *BARE],
        "verify": ["verify", str(place / "model"), "--against", str(checkpoint)],
    }
    gc.collect()  # of the command before: a process of its own would not have it
    before = _peak_from_now_on()
    with _streams(messages):
        watch.on = True
        try:
            code = _opened(checkpoint) if command == "open" else _main(arguments[command])
        finally:
            watch.on = False
    if any((place / "empty").iterdir()):
        watch.caught.append("it wrote into the current directory")
    if any((place / "temporary").iterdir()):
        watch.caught.append("it left a temporary file")
    message = messages.read_text(errors="replace")[:LONGEST_MESSAGE]
    return Outcome(
        place.name, command, code, message, out.exists(), _peak() - before, list(watch.caught)
    )


def _main(arguments: list[str]) -> int:
    sys.argv[1:] = arguments
    return _code_of(command_line)


def _opened(checkpoint: Path) -> int:
    def read_all() -> None:
        with unshard.open_checkpoint(checkpoint) as opened:
            for name in opened:
                _ = opened[name][...]

    return _code_of(read_all)


def _code_of(act: Callable[[], None]) -> int:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        act()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except UnshardError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except Exception:  # noqa: BLE001 (a defect, whatever it is: its traceback is the finding)
        traceback.print_exc()
        return 1
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stderr.flush()
    return 0


@contextmanager
def _streams(messages: Path) -> Iterator[None]:
    """Send stderr into a file, and stdout nowhere; the command line writes to their descriptors."""
    kept = sys.stdout, sys.stderr, os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    into = os.open(messages, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nowhere, 1)
    os.dup2(into, 2)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = kept[:2]
        os.dup2(kept[2], 1)
        os.dup2(kept[3], 2)
        for fd in (kept[2], kept[3], nowhere, into):
            os.close(fd)


def _peak_from_now_on() -> int:
    """Forget the peak of memory so far, and return what is in use; 0 where this is not known."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Return the most memory that was in use.

    Not getrusage's: that counts what the process that started this one had.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    main()
