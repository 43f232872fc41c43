"""LoRA: which tensors are an adapter's, what they are fused into, and what is refused."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import unshard
from lora_recipes import EXPERTS, Shapes, entry, linear, lora_only, recipes
from sources import Chunk, Sources, Tensor, merged, row_major, tensors_in
from unshard.convert.lora.files import adapter_tensors, completed
from unshard.convert.lora.fuse import fuse, scale_of
from unshard.convert.lora.names import FRONT, split_adapter
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import LowRank, Recipe, Take, pick, stored_dtype, take
from unshard.errors import ConversionError, UsageError
from unshard.plan.layout import lay_out
from unshard.plan.planner import make_plan, table_of
from unshard.read.beside.adapter_config import AdapterConfig
from unshard.tensors.boxes import Box
from unshard.tensors.dtypes import BY_NAME
from unshard.with_notes import WithNotes

Array = NDArray[np.float32]
PLAIN = AdapterConfig(alpha=8.0, rank=2, source="adapter_config.json")


def fused(
    shapes: Shapes,
    config: AdapterConfig = PLAIN,
    alpha: float | None = None,
    base: Mapping[str, Recipe] | None = None,
    types: Collection[str] = (),
) -> WithNotes[dict[str, Recipe]]:
    return fuse(split_adapter(recipes(shapes)), config, alpha, base, types)


def scales(result: WithNotes[dict[str, Recipe]]) -> dict[str, float]:
    return {name: one.scale for name, one in result.value.items() if isinstance(one, LowRank)}


# values: everything through the planner and the executor, against numpy


class Model:
    """Tensors with values, each cut in two along its first dimension."""

    def __init__(self, directory: Path, shapes: Shapes, dtype: str = "float32") -> None:
        self.sources = Sources(directory)
        self.values: dict[str, Array] = {}
        random = np.random.default_rng(0)
        for name, shape in shapes.items():
            values = random.standard_normal(shape).astype(np.float32)
            half = shape[0] // 2
            rest, zeros = shape[1:], tuple(0 for _ in shape[1:])
            boxes = [Box((0, *zeros), (half, *rest)), Box((half, *zeros), (shape[0] - half, *rest))]
            chunks = [Chunk(box, row_major(box.sizes), n) for n, box in enumerate(boxes)]
            kept = tuple(chunk for chunk in chunks if chunk.box.volume)
            self.sources.add(name, Tensor(BY_NAME[dtype], shape, kept), values.view("u4"))
            self.values[name] = values
        self.recipes = {name: take(one) for name, one in self.sources.entries.items()}

    def fuse(self, config: AdapterConfig = PLAIN) -> dict[str, Array]:
        """Fuse, write, and return what was written."""
        self.sources.plan()  # writes the files
        result = fuse(split_adapter(self.recipes), config, None, None)
        outputs = [
            ConvertedTensor(name, stored_dtype(recipe), recipe)
            for name, recipe in result.value.items()
        ]
        written = tensors_in(merged(make_plan(lay_out(outputs, 10**9))))
        return {name: np.frombuffer(data, np.float32) for name, data in written.items()}


def assert_close(found: Array, expected: Array) -> None:
    assert np.abs(found.reshape(expected.shape) - expected).max() < 1e-5


def test_a_linear_gets_scale_times_b_a(tmp_path: Path) -> None:
    model = Model(tmp_path, linear("m.q", 300, 520) | {f"{FRONT}m.norm.weight": (5,)})
    found = model.fuse()
    weight, a, b, norm = model.values.values()
    assert found.keys() == {"m.norm.weight", "m.q.weight"}
    assert_close(found["m.q.weight"], weight + 4 * (b @ a))
    assert_close(found["m.norm.weight"], norm)


def test_an_embedding_gets_the_transposed_update(tmp_path: Path) -> None:
    shapes = {
        f"{FRONT}m.embed.base_layer.weight": (13, 4),
        f"{FRONT}m.embed.lora_embedding_A.default": (2, 13),
        f"{FRONT}m.embed.lora_embedding_B.default": (4, 2),
        f"{FRONT}m.norm.weight": (4,),
    }
    model = Model(tmp_path, shapes)
    found = model.fuse()
    weight, a, b, _ = model.values.values()
    assert_close(found["m.embed.weight"], weight + 4 * (b @ a).T)


def test_a_conv1d_of_gpt2_gets_the_transposed_update(tmp_path: Path) -> None:
    shapes = linear("h.c_attn", 12, 4) | linear("h.c_proj", 4, 4)
    shapes[f"{FRONT}h.c_attn.base_layer.weight"] = (4, 12)
    model = Model(tmp_path, shapes)
    found = model.fuse()  # that c_proj, which is square, is turned too follows from c_attn
    values = list(model.values.values())
    assert_close(found["h.c_attn.weight"], values[0] + 4 * (values[2] @ values[1]).T)
    assert_close(found["h.c_proj.weight"], values[3] + 4 * (values[5] @ values[4]).T)


@pytest.mark.parametrize("is_turned", [False, True])
def test_experts_get_their_own_updates(tmp_path: Path, *, is_turned: bool) -> None:
    """The rule is that of ParamWrapper.get_delta_weight: ranks vary slowly in A, fast in B."""
    shapes: dict[str, tuple[int, ...]] = dict(EXPERTS)
    if is_turned:
        for name in list(shapes)[:2]:
            experts, rows, columns = shapes[name]
            shapes[name] = (experts, columns, rows)
    model = Model(tmp_path, shapes)
    found = model.fuse()
    gate_up, down, *matrices = model.values.values()
    pairs = (("gate_up_proj", gate_up, matrices[:2]), ("down_proj", down, matrices[2:]))
    for name, weight, (a, b) in pairs:
        ranks = a.reshape(3, 2, -1)
        delta = np.einsum("ore,eri->eoi", b.reshape(len(b), 2, 3), ranks)
        expected = weight + 4 * (delta.transpose(0, 2, 1) if is_turned else delta)
        assert_close(found[f"m.experts.{name}"], expected)


def test_an_expert_takes_one_piece_of_every_chunk(tmp_path: Path) -> None:
    """Its columns in B are evenly spaced: they are found, and read, all at once."""
    model = Model(tmp_path, EXPERTS)
    fused = fuse(split_adapter(model.recipes), PLAIN, None, None).value
    expert = pick(fused["m.experts.down_proj"], 1)
    assert isinstance(expert, LowRank)
    assert [len(table_of(one)) for one in (expert.a, expert.b)] == [2, 2]  # each cut in two


def test_an_attention_module_of_torch_is_refused() -> None:
    shapes = {
        f"{FRONT}attn.base_layer.in_proj_weight": (12, 4),
        f"{FRONT}attn.base_layer.out_proj.base_layer.weight": (4, 4),
        f"{FRONT}attn.base_layer.out_proj.lora_A.default.weight": (2, 4),
        f"{FRONT}attn.base_layer.out_proj.lora_B.default.weight": (4, 2),
        f"{FRONT}attn.lora_A.default.weight": (2, 4),
        f"{FRONT}attn.lora_B.default.weight": (12, 2),
    }
    with pytest.raises(ConversionError, match="attn belongs to a MultiheadAttention"):
        fused(shapes)
    split = split_adapter(recipes(shapes))
    assert completed(split, AdapterConfig()).target_modules == ("attn", "out_proj")


# names


def test_names_lose_what_peft_added_and_keep_their_order() -> None:
    shapes = {
        f"{FRONT}model.embed.weight": (9, 5),
        **linear("model.layers.0.q"),
        f"{FRONT}model.layers.0.q.base_layer.bias": (6,),
        f"{FRONT}model.norm.weight": (5,),
    }
    result = fused(shapes)
    assert list(result.value) == [
        "model.embed.weight",
        "model.layers.0.q.weight",
        "model.layers.0.q.bias",
        "model.norm.weight",
    ]
    assert len(scales(result)) == 1
    assert result.notes == ()


def test_an_adapter_injected_into_a_model_has_no_front() -> None:
    shapes = {name.removeprefix(FRONT): shape for name, shape in linear("model.q").items()}
    assert list(fused(shapes).value) == ["model.q.weight"]


def test_what_is_outside_of_peft_stays() -> None:
    shapes = {f"pretrained_model.{name}": shape for name, shape in linear("model.q").items()}
    result = fused(shapes | {"v_head.summary.weight": (1, 5)})
    assert list(result.value) == ["pretrained_model.model.q.weight", "v_head.summary.weight"]


def test_of_a_module_that_was_trained_whole_the_copy_counts() -> None:
    shapes = {
        **linear("model.q"),
        f"{FRONT}score.original_module.weight": (1, 5),
        f"{FRONT}score.modules_to_save.default.weight": (1, 5),
    }
    tensors = recipes(shapes)
    result = fuse(split_adapter(tensors), PLAIN, None, None)
    assert result.value["score.weight"] is tensors[f"{FRONT}score.modules_to_save.default.weight"]
    assert list(result.value) == ["model.q.weight", "score.weight"]


def test_a_model_without_an_adapter_is_left_alone() -> None:
    tensors = recipes({"model.base_layer.weight": (2, 2), "model.original_module.weight": (1,)})
    split = split_adapter(tensors)
    assert split.base == tensors
    assert not split.pairs
    assert not split.adapter_only


segments = st.from_regex(r"[a-z]{1,3}_?[0-9]?", fullmatch=True).filter(lambda s: s != "lora_")
module_names = st.lists(segments, min_size=1, max_size=3).map(".".join)


@given(
    st.lists(module_names, min_size=1, max_size=5, unique=True),
    st.data(),
    st.sampled_from(["", FRONT, f"pretrained_model.{FRONT}"]),
    st.sampled_from(["", ".default", ".actor"]),
)
def test_whatever_the_names_and_their_order_every_pair_is_used(
    modules: list[str], data: st.DataObject, front: str, adapter: str
) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for at, module in enumerate(modules):
        shapes |= linear(module, out=at + 2, inside=at + 7, rank=at + 1, adapter=adapter)
    names = data.draw(st.permutations(list(shapes)))
    tensors = recipes({front + name.removeprefix(FRONT): shapes[name] for name in names})
    result = fuse(split_adapter(tensors), AdapterConfig(), 3.0, None)
    outside = front.removesuffix(FRONT)
    assert scales(result) == {
        f"{outside}{module}.weight": 3.0 / (at + 1) for at, module in enumerate(modules)
    }
    assert len(scales(result)) == len(modules) == len(result.value)


# scales


@pytest.mark.parametrize(
    ("config", "alpha", "expected"),
    [
        (AdapterConfig(alpha=8.0), None, 4.0),
        (AdapterConfig(alpha=3.0, rank=2), None, 1.5),
        (AdapterConfig(alpha=8.0, use_rslora=True), None, 8 / math.sqrt(2)),
        (AdapterConfig(), 5.0, 2.5),
        (AdapterConfig(alpha=8.0, use_rslora=True), 2.0, 2 / math.sqrt(2)),
    ],
)
def test_a_pair_counts_alpha_by_rank(
    config: AdapterConfig, alpha: float | None, expected: float
) -> None:
    assert scales(fused(linear("m.q"), config, alpha)) == {"m.q.weight": expected}


def test_patterns_give_modules_ranks_and_alphas_of_their_own() -> None:
    config = AdapterConfig(
        alpha=8.0,
        rank=2,
        rank_pattern={"k": 4, r"layers\.1\.v": 1},
        alpha_pattern={"^m.layers.1.q": 6.0, "k|v": 12.0},
    )
    shapes = (
        linear("m.layers.0.q")
        | linear("m.layers.1.q")
        | linear("m.layers.0.k", rank=4)
        | linear("m.layers.1.v", rank=1)
        | linear("m.layers.1.qk")
    )
    assert scales(fused(shapes, config)) == {
        "m.layers.0.q.weight": 4.0,
        "m.layers.1.q.weight": 3.0,
        "m.layers.0.k.weight": 3.0,
        "m.layers.1.v.weight": 12.0,
        "m.layers.1.qk.weight": 4.0,
    }


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (AdapterConfig(), "neither lora_train_meta.json nor adapter_config.json"),
        (AdapterConfig(rank=2, fields={"lora_alpha": 0}, source="meta"), "meta has 0"),
        (AdapterConfig(rank=2, source="meta"), "meta has none"),
    ],
)
def test_an_alpha_that_is_not_recorded_is_asked_for(config: AdapterConfig, found: str) -> None:
    with pytest.raises(ConversionError, match="alpha is unknown") as caught:
        fused(linear("m.q"), config)
    assert caught.value.found == found
    assert "lora_alpha=…" in caught.value.hint


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, math.inf])
def test_an_alpha_of_the_user_must_be_positive(alpha: float) -> None:
    with pytest.raises(UsageError, match="lora_alpha="):
        fused(linear("m.q"), AdapterConfig(), alpha)


def test_an_alpha_of_the_user_that_differs_is_reported() -> None:
    assert fused(linear("m.q"), PLAIN, 8.0).notes == ()
    (note,) = fused(linear("m.q"), PLAIN, 6.0).notes
    assert note == "--lora-alpha 6 replaces 8 in adapter_config.json"


def test_a_rank_that_is_not_the_one_written_down_is_refused() -> None:
    with pytest.raises(
        ConversionError, match=r"m\.q does not have the rank[\s\S]*rank 2\n[\s\S]*rank 3"
    ):
        fused(linear("m.q", rank=3) | linear("m.k"))


ALPHAS = AdapterConfig(alpha=8.0, rank=2, source="adapter_config.json")


@pytest.mark.parametrize(
    "patterns",
    [{"q": 4.0, "m.q": 16.0}, {r".*\.q": 16.0, "q": 4.0}, {"k": 1.0, "m.q": 4.0, "q": 0.0}],
)
def test_two_alphas_of_one_pair_are_refused_with_both(patterns: dict[str, float]) -> None:
    """PEFT takes the first in the order of training, and sorts the keys when it saves them."""
    config = replace(ALPHAS, alpha_pattern=patterns)
    *_, first, second = patterns
    with pytest.raises(ConversionError) as error:
        fused(linear("m.q") | linear("m.v"), config)
    assert "m.q" in str(error.value)
    for key in (first, second):
        assert f"{key}: {patterns[key]:g}" in str(error.value)
    with pytest.raises(ConversionError, match="alpha_pattern"):
        completed(split_adapter(recipes(linear("m.q"))), replace(config, target_modules=("q",)))


def test_alphas_of_one_pair_that_agree_are_one() -> None:
    config = replace(ALPHAS, alpha_pattern={"q": 4.0, "m.q": 4.0, "v": 1.0})
    assert scales(fused(linear("m.q"), config)) == {"m.q.weight": 2.0}


@pytest.mark.parametrize("rank", [3, 5])
@pytest.mark.parametrize("keys", [("q", "m.q"), ("m.q", "q")])
def test_of_two_ranks_of_one_pair_the_matrices_show_which(rank: int, keys: tuple[str, str]) -> None:
    config = replace(ALPHAS, rank_pattern=dict(zip(keys, (3, 5), strict=True)))
    assert scales(fused(linear("m.q", rank=rank), config)) == {"m.q.weight": 8.0 / rank}
    with pytest.raises(ConversionError, match=r"rank 3 or 5\n.*rank 2"):
        fused(linear("m.q"), config)


@pytest.mark.parametrize(
    "targets", [("k_proj", "v_proj"), "all.*k_proj", r".*\.self_attn\.(k|v)_proj", ("layers.3.q",)]
)
def test_a_config_that_names_no_pair_is_of_another_run(targets: tuple[str, ...] | str) -> None:
    config = replace(ALPHAS, target_modules=targets)
    for shapes in (linear("m.q_proj"), linear("m.0.q_proj") | linear("m.1.up_proj")):
        with pytest.raises(ConversionError, match=r"adapter_config\.json[\s\S]*another run"):
            fused(shapes, config)
        with pytest.raises(ConversionError, match=r"adapter_config\.json[\s\S]*another run"):
            completed(split_adapter(recipes(shapes)), config)


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        "All-Linear",
        ("q_proj", "other"),
        "q_proj",
        r".*\.q_proj",
        r"(?!k).*q_proj",
        ("m.0.q_proj",),
        (),
    ],
)
def test_a_config_that_names_a_pair_or_may_do_so_is_taken(targets: tuple[str, ...] | str) -> None:
    config = replace(ALPHAS, target_modules=targets)
    assert len(scales(fused(linear("m.0.q_proj") | linear("m.1.up_proj"), config))) == 2
    parameters = replace(config, target_modules=("k_proj",), target_parameters=("x.q_proj",))
    assert len(scales(fused(linear("m.q_proj"), parameters))) == 1


@pytest.mark.parametrize("pattern", ["(a+)+b", "(" * 300, "[", "a{1000000000}{2}"])
def test_a_pattern_that_is_not_known_is_refused(pattern: str) -> None:
    config = AdapterConfig(alpha=8.0, alpha_pattern={pattern: 2.0})
    with pytest.raises(ConversionError, match="cannot be matched safely"):
        fused(linear("m.q"), config)


def test_a_pattern_that_re_matches_for_hours_is_followed() -> None:
    config = AdapterConfig(alpha=8.0, alpha_pattern={"q*q*q*q*x": 2.0, "q*": 4.0})
    name = "m." + "q" * 1000
    assert scale_of(name, 2, config, 8.0) == 2.0


def test_more_patterns_than_any_adapter_has_are_refused() -> None:
    config = AdapterConfig(alpha=8.0, alpha_pattern={str(n): 2.0 for n in range(10_001)})
    with pytest.raises(ConversionError, match="10001 patterns"):
        fused(linear("m.q"), config)


def test_an_alpha_of_0_in_a_pattern_is_refused() -> None:
    with pytest.raises(ConversionError, match="alpha_pattern has 0"):
        fused(linear("m.q"), AdapterConfig(alpha=8.0, alpha_pattern={"q": 0.0}))


# a base from elsewhere


BASE = {"model.embed.weight": (9, 5), "model.q.weight": (6, 5), "model.k.weight": (6, 5)}


def test_an_adapter_alone_is_fused_into_a_base_in_its_order() -> None:
    result = fused(lora_only("model.k", "model.q"), base=recipes(BASE))
    assert list(result.value) == list(BASE)
    assert scales(result) == {"model.q.weight": 4.0, "model.k.weight": 4.0}
    assert len(scales(result)) == 2


def test_whole_tensors_of_an_adapter_take_the_place_of_the_bases() -> None:
    shapes = lora_only("model.q") | {
        f"{FRONT}model.embed.weight": (11, 5),
        f"{FRONT}score.weight": (1, 5),
        f"{FRONT}model.q.base_layer.bias": (6,),
    }
    tensors = recipes(shapes)
    result = fuse(split_adapter(tensors), PLAIN, None, recipes(BASE))
    assert list(result.value) == [*BASE, "score.weight", "model.q.bias"]
    assert result.value["model.embed.weight"] is tensors[f"{FRONT}model.embed.weight"]
    assert result.notes == ("the checkpoint replaces 3 tensors of the base",)


def test_a_pair_that_the_base_does_not_know_is_an_error() -> None:
    with pytest.raises(ConversionError, match=r"pair layers\.0\.q is missing"):
        fused(lora_only("model.q", "layers.0.q"), base=recipes(BASE))


def test_a_base_that_is_not_needed_is_not_used() -> None:
    result = fused(linear("model.q"), base=recipes(BASE))
    assert list(result.value) == ["model.q.weight"]
    assert "--base is not used" in result.notes[0]


def test_modules_trained_whole_that_were_not_saved_are_missed() -> None:
    config = AdapterConfig(alpha=8.0, modules_to_save=("score",), source="adapter_config.json")
    with pytest.raises(ConversionError, match=r"trained whole[\s\S]*score \(modules_to_save"):
        fused(lora_only("model.q"), config, base=recipes(BASE))


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_adapter_that_changed_its_base_is_not_put_on_the_original(start: str) -> None:
    config = AdapterConfig(alpha=8.0, fields={"init_lora_weights": start})
    with pytest.raises(ConversionError, match=f"initialised with {start}"):
        fused(lora_only("model.q"), config, base=recipes(BASE))
    assert len(scales(fused(linear("model.q"), config))) == 1


# refusals


def q(**extra: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A pair, and more tensors of its module."""
    more = {f"{FRONT}m.q.{name.replace('__', '.')}": shape for name, shape in extra.items()}
    return linear("m.q") | more


