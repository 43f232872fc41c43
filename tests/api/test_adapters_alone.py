"""Adapters without a config of their own, as PEFT loads what is written of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import unshard
from ranks import assert_same, save_ranks
from tiny_models import logits, tiny_model
from unshard.cli.main import main

pytestmark = [
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = torch.nn.Linear(6, 6)
        self.to_out = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Dropout()])


class Block(torch.nn.Module):
    """Numbers, and a name that is a module's here and a container's there."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.attn = Attention()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6)
        )
        proj = torch.nn.Linear(6, 6)
        self.proj = proj if is_last else torch.nn.ModuleDict({"inner": proj})
        self.norm = torch.nn.LayerNorm(6)


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = torch.nn.ModuleList([Block(is_last=n == 1) for n in range(2)])
        self.norm = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block: Any
        for block in self.transformer_blocks:
            x = block.attn.to_out[0](block.attn.to_q(x))
            x = block.norm(block.net(getattr(block.proj, "inner", block.proj)(x)))
        out: torch.Tensor = self.norm(x)
        return out


CASES: list[tuple[list[str] | str, list[str] | None]] = [
    (["to_out.0"], None),
    (["net.0", "net.2"], None),
    (["to_q", "net.2"], None),
    (["transformer_blocks.1.proj"], None),  # a container in the other block
    (["transformer_blocks.0.proj.inner"], ["inner"]),
    (["to_q"], ["to_q"]),
]


@pytest.mark.parametrize(
    ("targets", "written", "is_alone"),
    [
        *((targets, written, False) for targets, written in CASES),
        *((targets, None, True) for targets, _ in CASES),  # an end may be another's, too
        ("norm", None, False),  # a LayerNorm elsewhere
    ],
    ids=str,
)
def test_peft_adapts_what_was_adapted(
    tmp_path: Path, targets: list[str] | str, written: list[str] | None, *, is_alone: bool
) -> None:
    torch.manual_seed(0)
    model: Any = get_peft_model(
        Transformer(),
        LoraConfig(target_modules=targets, r=2, lora_alpha=4, init_lora_weights=False),
    )
    pairs = {name for name in model.state_dict() if ".lora_" in name}
    kept = {n: one for n, one in model.state_dict().items() if n in pairs or not is_alone}
    save_ranks(tmp_path / "ckpt", kept, 1)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora="adapter", lora_alpha=4)
    stated = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    if written is not None:
        assert stated == written
    torch.manual_seed(0)
    again: Any = PeftModel.from_pretrained(Transformer(), tmp_path / "out")
    assert {name for name in again.state_dict() if ".lora_" in name} == pairs
    for name in pairs:
        assert torch.equal(again.state_dict()[name], model.state_dict()[name])
    x = torch.randn(3, 6)
    assert torch.equal(again.eval()(x), model.eval()(x))


@pytest.mark.parametrize("ranks", [{"^fc": 2}, {"enc.fc": 2}, {"^fc": 2, "enc.fc": 3}])
def test_a_rank_is_that_modules_only(tmp_path: Path, ranks: dict[str, int]) -> None:
    def model() -> nn.ModuleDict:
        inner = {"fc": nn.Linear(6, 6), "up": nn.Linear(6, 6), "down": nn.Linear(6, 6)}
        return nn.ModuleDict({"fc": nn.Linear(6, 6), "enc": nn.ModuleDict(inner)})

    config = LoraConfig(target_modules=["fc", "up", "down"], r=4, rank_pattern=ranks)
    adapted: Any = get_peft_model(model(), config)
    shapes = {n: one.shape for n, one in adapted.state_dict().items() if ".lora_" in n}
    save_ranks(tmp_path / "ckpt", adapted.state_dict(), 1)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora="adapter", lora_alpha=4)
    again: Any = PeftModel.from_pretrained(model(), tmp_path / "out")
    assert {n: one.shape for n, one in again.state_dict().items() if ".lora_" in n} == shapes


