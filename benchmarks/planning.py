"""Measure planning at scale: read, check, convert, lay out and plan, as `merge --dry-run` does.

The checkpoints are sparse: torch writes them without the values (`torch.serialization.skip_data`),
so that terabytes of tensors take little disk. Every rank file is written by real torch: DTensors on
a fake process group. The items of DCP are torch's own bytes, too, one per distinct shape; its
metadata is a `Metadata` object that pickle writes, as `FileSystemWriter.finish` does.

    python benchmarks/planning.py --directory DIR 1000x64 10000x64 --against OTHER_CHECKOUT

A case is TENSORSxRANKS; or a model, how it has its experts (one by one, fused, or fused with a LoRA
adapter), and optionally the number of ranks: deepseek-v3-experts, kimi-k2-expertsx8,
qwen3-moe-fused, gpt-oss-lora. With -dcp at its end it is a checkpoint of DCP.

With `--against`, the sources of another checkout run in turns with these. Times are medians, of the
clock and of all processors together; memory is the largest resident set of the command.
"""

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

Shapes = Mapping[str, tuple[int, ...]]

_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_KIMI_K2 = _DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
}
_QWEN3_MOE = {  # of 235 billion parameters
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_experts": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_GPT_OSS = _QWEN3_MOE | {  # of 120 billion parameters; its experts are stored as (E, in, out)
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "moe_intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
}
_CONFIGS = {
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": _KIMI_K2,
    "qwen3-moe": _QWEN3_MOE,
    "gpt-oss": _GPT_OSS,
}
_LORA_RANK = 16


def latent(config: Mapping[str, object], kind: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model like DeepSeek-V3; `kind` is as for `experts`."""
    size = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, heads = size["hidden_size"], size["num_attention_heads"]
    rope, nope, value = size["qk_rope_head_dim"], size["qk_nope_head_dim"], size["v_head_dim"]
    q_rank, kv_rank = size["q_lora_rank"], size["kv_lora_rank"]
    routed, inner = size["n_routed_experts"], size["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size["vocab_size"], hidden)}
    for layer in range(size["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_a_proj.weight": (q_rank, hidden),
            f"{at}.self_attn.q_a_layernorm.weight": (q_rank,),
            f"{at}.self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
            f"{at}.self_attn.kv_a_layernorm.weight": (kv_rank,),
            f"{at}.self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * value),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
        if layer < size["first_k_dense_replace"]:
            shapes |= mlp(f"{at}.mlp", size["intermediate_size"], hidden)
            continue
        shapes[f"{at}.mlp.gate.weight"] = (routed, hidden)
        shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (routed,)
        shapes |= mlp(f"{at}.mlp.shared_experts", inner, hidden)
        shapes |= experts(f"{at}.mlp.experts", kind, (routed, inner, hidden), turned=False)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (size["vocab_size"], hidden)}


def grouped(config: Mapping[str, object], kind: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model like Qwen3 MoE or gpt-oss; `kind` is as for `experts`."""
    size = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, routed, head = size["hidden_size"], size["num_experts"], size["head_dim"]
    queries, keys = size["num_attention_heads"] * head, size["num_key_value_heads"] * head
    turned = config["model_type"] == "gpt_oss"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size["vocab_size"], hidden)}
    for layer in range(size["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (queries, hidden),
            f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, queries),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.mlp.{'router' if turned else 'gate'}.weight": (routed, hidden),
        }
        if turned:
            widths = (queries, keys, keys, hidden)
            rows = zip("qkvo", widths, strict=True)
            shapes |= {f"{at}.self_attn.{one}_proj.bias": (width,) for one, width in rows}
            shapes |= {
                f"{at}.self_attn.sinks": (queries // head,),
                f"{at}.mlp.router.bias": (routed,),
            }
        else:
            shapes |= {f"{at}.self_attn.{one}_norm.weight": (head,) for one in "qk"}
        inner = size["moe_intermediate_size"]
        shapes |= experts(f"{at}.mlp.experts", kind, (routed, inner, hidden), turned=turned)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (size["vocab_size"], hidden)}


