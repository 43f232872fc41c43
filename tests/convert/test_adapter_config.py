"""What is written about an adapter next to a checkpoint, and what is written for PEFT."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lora_recipes import EXPERTS, entry, linear, lora_only, recipes
from unshard.convert.lora.files import completed
from unshard.convert.lora.names import FRONT, split_adapter
from unshard.convert.recipes import take
from unshard.errors import ConversionError, CorruptError
from unshard.read.beside.adapter_config import AdapterConfig, read_adapter_config
from unshard.read.format import Location
from unshard.read.rank_files.reader import RANK_FILES
from unshard.write.companions import adapter_config_json

PEFT = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 8,
    "target_modules": ["q"],
    "base_model_name_or_path": "org/model",
    "task_type": "CAUSAL_LM",
    "lora_dropout": 0.1,
    "inference_mode": False,
}
META = {"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}


def location(step_dir: Path) -> Location:
    weights = step_dir / "actor"
    weights.mkdir(parents=True, exist_ok=True)
    return Location(weights, step_dir, 3, "actor", "model", RANK_FILES)


def put(path: Path, fields: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))


# reading


def test_nothing_written_is_none(tmp_path: Path) -> None:
    assert read_adapter_config(location(tmp_path / "global_step_3")) is None


@pytest.mark.parametrize("place", ["actor", "actor/huggingface", "."])
def test_verls_file_is_found(tmp_path: Path, place: str) -> None:
    where = location(tmp_path / "global_step_3")
    put(where.step_dir / place / "lora_train_meta.json", META)
    config = read_adapter_config(where)
    assert config is not None
    assert (config.alpha, config.rank, config.task_type) == (8.0, 2, "CAUSAL_LM")
    assert config.source == str(where.step_dir / place / "lora_train_meta.json")


@pytest.mark.parametrize(
    "place", ["actor", "actor/lora_adapter", "actor/huggingface", ".", "lora_adapter", ".."]
)
def test_pefts_file_is_found(tmp_path: Path, place: str) -> None:
    where = location(tmp_path / "global_step_3")
    put((where.step_dir / place).resolve() / "adapter_config.json", PEFT | {"use_rslora": True})
    config = read_adapter_config(where)
    assert config is not None
    assert (config.alpha, config.rank, config.use_rslora) == (8.0, 2, True)
    assert config.target_modules == ("q",)
    assert config.base_model_name_or_path == "org/model"
    assert config.fields["lora_dropout"] == 0.1


def test_a_run_is_not_looked_at_for_a_directory_that_is_not_a_step(tmp_path: Path) -> None:
    where = replace(location(tmp_path / "some"), step=None)
    put(tmp_path / "adapter_config.json", PEFT)
    assert read_adapter_config(where) is None


@pytest.mark.parametrize(
    ("task", "expected"),
    [("TaskType.CAUSAL_LM", "CAUSAL_LM"), ("None", None), (None, None), ("", None)],
)
def test_the_task_types_that_verl_wrote_are_understood(
    tmp_path: Path, task: str | None, expected: str | None
) -> None:
    where = location(tmp_path / "global_step_3")
    put(where.weights_dir / "lora_train_meta.json", META | {"task_type": task})
    config = read_adapter_config(where)
    assert config is not None
    assert config.task_type == expected


def test_an_alpha_of_0_is_not_believed(tmp_path: Path) -> None:
    where = location(tmp_path / "global_step_3")
    put(where.weights_dir / "lora_train_meta.json", {"r": 0, "lora_alpha": 0})
    config = read_adapter_config(where)
    assert config is not None
    assert config.alpha is None
    assert config.rank is None
    put(where.weights_dir / "lora_adapter" / "adapter_config.json", PEFT)
    config = read_adapter_config(where)
    assert config is not None
    assert (config.alpha, config.rank) == (8.0, 2)


def test_verls_file_fills_what_pefts_leaves_open(tmp_path: Path) -> None:
    where = location(tmp_path / "global_step_3")
    put(where.weights_dir / "lora_train_meta.json", META)
    put(where.weights_dir / "adapter_config.json", {"peft_type": "LORA", "use_rslora": True})
    config = read_adapter_config(where)
    assert config is not None
    assert (config.alpha, config.rank, config.use_rslora) == (8.0, 2, True)
    assert config.task_type == "CAUSAL_LM"


@pytest.mark.parametrize("changed", [{"r": 4}, {"lora_alpha": 16}])
def test_files_that_contradict_one_another_are_both_named(
    tmp_path: Path, changed: dict[str, int]
) -> None:
    where = location(tmp_path / "global_step_3")
    put(where.weights_dir / "lora_train_meta.json", META | changed)
    put(where.weights_dir / "adapter_config.json", PEFT)
    with pytest.raises(CorruptError, match=r"lora_train_meta\.json and \S+adapter_config\.json"):
        read_adapter_config(where)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ([1], "not a JSON object"),
        ({"r": "8"}, "found: +'8'"),
        ({"r": 2.5}, "a whole number"),
        ({"r": True}, "a whole number"),
        ({"r": -1}, "a whole number"),
        ({"lora_alpha": "16"}, "a number"),
        ({"lora_alpha": -1}, "not below 0"),
        ('{"lora_alpha": NaN}', "a finite number"),
        ('{"lora_alpha": 1' + "0" * 400 + "}", "a finite number"),
        ({"use_rslora": "yes"}, "true or false"),
        ({"rank_pattern": [1]}, "an object"),
        ({"rank_pattern": {"q": "1"}}, "a whole number"),
        ({"alpha_pattern": {"q": []}}, "a number"),
        ({"target_modules": [1]}, "a list of names"),
        ({"modules_to_save": "score"}, "a list of names"),
        ({"task_type": 1}, "a string"),
        ({"peft_type": ["LORA"]}, "peft_type is not a string"),
        ({"bias": {}}, "bias is not a string"),
    ],
)
def test_what_is_malformed_is_named(tmp_path: Path, fields: object, message: str) -> None:
    where = location(tmp_path / "global_step_3")
    put(where.weights_dir / "adapter_config.json", fields)
    with pytest.raises(CorruptError, match=rf"adapter_config\.json[\s\S]*{message}"):
        read_adapter_config(where)


# writing


def written(
    shapes: dict[str, tuple[int, ...]],
    config: AdapterConfig | None = None,
    alpha: float | None = 8.0,
    model_config: dict[str, object] | None = None,
) -> dict[str, object]:
    data = adapter_config_json(split_adapter(recipes(shapes)), config, alpha, model_config)
    fields: dict[str, object] = json.loads(data)
    return fields


def test_what_is_not_recorded_follows_from_the_tensors() -> None:
    fields = written(
        linear("m.0.q") | linear("m.1.q") | linear("m.1.up", rank=4),
        model_config={"_name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]},
    )
    assert fields["peft_type"] == "LORA"
    assert fields["r"] == 2
    assert fields["rank_pattern"] == {"m.1.up": 4}
    assert fields["lora_alpha"] == 8
    assert fields["target_modules"] == ["q", "up"]
    assert fields["task_type"] == "CAUSAL_LM"
    assert fields["base_model_name_or_path"] == "org/model"
    assert fields["inference_mode"] is True
    assert fields["fan_in_fan_out"] is False
    assert fields["modules_to_save"] is None
    assert "target_parameters" not in fields


def test_whole_names_are_written_where_ends_would_target_other_modules() -> None:
    fields = written(linear("m.0.q") | {f"{FRONT}m.1.q.weight": (6, 5)})
    assert fields["target_modules"] == ["m.0.q"]


def test_experts_are_parameters() -> None:
    fields = written(EXPERTS | linear("m.q"))
    assert fields["target_modules"] == ["q"]
    assert fields["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert (fields["r"], fields["rank_pattern"]) == (2, {})


def test_matrices_stored_turned_are_reported() -> None:
    shapes = linear("h.c_attn", 12, 4)
    shapes[f"{FRONT}h.c_attn.base_layer.weight"] = (4, 12)
    assert written(shapes)["fan_in_fan_out"] is True


@pytest.mark.parametrize("alone", [False, True])
def test_modules_trained_whole_are_named(*, alone: bool) -> None:
    shapes = lora_only("m.q") if alone else linear("m.q")
    if alone:
        shapes |= {f"{FRONT}score.weight": (1, 5), f"{FRONT}m.q.base_layer.bias": (6,)}
    else:
        shapes |= {
            f"{FRONT}score.original_module.weight": (1, 5),
            f"{FRONT}score.modules_to_save.default.weight": (1, 5),
        }
    assert written(shapes)["modules_to_save"] == ["score"]


def test_what_the_training_run_wrote_stays() -> None:
    config = AdapterConfig(
        alpha=8.0,
        rank=2,
        target_modules="all-linear",
        alpha_pattern={"q": 4.0},
        task_type="CAUSAL_LM",
        base_model_name_or_path="org/model",
        fields=PEFT | {"target_modules": "all-linear"},
        source="adapter_config.json",
    )
    fields = written(lora_only("m.q"), config, None, {"_name_or_path": "other"})
    assert fields["target_modules"] == "all-linear"
    assert fields["base_model_name_or_path"] == "org/model"
    assert fields["alpha_pattern"] == {"q": 4.0}
    assert fields["lora_dropout"] == 0.1
    assert fields["inference_mode"] is True
    assert written(lora_only("m.q"), config, 2.5)["lora_alpha"] == 2.5


def test_a_quantised_models_adapter_can_be_written() -> None:
    tensors = recipes(linear("m.q"))
    name = f"{FRONT}m.q.base_layer.weight"
    tensors[name] = take(entry(name, (15, 1), "uint8"))
    shape = completed(split_adapter(tensors), AdapterConfig())
    assert (shape.rank, shape.target_modules) == (2, ("q",))


def test_an_alpha_is_never_made_up() -> None:
    with pytest.raises(ConversionError, match="alpha is unknown"):
        written(linear("m.q"), None, None)


def test_parameters_that_nothing_names_are_refused() -> None:
    alone = {name: shape for name, shape in EXPERTS.items() if ".lora_" in name}
    with pytest.raises(ConversionError, match=r"m\.experts belong to bare parameters"):
        written(alone)
    config = AdapterConfig(rank=2, target_parameters=("experts.gate_up_proj", "experts.down_proj"))
    assert written(alone, config)["target_parameters"] == list(config.target_parameters)


@pytest.mark.parametrize("targets", [None, ("q",)])
def test_ranks_that_differ_from_what_is_written_are_refused(
    targets: tuple[str, ...] | None,
) -> None:
    config = AdapterConfig(rank=4, target_modules=targets, source="adapter_config.json")
    with pytest.raises(ConversionError, match=r"m\.q does not have the rank"):
        written(linear("m.q"), config)


def test_biases_that_the_adapter_would_lack_are_refused() -> None:
    config = AdapterConfig(alpha=8.0, fields={"bias": "lora_only"}, source="adapter_config.json")
    with pytest.raises(ConversionError, match="biases were trained too"):
        written(linear("m.q"), config)
    assert written(lora_only("m.q"), config)["r"] == 2


def test_modules_trained_whole_that_are_missing_are_missed() -> None:
    config = AdapterConfig(alpha=8.0, modules_to_save=("score",), source="adapter_config.json")
    with pytest.raises(ConversionError, match="trained whole are not in the checkpoint"):
        written(linear("m.q"), config)
