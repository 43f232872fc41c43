"""`unshard.from_pretrained`: the model that transformers loads from a merge, without the merge."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2ForCausalLM

import trainers
import unshard
from ranks import rank_path, save_ranks, snapshot
from tiny_models import assert_same_model, logits, tiny_config, tiny_model
from unshard import ConversionError, CorruptError, UnshardWarning, UsageError
from unshard.errors import how_to_install

pytestmark = [
    pytest.mark.xdist_group("families"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]
GUIDE = Path(__file__).parent.parent.parent / "docs" / "guides" / "from-pretrained.md"
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "checkpoint"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def qwen() -> Any:
    return tiny_model()


@pytest.fixture
def checkpoint(qwen: Any, tmp_path: Path) -> Path:
    """Rank files of a tiny Qwen2, with its config and generation config next to them."""
    place = save_ranks(tmp_path / "ckpt", qwen.state_dict(), 2)
    qwen.config.save_pretrained(place)
    generation(temperature=0.5).save_pretrained(place)
    change_config(place, architectures=["Qwen2ForCausalLM"])
    return place


def generation(**fields: object) -> Any:
    make: Any = transformers.GenerationConfig
    return make(do_sample=True, **fields)


def change_config(place: Path, **fields: object) -> None:
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def merged_model(place: Path, out: Path, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Return what transformers loads from a merge."""
    unshard.merge(place, out, **options)
    return kind.from_pretrained(out)


# where tensors come from

