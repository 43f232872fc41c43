"""A backend for lmms-engine's asynchronous evaluation.

Start training with one word changed; lmms-engine itself is not edited:

    torchrun ... -m unshard.evaluate.lmms_engine config_yaml=train.yaml  # lmms_engine.launch.cli

or call in code, before the trainer is made:

    import unshard.evaluate.lmms_engine as evaluation
    evaluation.install()

`install` replaces `EvalConfig` by `UnshardEvalConfig`, and `EvalServerBackend` (lmms-engine 0.1.4),
which loses the last result, drops a job after one failed poll, and ends every submission in a
TypeError, by `UnshardEvalBackend`. `install_client` keeps lmms-engine's backend and gives it a
working client, under the name it imports: `lmms_eval.entrypoints.EvalClient`.

Started as above, lmms-engine also uses our merger: see `unshard.integrations.lmms_engine`.
"""

import importlib
import runpy
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from unshard.api.hinting import write_hint
from unshard.evaluate.client.lmms import AsyncEvalClient, LmmsClient
from unshard.evaluate.sinks.base import PREFIX, PacedSink
from unshard.evaluate.sinks.open import open_wandb
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.submitter import Submitter
from unshard.integrations import lmms_engine as merging
from unshard.integrations.harmless import ignoring_errors

__all__ = ["UnshardEvalBackend", "UnshardEvalConfig", "install", "install_client"]

_BACKENDS = "lmms_engine.eval.backends"
_CONFIG = "lmms_engine.eval.config"
_TRAINER = "lmms_engine.train.fsdp2.fsdp2_trainer"
_USERS = ("lmms_engine.eval", _TRAINER, "lmms_engine.launch.cli")
_DEFAULT_URL = "http://localhost:8000"
_COMMAND = "lmms_engine.launch.cli"
_SUMMARY_S = 5.0  # seconds for the table of the run at the end


class UnshardEvalBackend:
    """Submits checkpoints and returns results, as lmms-engine's `EvalServerBackend` does.

    Args:
        url: of the evaluation server; None: lmms-engine's own default.
        poll_interval: seconds between polls; None: 20.
        eval_config: lmms-engine's keys, and optionally our own.

    Raises:
        UsageError: a key of the configuration is missing or invalid. The trainer makes its backend
            before the first step, so training stops there.
    """

    def __init__(
        self,
        url: str | None,
        poll_interval: float | None = 20.0,
        eval_config: Mapping[str, object] | None = None,
    ) -> None:
        self.url = url or _DEFAULT_URL
        own = {"server_url": self.url, "poll_interval": poll_interval}
        self.eval_config = {**(eval_config or {}), **own}
        self._config = EvalConfig.from_dict(self.eval_config)
        self.poll_interval = self._config.poll_interval
        self._submitter: Submitter | None = None
        self._undelivered: list[tuple[int, dict[str, float]]] = []
        self._waiting_since: float | None = None
        self._wandb: PacedSink | None = None

    def submit_eval(
        self,
        checkpoint_dir: str,
        step: int,
        eval_output_dir: str | None = None,
        checkpoint_type: str | None = None,
        output_path: str | None = None,
    ) -> str | None:
        """Submit a checkpoint; return its name, or None if it will not be evaluated.

        The server chooses the directories of results and merged weights. The trainer's
        `checkpoint_type` ("regular" or "ema") counts unless the configuration has `weights`.
        """
        del eval_output_dir, output_path
        self._waiting_since = None
        run = Path(checkpoint_dir).absolute().parent
        submitter = self._start(run, checkpoint_type)
        with ignoring_errors("no MERGE.txt"):
            write_hint(checkpoint_dir)
        if submitter is None or not submitter.submit(checkpoint_dir, step):
            return None
        return f"step-{step}"

    def check_and_get_completed(self) -> list[tuple[int, dict[str, float]]]:
        """Return new results: step and metrics, under lmms-engine's names.

        While training continues, one result is returned at a time; at its end, all of them. With
        W&B the list is empty: lmms-engine would log each result as a separate row, which raises
        W&B's step, so the trainer's own rows would be dropped. Results are added to the trainer's
        rows instead.
        """
        if self._submitter is not None:
            self._submitter.tick()
            self._take(self._submitter)
        count = 1 if self._waiting_since is None else len(self._undelivered)
        results, self._undelivered = self._undelivered[:count], self._undelivered[count:]
        return [
            (step, {_lmms_name(key): value for key, value in metrics.items()})
            for step, metrics in results
        ]

    @property
    def pending_evals(self) -> dict[str, int]:
        """The evaluations without a result. lmms-engine waits for them when training has ended.

        After `flush_timeout` seconds of waiting it is empty, so that the trainer ends.
        """
        if self._submitter is None:
            return {}
        now = time.monotonic()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        if now - self._waiting_since > self._config.flush_timeout:
            self._submitter.close(0.0)
            return {}
        pending = dict(self._submitter.pending())
        self._take(self._submitter)
        pending |= {f"result-{n}": step for n, (step, _) in enumerate(self._undelivered)}
        if not pending:
            self._submitter.close(_SUMMARY_S)  # W&B's run is about to end
        return pending

    def _take(self, submitter: Submitter) -> None:
        results = submitter.completed()
        self._undelivered += [] if self._wandb is not None else results

    def close(self) -> None:
        """Stop without waiting; the next trainer continues with the jobs that are not final."""
        if self._submitter is not None:
            self._submitter.close(0.0)

    def _start(self, run_dir: Path, checkpoint_type: str | None) -> Submitter | None:
        if self._submitter is None:
            with ignoring_errors("checkpoints are not evaluated"):
                config = self._config
                if checkpoint_type == "ema" and "weights" not in self.eval_config:
                    config = EvalConfig.from_dict({**self.eval_config, "weights": ["ema"]})
                with ignoring_errors("lmms-engine logs the results itself"):
                    self._wandb = open_wandb()
                paced = [] if self._wandb is None else [self._wandb]
                self._submitter = Submitter(config, run_dir, paced=paced)
        return self._submitter


