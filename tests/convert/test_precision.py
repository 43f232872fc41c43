"""Which tensors a cast leaves alone, and how large values that float16 cannot hold are reported."""

import pkgutil
import re
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, merged, save_ranks, some_tensors
from unshard import UsageError
from unshard.convert import outputs as rules
from unshard.convert.outputs import KEPT_IN_16_BITS, KEPT_IN_FLOAT16, Precision, precision
from unshard.keywords import DtypeLike
from unshard.read.model_config import ModelConfig
from unshard.tensors.dtypes import BY_NAME

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

FLOAT32, BFLOAT16 = BY_NAME["float32"], BY_NAME["bfloat16"]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def rule(choice: DtypeLike, model_type: str = "llama", keep: str | None = None) -> Precision:
    return precision(choice, ModelConfig({"model_type": model_type}), None, keep)


def test_a_router_bias_stays_float32_under_a_cast_where_the_family_keeps_it() -> None:
    cast = rule("bfloat16", "deepseek_v3")
    assert cast.dtype(BIAS, FLOAT32) is FLOAT32
    assert cast.dtype("model.layers.1.mlp.gate.weight", FLOAT32) is BFLOAT16
    assert rule("bfloat16", "llama").dtype(BIAS, FLOAT32) is BFLOAT16


@pytest.mark.parametrize("keys", [["text_config"], ["thinker_config", "text_config"], ["decoder"]])
def test_a_config_inside_another_is_a_family_too_however_deep_it_is(keys: list[str]) -> None:
    config: dict[str, object] = {"model_type": "glm4_moe"}
    for key in reversed(keys):
        config = {"model_type": "outer", key: config}
    nested = precision("bfloat16", ModelConfig(config), None, None)
    assert nested.dtype(BIAS, FLOAT32) is FLOAT32


def test_some_families_keep_more_from_float16_than_from_bfloat16() -> None:
    name = "decoder.block.0.layer.2.DenseReluDense.wo.weight"
    assert rule("float16", "t5").dtype(name, FLOAT32) is FLOAT32
    assert rule("bfloat16", "t5").dtype(name, FLOAT32) is BFLOAT16
    assert rule("float16", "t5").dtype("decoder.two.weight", FLOAT32).name == "float16"


def test_the_user_can_keep_more() -> None:
    cast = rule("bfloat16", keep=r"norm\.weight$")
    assert cast.dtype("model.norm.weight", FLOAT32) is FLOAT32
    assert cast.dtype("model.norm.weights", FLOAT32) is BFLOAT16


def test_what_the_family_keeps_is_cast_up_to_float32_like_all() -> None:
    assert rule("float32", "deepseek_v3").dtype(BIAS, BFLOAT16) is FLOAT32


def test_an_expression_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"keep_fp32=.*not a regular expression"):
        rule("bfloat16", keep="(")


def test_the_dtypes_of_a_base_are_taken_tensor_by_tensor() -> None:
    base = {"a": BFLOAT16, "b": FLOAT32, "scale": BY_NAME["uint8"]}
    cast = precision("base", None, base, None)
    assert [cast.dtype(name, FLOAT32).name for name in ("a", "b", "c", "scale")] == [
        "bfloat16", "float32", "float32", "float32",
    ]  # fmt: skip
    assert cast.dtype("a", BY_NAME["int64"]).name == "int64"


def test_a_base_dtype_needs_a_base() -> None:
    with pytest.raises(UsageError, match=r"dtype='base'[\s\S]*base=…"):
        precision("base", None, None, None)


def modeling_sources() -> dict[str, str]:
    import transformers.models

    found = {}
    for module in pkgutil.iter_modules(transformers.models.__path__):
        directory = Path(transformers.models.__path__[0]) / module.name
        texts = [path.read_text() for path in directory.glob("modeling_*.py")]
        found[module.name] = "\n".join(texts)
    return found


def test_the_tables_are_those_of_the_installed_transformers() -> None:
    sources = modeling_sources()
    for table, attribute in (
        (KEPT_IN_16_BITS, "_keep_in_fp32_modules_strict"),
        (KEPT_IN_FLOAT16, "_keep_in_fp32_modules"),
    ):
        for model_type, parts in table.items():
            lists = re.findall(attribute + r"\s*=\s*\[([^\]]*)\]", sources[model_type])
            stated = {word for text in lists for word in re.findall(r'"([^"]+)"', text)}
            assert stated == set(parts), (attribute, model_type)
    assert set(KEPT_IN_16_BITS) >= {"deepseek_v3", "glm4_moe", "ernie4_5_moe"}
    assert rules.KEPT_IN_FLOAT16["gpt_oss"]


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.bfloat16])
def test_values_too_large_for_float16_are_counted_and_named(
    tmp_path: Path, stored: torch.dtype
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in some_tensors().items()}
    tensors["lm_head.weight"][3, 1:4] = torch.tensor([7e4, -1e30, float("inf")], dtype=stored)
    save_ranks(tmp_path / "ckpt", tensors, 2)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype="float16")
    (warning,) = [one for one in report.warnings if "float16" in one]
    assert "2 values of 1 tensors" in warning
    assert "lm_head.weight (2)" in warning
    assert_same(merged(tmp_path / "out"), {n: t.to(torch.float16) for n, t in tensors.items()})


def test_nothing_is_reported_where_nothing_overflows(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype="float16")
    assert not [one for one in report.warnings if "float16" in one]
