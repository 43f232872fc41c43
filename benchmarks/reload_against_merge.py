"""Compare a reload of vLLM from shards with a merge that vLLM then reloads, side by side.

There are two engines, both started once: one takes shards, the other what was merged, with vLLM's
own loader. The rounds interleave all contenders, so that a noisy machine slows all of them alike;
the report has ratios of medians. The merge is made as a user makes it, verified and flushed to
disk; its output is removed outside the clock. Only the first contender compares what the engine
holds afterwards; with `--against` there is a third engine, whose processes import unshard from
another checkout, for a figure from before a change. Processor time is that of all processes.

    VENV_WITH_VLLM/bin/python benchmarks/reload_against_merge.py --gigabytes 2 --rounds 5

The checkpoint is float32, the engines are bfloat16.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, cast

from from_pretrained_against_merge import write_checkpoint

if TYPE_CHECKING:
    from unshard.plugins.vllm import RunningEngine

_DTYPE: Final = "bfloat16"
_CHECKED, _PLAIN, _MERGED = "reload", "reload, not compared", "merge and reload"
_BEFORE = "reload of --against"


def start(arguments: Mapping[str, object], stack: ExitStack) -> "RunningEngine":
    """Return an engine, whose processes end with the stack."""
    from vllm import LLM

    engine = LLM(
        **arguments, dtype=_DTYPE, enforce_eager=True, max_model_len=64, skip_tokenizer_init=True
    )
    stack.callback(engine.llm_engine.engine_core.shutdown)
    return cast("RunningEngine", engine)


def reload(engine: "RunningEngine", path: Path) -> None:
    """Let vLLM load weights by itself."""
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})


def processor_seconds(process: str = "self") -> float:
    """Return what a process and those that it started have used."""
    ticks, directory = 0, Path("/proc") / process
    with suppress(OSError):  # it has ended
        fields = (directory / "stat").read_text().rpartition(") ")[2].split()
        ticks = sum(map(int, fields[11:15]))
        children = " ".join(one.read_text() for one in directory.glob("task/*/children"))
        return ticks / os.sysconf("SC_CLK_TCK") + sum(map(processor_seconds, children.split()))
    return 0.0


def measure(
    contenders: Mapping[str, Callable[[], object]], output: Path, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the median seconds of every contender, and of processors; a round runs all of them."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            shutil.rmtree(output, ignore_errors=True)
            os.sync()
            used, started = processor_seconds(), time.perf_counter()
            run()
            took = time.perf_counter() - started, processor_seconds() - used
            if number:  # the first round imports, and warms the page cache
                seconds[name].append(took)
    for name, values in seconds.items():
        print(f"  {name:<25} {' '.join(f'{one:.2f} ({cpu:.2f})' for one, cpu in values)} s (CPU)")
    columns = {name: list(zip(*values, strict=True)) for name, values in seconds.items()}
    return {name: (median(wall), median(cpu)) for name, (wall, cpu) in columns.items()}


def compare(work: Path, rounds: int, against: Path | None) -> dict[str, tuple[float, float]]:
    """Start the engines, and measure."""
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
        if against is not None:
            sys.path.insert(0, str(against / "src"))  # for new processes
            before = start(stack.enter_context(plugin.arguments(checkpoint)), stack)
            contenders[_BEFORE] = lambda: plugin.reload(before, checkpoint)
        return measure(contenders, output, rounds)


def main() -> None:
    """Write the checkpoint, measure, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of float32")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    parser.add_argument("--against", type=Path, default=None, help="another checkout of unshard")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        checkpoint = Path(folder) / "checkpoint"
        checkpoint.mkdir()
        write_checkpoint(checkpoint, ranks=options.ranks, gigabytes=options.gigabytes, dim=0)
        print(f"{options.gigabytes} GB of float32 on {options.ranks} ranks:")
        medians = compare(Path(folder), options.rounds, options.against)
    wall, cpu = medians.pop(_MERGED)
    for name, (one, used) in medians.items():
        print(f"  {name}: {one / wall:.2f} x {_MERGED}, {used / cpu:.2f} x its processor time")


if __name__ == "__main__":  # vLLM starts processes that import this module
    main()
