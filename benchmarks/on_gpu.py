"""Check and measure what only a GPU shows: checkpoints of CUDA tensors, and a model loaded onto it.

First it trains a small Llama with FSDP2 in one process, saves it as trainers do, with the tensors
and the random state where they are, and merges each checkpoint: rank files, DCP, one file of
`torch.save`. Every tensor of every output must be equal, bit by bit. Then it saves a model of
`--billions` in bfloat16, and loads it onto the device: from its shards, and by a merge that
transformers loads. The figures are printed as a table of Markdown; the exit code is 1 if a bit
differs.

    pip install torch transformers accelerate .
    python benchmarks/on_gpu.py --billions 7

It takes less than eight minutes, about 4 bytes of disk and 4 of GPU memory for each parameter.
`--device cpu --billions 0.05` goes the same way without a GPU, whose figures mean nothing.
"""

import argparse
import gc
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when transformers is imported

if TYPE_CHECKING:
    from torch import Tensor

_SECONDS: Final = 240.0  # after which no other round begins
_TINY: Mapping[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def sizes_of(billions: float) -> dict[str, Any]:
    """Return sizes like those of Llama 7B, with as many layers as there are parameters for."""
    hidden, inner, words = (4096, 11_008, 32_000) if billions >= 1 else (512, 1376, 8000)
    layers = (billions * 1e9 - 2 * words * hidden) / (4 * hidden**2 + 3 * hidden * inner)
    return {
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": max(1, round(layers)),
        "num_attention_heads": hidden // 128,
    }


def build(sizes: Mapping[str, Any], device: str, dtype: Any) -> Any:
    """Return a Llama of random values, made on the device, wrapped by FSDP2."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, LlamaConfig

    auto: Any = AutoModelForCausalLM
    config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"], dtype=dtype)
    with torch.device(device):
        model = auto.from_config(config, dtype=dtype)
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def generators() -> dict[str, "Tensor"]:
    """Return the state of torch's random number generators, by the names that verl gives them."""
    import torch

    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else state


def random_state() -> dict[str, object]:
    """Return the state of all random number generators, as verl saves it."""
    import numpy as np

    others = {"numpy": np.random.get_state(), "random": random.getstate()}  # noqa: NPY002 (as verl)
    return {**generators(), **others}


def save_all(directory: Path, device: str) -> dict[str, "Tensor"]:
    """Train a step, save the model in each format; return its tensors whole, on the CPU."""
    import torch
    from torch.distributed.checkpoint import state_dict_saver

    model = build(_TINY, device, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 1000, (2, 16), device=device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    state = model.state_dict()
    whole = {name: tensor.full_tensor().detach() for name, tensor in state.items()}
    folders = {name: directory / name for name in ("rank files", "DCP", "torch.save")}
    for folder in folders.values():
        model.config.save_pretrained(folder)
    torch.save(state, folders["rank files"] / "model_world_size_1_rank_0.pt")
    torch.save(optimizer.state_dict(), folders["rank files"] / "optim_world_size_1_rank_0.pt")
    extra = {"lr_scheduler": {"last_epoch": 1}, "rng": random_state()}
    torch.save(extra, folders["rank files"] / "extra_state_world_size_1_rank_0.pt")
    moments = {"state": {name: {"step": torch.ones((), device=device)} for name in state}}
    state_dict_saver.save(
        {"model": state, "optim": moments, "rng": random_state()},
        checkpoint_id=folders["DCP"],
    )
    torch.save(whole, folders["torch.save"] / "pytorch_model.bin")
    return {name: tensor.cpu() for name, tensor in whole.items()}


def check_formats(directory: Path, device: str) -> int:
    """Merge each format, and print how many tensors are equal; return how many are not."""
    import torch
    from safetensors.torch import load_file

    import unshard

    whole, different = save_all(directory, device), 0
    for folder in sorted(directory.iterdir()):
        files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
        output = directory.parent / "outputs" / folder.name
        unshard.merge(folder, output)
        found = differing(whole, load_file(output / "model.safetensors"))
        different += len(found)
        on = "cuda:0" if any(b"cuda:0" in one for one in files) else "cpu"
        print(f"| {folder.name}, tensors on {on} | {len(whole)} tensors, {len(found)} differ |")
    state = torch.load(output.parent / "rank files" / "extra_state_merged.pt")["rng"]
    kept = all(torch.equal(state[name], value) for name, value in generators().items())
    print(f"| random state of {', '.join(generators())} | {'equal' if kept else 'differs'} |")
    return different + (not kept)


def differing(left: Mapping[str, "Tensor"], right: Mapping[str, "Tensor"]) -> list[str]:
    """Return the names of tensors that are not in both with the same dtype, shape and bits."""
    import torch

    def bits(tensor: "Tensor") -> "Tensor":
        return tensor.detach().contiguous().flatten().view(torch.uint8)

    return [
        name
        for name in left.keys() | right.keys()
        if name not in left
        or name not in right
        or (left[name].dtype, left[name].shape) != (right[name].dtype, right[name].shape)
        or not torch.equal(bits(left[name]), bits(right[name]))
    ]


def measure(work: Path, device: str, billions: float, rounds: int) -> int:
    """Print the seconds of both ways onto the device; return how many tensors differ."""
    import torch
    from transformers import AutoModelForCausalLM

    import unshard

    checkpoint, output = work / "large", work / "output"
    model = build(sizes_of(billions), device, torch.bfloat16)
    model.config.save_pretrained(checkpoint)
    torch.save(model.state_dict(), checkpoint / "model_world_size_1_rank_0.pt")
    size = sum(one.numel() for one in model.parameters())
    print(f"| **{size / 1e9:.2f} B in bfloat16, {checkpoint_bytes(checkpoint)} GB** | |")
    del model
    gc.collect()
    steps: dict[str, Callable[[], Any]] = {
        "from_pretrained of the shards": lambda: unshard.from_pretrained(
            checkpoint, device_map=device
        ),
        "merge": lambda: unshard.merge(checkpoint, output),
        "from_pretrained of the output": lambda: AutoModelForCausalLM.from_pretrained(
            output, device_map=device
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    started, different = time.perf_counter(), list[str]()
    for number in range(rounds):
        if number and time.perf_counter() - started > _SECONDS:
            break
        shutil.rmtree(output, ignore_errors=True)
        made = {name: timed(run, seconds[name], device) for name, run in steps.items()}
        ours, _, theirs = made.values()
        different += differing(ours.state_dict(), theirs.state_dict())
        del made, ours, theirs
    direct, merge, load = (median(values) for values in seconds.values())
    for name, values in seconds.items():
        print(f"| {name} | {' '.join(f'{one:.2f}' for one in values)} s |")
    print(f"| from the shards, of merge and load | {direct / (merge + load):.2f} x |")
    print(f"| the same tensors | {f'{len(different)} differ' if different else 'equal'} |")
    return len(different)


def timed(run: Callable[[], Any], seconds: list[float], device: str) -> Any:
    """Return what a function returns once the device has it, and note the seconds."""
    import torch

    os.sync()
    started = time.perf_counter()
    made = run()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - started)
    return made


def checkpoint_bytes(checkpoint: Path) -> str:
    """Return the gigabytes of a checkpoint."""
    return f"{sum(path.stat().st_size for path in checkpoint.iterdir()) / 1e9:.1f}"


def main() -> None:
    """Check the formats, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--billions", type=float, default=7.0, help="parameters of the large model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    import torch

    dist: Any = torch.distributed
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch finds no CUDA device. `--device cpu --billions 0.05` goes the same way on the "
            "CPU, whose figures mean nothing."
        )
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo" if options.device == "cpu" else "nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    name = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"| {name}, torch {torch.__version__} | |\n|---|---|")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        work = Path(folder)
        different = check_formats(work / "formats", options.device)
        different += measure(work, options.device, options.billions, options.rounds)
    dist.destroy_process_group()
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
