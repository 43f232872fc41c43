"""Which of a DCP checkpoint's values are the model, and what are its tensors called?"""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from unshard.errors import NotMergeableError
from unshard.read.dcp.metadata import DcpMetadata, DescribedTensor
from unshard.read.dcp.model import ModelNames, model_names
from unshard.tensors.dtypes import BY_NAME

Path = tuple[str, ...]


def metadata(
    *tensors: Path, objects: Sequence[Path] = (), scalars: Sequence[Path] = (), flat: bool = True
) -> DcpMetadata:
    """Return what `.metadata` says of tensors of 3 elements, scalars and objects at these paths."""
    shapes: Mapping[Path, tuple[int, ...]] = dict.fromkeys(tensors, (3,)) | dict.fromkeys(
        scalars, ()
    )
    return DcpMetadata(
        tensors={
            ".".join(path): DescribedTensor(
                BY_NAME["float32"], shape, np.zeros((0, 2, len(shape)), np.int64)
            )
            for path, shape in shapes.items()
        },
        objects={".".join(path): None for path in objects},
        paths={".".join(path): path for path in (*shapes, *objects)} if flat else {},
    )


def found(data: DcpMetadata) -> ModelNames:
    return model_names(data, "the/checkpoint")


W, N = "layers.0.weight", "model.norm.weight"
PREFIXES: dict[str, tuple[Path, Path]] = {
    # what it is called: the path above the names, the prefix that is found
    "accelerate": (("model",), ("model",)),
    "flat": ((), ()),
    "PyTorch's AppState": (("app", "model"), ("app", "model")),
    "Composer": (("state", "model"), ("state", "model")),
    "Lightning": (("state_dict",), ("state_dict",)),
    "DDP": (("module",), ("module",)),
    "training scripts": (("model_state_dict",), ("model_state_dict",)),
    "an unknown word": (("weights",), ("weights",)),
}


@pytest.mark.parametrize("tool", PREFIXES)
def test_the_names_are_what_follows_the_prefix(tool: str) -> None:
    above, prefix = PREFIXES[tool]
    names = found(metadata((*above, N), (*above, W)))
    assert names.prefix == prefix
    assert list(names.names.items()) == [(".".join((*above, name)), name) for name in (N, W)]
    assert names.skipped == ()


def test_the_path_tells_accelerates_names_from_flat_ones() -> None:
    """Both are called `model.norm.weight` in the metadata; only the path differs."""
    assert found(metadata(("model", "norm.weight"))).names == {"model.norm.weight": "norm.weight"}
    assert found(metadata(("model.norm.weight",))).names == {
        "model.norm.weight": "model.norm.weight"
    }


def test_without_paths_the_names_are_the_flat_ones() -> None:
    data = metadata(("model", "norm.weight"), ("lm_head.weight",), flat=False)
    assert list(found(data).names.values()) == ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "beside",
    [
        ("optimizer", "state", W, "exp_avg"),
        ("optim", "state", W, "exp_avg"),
        ("optimizer_0", "state", W, "exp_avg"),
        ("optimizers", "state", W),
        ("app", "optim", "state", W),
        ("state", "optimizers", "AdamW", "state", W),
        ("train_state", "losses"),
        ("lr_scheduler", "_last_lr"),
        ("rng", "0", "torch"),
        ("ema", N),
        ("optimizer", "model", W),
    ],
)
@pytest.mark.parametrize("above", [(), ("model",), ("app", "model"), ("state", "model")])
def test_other_state_is_left_out_and_named(above: Path, beside: Path) -> None:
    names = found(metadata((*above, N), beside))
    assert list(names.names.values()) == [N]
    assert [(one.fqn, one.reason) for one in names.skipped] == [
        (".".join(beside), "not model weights: tensor")
    ]


def test_objects_are_left_out_and_named() -> None:
    names = found(metadata(("model", N), objects=[("step",), ("model", "_extra_state")]))
    assert {one.fqn: one.reason for one in names.skipped} == {
        "step": "not model weights: object",
        "model._extra_state": "not model weights: object",
    }


def test_many_values_of_one_kind_are_reported_as_one() -> None:
    moments = [("optimizer", "state", f"layers.{i}", "exp_avg") for i in range(9)]
    objects = [("optimizer", "param_groups", f"{i}") for i in range(3)]
    (skipped,) = found(metadata(("model", N), *moments, objects=objects)).skipped
    assert (skipped.fqn, skipped.reason) == (
        "optimizer.*",
        "not model weights: 9 tensors and 3 objects",
    )


def test_a_container_within_the_model_is_a_part_of_its_names() -> None:
    """A state dict may be nested; torch joins the path by dots, and so does the model's name."""
    names = found(metadata(("model", "layers", "0", "weight"), ("model", "norm.weight")))
    assert list(names.names.values()) == ["layers.0.weight", "norm.weight"]


def test_other_state_within_the_model_is_left_out() -> None:
    names = found(metadata(("model", N), ("model", "extra_state", "scale")))
    assert list(names.names.values()) == [N]