LAYOUTS: dict[str, Callable[..., list[str]]] = {
    "rank files": trainers.ranks,
    "DCP": trainers.dcp_under("model"),
    "sharded safetensors": trainers.shards,
    "torch_checkpointing": trainers.items,
    "one file": trainers.whole,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_model_of_the_merge(qwen: Any, tmp_path: Path, layout: str) -> None:
    place = tmp_path / "run" / "checkpoint-7"
    LAYOUTS[layout](place, qwen.state_dict())
    qwen.config.save_pretrained(place)
    before = snapshot(tmp_path / "run")
    found = unshard.from_pretrained(tmp_path / "run", step=7)
    assert snapshot(tmp_path / "run") == before
    assert_same_model(found, merged_model(place, tmp_path / "out"))
    assert torch.equal(logits(found), logits(qwen))


def test_a_run_of_verl_gives_the_actor_of_its_last_step(tmp_path: Path) -> None:
    found = unshard.from_pretrained(EXAMPLE)
    expected = merged_model(EXAMPLE, tmp_path / "out")
    assert_same_model(found, expected)
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    assert found.name_or_path == str(EXAMPLE / "global_step_10" / "actor")


def test_the_ema_is_loaded_if_it_is_asked_for(qwen: Any, tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-3"
    save_ranks(step / "pytorch_model_fsdp_0", qwen.state_dict(), 2)
    average = {name: one * 0.5 for name, one in qwen.state_dict().items()}
    save_ranks(step / "pytorch_ema_model_fsdp_0", average, 2)
    qwen.config.save_pretrained(step)
    found = unshard.from_pretrained(tmp_path, weights="ema")
    assert torch.equal(found.state_dict()[HEAD], average[HEAD])
    assert_same_model(found, merged_model(step, tmp_path / "out", weights="ema"))
    assert_same_model(unshard.from_pretrained(tmp_path), merged_model(step, tmp_path / "model"))


def adapted(place: Path, model: Any, *, alone: bool) -> Path:
    """Save a model with an adapter on its head in verl's layout, or the adapter alone."""
    state = {f"base_model.model.{name}": one for name, one in model.state_dict().items()}
    head = state.pop(f"base_model.model.{HEAD}")
    tensors = {} if alone else {**state, "base_model.model.lm_head.base_layer.weight": head}
    generator = torch.Generator().manual_seed(5)
    for name, shape in (("lora_A", (2, 16)), ("lora_B", (37, 2))):
        values = torch.randn(shape, generator=generator)
        tensors[f"base_model.model.lm_head.{name}.default.weight"] = values
    save_ranks(place, tensors, 2)
    model.config.save_pretrained(place)
    meta = {"r": 2, "lora_alpha": 8.0, "task_type": "CAUSAL_LM"}
    (place / "lora_train_meta.json").write_text(json.dumps(meta))
    return place


@pytest.mark.parametrize("alone", [False, True], ids=["with the model", "alone"])
def test_an_adapter_is_fused_on_the_way(qwen: Any, tmp_path: Path, *, alone: bool) -> None:
    place = adapted(tmp_path / "ckpt", qwen, alone=alone)
    qwen.save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {"base": tmp_path / "base"} if alone else {}
    with pytest.warns(UnshardWarning, match="1 LoRA pair was fused"):
        found = unshard.from_pretrained(place, **options)
    assert not torch.equal(found.state_dict()[HEAD], qwen.state_dict()[HEAD])
    assert_same_model(found, merged_model(place, tmp_path / "out", **options))


def test_a_critic_gets_the_class_of_its_head(tmp_path: Path) -> None:
    critic = tmp_path / "global_step_1" / "critic"
    config = tiny_config(num_labels=1)
    torch.manual_seed(0)
    model: Any = AutoModelForTokenClassification.from_config(config)  # type: ignore[no-untyped-call]
    save_ranks(critic, model.state_dict(), 2)
    tiny_config(architectures=["Qwen2ForCausalLM"]).save_pretrained(critic)
    found = unshard.from_pretrained(tmp_path, role="critic")
    assert type(found).__name__ == "Qwen2ForTokenClassification"
    kind = AutoModelForTokenClassification
    assert_same_model(found, merged_model(critic, tmp_path / "out", kind))
    assert_same_model(unshard.from_pretrained(critic, kind), found)


@pytest.mark.parametrize("untied", [False, True], ids=["equal", "trained apart"])
def test_tied_weights_stay_tied_unless_training_untied_them(
    tmp_path: Path, *, untied: bool
) -> None:
    model = tiny_model(tie_word_embeddings=True)
    state = dict(model.state_dict())
    if untied:
        state[HEAD] = state[HEAD] + 1
    place = save_ranks(tmp_path / "ckpt", state, 2)
    model.config.save_pretrained(place)
    found: Any = unshard.from_pretrained(place)
    assert (found.lm_head.weight is found.model.embed_tokens.weight) is not untied
    assert torch.equal(found.lm_head.weight, state[HEAD])
    assert_same_model(found, merged_model(place, tmp_path / "out"))


def test_a_compressed_checkpoint_is_decompressed_for_as_long_as_it_takes(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, scratch = tmp_path / "step-7", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    trainers.dcp_under("model", compressed=True)(place, qwen.state_dict())
    qwen.config.save_pretrained(place)
    found = unshard.from_pretrained(place)
    assert not list(scratch.iterdir())
    assert_same_model(found, merged_model(place, tmp_path / "out"))


def test_parameters_are_aligned_as_torch_aligns_them(checkpoint: Path) -> None:
    found = unshard.from_pretrained(checkpoint)
    assert {one.data_ptr() % 64 for one in found.parameters()} == {0}


# what transformers decides


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "auto", "torch_dtype"])
def test_dtypes_are_cast_by_transformers(checkpoint: Path, tmp_path: Path, dtype: Any) -> None:
    name = "torch_dtype" if dtype == "torch_dtype" else "dtype"
    options: dict[str, Any] = {name: torch.float16 if dtype == "torch_dtype" else dtype}
    found = unshard.from_pretrained(checkpoint, **options)
    unshard.merge(checkpoint, tmp_path / "out")
    assert_same_model(found, AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options))
    expected = {"auto": torch.float32, "torch_dtype": torch.float16}.get(dtype, torch.bfloat16)
    assert found.dtype == expected


def test_weights_of_another_dtype_than_the_config_names_are_kept_with_a_warning(
    checkpoint: Path, tmp_path: Path
) -> None:
    change_config(checkpoint, dtype="bfloat16")
    with pytest.warns(UnshardWarning, match="names bfloat16, but the weights stay float32"):
        found = unshard.from_pretrained(checkpoint)
    assert found.dtype == torch.float32
    assert_same_model(found, merged_model(checkpoint, tmp_path / "out"))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps_are_those_of_accelerate(
    checkpoint: Path, tmp_path: Path, device_map: Any
) -> None:
    found: Any = unshard.from_pretrained(checkpoint, device_map=device_map)
    unshard.merge(checkpoint, tmp_path / "out")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map=device_map)
    assert_same_model(found, expected)
    assert getattr(found, "hf_device_map", None) == getattr(expected, "hf_device_map", None)


