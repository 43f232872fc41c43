"""Work on checkpoints several times larger than the memory that a process may allocate.

Every command runs under `ulimit -d`: an allocation beyond it fails. The page cache does not count,
because the kernel gives it up whenever it is asked to. The report has the peak of each process
(resident, as the kernel counts it) and the bytes that it read as a multiple of the limit.

    python benchmarks/larger_than_memory.py --gigabytes 6 --limit 256

All layers have the same random values: memory does not depend on them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

_SIDE = 4096
_LAYER = "model.layers.{}.mlp.up_proj"
_RANK = 16
_BARE = ("--config", "none")


def write_checkpoint(directory: Path, *, ranks: int, layers: int, lora: bool) -> None:
    """Write rank files of float32 layers, sharded along dimension 0; `lora`: with adapters."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    directory.mkdir()
    layer = f"base_model.model.{_LAYER}" if lora else _LAYER
    shapes = {"base_layer.weight": (_SIDE, _SIDE)} if lora else {"weight": (_SIDE, _SIDE)}
    if lora:
        shapes |= {
            "lora_A.default.weight": (_RANK, _SIDE),
            "lora_B.default.weight": (_SIDE, _RANK),
        }
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        values = {name: torch.empty(shape).uniform_(-1, 1) for name, shape in shapes.items()}
        state = {
            f"{layer.format(number)}.{name}": distribute_tensor(
                value.clone(), mesh, [Shard(0)], src_data_rank=None
            )
            for number in range(layers)
            for name, value in values.items()
        }
        torch.save(state, directory / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()


def written(directory: Path, *, ranks: int, layers: int, lora: bool) -> Path:
    """Let another process write a checkpoint: children would inherit the peak of this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(write_checkpoint, directory, ranks=ranks, layers=layers, lora=lora).result()
    return directory


def links(checkpoint: Path, number: int) -> Path:
    """Return another checkpoint of the same files."""
    copy = checkpoint.with_name(f"{checkpoint.name}_{number}")
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).hardlink_to(file)
    return copy


def run(limit: int, *arguments: str | Path) -> int:
    """Run a command that may allocate `limit` MiB; return the peak of its memory, bytes."""
    shell = f'ulimit -d {limit * 1024}; OPENBLAS_NUM_THREADS=1 exec "$0" -m unshard "$@" --json'
    command = ["/bin/sh", "-c", shell, sys.executable, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"unshard {arguments[0]} failed under {limit} MiB")
    return used.ru_maxrss * 1024


def main() -> None:
    """Write the checkpoints, run the commands, print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=6)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--limit", type=int, default=256, help="MiB that a process may allocate")
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    layers = max(1, round(options.gigabytes * 1e9 / _SIDE**2 / 4))
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        plain = written(Path(folder) / "plain", ranks=options.ranks, layers=layers, lora=False)
        size = sum(file.stat().st_size for file in plain.iterdir())
        copies = [links(plain, number) for number in range(5)]
        output = Path(folder) / "output"
        cast = Path(folder) / "cast"
        steps: list[tuple[str, int, tuple[str | Path, ...]]] = [
            ("merge", 1, ("merge", plain, output, *_BARE)),
            ("verify", 2, ("verify", output, "--against", plain)),
            ("merge to bfloat16", 1, ("merge", plain, cast, "--dtype", "bfloat16", *_BARE)),
            ("average of five", 5, ("average", *copies, "-o", output, "--overwrite", *_BARE)),
        ]
        for name, times, arguments in steps:
            report(name, times * size, options.limit, run(options.limit, *arguments))
        for copy in (plain, *copies):
            for file in copy.iterdir():
                file.unlink()
        adapted = written(Path(folder) / "adapted", ranks=options.ranks, layers=layers, lora=True)
        fuse = ("merge", adapted, output, "--overwrite", "--lora-alpha", "16", *_BARE)
        report("LoRA fuse", size, options.limit, run(options.limit, *fuse))


def report(name: str, size: int, limit: int, peak: int) -> None:
    """Print one line."""
    times = size / (limit * 2**20)
    print(f"  {name:<18} {size / 1e9:5.1f} GB read, {times:5.1f} x the limit: {peak / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
