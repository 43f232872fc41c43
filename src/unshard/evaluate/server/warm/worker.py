"""The process that keeps an engine of vLLM, and runs lm-eval on it, one job after the other.

`python -m unshard.evaluate.server.warm.worker IDLE_S`, with a profile's interpreter, under a
supervisor. It listens on a Unix socket in its working directory, which only this user can enter. A
job is a line of JSON with lm-eval's command line, and so is the answer, `{"returncode": 0}`.

The first job starts the engine, which reads its weights from the shards. Each later job swaps in
the weights of its checkpoint and verifies them; if that fails, the worker answers `REPLACE` and
exits: a new worker must run the job.

Interfaces: lm_eval 0.4.13 makes its engine by the name `LLM` of `lm_eval.models.vllm_causallms`.
"""

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from unshard.errors import UnshardError
from unshard.evaluate.process import Process
from unshard.evaluate.server.evaluators.direct import PLACE_NAME
from unshard.fronts import Command
from unshard.write.dirfd import write_whole

if TYPE_CHECKING:
    from unshard.keywords import EngineKeywords
    from unshard.plugins.vllm import RunningEngine

SOCKET_NAME = "socket"  # the socket in the worker's directory
REPLACE = 75  # the exit code of a job that another worker must run; a job that exits with it gets 1
_RECORD_NAME = "worker.json"
_OF_A_JOB = frozenset({"model", "tokenizer"})  # arguments of an engine that each job changes


@dataclass(frozen=True, slots=True)
class EngineWorker:
    """The record of a worker, in its directory, for clients and the next server.

    Attributes:
        process: its supervisor, with its GPUs and its directory.
        profile: the name of the profile whose jobs it takes.
        key: the digest of its engine; a job with another key needs another engine.
        idle_s: how long it is kept without a job.
    """

    process: Process
    profile: str
    key: str
    idle_s: float


def write_worker(worker: EngineWorker) -> None:
    """Record a worker in its directory."""
    write_whole(Path(worker.process.directory) / _RECORD_NAME, json.dumps(asdict(worker)).encode())


def read_worker(directory: Path) -> EngineWorker | None:
    """Return the worker of a directory; None if none was recorded, so none has run."""
    try:
        fields = json.loads((directory / _RECORD_NAME).read_bytes())
        process = fields.pop("process")
        gpus = tuple(process.pop("gpus"))
        return EngineWorker(Process(**process, gpus=gpus), **fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None


class ReplaceError(Exception):
    """The engine does not have the weights of the job's checkpoint."""


class Evaluate(Protocol):
    """Runs an evaluator's command line."""

    def __call__(self, arguments: list[str]) -> None:
        """Return when it has succeeded.

        Raises:
            SystemExit: with its exit code.
            ReplaceError: another worker must run it.
        """


def main() -> None:
    """Serve jobs on the engine until none has come for argv[1] seconds; end this process."""
    run(_run_lm_eval(), float(sys.argv[1]))


def run(evaluate: Evaluate, idle_s: float) -> NoReturn:
    """Serve jobs, and end this process at once, also after an error.

    Python's own exit would wait for the processes of the engine; the supervisor ends them when this
    process is gone.
    """
    code = 1
    try:
        _serve(evaluate, idle_s)
        code = 0
    except BaseException:  # noqa: BLE001  its traceback is in the log
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):  # the log's pipe is gone
            sys.stdout.flush()
        os._exit(code)


def _serve(evaluate: Evaluate, idle_s: float) -> None:
    """Serve jobs until none has come for some seconds, or a job needs another worker."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(SOCKET_NAME)
        listening.listen(1)
        listening.settimeout(idle_s)
        code = 0
        while code != REPLACE:
            try:
                connected, _ = listening.accept()
            except TimeoutError:
                return
            with connected:
                code = _serve_one(connected, evaluate)


def _serve_one(connected: socket.socket, evaluate: Evaluate) -> int:
    """Run the job of a client; return its exit code."""
    line = connected.makefile("rb").readline()
    if not line.endswith(b"\n"):  # the client is gone
        return 0
    job = json.loads(line)
    is_done = threading.Event()
    threading.Thread(target=_end_with, args=(connected, is_done), daemon=True).start()
    code = _code_of(lambda: evaluate(job["arguments"]), Path(job["directory"]))
    is_done.set()
    sys.stderr.flush()
    sys.stdout.write(job["mark"])  # the client reads the log up to here
    sys.stdout.flush()
    with suppress(OSError):  # the client is gone: its job is judged without an answer
        connected.sendall(json.dumps({"returncode": code}).encode() + b"\n")
    return code


def _end_with(connected: socket.socket, is_done: threading.Event) -> None:
    """End this process with its client: a cancelled or timed out job must not hold the GPUs."""
    with suppress(OSError):
        connected.recv(1)
    if not is_done.is_set():
        os._exit(1)  # the supervisor ends the other processes


def _code_of(run: Callable[[], None], directory: Path) -> int:
    """Run a job in its directory; return the exit code that its own process would have."""
    own = Path.cwd()
    os.chdir(directory)
    try:
        run()
    except ReplaceError:
        traceback.print_exc()
        return REPLACE
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")  # as Python does
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return 1 if code == REPLACE else code
    except BaseException:  # noqa: BLE001  its traceback is the answer
        traceback.print_exc()
        return 1
    finally:
        os.chdir(own)
    return 0


class _EngineFactory:
    """Takes the place of vLLM's `LLM` in lm-eval: makes an engine once, then swaps its weights."""

    def __init__(self) -> None:
        self._engine: RunningEngine | None = None
        self._options: Mapping[str, object] = {}

    def __call__(self, **options: object) -> "RunningEngine":
        """Return the engine with the weights of a checkpoint.

        Raises:
            ReplaceError: it did not take them, or another engine is needed.
        """
        directory = str(options["model"])
        source = json.loads((Path(directory) / PLACE_NAME).read_bytes())
        checkpoint: str = source["checkpoint"]
        own: EngineKeywords = {"weights": source["weights"], "config": directory}
        chosen = {name: value for name, value in options.items() if name not in _OF_A_JOB}
        if self._engine is None:
            self._engine, self._options = _start(checkpoint, own, options), chosen
        elif chosen != self._options:
            raise ReplaceError(f"the engine was started with {self._options}, not with {chosen}")
        else:
            from unshard.plugins.vllm import reload

            try:
                compared = reload(self._engine, checkpoint, **own)
            except Exception as error:
                why = f"the engine does not have the weights of {checkpoint}"
                raise ReplaceError(why) from error
            sys.stdout.write(f"the engine has the weights of {checkpoint}: {compared}\n")
        return self._engine


def _start(
    checkpoint: str, own: "EngineKeywords", options: Mapping[str, object]
) -> "RunningEngine":
    from vllm import LLM

    from unshard.plugins.serving import loader_config
    from unshard.plugins.vllm import WORKER_EXTENSION

    engine: RunningEngine = LLM(
        **options,
        load_format="unshard",
        model_loader_extra_config=loader_config(checkpoint, None, own),
        worker_extension_cls=WORKER_EXTENSION,
    )
    return engine


def _run_lm_eval() -> Evaluate:
    factory = _EngineFactory()

    def evaluate(arguments: list[str]) -> None:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.models import vllm_causallms

        vllm_causallms.LLM = factory
        own, sys.argv = sys.argv, ["lm_eval", *arguments]
        try:
            cli_evaluate()
        except UnshardError as error:
            error.front = Command({})
            sys.exit(str(error))
        finally:
            sys.argv = own

    return evaluate


if __name__ == "__main__":
    main()
