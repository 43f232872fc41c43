"""Names and shapes of an output, loaded by transformers itself without weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    PreTrainedModel,
)

from tiny_models import tiny_model
from unshard.errors import OutputError, UsageError, how_to_install
from unshard.tensors.dtypes import BY_CODE, DType
from unshard.write.verification.comparison import Mismatch
from unshard.write.verification.load import verify_load

Tensors = dict[str, tuple[DType, tuple[int, ...]]]


def qwen(directory: Path, *, tied: bool = True) -> Tensors:
    return saved(tiny_model(tie_word_embeddings=tied), directory)


def saved(model: PreTrainedModel, directory: Path) -> Tensors:
    """Save a model and return what its files say of the tensors."""
    model.save_pretrained(directory)
    tensors: Tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                view = file.get_slice(name)
                tensors[name] = BY_CODE[view.get_dtype()], tuple(view.get_shape())
        path.unlink()  # nothing of the weights is read
    return tensors


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_complete(tmp_path: Path, *, tied: bool) -> None:
    tensors = qwen(tmp_path, tied=tied)
    assert ("lm_head.weight" in tensors) is not tied
    loading = verify_load(tmp_path, tensors)
    assert loading.complete
    assert loading.model_class == "Qwen2ForCausalLM"


def test_a_tied_head_may_be_there_as_well(tmp_path: Path) -> None:
    tensors = qwen(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert verify_load(tmp_path, tensors).complete


def test_experts_that_transformers_fuses_on_loading_are_not_a_difference(tmp_path: Path) -> None:
    tensors = saved(tiny_model("mixtral"), tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in tensors
    assert verify_load(tmp_path, tensors).complete
    del tensors["model.layers.0.block_sparse_moe.gate.weight"]
    assert len(verify_load(tmp_path, tensors).missing) == 1


def test_buffers_that_are_not_saved_are_not_missed(tmp_path: Path) -> None:
    assert verify_load(tmp_path, saved(tiny_model("bert"), tmp_path)).complete


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    tensors = qwen(tmp_path)
    dtype = tensors.pop("model.norm.weight")[0]
    tensors["model.layers.1.mlp.up_proj.weight"] = dtype, (23, 16)
    tensors["model.layers.7.mlp.up_proj.weight"] = dtype, (24, 16)
    loading = verify_load(tmp_path, tensors)
    assert not loading.complete
    assert loading.missing == ("model.norm.weight",)
    assert loading.unexpected == ("model.layers.7.mlp.up_proj.weight",)
    assert loading.mismatched == (
        Mismatch("model.layers.1.mlp.up_proj.weight", (23, 16), (24, 16)),
    )


def test_transformers_says_nothing_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tensors = qwen(tmp_path)
    del tensors["model.norm.weight"]
    capfd.readouterr()
    verify_load(tmp_path, tensors)
    assert capfd.readouterr() == ("", "")


def change_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["NoSuchModel"]}, "has no model class"),
        ({"architectures": ["AutoConfig"]}, "has no model class"),
        ({"architectures": None}, "no architectures"),
        ({"model_type": "no-such-type", "architectures": ["X"]}, "does not load it"),
        ({"hidden_size": "many"}, "does not load it"),
    ],
)
def test_a_config_that_names_no_model_is_an_output_error(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    tensors = qwen(tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(OutputError, match=words):
        verify_load(tmp_path, tensors)


def test_no_config_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"has no config\.json"):
        verify_load(tmp_path, {})


def test_code_of_the_output_never_runs(tmp_path: Path) -> None:
    tensors = qwen(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    change_config(tmp_path, model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    with pytest.raises(OutputError, match="does not load it"):
        verify_load(tmp_path, tensors)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_without_the_extra_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(UsageError, match=f"{absent} is not installed") as caught:
        verify_load(tmp_path, {})
    assert caught.value.hint == how_to_install("torch transformers", "torch")


def test_importing_it_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, unshard.write.verification.load; print({*sys.modules})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "'torch'" not in done.stdout
    assert "'transformers'" not in done.stdout
    assert torch.__version__
