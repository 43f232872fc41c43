"""Names and layouts of the output: renamed, split, fused, refused; values as by numpy."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recipe_values import evaluate
from unshard import ConversionError
from unshard.convert import names as naming
from unshard.convert.families import ADVICE, FAMILIES, VARIANTS, ExpertLayout
from unshard.convert.names import Renamed
from unshard.convert.recipes import LowRank, Recipe, WeightedSum, shape_of, take
from unshard.read.model_config import ModelConfig
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME

Shape = tuple[int, ...]
EXPERTS, WIDTH, HIDDEN = 3, 5, 4
AT = "model.layers.0.mlp.experts"
MOE = {
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "moe_intermediate_size": WIDTH,
    "hidden_size": HIDDEN,
    "intermediate_size": 99,
}
VL_TEXT = {**MOE, "model_type": "qwen3_vl_moe_text"}
VL_MOE = {"model_type": "qwen3_vl_moe", "text_config": VL_TEXT}
FUSED: dict[str, Shape] = {
    f"{AT}.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN),
    f"{AT}.down_proj": (EXPERTS, HIDDEN, WIDTH),
}
STACKED: dict[str, Shape] = {
    f"{AT}.gate_proj": (EXPERTS, WIDTH, HIDDEN),
    f"{AT}.up_proj": (EXPERTS, WIDTH, HIDDEN),
    f"{AT}.down_proj": (EXPERTS, HIDDEN, WIDTH),
}
PARTS = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
EACH: dict[str, Shape] = {
    f"{AT}.{n}.{part}.weight": shape for n in range(EXPERTS) for part, shape in PARTS.items()
}


def hub_names(tensors: Mapping[str, Recipe], fields: Mapping[str, object] | None) -> Renamed:
    return naming.hub_names(tensors, None if fields is None else ModelConfig(fields))


def names_of_base(
    tensors: Mapping[str, Recipe],
    base: Collection[str],
    fields: Mapping[str, object],
    shapes: Mapping[str, Shape] = MappingProxyType({}),
) -> Renamed:
    return naming.names_of_base(tensors, base, ModelConfig(fields), shapes)


def tensors(shapes: Mapping[str, Shape], dtype: str = "float32") -> dict[str, Recipe]:
    return {
        name: take(
            TensorEntry(name, BY_NAME[dtype], shape, ChunkRows(len(shape)).table((Path("f"),)))
        )
        for name, shape in shapes.items()
    }


def values(shapes: Mapping[str, Shape]) -> dict[str, NDArray[np.generic]]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape) for name, shape in shapes.items()}


def shapes_of(renamed: Renamed) -> dict[str, Shape]:
    return {name: shape_of(recipe) for name, recipe in renamed.value.items()}


def names(renamed: Renamed) -> list[str]:
    return list(renamed.value)


# split


def test_fused_experts_come_one_by_one_in_their_place() -> None:
    shapes = {"model.norm.weight": (HIDDEN,), **FUSED, "lm_head.weight": (7, HIDDEN)}
    renamed = hub_names(tensors(shapes), MOE)
    found = names(renamed)
    assert found[0] == "model.norm.weight"
    assert found[1:4] == [
        f"{AT}.0.gate_proj.weight",
        f"{AT}.0.up_proj.weight",
        f"{AT}.1.gate_proj.weight",
    ]
    assert found[-1] == "lm_head.weight"
    assert shapes_of(renamed) == {
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (7, HIDDEN),
        **EACH,
    }
    assert renamed.notes == ()


def test_an_expert_is_a_slice_of_the_fused_tensor() -> None:
    given_values = values(FUSED)
    renamed = hub_names(tensors(FUSED), MOE).value
    gate_up, down = given_values.values()
    for n in range(EXPERTS):
        for part, expected in {
            "gate_proj": gate_up[n, :WIDTH],
            "up_proj": gate_up[n, WIDTH:],
            "down_proj": down[n],
        }.items():
            found = evaluate(renamed[f"{AT}.{n}.{part}.weight"], given_values)
            assert np.array_equal(found, expected)


def test_stacked_experts_without_a_suffix_come_one_by_one() -> None:
    """lmms-engine's and VeOmni's: a tensor for gate, up and down each."""
    given_values = values(STACKED)
    renamed = hub_names(tensors(STACKED), MOE)
    assert shapes_of(renamed) == EACH
    for name, recipe in renamed.value.items():
        layer, _, rest = name.partition(".experts.")
        number, part, _ = rest.split(".")
        stacked = given_values[f"{layer}.experts.{part}"]
        assert np.array_equal(evaluate(recipe, given_values), stacked[int(number)])


def test_experts_of_a_language_model_inside_are_found() -> None:
    config = {
        "model_type": "internvl",
        "text_config": MOE,
        "vision_config": {"model_type": "internvl_vision", "hidden_size": 77},
    }
    before = {name.replace("model.", "model.language_model.", 1): s for name, s in FUSED.items()}
    before |= {"lm_head.weight": (7, HIDDEN), "model.vision_tower.layers.0.mlp.fc1.weight": (3, 3)}
    after = {name.replace("model.", "language_model.model.", 1): s for name, s in EACH.items()}
    after |= {
        "language_model.lm_head.weight": (7, HIDDEN),
        "vision_tower.layers.0.mlp.fc1.weight": (3, 3),
    }
    assert shapes_of(hub_names(tensors(before), config)) == after
    assert names(hub_names(tensors(after), config)) == list(after)


def test_mixtral_has_names_of_its_own() -> None:
    config = {"model_type": "mixtral", "num_local_experts": EXPERTS, "intermediate_size": WIDTH}
    found = hub_names(
        tensors({**FUSED, "model.layers.0.mlp.gate.weight": (EXPERTS, HIDDEN)}), config
    )
    block = "model.layers.0.block_sparse_moe"
    assert shapes_of(found)[f"{block}.experts.2.w1.weight"] == (WIDTH, HIDDEN)
    assert shapes_of(found)[f"{block}.experts.2.w2.weight"] == (HIDDEN, WIDTH)
    assert shapes_of(found)[f"{block}.gate.weight"] == (EXPERTS, HIDDEN)
    assert len(found.value) == 3 * EXPERTS + 1


def test_experts_that_the_hub_has_fused_stay() -> None:
    for shapes in (
        FUSED,
        {
            f"{AT}.gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDTH),
            f"{AT}.down_proj": (EXPERTS, WIDTH, HIDDEN),
        },
    ):
        assert shapes_of(hub_names(tensors(shapes), VL_MOE)) == shapes


# refused


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((EXPERTS, HIDDEN, 2 * WIDTH), "[3, 2 x 5, 4]"),  # turned
        ((EXPERTS + 1, 2 * WIDTH, HIDDEN), "[3, 2 x 5, 4]"),  # another number of experts
        ((EXPERTS, 2 * WIDTH + 2, HIDDEN), "[3, 2 x 5, 4]"),
        ((EXPERTS, WIDTH, HIDDEN), "[3, 2 x 5, 4]"),  # half of it
    ],
)
def test_experts_that_the_config_does_not_describe_are_refused(shape: Shape, expected: str) -> None:
    with pytest.raises(ConversionError) as caught:
        hub_names(tensors({f"{AT}.gate_up_proj": shape}), MOE)
    assert f"{AT}.gate_up_proj" in caught.value.subject
    assert caught.value.expected == expected
    assert caught.value.found == str(list(shape))


def test_all_problems_are_reported_together() -> None:
    wrong = {f"model.layers.{n}.mlp.experts.down_proj": (EXPERTS, WIDTH, HIDDEN) for n in range(3)}
    with pytest.raises(ConversionError, match=r"3 problems[\s\S]*layers\.2\."):
        hub_names(tensors(wrong), MOE)


def test_an_odd_number_of_rows_has_no_halves() -> None:
    config = {"model_type": "qwen3_moe"}
    with pytest.raises(ConversionError, match="5 rows are not two equal halves"):
        hub_names(tensors({f"{AT}.gate_up_proj": (EXPERTS, 5, HIDDEN)}), config)


def test_without_sizes_in_the_config_the_layout_of_transformers_5_is_meant() -> None:
    assert shapes_of(hub_names(tensors(FUSED), {"model_type": "qwen3_moe"})) == EACH


def test_square_matrices_are_not_ambiguous_where_only_one_layout_was_ever_saved() -> None:
    square = {f"{AT}.gate_up_proj": (EXPERTS, 4, 4), f"{AT}.down_proj": (EXPERTS, 4, 2)}
    config = {**MOE, "moe_intermediate_size": 2}
    assert shapes_of(hub_names(tensors(square), config))[f"{AT}.1.gate_proj.weight"] == (2, 4)


def test_square_matrices_are_refused_where_both_layouts_were_saved() -> None:
    square = {f"{AT}.gate_up_proj": (EXPERTS, 4, 4)}
    text = {**VL_TEXT, "moe_intermediate_size": 2}
    with pytest.raises(ConversionError, match="may be the inputs or the outputs"):
        names_of_base(tensors(square), EACH, {**VL_MOE, "text_config": text})


def test_one_name_for_two_tensors_is_refused() -> None:
    config = {"model_type": "llava"}
    both = {"lm_head.weight": (7, HIDDEN), "language_model.lm_head.weight": (7, HIDDEN)}
    with pytest.raises(ConversionError) as caught:
        hub_names(tensors(both), config)
    for name in both:
        assert name in str(caught.value)


# what is not known


@pytest.mark.parametrize("config", [None, {}, {"model_type": "nobody_knows"}])
def test_names_of_an_unknown_family_stay_and_a_note_says_so(
    config: dict[str, object] | None,
) -> None:
    shapes = {**FUSED, "model.language_model.norm.weight": (HIDDEN,)}
    renamed = hub_names(tensors(shapes), config)
    assert shapes_of(renamed) == shapes
    (note,) = renamed.notes
    assert "unknown" in note
    assert "nobody_knows" in note or not config


def test_a_known_language_model_inside_an_unknown_model_has_its_experts_split() -> None:
    config = {"model_type": "nobody_knows", "text_config": MOE}
    renamed = hub_names(tensors({**FUSED, "model.language_model.norm.weight": (HIDDEN,)}), config)
    assert shapes_of(renamed) == {**EACH, "model.language_model.norm.weight": (HIDDEN,)}
    assert len(renamed.notes) == 1


def test_towers_whose_names_changed_are_reported() -> None:
    config = {"model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"}}
    new = hub_names(tensors({"model.vision_tower.encoder.layers.0.a.weight": (2,)}), config)
    old = hub_names(tensors({"model.vision_tower.vision_model.a.weight": (2,)}), config)
    assert names(old) == ["vision_tower.vision_model.a.weight"]
    assert old.notes == ()
    assert len(new.notes) == 1
    assert "vision_tower.vision_model." in new.notes[0]


# a base


@pytest.mark.parametrize("before", [FUSED, STACKED, EACH])
@pytest.mark.parametrize("after", [FUSED, EACH])
def test_a_base_says_how_experts_lie(before: dict[str, Shape], after: dict[str, Shape]) -> None:
    renamed = names_of_base(tensors(before), set(after), MOE)
    assert shapes_of(renamed) == after


@given(st.sampled_from([FUSED, STACKED, EACH]), st.permutations(range(9)))
def test_split_and_fused_again_the_values_are_the_same(
    shapes: dict[str, Shape], order: list[int]
) -> None:
    given_values = values(shapes)
    split = hub_names(tensors(shapes), MOE).value
    parts = {name: evaluate(recipe, given_values) for name, recipe in split.items()}
    shuffled = {name: EACH[name] for name in (list(EACH)[n] for n in order)}
    fused = names_of_base(tensors(shuffled), set(FUSED), MOE).value
    assert fused.keys() == set(FUSED)
    again = {name: evaluate(recipe, parts) for name, recipe in fused.items()}
    split_again = hub_names(tensors(FUSED), MOE).value
    for name, recipe in split_again.items():
        assert np.array_equal(evaluate(recipe, again), parts[name])


def test_what_the_base_does_not_have_is_named_as_on_the_hub() -> None:
    config = {"model_type": "qwen2_5_vl"}
    shapes = {"model.visual.a.weight": (2,), "model.language_model.extra.weight": (2,)}
    renamed = names_of_base(tensors(shapes), {"visual.a.weight", "missing"}, config)
    assert names(renamed) == ["visual.a.weight", "model.extra.weight"]


def test_experts_that_are_not_all_there_are_not_fused() -> None:
    some = {name: shape for name, shape in EACH.items() if ".1." not in name}
    assert shapes_of(names_of_base(tensors(some), set(FUSED), MOE)) == some


def test_experts_that_differ_are_not_fused() -> None:
    mixed = tensors(EACH) | tensors({f"{AT}.1.up_proj.weight": (WIDTH, HIDDEN)}, "bfloat16")
    with pytest.raises(ConversionError, match="differ in shape or dtype"):
        names_of_base(mixed, set(FUSED), MOE)


def test_means_of_experts_are_fused_and_updates_are_not() -> None:
    mean: dict[str, Recipe] = {
        name: WeightedSum(((1.0, one), (3.0, one))) for name, one in tensors(EACH).items()
    }
    fused = names_of_base(mean, set(FUSED), MOE).value
    assert all(isinstance(recipe, WeightedSum) for recipe in fused.values())
    given_values = values(EACH)
    plain = names_of_base(tensors(EACH), set(FUSED), MOE).value
    for name, recipe in fused.items():
        assert np.allclose(evaluate(recipe, given_values), evaluate(plain[name], given_values))
    name = f"{AT}.0.up_proj.weight"
    low = tensors({"a": (2, HIDDEN), "b": (WIDTH, 2)})
    updated = tensors(EACH)
    updated[name] = LowRank(updated[name], low["a"], low["b"], 1.0)
    with pytest.raises(ConversionError, match="have updates of their own"):
        names_of_base(updated, set(FUSED), MOE)


def test_fused_experts_are_turned_as_the_base_has_them() -> None:
    turned = {name: (e, columns, rows) for name, (e, rows, columns) in FUSED.items()}
    renamed = names_of_base(tensors(FUSED), set(FUSED), VL_MOE, turned)
    assert shapes_of(renamed) == turned
    given_values = values(FUSED)
    for name, recipe in renamed.value.items():
        assert np.array_equal(evaluate(recipe, given_values), given_values[name].swapaxes(1, 2))
    assert shapes_of(names_of_base(tensors(FUSED), set(FUSED), VL_MOE, FUSED)) == FUSED


def test_square_experts_are_turned_with_the_others() -> None:
    before = {f"{AT}.gate_up_proj": (EXPERTS, 4, 4), f"{AT}.down_proj": (EXPERTS, 4, 2)}
    base = {f"{AT}.gate_up_proj": (EXPERTS, 4, 4), f"{AT}.down_proj": (EXPERTS, 2, 4)}
    given_values = values(before)
    renamed = names_of_base(tensors(before), set(base), VL_MOE, base)
    for name, recipe in renamed.value.items():
        assert np.array_equal(evaluate(recipe, given_values), given_values[name].swapaxes(1, 2))


def test_turned_experts_of_an_older_transformers_are_split_if_the_base_has_them_so() -> None:
    before = {
        f"{AT}.gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDTH),
        f"{AT}.down_proj": (EXPERTS, WIDTH, HIDDEN),
    }
    given_values = values(before)
    renamed = names_of_base(tensors(before), set(EACH), VL_MOE)
    assert shapes_of(renamed) == EACH
    up = evaluate(renamed.value[f"{AT}.1.up_proj.weight"], given_values)
    assert np.array_equal(up, given_values[f"{AT}.gate_up_proj"][1, :, WIDTH:].T)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("model.layers.0.a.weight", "model.language_model.layers.0.a.weight"),
        ("layers.0.a.weight", "model.layers.0.a.weight"),
        ("model.layers.0.a.weight", "layers.0.a.weight"),
        ("model.vision_tower.a.weight", "model.vision_tower.vision_model.a.weight"),
        ("model.layers.0.a.weight", "thinker.model.layers.0.a.weight"),
    ],
)
def test_a_base_may_name_the_same_tensors_in_other_ways(name: str, base: str) -> None:
    assert names(names_of_base(tensors({name: (2,)}), {base}, {"model_type": "llama"})) == [base]


# the table


def test_a_model_type_is_in_one_row() -> None:
    listed = " ".join(family.model_types for family in FAMILIES).split()
    assert len(listed) == len(set(listed))
    advised = " ".join(advice.model_types for advice in ADVICE).split()
    assert not {name for name in advised if not name.endswith("vision_model")} - set(listed)


@pytest.mark.parametrize(
    ("model_type", "training", "hub"),
    [
        (family.model_types.split()[0], rename.training, rename.hub)
        for family in FAMILIES
        for rename in family.renames
    ],
)
def test_every_rename_leads_there_and_back(model_type: str, training: str, hub: str) -> None:
    config = {"model_type": model_type}
    whole = training.startswith("^")
    before = f"{training[1:]}end" if whole else f"layers.0{training}"
    after = f"{hub}end" if whole else f"layers.0{hub}"
    shapes = {before: (2,)}
    assert names(hub_names(tensors(shapes), config)) == [after]
    assert names(hub_names(tensors({after: (2,)}), config)) == [after]
    assert names(names_of_base(tensors({after: (2,)}), {before}, config)) == [before]
    assert names(names_of_base(tensors(shapes), {after}, config)) == [after]


def test_every_layout_of_experts_is_split_and_fused() -> None:
    for family in FAMILIES:
        config = {"model_type": family.model_types.split()[0]}
        for experts in family.experts:
            down = {f"model.layers.0.{experts.at}.down_proj": (EXPERTS, HIDDEN, WIDTH)}
            split = hub_names(tensors(down), config)
            if experts.layout is ExpertLayout.FUSED:
                assert list(split.value) == list(down)
                continue
            assert len(split.value) == EXPERTS
            again = names_of_base(tensors(shapes_of(split)), set(down), config)
            assert shapes_of(again) == down


def test_variants_are_not_renames_of_their_own() -> None:
    """They would apply without a base otherwise."""
    assert not {rename for family in FAMILIES for rename in family.renames} & set(VARIANTS)


def test_the_guide_lists_every_type_with_rules() -> None:
    guide = Path(__file__).parent.parent.parent / "docs" / "guides" / "names.md"
    listed = set(re.findall(r"`([\w.]+)`", guide.read_text(encoding="utf-8")))
    ruled = (one.model_types for one in FAMILIES if one.renames or one.experts)
    assert set(" ".join(ruled).split()) <= listed
