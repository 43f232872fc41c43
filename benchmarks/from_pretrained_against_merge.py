"""Compare `unshard.from_pretrained` with a merge that transformers then loads, side by side.

Both end with the same model in the memory of this process. Every round has all contenders, in
another random order, because what ran before decides how dear fresh memory is; the report has
ratios of medians. The merge is made as a user makes it, verified and flushed to disk; its output is
removed outside the clock.

    python benchmarks/from_pretrained_against_merge.py --gigabytes 3.2 --rounds 7

The checkpoint is written by real torch: DTensors on a fake process group, in one process.
"""

import argparse
import gc
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when transformers is imported

if TYPE_CHECKING:
    from torch import nn

    from unshard.keywords import Cast

_SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
_EMBEDDINGS = 2 * 32_000 * 2048
_LAYER = 4 * 2048**2 + 3 * 2048 * 5632


def write_checkpoint(
    directory: Path,
    *,
    ranks: int,
    gigabytes: float,
    dim: int,
    sizes: Mapping[str, Any] = _SIZES,
) -> None:
    """Write rank files of a Llama in float32, matrices sharded along `dim`, and its config."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, int((gigabytes * 1e9 / 4 - _EMBEDDINGS) / _LAYER))
    config = LlamaConfig(
        **{"num_hidden_layers": layers, **sizes}, architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {n: one.shape for n, one in LlamaForCausalLM(config).state_dict().items()}
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        state = {
            name: distribute_tensor(
                torch.empty(shape).uniform_(-1, 1),
                mesh,
                [Shard(min(dim, len(shape) - 1))],
                src_data_rank=None,
            )
            for name, shape in shapes.items()
        }
        torch.save(state, directory / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()


def direct(checkpoint: Path, _: Path, dtype: "Cast") -> "nn.Module":
    """Load the shards."""
    import unshard

    return unshard.from_pretrained(checkpoint, dtype=dtype)


def merged(checkpoint: Path, output: Path, dtype: "Cast") -> "nn.Module":
    """Merge the shards, and load what was written."""
    from transformers import AutoModelForCausalLM

    import unshard

    unshard.merge(checkpoint, output, dtype=dtype)
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(output)
    return loaded


def measure(checkpoint: Path, work: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds of every contender; each round runs all of them."""
    load: dict[str, Callable[[Path, Path, Cast], nn.Module]] = {
        "from_pretrained": direct,
        "merge and load": merged,
    }
    dtypes: tuple[Cast, ...] = ("float32", "bfloat16")
    contenders = [(name, dtype) for dtype in dtypes for name in load]
    seconds: dict[str, list[float]] = {f"{name}, {dtype}": [] for name, dtype in contenders}
    order = random.Random(0)  # noqa: S311 (an order of rounds, always the same)
    for number in range(rounds + 1):
        for name, dtype in order.sample(contenders, len(contenders)):
            os.sync()
            started = time.perf_counter()
            model = load[name](checkpoint, work / "output", dtype)
            for one in model.parameters():
                one.sum()  # a file that is only mapped is read here
            took = time.perf_counter() - started
            if number:  # the first round imports, and warms the page cache
                seconds[f"{name}, {dtype}"].append(took)
            del model
            gc.collect()
            shutil.rmtree(work / "output", ignore_errors=True)
    for contender, values in seconds.items():
        print(f"  {contender:<25} {' '.join(f'{value:.2f}' for value in values)} s")
    return {contender: median(values) for contender, values in seconds.items()}


def main() -> None:
    """Write the checkpoint, measure, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dim", type=int, default=0, help="along which matrices are sharded")
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        checkpoint = Path(folder) / "checkpoint"
        checkpoint.mkdir()
        write_checkpoint(
            checkpoint, ranks=options.ranks, gigabytes=options.gigabytes, dim=options.dim
        )
        what = f"{options.gigabytes} GB of float32 on {options.ranks} ranks"
        print(f"{what}, sharded along dimension {options.dim}:")
        medians = measure(checkpoint, Path(folder), options.rounds)
    for dtype in ("float32", "bfloat16"):
        ratio = medians[f"from_pretrained, {dtype}"] / medians[f"merge and load, {dtype}"]
        print(f"  from_pretrained, {dtype}: {ratio:.2f} x merge and load")


if __name__ == "__main__":
    main()