def test_scalars_next_to_a_state_dict_of_unknown_name_do_not_make_it_ambiguous() -> None:
    names = found(metadata(("weights", N), ("weights", W), scalars=[("epoch",)]))
    assert names.prefix == ("weights",)
    assert [one.fqn for one in names.skipped] == ["epoch"]


def test_a_word_for_a_model_wins_over_other_sets() -> None:
    names = found(metadata(("model", N), ("teacher", N)))
    assert (names.prefix, [one.fqn for one in names.skipped]) == (("model",), [f"teacher.{N}"])


@pytest.mark.parametrize(
    "sets",
    [
        [("model", N), ("module", N)],
        [("generator", N), ("discriminator", N)],
        [("weights", N), (N,)],
        [("state", "model", N), ("app", "model", N)],
    ],
)
def test_several_sets_that_may_be_the_model_are_refused(sets: list[Path]) -> None:
    with pytest.raises(NotMergeableError, match="several sets of tensors") as caught:
        found(metadata(*sets))
    assert "the/checkpoint" in caught.value.subject
    for path in sets:
        assert (".".join(path[:-1]) or "the top level") in caught.value.found
    assert caught.value.hint


def test_a_directory_of_the_optimizer_has_no_model() -> None:
    names = found(metadata(("optimizer", "state", N, "exp_avg"), objects=[("optimizer", "lr")]))
    assert (names.prefix, names.names) == ((), {})
    assert len(names.skipped) == 2


def test_an_empty_state_has_no_model() -> None:
    assert found(DcpMetadata()) == ModelNames((), {}, ())


def test_two_paths_that_give_one_name_are_not_silently_one() -> None:
    """`model.a.b` as a nested dict and as a flat key: torch cannot save it, but a file may say so.

    Their flat names differ only if one of them has no path.
    """
    data = metadata(("model", "a", "b"))
    data.tensors["other"] = data.tensors["model.a.b"]
    data.paths["other"] = ("model", "a.b")
    with pytest.raises(NotMergeableError, match=r"a\.b"):
        found(data)


def test_flat_names_stay_in_the_order_of_the_metadata() -> None:
    order = ["z", "a", "m"]
    assert list(found(metadata(*((name,) for name in order))).names) == order


# an optimizer by itself


@pytest.mark.parametrize("start", ["", "state.", "model."])
@pytest.mark.parametrize("moments", [("exp_avg", "exp_avg_sq"), ("momentum_buffer",)])
def test_a_flattened_optimizer_is_refused_as_one(start: str, moments: Sequence[str]) -> None:
    """VeOmni's, xtuner's and cosmos': a directory of its own, with a flat dict."""
    tensors = [(f"{start}{name}.{moment}",) for name in (W, N) for moment in moments]
    steps = [(f"{start}{name}.step",) for name in (W, N)]
    groups = [(f"param_groups.{name}.lr",) for name in (W, N)]
    for flat in (True, False):
        data = metadata(*tensors, scalars=(*steps, *groups), flat=flat)
        with pytest.raises(NotMergeableError, match="an optimizer's state, not a model") as raised:
            found(data)
        assert f"{4 + 2 * len(moments)} values, such as " in str(raised.value)


def test_an_optimizer_in_a_nested_dict_of_its_own_is_refused_too() -> None:
    data = metadata(
        ("state", N, "exp_avg"), ("state", N, "exp_avg_sq"), scalars=[("state", N, "step")]
    )
    with pytest.raises(NotMergeableError, match="an optimizer's state, not a model"):
        found(data)


def test_a_flattened_optimizer_next_to_the_model_is_left_out() -> None:
    moments = [(f"state.{N}.exp_avg",), (f"state.{N}.exp_avg_sq",)]
    names = found(metadata((N,), (W,), *moments, scalars=[(f"state.{N}.step",)]))
    assert list(names.names.values()) == [N, W]
    assert len(names.skipped) == 3


def test_a_models_own_counter_is_not_an_optimizers() -> None:
    assert list(found(metadata((N,), ("ema.step",), ("encoder.step",))).names.values()) == [
        N,
        "ema.step",
        "encoder.step",
    ]


P = "param_groups.0.weight"


@pytest.mark.parametrize(
    ("tensors", "scalars", "kept"),
    [
        # Parameters of these names, with and without moments, and a scalar with them.
        ([(P,), (f"state.{W}.exp_avg",)], [], [P]),
        ([(P,), (f"state.{P}.exp_avg",)], [], [P]),
        ([(f"state.{P}.exp_avg",)], [(P,)], [P]),
        ([("param_groups.bias",), (f"state.{W}.momentum_buffer",)], [], ["param_groups.bias"]),
        # What groups have: numbers, and for each parameter with moments whatever it is.
        ([(f"state.{W}.exp_avg",)], [(f"param_groups.{W}.lr",), ("param_groups.frozen.lr",)], []),
        ([(f"state.{W}.exp_avg",), (f"param_groups.{W}.betas",)], [], []),
    ],
)
def test_parameters_may_be_called_as_groups_are(
    tensors: list[Path], scalars: list[Path], kept: list[str]
) -> None:
    names = found(metadata((W,), *tensors, scalars=scalars, flat=False))
    assert sorted(names.names.values()) == sorted([W, *kept])
