"""config.json and its friends: found where every writer puts them, adjusted, copied."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unshard
from ranks import save_ranks, some_tensors
from unshard.errors import CorruptError, OutputError, UsageError
from unshard.read.beside.companions import Companions, find_companions
from unshard.read.format import Location
from unshard.read.model_config import Fields, ModelConfig, read_config
from unshard.read.rank_files.reader import RANK_FILES
from unshard.write.companions import companion_files, write_files


def location(weights: Path, step: Path | None = None) -> Location:
    weights.mkdir(parents=True, exist_ok=True)
    return Location(weights, step or weights, 1, None, "model", RANK_FILES)


def write(directory: Path, *names: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_text("{}")


@pytest.mark.parametrize("place", ["huggingface", ".", "model/huggingface"])
def test_config_is_found_where_verl_ever_put_it(tmp_path: Path, place: str) -> None:
    at = location(tmp_path / "global_step_1" / "actor")
    write(at.weights_dir / place, "config.json", "tokenizer.json")
    found = find_companions(at, None)
    assert found.config == at.weights_dir / place / "config.json"
    assert list(found.files) == ["tokenizer.json"]


def test_config_is_found_in_lmms_engines_checkpoint_directory(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-1"
    at = location(step / "pytorch_model_fsdp_0", step)
    write(step, "preprocessor_config.json")
    (step / "config.json").write_text('{"model_type": "qwen2"}')
    found = find_companions(at, None)
    assert found.config == step / "config.json"
    assert list(found.files) == ["preprocessor_config.json"]


def test_everything_that_makes_a_model_is_taken_and_nothing_else(tmp_path: Path) -> None:
    at = location(tmp_path)
    wanted = [
        "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
        "merges.txt", "spm.model", "tiktoken.model", "normalizer.json",
        "tokenizer.model", "processor_config.json", "chat_template.jinja",
        "modeling_custom.py", "qwen.tiktoken",
    ]  # fmt: skip
    unwanted = [
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
        "optim_world_size_1_rank_0.pt", "training_args.bin", "rng_state_0.pth",
        "trainer_state.json", "fsdp_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    write(tmp_path / "huggingface", "config.json", *wanted, *unwanted)
    write(tmp_path / "huggingface" / "additional_chat_templates", "tools.jinja", "note.txt")
    found = find_companions(at, None)
    assert set(found.files) == {*wanted, "additional_chat_templates/tools.jinja"}


def test_without_a_config_a_tokenizer_is_still_taken(tmp_path: Path) -> None:
    write(tmp_path / "huggingface", "tokenizer.json")
    found = find_companions(location(tmp_path), None)
    assert found.config is None
    assert list(found.files) == ["tokenizer.json"]


def test_a_given_directory_replaces_all_and_a_given_file_only_the_config(tmp_path: Path) -> None:
    at = location(tmp_path / "checkpoint")
    write(at.weights_dir, "config.json", "tokenizer.json")
    write(tmp_path / "other", "config.json", "vocab.txt")
    from_directory = find_companions(at, tmp_path / "other")
    assert list(from_directory.files) == ["vocab.txt"]
    from_file = find_companions(at, tmp_path / "other" / "config.json")
    assert from_file.config == tmp_path / "other" / "config.json"
    assert list(from_file.files) == ["tokenizer.json"]


HF_CONFIG = '{"model_type": "qwen2"}'
OLMO_CONFIG = '{"run_name": "olmo", "model": {"d_model": 4096}, "trainer": {}}'


def in_run(tmp_path: Path, config: str, *names: str) -> Location:
    """Return a checkpoint without companions, in a run's directory that holds some."""
    run = tmp_path / "run"
    write(run, *names)
    (run / "config.json").write_text(config)
    step = run / "checkpoint-1"
    return location(step / "pytorch_model_fsdp_0", step)


def test_companions_of_the_run_are_taken_where_the_checkpoint_has_none(tmp_path: Path) -> None:
    at = in_run(tmp_path, HF_CONFIG, "tokenizer.json", "chat_template.jinja", "adapter.bin")
    found = find_companions(at, None)
    assert found.config == tmp_path / "run" / "config.json"
    assert list(found.files) == ["chat_template.jinja", "tokenizer.json"]


@pytest.mark.parametrize("place", ["", "pytorch_model_fsdp_0"])
def test_companions_of_the_checkpoint_win_over_those_of_the_run(tmp_path: Path, place: str) -> None:
    at = in_run(tmp_path, HF_CONFIG, "tokenizer.json")
    (at.step_dir / place / "config.json").write_text(HF_CONFIG)
    found = find_companions(at, None)
    assert found.config == at.step_dir / place / "config.json"
    assert list(found.files) == []