def test_what_a_device_map_puts_on_disk_is_offloaded(
    qwen: Any, checkpoint: Path, tmp_path: Path
) -> None:
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"}
    found: Any = unshard.from_pretrained(
        checkpoint,
        device_map={**places, "model.rotary_emb": "cpu", "lm_head": "cpu"},
        offload_folder=str(tmp_path / "offloaded"),
    )
    assert torch.equal(logits(found), logits(qwen))


def test_keywords_change_the_config_as_they_do_in_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"attn_implementation": "eager", "use_cache": False}
    found = unshard.from_pretrained(checkpoint, **options)
    unshard.merge(checkpoint, tmp_path / "out")
    assert_same_model(found, AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options))
    assert found.config._attn_implementation == "eager"
    assert found.config.use_cache is False


def test_the_generation_config_is_the_checkpoints_or_the_callers(checkpoint: Path) -> None:
    found: Any = unshard.from_pretrained(checkpoint)
    assert found.generation_config.temperature == 0.5
    given = generation(temperature=0.25)
    found = unshard.from_pretrained(checkpoint, generation_config=given)
    assert found.generation_config.temperature == 0.25


def test_without_a_generation_config_that_of_the_config_is_taken(
    checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "generation_config.json").unlink()
    change_config(checkpoint, max_length=33, num_beams=3)
    found: Any = unshard.from_pretrained(checkpoint)
    assert_same_model(found, merged_model(checkpoint, tmp_path / "out"))
    assert (found.generation_config.max_length, found.generation_config.num_beams) == (33, 3)


FP8 = {"quant_method": "fp8", "weight_block_size": [4, 4], "modules_to_not_convert": ["lm_head"]}