REFUSED = {
    "DoRA": q(lora_magnitude_vector__default__weight=(6,)),
    "DoRA, old": q(lora_magnitude_vector__default=(6,)),
    "lora_bias": q(lora_B__default__bias=(6,)),
    "not plain LoRA": q(lora_diag__default=(2,)),
    "not plain LoRA (AdaLoRA)": {f"{FRONT}m.q.lora_A.default": (2, 5), **linear("m.k")},
    "trained tokens": q() | {f"{FRONT}embed.token_adapter.base_layer.weight": (4, 5)},
    "LoRA inside a module": q() | {f"{FRONT}s.modules_to_save.default.lora_A.default.weight": (2,)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_tensors_of_other_adapters_are_refused_by_name(reason: str) -> None:
    word = re.split(r"[,(]", reason, maxsplit=1)[0].strip()
    with pytest.raises(ConversionError, match=rf"1 tensor \(\S+ …\)[\s\S]*{word}"):
        split_adapter(recipes(REFUSED[reason]))


def test_other_adapters_than_lora_are_refused() -> None:
    with pytest.raises(ConversionError, match="there is no LoRA pair"):
        split_adapter(recipes({f"{FRONT}m.q.ia3_l.default": (5,)}))


def test_several_adapters_are_listed() -> None:
    with pytest.raises(ConversionError, match="2 adapters") as caught:
        split_adapter(recipes(linear("m.q") | linear("m.k", adapter=".ref")))
    assert caught.value.found == "default, ref"


@pytest.mark.parametrize("side", ["A", "B"])
def test_matrices_without_a_partner_are_counted(side: str) -> None:
    shapes = linear("m.q") | linear("m.k") | linear("m.v")
    for module in ("q", "v"):
        del shapes[f"{FRONT}m.{module}.lora_{side}.default.weight"]
    with pytest.raises(ConversionError, match=r"3 in all \(2 problems\)[\s\S]*is incomplete"):
        split_adapter(recipes(shapes))


def test_a_matrix_that_is_there_twice_is_refused() -> None:
    shapes = linear("m.q") | linear("m.q", adapter="")
    with pytest.raises(ConversionError, match="are one matrix"):
        split_adapter(recipes(shapes))


def test_a_pair_without_its_weight_is_named() -> None:
    shapes = linear("m.q") | linear("m.k")
    del shapes[f"{FRONT}m.q.base_layer.weight"]
    with pytest.raises(ConversionError, match=r"pair m\.q is missing"):
        fused(shapes)


def test_an_original_without_its_trained_copy_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"score\.original_module\.weight: the trained copy"):
        split_adapter(recipes(q() | {f"{FRONT}score.original_module.weight": (1, 5)}))


def test_names_that_become_one_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"the same name without PEFT's parts, m\.q\.weight"):
        split_adapter(recipes(q(weight=(6, 5))))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base_layer.weight": (6, 4)}, "does not fit its weight"),
        ({"base_layer.weight": (15, 1)}, "is quantised"),
        ({"base_layer.weight": (6,)}, "is missing"),
        ({"base_layer.weight": (6, 5, 3, 3)}, "does not fit its weight"),
        ({"lora_A.default.weight": (3, 5)}, "do not fit each other"),
        ({"lora_A.default.weight": (0,)}, "not a pair of matrices"),
        ({"lora_A.default.weight": (0, 5), "lora_B.default.weight": (6, 0)}, "fit each other"),
        ({"lora_A.default.weight": (2, 5, 3, 3)}, "not a pair of matrices"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    changed: dict[str, tuple[int, ...]], message: str
) -> None:
    shapes = linear("m.q") | linear("m.k")
    shapes |= {f"{FRONT}m.q.{name}": shape for name, shape in changed.items()}
    with pytest.raises(ConversionError, match=message):
        fused(shapes)