def test_code_in_a_run_is_the_models_only_if_its_config_says_so(tmp_path: Path) -> None:
    at = in_run(tmp_path, HF_CONFIG, "train.py", "tokenizer.json")
    assert list(find_companions(at, None).files) == ["tokenizer.json"]
    config = '{"model_type": "x", "auto_map": {"AutoModel": "modeling_x.X"}}'
    at = in_run(tmp_path / "with code", config, "modeling_x.py")
    assert list(find_companions(at, None).files) == ["modeling_x.py"]


def test_a_config_in_a_run_that_is_not_a_models_is_left(tmp_path: Path) -> None:
    found = find_companions(in_run(tmp_path, OLMO_CONFIG, "tokenizer.json"), None)
    assert (found.config, found.files) == (None, {})


def test_olmos_own_config_in_the_step_directory_is_left(tmp_path: Path) -> None:
    step = tmp_path / "step100"
    at = location(step / "model_and_optim", step)
    (step / "config.json").write_text(OLMO_CONFIG)
    assert find_companions(at, None) == Companions()


def test_a_run_without_a_config_gives_nothing(tmp_path: Path) -> None:
    at = in_run(tmp_path, HF_CONFIG, "tokenizer.json")
    (tmp_path / "run" / "config.json").unlink()
    assert find_companions(at, None) == Companions()


def test_what_is_above_a_directory_that_is_not_a_step_is_left(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer.json")
    (tmp_path / "config.json").write_text(HF_CONFIG)
    (tmp_path / "weights").mkdir()
    at = Location(tmp_path / "weights", tmp_path / "weights", None, None, "model", RANK_FILES)
    assert find_companions(at, None) == Companions()


def test_nemos_companions_are_in_a_hidden_directory(tmp_path: Path) -> None:
    at = location(tmp_path / "epoch_0_step_1" / "model", tmp_path / "epoch_0_step_1")
    write(at.weights_dir / ".hf_metadata", "config.json", "tokenizer.json")
    found = find_companions(at, None)
    assert found.config == at.weights_dir / ".hf_metadata" / "config.json"


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_given_config_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=f"config=.*{name}"):
        find_companions(location(tmp_path / "checkpoint"), tmp_path / name)


@pytest.mark.parametrize(
    "text", ["{", "[1]", "\x00", "[" * 100_000], ids=["cut", "a list", "a zero byte", "deep"]
)
def test_a_config_that_is_not_a_json_object_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CorruptError, match=r"config\.json is not"):
        read_config(path)


