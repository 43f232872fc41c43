"""`--base ID`: what is downloaded of a hub model, and what is not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from hub_server import TOKEN, Hub, Repo, serving
from ranks import assert_same, merged, save_ranks, some_tensors


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with a model of two files."""
    tensors = {name: tensor.bfloat16() for name, tensor in some_tensors(7).items()}
    first, *others = tensors
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    weight_map = {first: one} | dict.fromkeys(others, two)
    with serving() as hub:
        hub.repos["org/base"] = Repo(
            private=False,
            files={
                one: save({first: tensors[first]}, {"format": "pt"}),
                two: save({name: tensors[name] for name in others}, {"format": "pt"}),
                "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
                "config.json": b'{"model_type": "llama"}',
                "tokenizer.json": b"{}",
            },
        )
        yield hub


def run(hub: Hub, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-m", "unshard", "merge", str(tmp_path / "ckpt"), *options]
    return subprocess.run(
        [*command, "--json"], env=environment, capture_output=True, text=True, check=False
    )


def downloaded(hub: Hub) -> set[str]:
    return {one.rpartition("/")[2] for one in hub.requests if one.startswith("GET /org/base/res")}


def test_names_dtypes_and_files_are_taken_from_headers_without_the_weights(
    hub: Hub, tmp_path: Path
) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    out = tmp_path / "out"
    done = run(hub, tmp_path, str(out), "--base", "org/base", "--dtype", "base")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["files"]) == 2
    assert report["changed_from_base"] is None
    assert {"config.json", "tokenizer.json"} <= set(report["companions"])
    assert_same(merged(out), {name: tensor.bfloat16() for name, tensor in some_tensors().items()})
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert "tokenizer.json" in downloaded(hub)


def test_the_cache_is_asked_first(hub: Hub, tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    assert run(hub, tmp_path, str(tmp_path / "one"), "--base", "org/base").returncode == 0
    hub.requests.clear()
    assert run(hub, tmp_path, str(tmp_path / "two"), "--base", "org/base").returncode == 0
    assert "tokenizer.json" not in downloaded(hub)


def test_weights_are_downloaded_where_an_adapter_needs_them(hub: Hub, tmp_path: Path) -> None:
    import torch

    path = "base_model.model.model.embed_tokens.lora_embedding_"
    adapter = {f"{path}A": torch.randn(2, 13), f"{path}B": torch.randn(6, 2)}
    save_ranks(tmp_path / "ckpt", adapter, 2)
    (tmp_path / "ckpt" / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 4}')
    out = tmp_path / "out"
    done = run(hub, tmp_path, str(out), "--base", "org/base")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["changed_from_base"] == [1, 3]
    name = "model.embed_tokens.weight"
    base = some_tensors(7)[name].bfloat16().float()
    expected = base + 2 * (adapter[f"{path}B"] @ adapter[f"{path}A"]).T
    assert torch.allclose(merged(out)[name].float(), expected, atol=0.05)


def test_a_model_that_does_not_exist_is_refused(hub: Hub, tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    done = run(hub, tmp_path, str(tmp_path / "out"), "--base", "org/nothing")
    assert done.returncode == 4
    assert "--base org/nothing: is not a directory here" in done.stderr
    assert not (tmp_path / "out").exists()


def test_weights_are_downloaded_for_layers_that_training_dropped(hub: Hub, tmp_path: Path) -> None:
    files = hub.repos["org/base"].files
    mtp = {"mtp.fc.weight": torch.ones(3, 2).bfloat16()}
    file = "model-00001-of-00002.safetensors"
    index = json.loads(files["model.safetensors.index.json"])
    index["weight_map"] |= dict.fromkeys(mtp, file)
    files[file] = save({**load(files[file]), **mtp}, {"format": "pt"})
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["config.json"] = b'{"model_type": "llama", "mtp_num_hidden_layers": 1}'
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    without = run(hub, tmp_path, str(tmp_path / "out"), "--base", "org/base", "--exclude", "^mtp")
    assert without.returncode == 0, without.stderr
    assert_same(merged(tmp_path / "out"), some_tensors())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 0
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    done = run(hub, tmp_path, str(tmp_path / "two"), "--base", "org/base")
    assert done.returncode == 0, done.stderr
    assert_same(merged(tmp_path / "two"), {**some_tensors(), **mtp})
    assert list((tmp_path / "cache").rglob(file))