def test_quantised_weights_of_any_shapes_are_one_fault(tmp_path: Path) -> None:
    """QLoRA's weights are packed, each to its own length."""
    stored: dict[str, torch.Tensor] = {}
    for layer in range(9):
        path = f"base_model.model.layers.{layer}.q_proj"
        stored[f"{path}.base_layer.weight"] = torch.zeros(layer + 3, 1, dtype=torch.uint8)
        stored[f"{path}.lora_A.default.weight"] = torch.zeros(2, 8)
        stored[f"{path}.lora_B.default.weight"] = torch.zeros(8, 2)
    torch.save(stored, tmp_path / "model.pt")
    with pytest.raises(ConversionError, match="9 problems") as error:
        unshard.merge(tmp_path / "model.pt", dry_run=True, lora_alpha=4.0, config="none")
    assert str(error.value).count("is quantised") == 1
    assert "and 8 more tensors: layers.1.q_proj.weight" in str(error.value)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float8_e4m3fn"])
def test_a_quantised_weight_is_refused(dtype: str) -> None:
    tensors = recipes(linear("m.q"))
    name = f"{FRONT}m.q.base_layer.weight"
    tensors[name] = take(entry(name, (6, 5), dtype))
    with pytest.raises(ConversionError, match=rf"m\.q\.weight: is quantised[\s\S]*{dtype}"):
        fuse(split_adapter(tensors), PLAIN, None, None)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"peft_type": "ADALORA"}, "ADALORA"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal LoRA"),
    ],
)
def test_variants_that_only_the_config_names_are_refused(
    fields: dict[str, object], name: str
) -> None:
    with pytest.raises(ConversionError, match=f"the adapter is {name}, which cannot be fused"):
        fused(linear("m.q"), AdapterConfig(alpha=8.0, fields=fields))


