"""What a run of transformers' Trainer lacks: config and tokenizer, and the models of its steps.

    from unshard.integrations.transformers import UnshardCallback

    trainer = Trainer(..., callbacks=[UnshardCallback(follow="models/my-run --dtype bfloat16")])

With FSDP's sharded state dicts the Trainer saves neither config nor tokenizer (transformers 5.23,
`save_model`). No mtime of a checkpoint changes: the Trainer removes the oldest.
"""

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unshard.api.hinting import write_hint
from unshard.containers.json_file import json_object
from unshard.errors import UnshardError
from unshard.integrations.harmless import ignoring_errors
from unshard.read.beside.companions import companions_in
from unshard.read.step_names import STATE_FOLDER
from unshard.write.dirfd import closing, open_regular, write_whole

__all__ = ["UnshardCallback", "write_companions"]

_GENERATION = "generation_config.json"
# Of config.json: who wrote it, and what says nothing about the model that was trained.
_FREE = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
_FREE |= {"use_cache"}

log = logging.getLogger(__name__)

# Becomes a command of low priority that gets SIGTERM when its parent ends in any way
# (PR_SET_PDEATHSIG). Between fork and exec none of our code may run: there are threads.
_BECOME = """if True:
    import ctypes, os, sys
    os.nice(10)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
    if os.getppid() == int(sys.argv[1]):  # it may have ended before that
        os.execv(sys.executable, [sys.executable, "-P", "-m", "unshard", "merge", *sys.argv[2:]])
"""


class UnshardCallback(TrainerCallback):
    """Writes config and tokenizer into the run when training begins; on request merges its steps.

    An error is a warning, and never ends a training.

    Args:
        follow: what comes after the run in `unshard merge RUN … --follow`, the outputs' directory
            or store and options; a text is split as a shell does. One process, on the node of rank
            0, merges each step, and prints to `<output_dir>/_unshard/follow.log`.
        timeout: seconds for which rank 0 waits at most, when training ends, until the last step is
            merged. Other ranks may wait for it, and NCCL gives up after 10 minutes.
    """

    def __init__(
        self, follow: str | Path | Sequence[str] | None = None, timeout: float = 300.0
    ) -> None:
        words = [str(follow)] if isinstance(follow, Path) else follow or ()
        self._words = shlex.split(words) if isinstance(words, str) else list(words)
        self._timeout = timeout
        self._follower: _Follower | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Write what the run lacks, and start to follow it."""
        del control
        run = Path(args.output_dir or ".")
        if state.is_world_process_zero:
            with ignoring_errors("the run may lack config and tokenizer"):
                write_companions(run, given.get("model"), given.get("processing_class"))
            with ignoring_errors("no step is merged while training goes on"):
                if self._words and self._follower is None:  # else a training was interrupted
                    self._follower = _Follower(run, self._words)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Write `MERGE.txt` at the first save, and see to it that the run is followed."""
        del control
        with ignoring_errors("no MERGE.txt"):
            if state.is_world_process_zero:
                write_hint(Path(args.output_dir or ".", f"checkpoint-{state.global_step}"))
        with ignoring_errors("no step is merged while training goes on"):
            if self._follower is not None:
                self._follower.go_on()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Wait until the last step is merged, for as long as is allowed."""
        del args, control
        follower, self._follower = self._follower, None
        with ignoring_errors("not all steps are merged"):
            if follower is not None:
                follower.finish(state.global_step, self._timeout)


class _Follower:
    """A process that merges each step; a lock in the outputs sees to it that there is only one."""

    def __init__(self, run: Path, words: Sequence[str]) -> None:
        self._run, self._words = run.absolute(), words
        self._log = run / STATE_FOLDER / "follow.log"
        self._began = self._log.stat().st_size if self._log.is_file() else 0
        self._process = self._start()
        self._failed = 0

    def go_on(self) -> None:
        """Start it again if it failed: that of an earlier training may not have ended yet."""
        if code := self._process.poll():
            self._process, self._failed = self._start(), self._failed + 1
            if self._failed == 1:
                raise UnshardError(f"exit code {code}: see {self._log}")
        elif not self._failed and b": failed: " in self._log.read_bytes()[self._began :]:
            self._failed = 1
            raise UnshardError(f"a step is not merged: see {self._log}")

    def finish(self, step: int, timeout: float) -> None:
        """Merge what is left until the last step, and wait for it `timeout` seconds at most."""
        end = time.monotonic() + timeout
        if self._process.poll() == 0:  # it was told when to end
            return
        self._process.terminate()
        try:
            self._process.wait(timeout)
            self._process = self._start("--until", str(step), "--idle", "5", "--interval", "1")
            if code := self._process.wait(end - time.monotonic()):
                raise UnshardError(f"exit code {code}: see {self._log}")
        except subprocess.TimeoutExpired as error:
            raise UnshardError(f"{timeout:g} s have passed: see {self._log}") from error

    def _start(self, *more: str) -> "subprocess.Popen[bytes]":
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # What the user gives comes last, and counts.
        words = (str(self._run), "--follow", *more, *self._words)
        with closing(open_regular(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)) as output:
            return subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", _BECOME, str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # Ctrl-C in a terminal is not for it
            )


def write_companions(run: Path, model: Any, processing_class: Any) -> None:
    """Write config and tokenizer into a run's directory; replace no file, and mix no tokenizers.

    The model is as the Trainer has it, wrapped or not. Of an adapter, its own config is written,
    and the base's. A config that is there already and differs from the model's is told.
    """
    for name in ("module", "_orig_mod"):  # of DDP, FSDP1 and DeepSpeed; of torch.compile
        model = getattr(model, name, model)
    adapters = [*(getattr(model, "peft_config", None) or {}).values()]
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    config: Any = deepcopy(getattr(model, "config", None))
    if hasattr(model, "config_class"):  # a model of transformers, of which FSDP2 makes FSDP<Class>
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
    there = companions_in(run)
    code = {name for name in there.files if name.endswith(".py")}
    if not there.files.keys() - code - {_GENERATION}:
        _write(run, processing_class)
    _write(run, getattr(model, "generation_config", None))
    _write(run, adapters[0] if len(adapters) == 1 else None)
    if there.config is None:
        _write(run, config)
        return
    own = {} if config is None else json.loads(config.to_json_string())
    if keys := _differing(json_object(run / "config.json"), own):
        log.warning(
            "%s/config.json is not that of the model that is trained: %s. Merges would use it: "
            "remove it, and the next training writes its own",
            run,
            ", ".join(keys),
        )


def _write(run: Path, part: Any) -> None:
    if part is None:
        return
    with (
        ignoring_errors(f"{type(part).__name__} is not written into {run}"),
        TemporaryDirectory(prefix="_unshard-") as scratch,
    ):
        part.save_pretrained(scratch)
        for path in filter(Path.is_file, Path(scratch).rglob("*")):
            target = run / path.relative_to(scratch)
            if not os.path.lexists(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                write_whole(target, path.read_bytes())


def _differing(there: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return the keys that both configs have, with different values."""
    shared = sorted(there.keys() & own.keys() - _FREE)
    pairs = {key: (there[key], own[key]) for key in shared}
    return [
        key
        for key, (one, other) in pairs.items()
        if (
            _differing(one, other)
            if isinstance(one, dict) and isinstance(other, dict)
            else one != other
        )
    ]