@pytest.mark.parametrize("target", ["0", "2.0"])
def test_a_number_at_the_root_is_that_module_only(tmp_path: Path, target: str) -> None:
    def model() -> nn.Sequential:
        inner = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6)))
        outer = nn.Sequential(nn.ReLU(), nn.ModuleList([nn.ModuleList([nn.Linear(6, 6)])]))
        return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), inner, outer)

    asked = LoraConfig(target_modules=re.escape(target), r=2, init_lora_weights=False)
    state = get_peft_model(model(), asked).state_dict()
    pairs = {name: one for name, one in state.items() if ".lora_" in name}
    save_ranks(tmp_path / "ckpt", pairs, 1)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora="adapter", lora_alpha=8)
    again = PeftModel.from_pretrained(model(), tmp_path / "out").state_dict()
    assert_same({name: one for name, one in again.items() if ".lora_" in name}, pairs)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Any]:
    """Save a base, and an adapter's tensors alone; return the directory, and the whole model."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False)  # type: ignore[arg-type]
    base = LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    asked = LoraConfig(
        target_modules=["q_proj"], r=2, lora_alpha=4, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model: Any = get_peft_model(base, asked)
    pairs = {name: one for name, one in model.state_dict().items() if ".lora_" in name}
    save_ranks(tmp_path / "ckpt", pairs, 1)
    return tmp_path, model


@pytest.mark.parametrize("is_relative", [False, True])
def test_an_adapter_with_its_base_loads_by_itself(
    trained: tuple[Path, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_relative: bool,
) -> None:
    place, model = trained
    monkeypatch.chdir(place)
    base = "base" if is_relative else str(place / "base")
    given = ("--lora", "adapter", "--base", base, "--lora-alpha", "4")
    with pytest.raises(SystemExit) as ended:
        main(["merge", "ckpt", "out", *given])
    assert ended.value.code == 0
    assert "names not checked" not in capsys.readouterr().out
    monkeypatch.chdir(place / "ckpt")
    loaded: Any = AutoPeftModelForCausalLM.from_pretrained(place / "out")
    ids = torch.arange(7)[None]
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_modules_that_the_base_lacks_are_named(trained: tuple[Path, Any]) -> None:
    place, _ = trained
    other = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        vocab_size=40,
        num_attention_heads=2,
    )
    LlamaForCausalLM(other).save_pretrained(place / "other")
    report = unshard.merge(
        place / "ckpt", place / "out", lora="adapter", lora_alpha=4, base=place / "other"
    )
    assert report.names_checked == "base"
    assert any(
        "lacks 1 module that the adapter adapts: model.layers.1.self_attn.q_proj" in note
        for note in report.notes
    )
    unshard.merge(place / "ckpt", place / "alone", lora="adapter", lora_alpha=4)
    fields = json.loads((place / "alone" / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] is None


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")  # peft corrects it
@pytest.mark.parametrize(
    ("family", "target"),
    [("qwen2_5_vl", "q_proj"), ("gpt2", "c_fc"), ("bert", "query"), ("llava", "v_proj")],
)
def test_a_model_without_a_task_of_peft_is_loaded_by_its_class(
    tmp_path: Path, family: str, target: str
) -> None:
    base = tiny_model(family)
    base.save_pretrained(tmp_path / "base")
    model: Any = get_peft_model(base, LoraConfig(r=3, lora_alpha=4, target_modules=[target]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    pairs = {name: one for name, one in model.state_dict().items() if "lora_" in name}
    save_ranks(tmp_path / "ckpt", pairs, 2)
    checkpoint, given = tmp_path / "ckpt", tmp_path / "base"
    unshard.merge(checkpoint, tmp_path / "out", lora="adapter", base=given, lora_alpha=4)
    loaded: Any = AutoPeftModel.from_pretrained(tmp_path / "out")
    assert type(loaded.get_base_model()) is type(base)
    assert torch.equal(logits(loaded), logits(model))


def test_a_class_of_remote_code_is_not_named(trained: tuple[Path, Any]) -> None:
    place, _ = trained
    file = place / "base" / "config.json"
    fields = json.loads(file.read_text()) | {"architectures": ["Own"], "auto_map": {"Own": "own"}}
    file.write_text(json.dumps(fields))
    out = place / "out"
    unshard.merge(place / "ckpt", out, lora="adapter", base=place / "base", lora_alpha=4)
    assert json.loads((out / "adapter_config.json").read_text())["auto_mapping"] is None