# square matrices, which do not tell how they are stored


@pytest.mark.parametrize(
    ("config", "is_turned"),
    [(PLAIN, False), (AdapterConfig(alpha=8.0, fan_in_fan_out=True), True)],
)
def test_where_all_are_square_the_config_tells(config: AdapterConfig, *, is_turned: bool) -> None:
    result = fused(linear("m.q", 5, 5), config, 8.0)
    update = result.value["m.q.weight"]
    assert isinstance(update, LowRank)
    assert isinstance(update.a, Take)
    assert update.a.entry.fqn.endswith("lora_B.default.weight" if is_turned else "A.default.weight")


def turned(result: WithNotes[dict[str, Recipe]]) -> dict[str, bool]:
    """Whether each update is transposed before it is added: b, not a, is its left factor."""
    updates = {name: one for name, one in result.value.items() if isinstance(one, LowRank)}
    return {
        name: ".lora_B." in one.a.entry.fqn
        for name, one in updates.items()
        if isinstance(one.a, Take)
    }


FALSE = AdapterConfig(alpha=8.0, rank=2, fan_in_fan_out=False, source="adapter_config.json")
TRUE = replace(FALSE, fan_in_fan_out=True)
HEAD = linear("lm_head", 50, 4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "bert"])
def test_a_linear_is_not_stored_turned_whatever_the_config_says(family: str) -> None:
    """PEFT resets fan_in_fan_out for a Linear."""
    assert not turned(fused(linear("m.q_proj", 5, 5), TRUE, types=["", family]))["m.q_proj.weight"]


