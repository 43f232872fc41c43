"""What engines are given: options as JSON, the config that fits, the tensors to compare."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import unshard
from ranks import save_ranks
from tiny_models import tiny_model, tiny_tokenizer
from unshard.cli.main import main
from unshard.errors import ConversionError, UsageError
from unshard.plugins import sglang, vllm
from unshard.plugins.probes import choose_probes
from unshard.plugins.serving import checked, describe, model_directory, weights_of
from unshard.plugins.vllm import arguments

SOURCE = Path(unshard.__file__).parents[1]


def save(run: Path, model: object, *, tokenizer: bool = True) -> Path:
    """Save a model as verl does; return the directory of the actor."""
    actor = run / "global_step_10" / "actor"
    save_ranks(actor, model.state_dict(), 2)  # type: ignore[attr-defined]  # of transformers
    model.config.save_pretrained(actor / "huggingface")  # type: ignore[attr-defined]
    if tokenizer:
        tiny_tokenizer().save_pretrained(actor / "huggingface")
    return actor


def test_the_checkpoints_own_directory_is_given_if_it_is_right(tmp_path: Path) -> None:
    actor = save(tmp_path / "run", tiny_model())
    with arguments(tmp_path / "run", weights="model") as given:
        assert given["model"] == str(actor / "huggingface")
        assert given["model_loader_extra_config"] == {
            "checkpoint": str(tmp_path / "run"),
            "step": 10,
            "weights": "model",
        }


def test_an_empty_path_is_not_reloaded_from_the_current_directory() -> None:
    idle = SimpleNamespace(has_unfinished_requests=lambda: False)
    with pytest.raises(UsageError, match="is an empty path"):
        vllm.reload(SimpleNamespace(llm_engine=idle), "")


def test_a_head_that_is_tied_no_more_needs_another_config(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    actor = save(tmp_path / "run", model)
    with pytest.warns(match="differs from"), weights_of(actor, {}) as weights:
        assert "lm_head.weight" in weights.tensors
    described = describe(actor, {})
    with model_directory(described) as directory:
        assert directory != actor / "huggingface"
        assert not json.loads((directory / "config.json").read_bytes())["tie_word_embeddings"]
        assert (directory / "tokenizer.json").is_file()
        assert not list(directory.glob("*.safetensors"))
    assert not directory.exists()


def test_missing_tensors_are_an_error_as_in_a_merge(tmp_path: Path) -> None:
    model = tiny_model()
    actor = save(tmp_path / "run", model)
    state = {name: one for name, one in model.state_dict().items() if "layers.1.mlp" not in name}
    save_ranks(actor, state, 2)
    with pytest.raises(ConversionError, match=r"Missing.*layers\.1\.mlp"), weights_of(actor, {}):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colour": "red"}, "colour: not an option"),
        ({"": 1}, "^: not an option"),
        ({"names": "training"}, "names: not an option"),
        ({"step": "10"}, "step: invalid value '10'"),
        ({"step": True}, "step: invalid value True"),
        ({"also": "dir"}, "also: invalid value 'dir'"),
    ],
)
def test_options_of_the_loader_are_checked(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked(given)


def test_none_leaves_an_option_out() -> None:
    assert checked({"weights": None, "step": 3, "assume_dim0": True}) == {
        "step": 3,
        "assume_dim0": True,
    }


def test_every_layer_has_probes_and_some_have_all() -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (9, 4)}
    for layer in range(10):
        for name in ("q_proj", "k_proj", "up_proj"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (4, 4)
        shapes[f"model.layers.{layer}.norm.weight"] = (4,)
    groups = choose_probes(shapes)
    assert groups[0] == ["model.embed_tokens.weight"]
    by_layer = groups[1:]
    assert [len(group) for group in by_layer] == [4, 2, 2, 2, 2, 4, 2, 2, 2, 4]
    assert all(f"model.layers.{layer}.norm.weight" in group for layer, group in enumerate(by_layer))
    matrices = {name.split(".")[3] for group in by_layer if len(group) == 2 for name in group}
    assert matrices == {"q_proj", "k_proj", "up_proj", "norm"}


@pytest.mark.parametrize(
    ("plugin", "command", "name"), [(vllm, "vllm", "vLLM"), (sglang, "sglang", "SGLang")]
)
def test_without_the_engine_the_plugin_is_silent_and_the_command_says_so(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    plugin: ModuleType,
    command: str,
    name: str,
) -> None:
    plugin.register()
    with pytest.raises(SystemExit) as ended:
        main([command, str(tmp_path), "--port", "64"])
    assert ended.value.code == 2
    assert f"{name} is not installed in the environment of unshard" in capsys.readouterr().err


def test_another_interface_of_sglang_is_an_error_only_for_our_format() -> None:
    """Here the loader cannot be imported; a real SGLang calls this for every load format."""
    left: list[object] = []
    config = SimpleNamespace(load_format="auto")
    sglang._verify_load_format(left.append, config)
    assert left == [config]
    config.load_format = "unshard"
    with pytest.raises(UsageError, match="does not fit the interface"):
        sglang._verify_load_format(left.append, config)


def test_what_the_command_gives_to_vllm(tmp_path: Path) -> None:
    """A package in the place of vLLM shows its command line; nothing else of it is used."""
    actor = save(tmp_path / "run", tiny_model())
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'packages'}:{SOURCE}"}
    command = [sys.executable, "-m", "unshard", "vllm", str(actor), "--port", "8001", "-tp", "2"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    serve, directory, *rest = json.loads(done.stdout)
    assert (serve, directory) == ("serve", str(actor / "huggingface"))
    assert rest[:2] == ["--served-model-name", str(actor)]
    assert json.loads(rest[5]) == {"checkpoint": str(actor), "step": 10}
    assert rest[6] == "--worker-extension-cls"
    assert rest[8:] == ["--port", "8001", "-tp", "2"]
    assert f"{actor}" in done.stderr or "step 10" in done.stderr


def test_what_the_command_gives_to_sglang(tmp_path: Path) -> None:
    """As above: a package in its place."""
    actor = save(tmp_path / "run", tiny_model())
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "launch_server.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'packages'}:{SOURCE}"}
    ours = ["--weights", "model", "--served-model-name", "mine"]
    command = [sys.executable, "-m", "unshard", "sglang", str(actor), *ours]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        *("--model-path", str(actor / "huggingface"), "--load-format", "unshard"),
        "--model-loader-extra-config",
        json.dumps({"checkpoint": str(actor), "step": 10, "weights": "model"}),
        *("--served-model-name", "mine"),
    ]
    command += ["--model-path", "elsewhere"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--model-path is set by unshard sglang" in done.stderr


def test_without_a_tokenizer_the_command_says_what_to_give(tmp_path: Path) -> None:
    actor = save(tmp_path / "run", tiny_model(), tokenizer=False)
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'packages'}:{SOURCE}"}
    command = [sys.executable, "-m", "unshard", "vllm", str(actor)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no tokenizer" in done.stderr