def mlp(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the three matrices of an expert, or of a dense layer."""
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def experts(
    at: str, kind: str, size: tuple[int, int, int], *, turned: bool
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a layer's experts; `size` is their number, and their sizes.

    Their `kind` is "experts" (one by one), "fused" in two tensors, or "lora": fused, as PEFT names
    them when both have an adapter.
    """
    count, inner, hidden = size
    if kind == "experts":
        each = (mlp(f"{at}.{expert}", inner, hidden) for expert in range(count))
        return {name: shape for one in each for name, shape in one.items()}
    front, wrapper = ("base_model.model.", ".base_layer") if kind == "lora" else ("", "")
    shapes: dict[str, tuple[int, ...]] = {}
    parts = ("gate_up_proj", wrapper, 2 * inner, hidden), ("down_proj", "", hidden, inner)
    for name, inside, rows, columns in parts:
        matrix = (columns, rows) if turned else (rows, columns)
        shapes[f"{front}{at}{wrapper * 2}.{name}"] = (count, *matrix)
        if turned:
            shapes[f"{front}{at}{wrapper * 2}.{name}_bias"] = (count, rows)
        if kind == "lora":
            pair = f"{front}{at}{inside}.lora_"
            shapes[f"{pair}A.default.weight"] = (count * _LORA_RANK, matrix[1])
            shapes[f"{pair}B.default.weight"] = (matrix[0], _LORA_RANK * count)
    return shapes


def shapes_of(case: str) -> tuple[Shapes, int, Mapping[str, object] | None]:
    """Return names and shapes, number of ranks, and config of a case."""
    count, _, ranks = case.partition("x")
    if count.isdigit():
        rows = max(1024, int(ranks))
        odd = (rows + 1, 64)  # one in eight does not divide
        return (
            {
                f"model.layers.{at // 10}.part{at % 10}.weight": odd if at % 8 == 3 else (rows, 64)
                for at in range(int(count))
            },
            int(ranks),
            None,
        )
    found = re.fullmatch(r"(.+)-(experts|fused|lora)(?:x(\d+))?", case)
    if found is None or found[1] not in _CONFIGS:
        raise SystemExit(f"{case}: unknown, see --help")
    config = _CONFIGS[found[1]]
    make = latent if "q_lora_rank" in config else grouped
    return make(config, found[2]), int(found[3] or 64), config


def write_rank(rank: int, *, directory: Path, shapes: Shapes, ranks: int) -> None:
    """Write the file of a rank, with DTensors sharded along dimension 0, without their values."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    hashes = Random(rank)  # noqa: S311 (no secret)
    state = {}
    for name, shape in shapes.items():
        whole = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        start, end = _rows(shape[0], ranks, rank)
        local = torch.empty((end - start, *shape[1:]), dtype=torch.bfloat16)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
        # As a trainer's ranks have them, all different.
        object.__setattr__(spec, "_hash", hashes.getrandbits(64) - (1 << 63))
        state[name] = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    with torch.serialization.skip_data():
        torch.save(state, directory / f"model_world_size_{ranks}_rank_{rank}.pt")
    dist.destroy_process_group()


def _rows(size: int, ranks: int, rank: int) -> tuple[int, int]:
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def write_dcp(directory: Path, shapes: Shapes, ranks: int) -> None:
    """Write a checkpoint of DCP: one item for every tensor and rank that has rows of it."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    storage, ends = {}, {}
    properties = dcp.TensorProperties(dtype=torch.bfloat16)
    files = [(directory / f"__{rank}_0.distcp").open("wb") for rank in range(ranks)]
    for name, shape in shapes.items():
        chunks = []
        for rank in range(ranks):
            start, end = _rows(shape[0], ranks, rank)
            if start == end:
                continue
            offsets = torch.Size((start, *(0 for _ in shape[1:])))
            sizes = torch.Size((end - start, *shape[1:]))
            if sizes not in ends:
                ends[sizes] = _ends_of_item(directory, tuple(sizes))
            head, tail, length = ends[sizes]
            file = files[rank]
            at = file.tell()
            file.write(head)
            file.seek(at + length - len(tail))
            file.write(tail)
            info = _StorageInfo(f"__{rank}_0.distcp", at, length)
            storage[dcp.MetadataIndex(name, offsets)] = info
            chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
        described[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    for file in files:
        file.close()
    whole = dcp.Metadata(described, {name: (name,) for name in shapes}, storage)
    with (directory / ".metadata").open("wb") as file:
        pickle.dump(whole, file)


def _ends_of_item(directory: Path, sizes: tuple[int, ...]) -> tuple[bytes, bytes, int]:
    """Return the bytes around the values of a saved tensor, and the length of all."""
    import torch

    path = directory / "archive"  # the name of the records, as in a buffer, where DCP writes them
    with torch.serialization.skip_data():
        torch.save(torch.empty(sizes, dtype=torch.bfloat16), path)
    length = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(min(2048, length))
        file.seek(max(len(head), length - 2048))
        tail = file.read()
    path.unlink()
    return head, tail, length


def write(case: str, directory: Path) -> Path:
    """Return the directory of a case's checkpoint; write it if it is not there."""
    target = directory / case
    if target.is_dir():
        return target
    shapes, ranks, config = shapes_of(case.removesuffix("-dcp"))
    begun = directory / f"{case}.begun"
    begun.mkdir(parents=True)
    if config is not None:
        (begun / "config.json").write_text(json.dumps(config))
        meta = {"r": _LORA_RANK, "lora_alpha": 32, "task_type": "CAUSAL_LM"}
        (begun / "lora_train_meta.json").write_text(json.dumps(meta))
    if case.endswith("-dcp"):
        write_dcp(begun, shapes, ranks)
    else:
        job = partial(write_rank, directory=begun, shapes=shapes, ranks=ranks)
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(job, range(ranks)))
    return begun.rename(target)


def measure(checkpoint: Path, sources: Path) -> tuple[float, float, float]:
    """Return the seconds that a dry run takes, those of all its threads, and the megabytes."""
    command = [sys.executable, "-m", "unshard", "merge", str(checkpoint), "--dry-run", "--quiet"]
    command += ["--config", "none"]
    environment = os.environ | {"PYTHONPATH": str(sources)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed is compiled
    with TemporaryDirectory() as empty:
        started = time.perf_counter()
        child = subprocess.Popen([*command, str(Path(empty) / "output")], env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
    child.returncode = status
    if status:
        raise SystemExit(f"{checkpoint}: unshard failed")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3


def main() -> None:
    """Write what is missing, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=["1000x64", "1000x256", "10000x64"])
    parser.add_argument("--directory", type=Path, required=True, help="keeps the checkpoints")
    parser.add_argument("--against", type=Path, help="another checkout of unshard")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write-only", action="store_true")
    options = parser.parse_args()
    ours = Path(__file__).resolve().parents[1] / "src"
    contenders = {"this": ours}
    if options.against is not None:
        contenders["other"] = options.against.resolve() / "src"
    for case in options.cases:
        checkpoint = write(case, options.directory)
        if options.write_only:
            continue
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, sources in contenders.items():
                found[name].append(measure(checkpoint, sources))
        shown = ", ".join(
            f"{name} {median(one[0] for one in values):.1f} s (CPU "
            f"{median(one[1] for one in values):.1f} s) {max(one[2] for one in values):.0f} MB"
            for name, values in found.items()
        )
        print(f"{case}: {shown}", flush=True)


if __name__ == "__main__":
    main()