@pytest.mark.parametrize("family", ["gpt2", "openai-gpt", "imagegpt", "decision_transformer"])
@pytest.mark.parametrize("config", [PLAIN, FALSE, TRUE])
@pytest.mark.parametrize("more", [{}, HEAD, linear("h.embed_state", 4, 17)])
def test_a_square_conv1d_of_a_known_family_is_stored_turned(
    family: str, config: AdapterConfig, more: Shapes
) -> None:
    result = fused({**linear("h.c_proj", 4, 4), **more}, config, types=["", family])
    assert turned(result)["h.c_proj.weight"]
    assert sum(turned(result).values()) == 1


@pytest.mark.parametrize("family", ["gpt_bigcode", ""])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_bias_shows_how_matrices_are_stored(family: str, *, is_turned: bool) -> None:
    """GPTBigCode names its Linear modules as GPT-2 does its Conv1D; neither c_fc has an adapter."""
    shapes = linear("h.c_proj", 4, 4) | HEAD
    shapes[f"{FRONT}h.c_fc.weight"] = (4, 16) if is_turned else (16, 4)
    shapes[f"{FRONT}h.c_fc.bias"] = (16,)
    expected = {"h.c_proj.weight": is_turned, "lm_head.weight": False}
    assert turned(fused(shapes, FALSE, types=[family])) == expected