def _lmms_name(key: str) -> str:
    """Return the name of a metric as `eval/<task>_<metric>`."""
    task, _, metric = key.removeprefix(f"{PREFIX}/").rpartition("/")
    return f"eval/{task}_{metric}"


class UnshardEvalConfig:
    """The `eval_config` of a YAML file, unchanged.

    lmms-engine's own class drops unknown keys, and adds defaults that the file does not have
    (`num_fewshot: 0`, `model_args` for vllm).
    """

    def __init__(self, **given: object) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> object:
        """Return None for a key that the file does not have."""
        if name.startswith("_"):
            raise AttributeError(name)
        return None

    def to_dict(self) -> dict[str, object]:
        """Return the keys and values of the file."""
        return dict(vars(self))


def install() -> None:
    """Replace lmms-engine's backend and `EvalConfig` by ours in every module that imported them.

    Raises:
        ImportError: lmms-engine is not installed.
    """
    importlib.import_module(_BACKENDS)
    ours = {"EvalServerBackend": UnshardEvalBackend, "EvalConfig": UnshardEvalConfig}
    for name in (_BACKENDS, _CONFIG, *_USERS):
        names = vars(sys.modules[name]) if name in sys.modules else {}
        names.update({key: ours[key] for key in ours.keys() & names.keys()})


def install_client() -> None:
    """Give our client the name `lmms_eval.entrypoints.EvalClient`, with lmms-eval or without.

    An installed lmms-eval is not changed otherwise; without lmms-eval, two empty modules are made.
    """
    try:
        entrypoints = importlib.import_module("lmms_eval.entrypoints")
    except ImportError:
        package = sys.modules.setdefault("lmms_eval", ModuleType("lmms_eval"))
        entrypoints = ModuleType("lmms_eval.entrypoints")
        sys.modules["lmms_eval.entrypoints"] = entrypoints
        vars(package)["entrypoints"] = entrypoints
    vars(entrypoints).update(EvalClient=LmmsClient, AsyncEvalClient=AsyncEvalClient)


if __name__ == "__main__":
    install()
    with suppress(ImportError):  # a version without a merger needs none
        merging.install()
    runpy.run_module(_COMMAND, run_name="__main__", alter_sys=True)
