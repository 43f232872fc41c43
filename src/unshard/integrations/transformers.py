"""A callback for transformers' Trainer that writes config and tokenizer, and merges the steps.

    from unshard.integrations.transformers import UnshardCallback

    trainer = Trainer(..., callbacks=[UnshardCallback(follow="models/my-run --dtype bfloat16")])

With FSDP's sharded state dicts the Trainer saves neither config nor tokenizer (transformers 5.23,
`save_model`). The callback changes no mtime of a checkpoint, by which the Trainer removes the
oldest.
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
# Keys of config.json that do not depend on the trained model.
_FREE = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
_FREE |= {"use_cache"}

log = logging.getLogger(__name__)

# Executes a command of low priority that gets SIGTERM when its parent ends in any way
# (PR_SET_PDEATHSIG). It is a script, because after a fork with threads no code of ours may run.
_BECOME = """if True:
    import ctypes, os, sys
    os.nice(10)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
    if os.getppid() == int(sys.argv[1]):  # it may have ended before that
        os.execv(sys.executable, [sys.executable, "-P", "-m", "unshard", "merge", *sys.argv[2:]])
"""


class UnshardCallback(TrainerCallback):
    """Writes config and tokenizer into the run when training begins; optionally merges its steps.

    Errors are logged as warnings, and never end a training.

    Args:
        follow: the arguments after the run in `unshard merge RUN … --follow`: the outputs'
            directory or store, and options; a string is split like in a shell. A process on the
            node of rank 0 merges each step, and writes to `<output_dir>/_unshard/follow.log`.
        timeout: seconds that rank 0 waits at the end of training for the last step to be merged.
            Other ranks may wait for rank 0, and NCCL gives up after 10 minutes.
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
        """Write config and tokenizer, and start to follow the run."""
        del control
        run = Path(args.output_dir or ".")
        if state.is_world_process_zero:
            with ignoring_errors("the run may lack config and tokenizer"):
                write_companions(run, given.get("model"), given.get("processing_class"))
            with ignoring_errors("no step is merged during training"):
                if self._words and self._follower is None:  # not None after an interruption
                    self._follower = _Follower(run, self._words)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Write `MERGE.txt` at the first save, and make sure that the run is followed."""
        del control
        with ignoring_errors("no MERGE.txt"):
            if state.is_world_process_zero:
                write_hint(Path(args.output_dir or ".", f"checkpoint-{state.global_step}"))
        with ignoring_errors("no step is merged during training"):
            if self._follower is not None:
                self._follower.ensure_running()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Wait until the last step is merged, at most for `timeout`."""
        del args, control
        follower, self._follower = self._follower, None
        with ignoring_errors("not all steps are merged"):
            if follower is not None:
                follower.finish(state.global_step, self._timeout)


class _Follower:
    """A process that merges each step; a lock in the outputs' directory allows only one."""

    def __init__(self, run: Path, words: Sequence[str]) -> None:
        self._run, self._words = run.absolute(), words
        self._log = run / STATE_FOLDER / "follow.log"
        self._began = self._log.stat().st_size if self._log.is_file() else 0
        self._process = self._start()
        self._failed = 0

    def ensure_running(self) -> None:
        """Restart the process if it failed, perhaps because an earlier training's still ran."""
        if code := self._process.poll():
            self._process, self._failed = self._start(), self._failed + 1
            if self._failed == 1:
                raise UnshardError(f"exit code {code}: see {self._log}")
        elif not self._failed and b": failed: " in self._log.read_bytes()[self._began :]:
            self._failed = 1
            raise UnshardError(f"a step is not merged: see {self._log}")

    def finish(self, step: int, timeout: float) -> None:
        """Merge the remaining steps, and wait for at most `timeout` seconds."""
        end = time.monotonic() + timeout
        if self._process.poll() == 0:  # the user's options made it end
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
        # The user's words come last, so that they override ours.
        words = (str(self._run), "--follow", *more, *self._words)
        with closing(open_regular(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)) as output:
            return subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", _BECOME, str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # so that Ctrl-C in a terminal does not reach it
            )


def write_companions(run: Path, model: Any, processing_class: Any) -> None:
    """Write config and tokenizer into a run's directory; replace no file, and mix no tokenizers.

    The model may be wrapped, as in the Trainer. For an adapter, its own config and the base's are
    written. A warning reports an existing config that differs from the model's.
    """
    for name in ("module", "_orig_mod"):  # wrappers of DDP, FSDP1 and DeepSpeed; of torch.compile
        model = getattr(model, name, model)
    adapters = [*(getattr(model, "peft_config", None) or {}).values()]
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    config: Any = deepcopy(getattr(model, "config", None))
    if hasattr(model, "config_class"):  # a model of transformers; FSDP2 renames it to FSDP<Class>
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
    existing = companions_in(run)
    code = {name for name in existing.files if name.endswith(".py")}
    if not existing.files.keys() - code - {_GENERATION}:
        _write(run, processing_class)
    _write(run, getattr(model, "generation_config", None))
    _write(run, adapters[0] if len(adapters) == 1 else None)
    if existing.config is None:
        _write(run, config)
        return
    own = {} if config is None else json.loads(config.to_json_string())
    if keys := _differing(json_object(run / "config.json"), own):
        log.warning(
            "%s/config.json differs from the config of the trained model: %s. Merges would use it: "
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


def _differing(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return the common keys of two configs that have different values."""

    def differ(one: Any, other: Any) -> bool:
        if isinstance(one, dict) and isinstance(other, dict):
            return bool(_differing(one, other))
        return bool(one != other)

    shared = sorted(saved.keys() & own.keys() - _FREE)
    return [key for key in shared if differ(saved[key], own[key])]