def test_a_linear_next_to_conv1d_keeps_its_order() -> None:
    """A ViT that is the encoder of a GPT-2, whose c_proj was adapted last."""
    shapes = linear("encoder.query", 4, 4) | linear("decoder.c_attn", 12, 4)
    shapes[f"{FRONT}decoder.c_attn.base_layer.weight"] = (4, 12)
    shapes |= linear("decoder.c_proj", 4, 4) | linear("encoder.dense", 8, 4)
    found = turned(fused(shapes, TRUE, types=["vit", "gpt2"]))
    assert [name for name, one in found.items() if one] == [
        "decoder.c_attn.weight",
        "decoder.c_proj.weight",
    ]


@pytest.mark.parametrize("more", [{}, HEAD, linear("m.query", 4, 9)])
def test_a_conv1d_that_nothing_shows_is_refused(more: Shapes) -> None:
    with pytest.raises(ConversionError, match=r"h\.c_proj may belong to[\s\S]*\(out, in\) or as"):
        fused({**linear("h.c_proj", 4, 4), **more}, FALSE, types=["unheard_of"])


def test_a_linear_that_nothing_shows_next_to_conv1d_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"m\.query may belong to"):
        fused(linear("m.query", 4, 4) | linear("h.c_proj", 4, 4), TRUE, types=["gpt2"])


