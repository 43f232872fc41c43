"""LoRA under FSDP2, trained by real peft and saved as verl does, against peft's own merging."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import unshard
from oracle.writers.lora import IDS, LoraCase, Truth, load_truth
from oracle.writers.workers import WorkerPool
from ranks import Tensors, assert_same, merged
from tiny_models import assert_same_model
from unshard.keywords import Names

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

CAUSAL = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 8}
LINEAR = CAUSAL | {"target_modules": "all-linear"}

CASES = {
    "plain": LoraCase("llama", LINEAR),
    "bfloat16": LoraCase("llama", LINEAR, dtype="bfloat16"),
    "rslora": LoraCase("llama", LINEAR | {"use_rslora": True}, peft_file=True),
    "patterns": LoraCase(
        "llama",
        LINEAR | {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 5}},
        peft_file=True,
    ),
    "head": LoraCase("llama", LINEAR | {"modules_to_save": ["lm_head"]}),
    "embedding": LoraCase("llama", CAUSAL | {"target_modules": ["q_proj", "embed_tokens"]}),
    "conv1d": LoraCase("gpt2", CAUSAL | {"target_modules": ["c_attn", "c_proj"]}),
    "square conv1d": LoraCase("gpt2", CAUSAL | {"target_modules": ["attn.c_proj"]}),
    "head and conv1d": LoraCase(
        "gpt2", CAUSAL | {"target_modules": ["attn.c_proj", "lm_head"]}, peft_file=True
    ),
    "experts": LoraCase(
        "qwen3_moe",
        CAUSAL
        | {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "experts turned": LoraCase(
        "gpt_oss",
        CAUSAL
        | {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}


Train = Callable[[LoraCase], tuple[Path, Truth]]


@pytest.fixture(scope="module")
def trained(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return `trained(case)`: where `run` and `base` are, for reading only, and the truth."""

    @cache
    def train(case: LoraCase) -> tuple[Path, Truth]:
        place = tmp_path_factory.mktemp("lora")
        (place / "run").mkdir()
        worker_pool.run(case, 2, place / "run")
        return place, load_truth(place / "run")

    return train


def loaded(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def merge(run: Path, out: Path, base: Path | None = None) -> None:
    """Fuse into `out`, and write the adapter into `out/lora_adapter`.

    Names stay those of training, as peft's own model has them; a base is named so itself here.
    """
    names: Names = "training" if base is None else "hub"
    unshard.merge(run, out, lora="both", base=base, names=names)


def assert_fused(found: Tensors, truth: Tensors) -> None:
    """Equal, but for what the order of float32 sums and the last rounding can change.

    Both add up a few products in float32; of 16 bits peft rounds the update first, and once more
    after the addition.
    """
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        assert found[name].dtype == expected.dtype, name
        size = expected.abs().amax().double() + 1
        step = torch.finfo(expected.dtype).eps
        bound = (2 if expected.dtype == torch.bfloat16 else 8) * step * size
        assert (found[name].double() - expected.double()).abs().amax() <= bound, name


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal logits, of one model computed by one weight or by two matrices next to it."""
    tolerance = 0.1 if expected.dtype == torch.bfloat16 else 1e-4
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("kind", CASES)
def test_fusing_gives_what_merge_and_unload_gives(
    trained: Train, tmp_path: Path, kind: str
) -> None:
    place, truth = trained(CASES[kind])
    merge(place / "run", tmp_path / "out")
    found = merged(tmp_path / "out")
    assert_fused(found, truth.merged)
    assert_close(logits(loaded(tmp_path / "out")), truth.logits)
    assert_far(logits(loaded(place / "base")), truth.logits)


def assert_far(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Training changed more than what counts as equal."""
    with pytest.raises(AssertionError):
        assert_close(found, expected)


@pytest.mark.parametrize("kind", CASES)
def test_a_model_from_the_shards_has_the_adapter_fused(
    trained: Train, tmp_path: Path, kind: str
) -> None:
    place, truth = trained(CASES[kind])
    found = unshard.from_pretrained(place / "run")
    unshard.merge(place / "run", tmp_path / "out")
    assert_same_model(found, loaded(tmp_path / "out"))
    assert_close(logits(found), truth.logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")  # peft corrects it
@pytest.mark.parametrize("kind", CASES)
def test_peft_loads_the_adapter(trained: Train, tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    place, truth = trained(CASES[kind])
    merge(place / "run", tmp_path / "out")
    adapter = tmp_path / "out" / "lora_adapter"
    found = load_file(adapter / "adapter_model.safetensors")
    written = {name: one for name, one in truth.adapter.items() if ".base_layer.weight" not in name}
    assert_same({name: found[name] for name in written}, written)
    assert found.keys() == written.keys()
    model = PeftModel.from_pretrained(loaded(place / "base"), adapter, autocast_adapter_dtype=False)
    assert_close(logits(model), truth.logits)


@pytest.mark.parametrize(
    "kind",
    [
        *("plain", "bfloat16", "rslora", "embedding", "conv1d"),
        *("head and conv1d", "experts", "experts turned"),
    ],
)
def test_an_adapter_alone_is_fused_into_its_base(trained: Train, tmp_path: Path, kind: str) -> None:
    case = CASES[kind]
    # Nothing else states which parameters the adapter by itself is of.
    is_bare = "target_parameters" in case.lora
    place, truth = trained(replace(case, lora_only=True, peft_file=case.peft_file or is_bare))
    merge(place / "run", tmp_path / "out", base=place / "base")
    made = loaded(tmp_path / "out")  # a base has its experts one by one
    assert_fused(made.state_dict(), truth.merged)
    found = unshard.from_pretrained(place / "run", base=place / "base")
    assert_same_model(found, made)