def test_quantised_weights_are_dequantised_as_transformers_does_without_a_gpu(
    qwen: Any, checkpoint: Path, tmp_path: Path
) -> None:
    """The one quantiser that needs no package and no GPU: weights of 8 bits with their scales."""
    state = {}
    for name, one in qwen.state_dict().items():
        if "_proj.weight" in name:
            rows, columns = (-(-size // 4) for size in one.shape)
            state[name] = one.to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = torch.rand(rows, columns) + 0.5
        else:
            state[name] = one.to(torch.bfloat16)
    save_ranks(checkpoint, {}, 2, plain=[state, state])
    change_config(checkpoint, quantization_config=FP8)
    found = unshard.from_pretrained(checkpoint)
    expected = merged_model(checkpoint, tmp_path / "out")
    assert_same_model(found, expected)
    assert found.state_dict()["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16


def register_eighths() -> None:
    """Teach transformers a quantiser that rounds to eighths: those that it has want a GPU."""
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class EighthsConfig(QuantizationConfigMixin):
        def __init__(self, **_: Any) -> None:
            self.quant_method = "eighths"  # type: ignore[assignment]  # an enum of its own methods

    class Round(ConversionOps):
        def convert(self, input_dict: Any, *_: Any, **__: Any) -> Any:
            pairs = input_dict.items()
            found = {name: one[0] if isinstance(one, list) else one for name, one in pairs}
            return {name: torch.round(one * 8) / 8 for name, one in found.items()}

    class Eighths(HfQuantizer):
        requires_calibration = False

        def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
            del model
            return "_proj.weight" in param_name

        def get_quantize_ops(self) -> Any:
            return Round()

        def is_serializable(self) -> bool:
            return False

        def is_trainable(self) -> bool:
            return False

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault("eighths", EighthsConfig)
    auto.AUTO_QUANTIZER_MAPPING.setdefault("eighths", Eighths)


def test_weights_are_quantised_on_load_by_transformers(
    qwen: Any, checkpoint: Path, tmp_path: Path
) -> None:
    register_eighths()
    options: dict[str, Any] = {"quantization_config": {"quant_method": "eighths"}}
    found = unshard.from_pretrained(checkpoint, **options)
    unshard.merge(checkpoint, tmp_path / "out")
    assert_same_model(found, AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found.state_dict()[name], torch.round(qwen.state_dict()[name] * 8) / 8)
    assert torch.equal(found.state_dict()[HEAD], qwen.state_dict()[HEAD])


# classes and configs


@pytest.mark.parametrize(
    "kind", ["Qwen2ForCausalLM", "AutoModelForCausalLM", "AutoModelForImageTextToText", None]
)
def test_a_class_may_be_given(tmp_path: Path, kind: str | None) -> None:
    family = "qwen2_5_vl" if kind == "AutoModelForImageTextToText" else "qwen2"
    model = tiny_model(family)
    place = save_ranks(tmp_path / "ckpt", model.state_dict(), 2)
    model.config.save_pretrained(place)
    found = unshard.from_pretrained(place, None if kind is None else getattr(transformers, kind))
    assert type(found) is type(model)
    assert torch.equal(logits(found), logits(model))


def test_the_text_model_inside_a_larger_one_has_its_own_config(tmp_path: Path) -> None:
    """Of a vision-language model AutoModelForCausalLM may load the text model alone."""
    model = tiny_model("qwen3_5")
    place = save_ranks(tmp_path / "ckpt", model.state_dict(), 2)
    model.config.save_pretrained(place)
    options: dict[str, Any] = {"dtype": torch.float32}
    found = unshard.from_pretrained(place, AutoModelForCausalLM, allow_unexpected=True, **options)
    unshard.merge(place, tmp_path / "out")
    assert type(found).__name__ == "Qwen3_5ForCausalLM"
    assert_same_model(found, AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options))


def test_a_config_of_an_unknown_class_is_loaded_as_a_language_model(checkpoint: Path) -> None:
    change_config(checkpoint, architectures=["TrainersOwnName"])
    assert type(unshard.from_pretrained(checkpoint)) is Qwen2ForCausalLM


def test_a_class_that_does_not_fit_the_config_is_named(tmp_path: Path) -> None:
    model = tiny_model("qwen2_5_vl")
    place = save_ranks(tmp_path / "ckpt", model.state_dict(), 2)
    model.config.save_pretrained(place)
    change_config(place, architectures=["Qwen2_5_VLForConditionalGeneration"])
    with pytest.raises(
        UsageError, match="AutoModelForCausalLM has no model for this conf"
    ) as caught:
        unshard.from_pretrained(place, AutoModelForCausalLM)
    assert "the config's class is Qwen2_5_VLForConditionalGeneration" in caught.value.hint


@pytest.mark.parametrize("given", ["AutoModelForCausalLM", dict])
def test_what_is_no_class_of_transformers_is_refused(checkpoint: Path, given: Any) -> None:
    with pytest.raises(UsageError, match="has no from_pretrained"):
        unshard.from_pretrained(checkpoint, given)


def test_a_config_object_is_used_as_it_is(qwen: Any, checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    config = tiny_config(use_cache=False)
    found = unshard.from_pretrained(checkpoint, config=config)
    assert found.config.use_cache is False
    assert found.dtype == torch.float32
    assert torch.equal(logits(found), logits(qwen))
    assert found.generation_config.temperature == 0.5
    found = unshard.from_pretrained(checkpoint, config=tiny_config(dtype="bfloat16"))
    assert found.dtype == torch.bfloat16


def test_what_is_no_config_is_refused(checkpoint: Path) -> None:
    wrong: Any = {"model_type": "qwen2"}
    with pytest.raises(UsageError, match="config: a dict is not a config"):
        unshard.from_pretrained(checkpoint, config=wrong)


CODE = """
open({marker!r}, "a").close()
from transformers import Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own"

class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_the_checkpoint_runs_only_if_it_is_trusted(
    qwen: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    monkeypatch.syspath_prepend(tmp_path / "c")
    marker = tmp_path / "ran"
    (checkpoint / "own_code.py").write_text(CODE.format(marker=str(marker)))
    auto = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    change_config(checkpoint, model_type="own", architectures=["OwnModel"], auto_map=auto)
    with pytest.raises(UsageError, match="trust_remote_code=True"):
        unshard.from_pretrained(checkpoint)
    assert not marker.exists()
    found = unshard.from_pretrained(checkpoint, trust_remote_code=True)
    assert marker.exists()
    assert type(found).__name__ == "OwnModel"
    assert torch.equal(logits(found), logits(qwen))


# what is refused


def test_missing_tensors_are_errors_unless_they_are_allowed(qwen: Any, tmp_path: Path) -> None:
    state = {name: one for name, one in qwen.state_dict().items() if "norm" not in name}
    place = save_ranks(tmp_path / "ckpt", state, 2)
    qwen.config.save_pretrained(place)
    with pytest.raises(ConversionError, match=r"model\.norm\.weight") as caught:
        unshard.from_pretrained(place)
    assert "allow_missing=True" in str(caught.value)
    found = unshard.from_pretrained(place, allow_missing=True)
    assert torch.equal(found.state_dict()[HEAD], state[HEAD])


def test_unexpected_tensors_are_errors_unless_they_are_allowed(qwen: Any, tmp_path: Path) -> None:
    state = {**qwen.state_dict(), "model.extra.weight": torch.ones(3)}
    place = save_ranks(tmp_path / "ckpt", state, 2)
    qwen.config.save_pretrained(place)
    with pytest.raises(ConversionError, match=r"model\.extra\.weight") as caught:
        unshard.from_pretrained(place)
    assert "allow_unexpected=True" in str(caught.value)
    found = unshard.from_pretrained(place, allow_unexpected=True)
    assert torch.equal(logits(found), logits(qwen))


def test_what_the_class_lacks_or_wants_is_found_after_the_loading(checkpoint: Path) -> None:
    """The config's names are those of the checkpoint; the class that was given has others."""
    with pytest.raises(ConversionError, match="does not fit Qwen2ForSequenceClassific") as caught:
        unshard.from_pretrained(checkpoint, transformers.AutoModelForSequenceClassification)
    assert caught.value.found == "score.weight: is missing; lm_head.weight: is not in the model"
    assert "allow_missing=True" in str(caught.value)
    assert "auto_class=…" in str(caught.value)


def test_shapes_that_differ_are_errors_unless_transformers_may_ignore_them(
    checkpoint: Path,
) -> None:
    config = tiny_config(intermediate_size=40)
    with pytest.raises(ConversionError, match="does not fit Qwen2ForCausalLM") as caught:
        unshard.from_pretrained(checkpoint, config=config)
    name = "model.layers.0.mlp.down_proj.weight"
    assert f"{name}: shape [16, 24], not [16, 40]" in caught.value.found
    found = unshard.from_pretrained(checkpoint, config=config, ignore_mismatched_sizes=True)
    assert found.state_dict()[name].shape == (16, 40)


def test_without_a_config_the_ways_to_give_one_are_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json was found in or next to") as caught:
        unshard.from_pretrained(checkpoint)
    assert "give it with base=… or config=…" in str(caught.value)


@pytest.mark.parametrize("name", ["names", "include", "state_dict", "output_loading_info"])
def test_keywords_that_it_does_not_have_are_refused(checkpoint: Path, name: str) -> None:
    with pytest.raises(TypeError, match=rf"from_pretrained\(\) got an unexpected .* '{name}'"):
        unshard.from_pretrained(checkpoint, **{name: None})


def test_keywords_that_nobody_has_are_refused_by_transformers(checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="no_such_keyword"):
        unshard.from_pretrained(checkpoint, no_such_keyword=1)


def test_shards_that_vanish_meanwhile_are_named(checkpoint: Path) -> None:
    class Rotated:
        @staticmethod
        def from_pretrained(*args: Any, **kwargs: Any) -> Any:
            rank_path(checkpoint, 2, 1).unlink()
            return Qwen2ForCausalLM.from_pretrained(*args, **kwargs)

    with pytest.raises(CorruptError, match=r"rank_1\.pt"):
        unshard.from_pretrained(checkpoint, Rotated)


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_without_the_extra_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(UsageError, match=f"{absent} is not installed") as caught:
        unshard.from_pretrained(EXAMPLE)
    assert caught.value.hint == how_to_install("torch transformers", "torch")


def test_a_transformers_without_lazy_loading_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    older = ModuleType("transformers")
    older.__dict__["__version__"] = "4.57.6"
    monkeypatch.setitem(sys.modules, "transformers", older)
    with pytest.raises(UsageError, match="needs transformers 5 or later") as caught:
        unshard.from_pretrained(EXAMPLE)
    assert caught.value.found == "transformers 4.57.6"


def test_the_guides_code_runs(
    qwen: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    codes = [code for code in blocks if "Qwen/" not in code]  # that model is on the hub
    assert len(codes) == len(blocks) - 1 == 3
    checkpoint.rename(tmp_path / "checkpoint-1000")
    monkeypatch.chdir(tmp_path)
    for code, dtype in zip(codes, (torch.float32, torch.bfloat16, torch.float32), strict=True):
        names: dict[str, Any] = {}
        exec(compile(code, str(GUIDE), "exec"), names)  # noqa: S102 (it is our own page)
        assert type(names["model"]) is type(qwen)
        assert names["model"].dtype == dtype
