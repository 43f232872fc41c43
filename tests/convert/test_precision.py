"""Which tensors a cast leaves alone, and how large values that float16 cannot hold are reported."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, merged, save_ranks, some_tensors
from unshard import UsageError
from unshard.convert.kept import KEPT_BY_CLASS, KEPT_IN_16_BITS, KEPT_IN_FLOAT16
from unshard.convert.outputs import Precision, precision
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
    """Return the text of each module of transformers with models, by the module's name."""
    import transformers.models

    root = Path(transformers.models.__path__[0])
    return {
        f"transformers.models.{path.parent.name}.{path.stem}": path.read_text()
        for path in sorted(root.glob("*/modeling_*.py"))
    }


def kept_by_transformers(attribute: str) -> dict[str, set[str]]:
    """Return what the classes of a model type keep, together; they are asked, and none is left."""
    from transformers import PreTrainedModel

    found: dict[str, set[str]] = {}
    for name, source in modeling_sources().items():
        if "_keep_in_fp32_modules" not in source:
            continue
        for one in vars(import_module(name)).values():
            is_own = isinstance(one, type) and one.__module__ == name
            if is_own and issubclass(one, PreTrainedModel) and getattr(one, attribute, None):
                types = found.setdefault(one.config_class.model_type, set())
                types |= set(getattr(one, attribute))
    return found


@pytest.mark.parametrize(
    ("table", "attribute"),
    [
        (KEPT_IN_16_BITS, "_keep_in_fp32_modules_strict"),
        (KEPT_IN_FLOAT16, "_keep_in_fp32_modules"),
    ],
)
def test_the_tables_are_those_of_the_installed_transformers(
    table: dict[str, tuple[str, ...]], attribute: str
) -> None:
    stated = kept_by_transformers(attribute)
    for model_type, parts in stated.items():
        known = [one for one in table if f"{model_type}_".startswith(f"{one}_")]
        assert {part for one in known for part in table[one]} == parts, model_type
    assert not [one for one in table if not any(f"{of}_".startswith(f"{one}_") for of in stated)]


def test_the_table_of_classes_is_that_of_the_installed_diffusers() -> None:
    import diffusers

    stated = {}
    for name in dir(diffusers):
        one = getattr(diffusers, name) if name.endswith(("Model", "former", "3", "o", "er")) else 0
        if isinstance(one, type) and issubclass(one, diffusers.ModelMixin):
            stated[name] = tuple(one._keep_in_fp32_modules or ())
    assert len(stated) > 100
    assert {name: parts for name, parts in stated.items() if parts} == KEPT_BY_CLASS


@pytest.mark.parametrize("model_type", ["glm4v_moe_text", "inkling_mm_model", "muse_spark_audio"])
def test_a_type_stands_for_those_of_its_parts(model_type: str) -> None:
    assert rule("bfloat16", model_type).dtype(BIAS, FLOAT32) is FLOAT32
    assert rule("bfloat16", "glm4").dtype(BIAS, FLOAT32) is BFLOAT16


def test_what_recurrences_compute_in_float32_is_kept_in_every_family() -> None:
    found = [name for name, text in modeling_sources().items() if "self.A_log.float()" in text]
    assert len(found) >= 14
    for name in found:
        cast = rule("bfloat16", name.split(".")[2])
        for part in ("A_log", "D", "dt_bias", "A_log.0", "D.1"):  # Hymba has lists of them
            assert cast.dtype(f"backbone.layers.0.mixer.{part}", FLOAT32) is FLOAT32
        assert cast.dtype("backbone.layers.0.mixer.out_proj.weight", FLOAT32) is BFLOAT16
        assert cast.dtype("backbone.layers.0.mixer.norm_D", FLOAT32) is BFLOAT16


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.bfloat16])
def test_values_too_large_for_float16_are_counted_and_named(
    tmp_path: Path, stored: torch.dtype
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in some_tensors().items()}
    tensors["lm_head.weight"][3, 1:4] = torch.tensor([7e4, -1e30, float("inf")], dtype=stored)
    save_ranks(tmp_path / "ckpt", tensors, 2)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype="float16", config="none")
    (warning,) = [one for one in report.warnings if "float16" in one]
    assert "2 values of 1 tensor became" in warning
    assert "lm_head.weight (2)" in warning
    assert_same(merged(tmp_path / "out"), {n: t.to(torch.float16) for n, t in tensors.items()})


def test_nothing_is_reported_where_nothing_overflows(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype="float16", config="none")
    assert not [one for one in report.warnings if "float16" in one]