def test_a_head_has_no_vote() -> None:
    shapes = linear("m.mix", 4, 4) | HEAD
    assert turned(fused(shapes, TRUE)) == {"m.mix.weight": True, "lm_head.weight": False}


def test_where_others_are_stored_both_ways_a_square_one_is_refused() -> None:
    shapes = linear("m.q", 5, 5) | linear("m.k", 6, 5) | linear("m.v", 6, 5)
    shapes[f"{FRONT}m.v.base_layer.weight"] = (5, 6)
    with pytest.raises(ConversionError, match=r"m\.q may belong to[\s\S]*\(out, in\) or as"):
        fused(shapes)


def test_experts_that_could_be_stored_both_ways_are_refused() -> None:
    shapes = {
        f"{FRONT}m.experts.base_layer.down_proj": (3, 7, 7),
        f"{FRONT}m.experts.lora_A.default.weight": (6, 7),
        f"{FRONT}m.experts.lora_B.default.weight": (7, 6),
    }
    with pytest.raises(
        ConversionError, match=r"m\.experts may belong to m\.experts\.down_proj, st"
    ):
        fused(shapes)


def test_experts_that_could_be_two_parameters_are_refused() -> None:
    shapes = {
        f"{FRONT}m.experts.base_layer.gate_proj": (3, 8, 7),
        f"{FRONT}m.experts.base_layer.up_proj": (3, 8, 7),
        f"{FRONT}m.experts.lora_A.default.weight": (6, 7),
        f"{FRONT}m.experts.lora_B.default.weight": (8, 6),
    }
    with pytest.raises(ConversionError, match=r"gate_proj or m\.experts\.up_proj"):
        fused(shapes)


