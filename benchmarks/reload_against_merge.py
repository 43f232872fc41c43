"""Compare a reload of vLLM from shards with a merge that vLLM then reloads, side by side.

There are two engines, both started once: one takes shards, the other what was merged, with vLLM's
own loader. The rounds interleave all contenders, so that a noisy machine slows all of them alike;
the report has ratios of medians. The merge is made as a user makes it, verified and flushed to
disk; its output is removed outside the clock. Only the first contender compares what the engine
holds afterwards.

    VENV_WITH_VLLM/bin/python benchmarks/reload_against_merge.py --gigabytes 2 --rounds 5

The checkpoint is float32, the engines are bfloat16.
"""

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, cast

from from_pretrained_against_merge import write_checkpoint

if TYPE_CHECKING:
    from unshard.plugins.vllm import Engine

_DTYPE: Final = "bfloat16"
_CHECKED, _PLAIN, _MERGED = "reload", "reload, not compared", "merge and reload"


def start(arguments: Mapping[str, object], stack: ExitStack) -> "Engine":
    """Return an engine, whose processes end with the stack."""
    from vllm import LLM

    engine = LLM(
        **arguments, dtype=_DTYPE, enforce_eager=True, max_model_len=64, skip_tokenizer_init=True
    )
    stack.callback(engine.llm_engine.engine_core.shutdown)
    return cast("Engine", engine)


def reload(engine: "Engine", path: Path) -> None:
    """Let vLLM load weights by itself."""
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})


def measure(
    contenders: Mapping[str, Callable[[], object]], output: Path, rounds: int
) -> dict[str, float]:
    """Return the median seconds of every contender; each round runs all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            shutil.rmtree(output, ignore_errors=True)
            os.sync()
            started = time.perf_counter()
            run()
            took = time.perf_counter() - started
            if number:  # the first round imports, and warms the page cache
                seconds[name].append(took)
    for name, values in seconds.items():
        print(f"  {name:<25} {' '.join(f'{value:.2f}' for value in values)} s")
    return {name: median(values) for name, values in seconds.items()}


def compare(work: Path, rounds: int) -> dict[str, float]:
    """Start both engines, and measure."""
    import unshard
    from unshard.plugins import vllm as plugin

    checkpoint, first, output = (work / name for name in ("checkpoint", "first", "output"))

    def merge_and_reload() -> None:
        unshard.merge(checkpoint, output, dtype=_DTYPE)
        reload(theirs, output)

    with ExitStack() as stack:
        ours = start(stack.enter_context(plugin.arguments(checkpoint)), stack)
        unshard.merge(checkpoint, first, dtype=_DTYPE)
        theirs = start({"model": str(first)}, stack)
        contenders: dict[str, Callable[[], Any]] = {
            _CHECKED: lambda: plugin.reload(ours, checkpoint),
            _PLAIN: lambda: reload(ours, checkpoint),
            _MERGED: merge_and_reload,
        }
        return measure(contenders, output, rounds)


def main() -> None:
    """Write the checkpoint, measure, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of float32")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        checkpoint = Path(folder) / "checkpoint"
        checkpoint.mkdir()
        write_checkpoint(checkpoint, ranks=options.ranks, gigabytes=options.gigabytes, dim=0)
        print(f"{options.gigabytes} GB of float32 on {options.ranks} ranks:")
        medians = compare(Path(folder), options.rounds)
    for name in (_CHECKED, _PLAIN):
        print(f"  {name}: {medians[name] / medians[_MERGED]:.2f} x {_MERGED}")


if __name__ == "__main__":  # vLLM starts processes that import this module
    main()