@pytest.mark.parametrize("kind", [[], {}, 1, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_model_type_that_is_not_text_is_named(
    tmp_path: Path, kind: object, *, nested: bool
) -> None:
    path = tmp_path / "config.json"
    fields = {"model_type": kind}
    path.write_text(json.dumps({"text_config": fields} if nested else fields))
    key = r"text_config\.model_type" if nested else "model_type"
    with pytest.raises(CorruptError, match=rf"config\.json: {key} is not a string"):
        read_config(path)


@pytest.mark.parametrize("classes", ["Qwen3ForCausalLM", {}, [1], [["Qwen3ForCausalLM"]]])
def test_architectures_that_are_not_names_are_named(tmp_path: Path, classes: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": classes}))
    with pytest.raises(CorruptError, match=r"config\.json: architectures is not a list of names"):
        read_config(path)


def test_a_config_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    """The output would have no config, as if the checkpoint had none."""
    model = tmp_path / "model"
    model.mkdir()
    save_file({"weight": torch.zeros(2)}, model / "model.safetensors")
    os.mkfifo(model / "config.json")
    with pytest.raises(CorruptError, match=r"config\.json: cannot be read: not a regular file"):
        unshard.merge(model, tmp_path / "out", allow_missing=True, allow_unexpected=True)
    assert not (tmp_path / "out").exists()


def written(fields: Fields, dtype: str) -> Fields:
    return ModelConfig(fields).as_written(dtype).fields


def test_the_dtype_key_that_is_there_says_what_was_written() -> None:
    assert written({"torch_dtype": "bfloat16"}, "float32") == {"torch_dtype": "float32"}
    assert written({"dtype": "bfloat16"}, "float32") == {"dtype": "float32"}


@pytest.mark.parametrize(("version", "key"), [("4.51.0", "torch_dtype"), ("5.23.0", "dtype")])
def test_a_missing_dtype_key_is_added_as_that_transformers_spells_it(
    version: str, key: str
) -> None:
    assert written({"transformers_version": version}, "bfloat16")[key] == "bfloat16"


def test_nested_configs_are_adjusted_but_quantization_is_not() -> None:
    config = {
        "dtype": None,
        "text_config": {"dtype": "bfloat16", "hidden_size": 4},
        "vision_config": {"hidden_size": 4},
        "decoder": {"model_type": "t5", "dtype": "bfloat16"},
        "quantization_config": {"dtype": "bfloat16"},
    }
    assert written(config, "float16") == {
        "dtype": "float16",
        "text_config": {"dtype": "float16", "hidden_size": 4},
        "vision_config": {"hidden_size": 4},
        "decoder": {"model_type": "t5", "dtype": "float16"},
        "quantization_config": {"dtype": "bfloat16"},
    }


def test_the_prefix_that_fsdp2_gives_classes_is_stripped() -> None:
    config = {"architectures": ["FSDPQwen2ForCausalLM"], "dtype": "float32"}
    assert written(config, "float32")["architectures"] == ["Qwen2ForCausalLM"]


def test_companions_are_written_as_they_are_and_the_config_keeps_its_order(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(source / "additional_chat_templates", "tools.jinja")
    (source / "tokenizer.json").write_bytes(b'{"a":\r\n1}')
    output = tmp_path / "output"
    output.mkdir()
    files = {
        "tokenizer.json": source / "tokenizer.json",
        "additional_chat_templates/tools.jinja": source / "additional_chat_templates/tools.jinja",
    }
    made = companion_files(Companions(None, files), ModelConfig({"z": "ü", "a": 1}))
    write_files(made, output)
    found = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert found == {"config.json", *files}
    assert (output / "tokenizer.json").read_bytes() == b'{"a":\r\n1}'
    assert (output / "additional_chat_templates" / "tools.jinja").exists()
    assert list(json.loads((output / "config.json").read_text())) == ["z", "a"]
    assert "ü" in (output / "config.json").read_text(encoding="utf-8")


# trainer: the weights and the step below the run, where its config and its tokenizer are
PLACES = {
    "SkyRL": ("global_step_1/policy", "global_step_1", "global_step_1/policy/huggingface", None),
    "NeMo-RL": (
        *("step_1/policy/weights/model", "step_1"),
        *("step_1/policy/weights/model/.hf_metadata", "step_1/policy/tokenizer"),
    ),
    "LLaMA-Factory": ("checkpoint-1/model", "checkpoint-1", "checkpoint-1/hf_model", None),
    "ROLL": ("checkpoint-1/dcp", "checkpoint-1", "checkpoint-1", None),
    "VeOmni": (*("checkpoints/global_step_1", "checkpoints/global_step_1", "model_assets", None),),
    "VeOmni's export": (
        *("checkpoints/global_step_1", "checkpoints/global_step_1"),
        *("checkpoints/global_step_1/hf_ckpt", None),
    ),
    "a run's root": ("checkpoints/step_1/trainer", "checkpoints/step_1", ".", None),
}


@pytest.mark.parametrize("trainer", PLACES)
def test_config_and_tokenizer_are_found_where_trainers_put_them(
    tmp_path: Path, trainer: str
) -> None:
    weights, step, config, tokenizer = PLACES[trainer]
    at = location(tmp_path / weights, tmp_path / step)
    write(tmp_path / (tokenizer or config), "tokenizer.json", "tokenizer_config.json")
    write(tmp_path / config)
    (tmp_path / config / "config.json").write_text('{"model_type": "qwen3"}')
    found = find_companions(at, None)
    assert found.config == tmp_path / config / "config.json"
    assert set(found.files) == {"tokenizer.json", "tokenizer_config.json"}


# What a trainer writes of the base model, in which file.
NAMING = {
    "adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B"}',
    "args.json": '{\n "model": null,\n "model_id_or_path": "Qwen/Qwen3-8B"\n}',
    "axolotl.yaml": "# base_model: no/no\nbase_model: Qwen/Qwen3-8B  # the base\n",
    "config.yaml": "actor_rollout_ref:\n  model:\n    path: Qwen/Qwen3-8B\n    lora: 0\n",
    "run.toml": '[model]\nattn = "flash"\nname = "Qwen/Qwen3-8B"\n',
    "policy.yml": "policy:\n  model_name: 'Qwen/Qwen3-8B'\n",
}


@pytest.mark.parametrize("name", NAMING)
def test_the_warning_says_which_base_a_trainers_file_names(tmp_path: Path, name: str) -> None:
    step = tmp_path / "run" / "global_step_1"
    save_ranks(step / "actor", some_tensors(), 2)
    (tmp_path / "run" / name).write_text(NAMING[name], encoding="utf-8")
    found = " ".join(unshard.inspect(step).warnings)
    assert (
        f"{name} names Qwen/Qwen3-8B, but it is not on this machine; give it with base='Qwen"
        in found
    )


VERL = """
critic:
  model:
    path: org/critic-base
  optim:
    lr: 1e-5
actor_rollout_ref:
  model:
    path: "org/policy-base"
  ref:
    model:
      path: org/reference
reward_model:
  model:
    path: org/reward
"""
SKYRL = """
trainer:
  ref:
    model: {path: org/reference}
  critic:
    model:
      path: org/critic-base
  policy:
    model: {path: org/policy-base, lora: 0}
"""
PRIME_RL = """
[model]
name = "org/policy-base"
[orchestrator.eval]
model_name = "org/judge"
[teacher.model]
name = "org/teacher"
"""
# A file's text, and the base of the actor and of the critic that it names.
ROLES: dict[str, tuple[str, str | None, str | None]] = {
    "verl.yaml": (VERL, "org/policy-base", "org/critic-base"),
    "skyrl.yaml": (SKYRL, "org/policy-base", "org/critic-base"),
    "areal.yaml": ("critic:\n  path: org/c\nactor:\n  path: org/a\n", "org/a", "org/c"),
    "prime.toml": (PRIME_RL, "org/policy-base", None),
    "one.yaml": ("model_name_or_path: org/policy-base\n", "org/policy-base", None),
    "critic.yaml": ('{"critic": {"model": {"path": "org/critic-base"}}}', None, "org/critic-base"),
    "two.yml": ('{"base_model": "org/one", "model_name_or_path": "org/two"}', None, None),
    "two.yaml": ("a:\n  model_name: org/one\nb:\n  model_name: org/two\n", None, None),
    "deep.yaml": ('{"x": {"model_name": "org/eval"}, "base_model": "org/a"}', "org/a", None),
    "train_config.json": ('{"base_model": "org/one"', None, None),
    "broken.toml": ('base_model = "org/one"\n[', None, None),
}


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", ROLES)
def test_the_base_that_is_named_is_that_of_the_role(tmp_path: Path, name: str, role: str) -> None:
    save_ranks(tmp_path / "global_step_1" / role, some_tensors(), 2)
    text, *bases = ROLES[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = " ".join(unshard.inspect(tmp_path, role=role).warnings)
    expected = bases[role == "critic"]
    assert (f"{name} names {expected}, but it is not on this machine" in found) == bool(expected)
    give = f"base='{expected}' or config=…" if role == "actor" else "config=…"
    assert (f"give it with {give}" in found) or not expected


def test_a_config_next_to_a_critic_names_its_own_base(tmp_path: Path) -> None:
    critic = save_ranks(tmp_path / "global_step_1" / "critic", some_tensors(), 2)
    (critic / "args.json").write_text('{"model": "org/critic-base"}', encoding="utf-8")
    (tmp_path / "config.yaml").write_text("base_model: org/policy-base\n", encoding="utf-8")
    found = " ".join(unshard.inspect(critic).warnings)
    assert "args.json names org/critic-base, but it is" in found


@pytest.mark.parametrize("text", ["base_model: null", "base_model: ''", "model_name: x"])
def test_what_is_not_a_model_is_not_named_as_one(tmp_path: Path, text: str) -> None:
    save_ranks(tmp_path / "run" / "step_1" / "actor", some_tensors(), 2)
    (tmp_path / "run" / "config.yaml").write_text(text, encoding="utf-8")
    assert "give it with base=… or config=…" in " ".join(unshard.inspect(tmp_path / "run").warnings)


def test_two_names_that_are_one_file_are_refused(tmp_path: Path) -> None:
    """Where the case of names is ignored; a file that is there stands for it."""
    out = tmp_path / "out"
    write(out, "modeling.py")
    before = (out / "modeling.py").read_bytes()
    with pytest.raises(OutputError, match=r"modeling\.py: is the same file as modeling\.py there"):
        write_files({"Modeling.py": b"one", "modeling.py": b"other"}, out)
    assert (out / "modeling.py").read_bytes() == before
    assert (out / "Modeling.py").read_bytes() == b"one"