def test_what_is_square_among_experts_follows_from_what_is_not() -> None:
    """gpt-oss: down_proj is square, gate_up_proj is (experts, in, out)."""
    shapes = dict(EXPERTS)
    shapes[f"{FRONT}m.experts.base_layer.base_layer.gate_up_proj"] = (3, 7, 10)
    shapes[f"{FRONT}m.experts.base_layer.base_layer.down_proj"] = (3, 7, 7)
    shapes[f"{FRONT}m.experts.lora_A.default.weight"] = (6, 7)
    assert len(scales(fused(shapes))) == 2


def test_a_fused_embedding_says_that_ties_end() -> None:
    shapes = {
        f"{FRONT}m.embed.base_layer.weight": (13, 4),
        f"{FRONT}m.embed.lora_embedding_A.default": (2, 13),
        f"{FRONT}m.embed.lora_embedding_B.default": (4, 2),
        f"{FRONT}m.norm.weight": (4,),
        f"{FRONT}m.lm_head.weight": (13, 4),
    }
    (note,) = fused(shapes).notes
    assert "m.embed.weight" in note
    assert "tie_word_embeddings" in note


# an adapter's own files


def test_an_adapter_is_written_under_the_names_of_pefts_files() -> None:
    shapes = {
        **linear("m.q"),
        f"{FRONT}m.embed.base_layer.weight": (13, 5),
        f"{FRONT}m.embed.lora_embedding_A.default": (2, 13),
        f"{FRONT}m.embed.lora_embedding_B.default": (5, 2),
        f"{FRONT}score.original_module.weight": (1, 5),
        f"{FRONT}score.modules_to_save.default.weight": (1, 5),
    }
    assert list(adapter_tensors(split_adapter(recipes(shapes)))) == [
        f"{FRONT}m.q.lora_A.weight",
        f"{FRONT}m.q.lora_B.weight",
        f"{FRONT}m.embed.lora_embedding_A",
        f"{FRONT}m.embed.lora_embedding_B",
        f"{FRONT}score.weight",
    ]


def test_an_adapter_alone_is_written_as_it_is() -> None:
    shapes = {
        f"{FRONT}m.q.lora_A.weight": (2, 5),
        f"{FRONT}m.q.lora_B.weight": (6, 2),
        f"{FRONT}m.q.base_layer.bias": (6,),
        f"{FRONT}score.weight": (1, 5),
    }
    tensors = recipes(shapes)
    assert adapter_tensors(split_adapter(tensors)) == tensors
