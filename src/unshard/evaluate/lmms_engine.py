"""lmms-engine's asynchronous evaluation, made to work: its backend's interface over our client.

Start training with one word changed; nothing of lmms-engine is edited:

    torchrun ... -m unshard.evaluate.lmms_engine config_yaml=train.yaml  # lmms_engine.launch.cli

or say in code, before the trainer is made:

    import unshard.evaluate.lmms_engine as evaluation
    evaluation.install()

`install` puts `UnshardEvalBackend` in the place of `EvalServerBackend` (lmms-engine 0.1.4), which
loses the last result, drops a job after one failed poll, and whose every submission ends in a
TypeError. `install_client` leaves lmms-engine's backend as it is and gives it only a client that
works, under the name it imports: `lmms_eval.entrypoints.EvalClient`.
"""

import importlib
import logging
import runpy
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from unshard.evaluate.client import AsyncEvalClient, EvalClient
from unshard.evaluate.config import EvalConfig
from unshard.evaluate.courier import ignoring_errors
from unshard.evaluate.sinks.base import PREFIX
from unshard.evaluate.submitter import Submitter

__all__ = ["UnshardEvalBackend", "install", "install_client"]

_BACKENDS = "lmms_engine.eval.backends"
_USERS = ("lmms_engine.eval", "lmms_engine.train.fsdp2.fsdp2_trainer")
_COMMAND = "lmms_engine.launch.cli"

log = logging.getLogger(__name__)


class UnshardEvalBackend:
    """Submits checkpoints and returns results, as lmms-engine's `EvalServerBackend` does.

    Args:
        url: of the evaluation server.
        poll_interval: seconds between polls.
        eval_config: of lmms-engine's form, with our own keys if there are any.
    """

    def __init__(
        self,
        url: str,
        poll_interval: float = 20.0,
        eval_config: Mapping[str, object] | None = None,
    ) -> None:
        given = {**(eval_config or {}), "server_url": url, "poll_interval": poll_interval}
        self.url = url
        self.poll_interval = poll_interval
        self.eval_config = given
        self._submitter: Submitter | None = None
        self._undelivered: list[tuple[int, dict[str, float]]] = []
        self._waiting_since: float | None = None
        self._config: EvalConfig | None = None
        with ignoring_errors("checkpoints are not evaluated"):
            self._config = EvalConfig.from_dict(given)

    def submit_eval(
        self,
        checkpoint_dir: str,
        step: int,
        eval_output_dir: str | None = None,
        checkpoint_type: str | None = None,
        output_path: str | None = None,
    ) -> str | None:
        """Have a checkpoint evaluated; return a name for it, or None if it will not be.

        Where results and merged weights go is the server's affair. The trainer's `checkpoint_type`
        ("regular" or "ema") counts unless the configuration says which weights.
        """
        del eval_output_dir, output_path
        self._waiting_since = None
        submitter = self._started(Path(checkpoint_dir).absolute().parent, checkpoint_type)
        if submitter is None or not submitter.submit(checkpoint_dir, step):
            return None
        return f"step-{step}"

    def check_and_get_completed(self) -> list[tuple[int, dict[str, float]]]:
        """Return results that came: step and metrics, named as lmms-engine names them.

        One at a time while training goes on, because lmms-engine logs each as a W&B row, which
        counts W&B's step up; all of them when the trainer only waits.
        """
        if self._submitter is not None:
            self._undelivered += self._submitter.completed()
        count = 1 if self._waiting_since is None else len(self._undelivered)
        handed, self._undelivered = self._undelivered[:count], self._undelivered[count:]
        return [(step, _lmms_names(metrics)) for step, metrics in handed]

    @property
    def pending_evals(self) -> dict[str, int]:
        """What is not handed over yet. lmms-engine asks only when training is over, and waits.

        After `flush_timeout` seconds of waiting nothing is: the trainer must come to its end.
        """
        if self._submitter is None or self._config is None:
            return {}
        now = time.monotonic()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        if now - self._waiting_since > self._config.flush_timeout:
            return {}
        pending = dict(self._submitter.pending())
        self._undelivered += self._submitter.completed()
        return pending | {f"result-{n}": step for n, (step, _) in enumerate(self._undelivered)}

    def close(self) -> None:
        """Stop without waiting; what is not final goes on with the next trainer."""
        if self._submitter is not None:
            self._submitter.close(0.0)

    def _started(self, run_dir: Path, checkpoint_type: str | None) -> Submitter | None:
        if self._submitter is None and self._config is not None:
            with ignoring_errors("checkpoints are not evaluated"):
                config = self._config
                if checkpoint_type == "ema" and "weights" not in self.eval_config:
                    config = EvalConfig.from_dict({**self.eval_config, "weights": ["ema"]})
                self._submitter = Submitter(config, run_dir)
        return self._submitter


def _lmms_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as `eval/<task>_<metric>`."""
    names = {key: key.removeprefix(f"{PREFIX}/").rpartition("/") for key in metrics}
    return {f"eval/{names[key][0]}_{names[key][2]}": value for key, value in metrics.items()}


def install() -> None:
    """Put our backend in the place of lmms-engine's, wherever it was imported already.

    Raises:
        ImportError: lmms-engine is not installed.
    """
    importlib.import_module(_BACKENDS)
    for name in (_BACKENDS, *_USERS):
        if name in sys.modules:
            vars(sys.modules[name])["EvalServerBackend"] = UnshardEvalBackend


def install_client() -> None:
    """Give our client the name `lmms_eval.entrypoints.EvalClient`, with lmms-eval or without.

    An installed lmms-eval keeps everything else; where there is none, two empty modules are made.
    """
    try:
        entrypoints = importlib.import_module("lmms_eval.entrypoints")
    except ImportError:
        package = sys.modules.setdefault("lmms_eval", ModuleType("lmms_eval"))
        entrypoints = ModuleType("lmms_eval.entrypoints")
        sys.modules["lmms_eval.entrypoints"] = entrypoints
        vars(package)["entrypoints"] = entrypoints
    vars(entrypoints).update(EvalClient=EvalClient, AsyncEvalClient=AsyncEvalClient)


if __name__ == "__main__":
    install()
    runpy.run_module(_COMMAND, run_name="__main__", alter_sys=True)
