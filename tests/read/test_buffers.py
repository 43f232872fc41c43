"""Plain tensors that differ between ranks: which are buffers, and so the first rank's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unshard
from ranks import as_rank, assert_same, merged, save_ranks, some_tensors
from unshard import NotMergeableError
from unshard.keywords import MergeKeywords

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

Tensors = dict[str, torch.Tensor]


def per_rank(**shapes: tuple[int, ...]) -> list[Tensors]:
    """Return plain tensors, other values on each of two ranks."""
    generator = torch.Generator().manual_seed(1)
    each = range(2)
    return [{n: torch.rand(s, generator=generator) for n, s in shapes.items()} for _ in each]


def save(tmp_path: Path, plain: list[Tensors], **sharded: torch.Tensor) -> Path:
    return save_ranks(tmp_path / "ckpt", some_tensors() | sharded, 2, plain=plain)


def assert_first(tmp_path: Path, plain: list[Tensors], **sharded: torch.Tensor) -> None:
    """Assert that both with and without `assume_dim0`, a merge has what the first rank has."""
    checkpoint = save(tmp_path, plain, **sharded)
    for assume_dim0 in (False, True):
        output = tmp_path / f"out-{assume_dim0}"
        report = unshard.merge(checkpoint, output, assume_dim0=assume_dim0, config="none")
        assert_same(merged(output), some_tensors() | sharded | plain[0])
        (note,) = (one for one in report.warnings if "plain" in one or "buffer" in one)
        assert note.endswith(f"are taken: {', '.join(plain[0])}")


def assert_refused(tmp_path: Path, plain: list[Tensors], **sharded: torch.Tensor) -> None:
    """Assert that a merge refuses each of the tensors, or joins it if it is told to."""
    checkpoint = save(tmp_path, plain, **sharded)
    with pytest.raises(NotMergeableError) as error:
        unshard.merge(checkpoint, tmp_path / "out")
    assert all(name in str(error.value) for name in plain[0])
    if all(one.ndim for one in plain[0].values()):
        unshard.merge(checkpoint, tmp_path / "out", assume_dim0=True, config="none")
        joined = {name: torch.cat([part[name] for part in plain]) for name in plain[0]}
        assert_same(merged(tmp_path / "out"), some_tensors() | sharded | joined)


@pytest.mark.parametrize(
    "name",
    """norm.running_mean layers.3.stats.running_std q.input_quantizer._amax fp8_amax_history_input
    mlp.shared_expert.up_proj.input_amax act.min_val codebook.cluster_usage codebook.embed_sum
    net.parametrizations.weight.0._v running_var model.rotary_emb.inv_freq
    rotary_emb.original_inv_freq""".split(),
)
def test_the_first_rank_has_the_buffer(tmp_path: Path, name: str) -> None:
    assert_first(tmp_path, per_rank(**{name: (4,)}))


def test_scalars_and_counters_are_buffers(tmp_path: Path) -> None:
    plain: list[Tensors] = [
        {"steps": torch.tensor(n), "seen": torch.tensor([n]), "t": torch.tensor(n / 2)}
        for n in (3, 4)
    ]
    assert_first(tmp_path, plain)


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("fc.weight_v", "fc.weight_orig"),
        ("act.scale", "act.observer_enabled"),
        ("vq.codebook", "vq.cluster_size"),
        ("vq._ema_w", "vq._ema_cluster_size"),
        ("vq.embedding", "vq.ema_cluster_size"),
    ],
)
def test_what_is_beside_a_name_decides(tmp_path: Path, name: str, beside: str) -> None:
    other = f"{name}.{beside.rpartition('.')[2]}"  # in another module
    assert_first(tmp_path / "a", per_rank(**{name: (4, 3)}), **{beside: torch.ones(4)})
    assert_refused(tmp_path / "b", per_rank(**{name: (4, 3)}), **{other: torch.ones(4)})


@pytest.mark.parametrize(
    "name",
    """mlp.experts.0.norm.running_mean mlp.experts.running_var block.local_experts.1.input_amax
    moe.expert_7.codebook.embed_avg Experts.cluster_size experts.weight norm.weight
    fc.weight_g fc.weight_v codebook.weight router.e_score_correction_bias act.scale
    running_mean.weight act.alpha""".split(),
)
def test_what_may_be_a_parameter_of_each_rank_is_refused(tmp_path: Path, name: str) -> None:
    assert_refused(tmp_path, per_rank(**{name: (4, 3)}))


def test_scalars_of_experts_are_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, per_rank(**{"mlp.experts.2.logit_scale": ()}))


def test_statistics_of_a_part_of_the_channels_are_refused(tmp_path: Path) -> None:
    plain = per_rank(**{"bn.running_mean": (4,), "bn.running_var": (4,)})
    assert_refused(tmp_path, plain, **{"bn.weight": torch.rand(8)})


def test_buffers_of_uneven_sizes_are_refused(tmp_path: Path) -> None:
    plain: list[Tensors] = [{"bn.running_mean": torch.rand(n)} for n in (3, 2)]
    assert_refused(tmp_path, plain)


@pytest.mark.parametrize("name", ["bn.running_mean", "counter"])
def test_where_all_tensors_are_plain_nothing_is_a_buffer(tmp_path: Path, name: str) -> None:
    plain = per_rank(**{name: (4,), "w": (4, 3)})
    checkpoint = save_ranks(tmp_path / "ckpt", {}, 2, plain=plain)
    with pytest.raises(NotMergeableError, match=f"tensor {name}"):
        unshard.merge(checkpoint, tmp_path / "out")
    unshard.merge(checkpoint, tmp_path / "out", assume_dim0=True, config="none")
    joined = {one: torch.cat([part[one] for part in plain]) for one in plain[0]}
    assert_same(merged(tmp_path / "out"), joined)


def test_buffers_make_no_other_tensor_ambiguous(tmp_path: Path) -> None:
    equal = {"inv_freq": torch.ones(4)}
    plain = [part | equal for part in per_rank(**{"bn.running_mean": (4,)})]
    unshard.merge(save(tmp_path, plain), tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors() | plain[0])


class TestSelected:
    """--include and --exclude come before the decision, by the names of the output."""

    def test_what_is_left_out_need_not_be_mergeable(self, tmp_path: Path) -> None:
        names = {"mlp.experts.0.w": (4, 3), "bn.running_mean": (4,), "steps": ()}
        equal = {"inv_freq": torch.ones(4)}
        plain = [part | equal for part in per_rank(**names)]
        report = unshard.merge(
            save(tmp_path, plain), tmp_path / "out", exclude=r"experts|running", config="none"
        )
        kept = {name: plain[0][name] for name in ("steps", "inv_freq")}
        assert_same(merged(tmp_path / "out"), some_tensors() | kept)
        (note,) = (one for one in report.warnings if "plain" in one or "buffer" in one)
        assert note.startswith("1 buffer")
        assert note.endswith("are taken: steps")

    def test_what_is_included_must_be(self, tmp_path: Path) -> None:
        plain = per_rank(**{"mlp.experts.0.w": (4, 3), "w": (4,)})
        checkpoint = save(tmp_path, plain)
        with pytest.raises(NotMergeableError, match=r"^tensor w: a plain tensor that differs"):
            unshard.merge(checkpoint, tmp_path / "out", include="^(w|lm_head)", config="none")
        unshard.merge(checkpoint, tmp_path / "out", include="^(norm|lm_head)", config="none")
        assert {*merged(tmp_path / "out")} == {"lm_head.weight"}

    @pytest.mark.parametrize("options", [{"include": "^ones"}, {"exclude": "^w$"}])
    def test_where_all_tensors_are_plain_an_equal_one_may_still_be_a_part(
        self, tmp_path: Path, options: MergeKeywords
    ) -> None:
        options = {**options, "config": "none"}
        plain = [part | {"ones": torch.ones(4)} for part in per_rank(w=(4, 3))]
        checkpoint = save_ranks(tmp_path / "ckpt", {}, 2, plain=plain)
        with pytest.raises(NotMergeableError, match=r"^tensor ones: a plain tensor that may be"):
            unshard.merge(checkpoint, tmp_path / "out", **options)

    @pytest.mark.parametrize("name", ["mlp.experts.bias", "moe.expert_0.norm.weight"])
    def test_parts_of_experts_may_be_equal(self, tmp_path: Path, name: str) -> None:
        plain = [part | {name: torch.ones(4)} for part in per_rank(**{"mlp.experts.w": (4, 3)})]
        checkpoint = save(tmp_path, plain)
        with pytest.raises(NotMergeableError, match=f"^tensor {name}: a plain tensor that may be"):
            unshard.merge(checkpoint, tmp_path / "out", exclude=r"experts\.w", config="none")
        unshard.merge(checkpoint, tmp_path / "out", exclude="expert", config="none")
        assert_same(merged(tmp_path / "out"), some_tensors())

    def test_names_of_the_files_do_not_count(self, tmp_path: Path) -> None:
        plain = per_rank(**{"block._orig_mod.w": (4, 3)})
        checkpoint = save(tmp_path, plain)
        with pytest.raises(NotMergeableError, match=r"_orig_mod.w: a plain tensor that differs"):
            unshard.merge(checkpoint, tmp_path / "out", exclude="_orig_mod", config="none")
        unshard.merge(checkpoint, tmp_path / "out", exclude=r"^block\.w", config="none")
        assert_same(merged(tmp_path / "out"), some_tensors())

    def test_an_adapter_written_by_itself_must_be_mergeable_whole(self, tmp_path: Path) -> None:
        plain = per_rank(
            **{f"base_model.model.model.norm.lora_{x}.default.weight": (6, 6) for x in "AB"}
        )
        checkpoint = save_ranks(
            tmp_path / "ckpt",
            {"base_model.model.model.norm.base_layer.weight": torch.rand(6, 6)},
            2,
            plain=plain,
        )
        with pytest.raises(NotMergeableError, match=r"lora_[\s\S]*plain tensor that differs"):
            unshard.merge(
                checkpoint, tmp_path / "out", lora="both", exclude="x", lora_alpha=6, config="none"
            )


def base_of(tmp_path: Path, tensors: Tensors) -> Path:
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    (tmp_path / "base" / "config.json").write_text("{}")
    return tmp_path / "base"


def test_a_scalar_that_the_base_lists_may_be_a_parameter(tmp_path: Path) -> None:
    plain = per_rank(**{"logit_scale": (), "bn.running_mean": (4,)})
    base = base_of(tmp_path, some_tensors() | plain[1])
    checkpoint = save(tmp_path, plain)
    with pytest.raises(NotMergeableError, match=r"^tensor logit_scale: a plain tensor"):
        unshard.merge(checkpoint, tmp_path / "out", base=base)
    exclude = "^logit_scale$"
    unshard.merge(checkpoint, tmp_path / "out", base=base, exclude=exclude)
    first = {"bn.running_mean": plain[0]["bn.running_mean"]}
    assert_same(merged(tmp_path / "out"), some_tensors() | first)


def test_a_base_with_the_joined_shape_joins(tmp_path: Path) -> None:
    plain = per_rank(**{"bn.running_mean": (4,)})
    base = base_of(tmp_path, some_tensors() | {"bn.running_mean": torch.rand(8)})
    unshard.merge(save(tmp_path, plain), tmp_path / "out", base=base)
    joined = {"bn.running_mean": torch.cat([part["bn.running_mean"] for part in plain])}
    assert_same(merged(tmp_path / "out"), some_tensors() | joined)


def test_a_scalar_that_the_config_lists_is_a_parameter(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 0,
        "vocab_size": 13,
        "hidden_size": 6,
    }
    tensors = {name: one for name, one in some_tensors().items() if "norm" not in name}
    plain = per_rank(**{"model.norm.weight": ()})
    checkpoint = save_ranks(tmp_path / "ckpt", tensors, 2, plain=plain)
    (checkpoint / "config.json").write_text(json.dumps(fields))
    with pytest.raises(NotMergeableError, match=r"^tensor model.norm.weight: a plain tensor"):
        unshard.merge(checkpoint, tmp_path / "out")


def test_the_state_of_an_optimizer_has_no_buffers(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, [{}, {}])
    for rank in range(2):
        with as_rank(rank, 2):
            saved = torch.load(checkpoint / f"model_world_size_2_rank_{rank}.pt")
            own = {"running_avg": torch.full((4,), rank), "exp_avg": saved["lm_head.weight"]}
            state = {"state": {"lm_head.weight": own}, "param_groups": [{"params": [*saved]}]}
            torch.save(state, checkpoint / f"optim_world_size_2_rank_{rank}.pt")
    with pytest.raises(NotMergeableError, match="running_avg: a plain tensor that differs"):
        unshard.merge(checkpoint, tmp_path / "out", optimizer=True)
