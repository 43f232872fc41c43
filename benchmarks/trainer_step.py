"""Compare the steps of a training alone, with the callback, and with its server down.

The rounds interleave all contenders, so that a noisy machine slows all of them alike; the report
has ratios of medians, and the spread. Each contender trains the same tiny Qwen2 with transformers'
Trainer, on one thread, in a separate process. The server accepts every job, and runs one that
sleeps, because an evaluation would use the processor that the training needs. The last figure is
the time to pin a checkpoint of many files.

    python benchmarks/trainer_step.py --rounds 5 --steps 200
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainerCallback

_WARM = 10  # steps that are left out
_SERVER_S = 120.0


def train(directory: Path, url: str, steps: int, save_steps: int) -> dict[str, list[float]]:
    """Return the seconds from the start of a step to that of the next, with a save and without."""
    import torch
    from transformers import (
        Qwen2Config,
        Qwen2ForCausalLM,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )

    begins: list[float] = []

    class Clock(TrainerCallback):
        """Notes when each step begins: what callbacks do at the end of one counts."""

        def on_step_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
        ) -> None:
            """Note the time."""
            del args, state, control
            begins.append(time.perf_counter())

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    arguments = TrainingArguments(
        str(directory),
        use_cpu=True,
        max_steps=steps,
        save_steps=save_steps,
        save_total_limit=1,
        logging_steps=1,
        per_device_train_batch_size=4,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(256, (64, 64))]
    callbacks: list[TrainerCallback] = [Clock(), *_evaluation(url)]
    Trainer(
        Qwen2ForCausalLM(model),
        arguments,
        train_dataset=rows,
        callbacks=callbacks,
    ).train()
    seconds: dict[str, list[float]] = {"step": [], "step that saves": []}
    for step in range(_WARM, len(begins)):  # of step N, counted from 1, begins[N] is the end
        kind = "step that saves" if step % save_steps == 0 else "step"
        seconds[kind].append(begins[step] - begins[step - 1])
    return seconds


def _evaluation(url: str) -> "list[TrainerCallback]":
    if not url:
        return []
    from unshard.evaluate.callbacks.transformers import UnshardEvalCallback

    config = {
        "server_url": url,
        "profile": "sleeps",
        "tasks": ["nothing"],
        "poll_interval": 1,
        "flush_timeout": 0,
    }
    return [UnshardEvalCallback(config)]


@contextmanager
def server(work: Path, port: int) -> Iterator[str]:
    """Run a server of one slot, whose evaluator sleeps."""
    config = {
        "roots": [str(work)],
        "gpus": 0,
        "port": port,
        "work_directory": str(work / "server"),
        "profiles": {"sleeps": {"kind": "command", "command": ["sleep", "3600"]}},
    }
    path = work / "server.yaml"
    path.write_text(json.dumps(config))  # which is YAML, too
    command = [sys.executable, "-m", "unshard", "eval", "serve", "--config", str(path)]
    with (work / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(process, port)
        yield f"http://127.0.0.1:{port}"
        _cancel_all(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


def _wait_for(process: "subprocess.Popen[bytes]", port: int) -> None:
    end = time.monotonic() + _SERVER_S
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("the server does not answer")


def _cancel_all(url: str) -> None:
    """End the evaluators that sleep."""
    from unshard.evaluate.client.v1 import EvalClient

    with EvalClient(url) as client:
        jobs = [job for job in client.jobs() if job["completed_at"] is None]
        for job in sorted(jobs, key=lambda job: job["status"] == "running"):
            client.cancel(str(job["id"]))
        time.sleep(2)


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def measure(work: Path, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of every contender by kind of step; each round runs all of them."""
    found: dict[str, dict[str, list[float]]] = {}
    with server(work, free_port()) as url:
        away = f"http://127.0.0.1:{free_port()}"
        contenders = {"alone": "", "callback": url, "server down": away}
        for number in range(options.rounds):
            for name, where in contenders.items():
                run = work / f"{name.replace(' ', '-')}-{number}"
                numbers = [str(options.steps), str(options.save_steps)]
                command = [sys.executable, __file__, "--train", str(run), where, *numbers]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                for kind, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                    found.setdefault(kind, {}).setdefault(name, []).extend(seconds)
    return found


def pin_times(work: Path, files: int, times: int) -> list[float]:
    """Return the seconds that it takes to pin a checkpoint of so many files, again and again."""
    from unshard.evaluate.pins.pin import Quota, pin_checkpoint, unpin

    checkpoint = work / "pinned" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    for number in range(files):
        (checkpoint / f"__{number}_0.distcp").write_bytes(b"0" * 4096)
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        pin = pin_checkpoint(checkpoint, quota=Quota(count=8, bytes=None))
        seconds.append(time.perf_counter() - started)
        unpin(pin)
    return seconds


def shown(seconds: Sequence[float]) -> str:
    """Return median and quartiles in milliseconds."""
    low, middle, high = (1000 * value for value in quantiles(seconds, n=4))
    return f"{middle:7.2f} ms, half of them {low:.2f} to {high:.2f} ms ({len(seconds)} steps)"


def main() -> None:
    """Measure and print; or be one contender."""
    if sys.argv[1:2] == ["--train"]:
        directory, url, steps, save_steps = sys.argv[2:]
        print(json.dumps(train(Path(directory), url, int(steps), int(save_steps))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-steps", type=int, default=25)
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for kind, contenders in measure(Path(folder), options).items():
            print(f"{kind}:")
            alone = median(contenders["alone"])
            for name, seconds in contenders.items():
                ratio = f"{median(seconds) / alone:.3f} x alone"
                print(f"  {name:<12} {ratio}, median {shown(seconds)}")
        pins = pin_times(Path(folder), options.files, 30)
        print(
            f"pinning {options.files} files: median {1000 * median(pins):.1f} ms, "
            f"{1000 * min(pins):.1f} to {1000 * max(pins):.1f} ms"
        )


if __name__ == "__main__":
    main()
