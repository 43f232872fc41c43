"""A model of sentence-transformers, trained under FSDP2: merged, it is what that loads.

It is compared with the live model of the training: the same tensors, the same output.
"""

import filecmp
import json
from pathlib import Path

import pytest
import torch

import unshard
from oracle.writers.libraries import SENTENCES, files_in, truth_of
from ranks import assert_same, bits, save_ranks
from tiny_sentences import sentence_embeddings, tiny_sentences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def folder(libraries: Path) -> Path:
    return libraries / SENTENCES


def assert_trained(place: Path, folder: Path) -> None:
    """Its library loads the live model: the same tensors, the same output, bit for bit."""
    model = tiny_sentences(place)
    assert_same(model.state_dict(), truth_of(folder))
    with torch.no_grad():
        found = sentence_embeddings(model)
    assert bits(found) == bits(torch.load(folder / "output"))


def test_rank_files_become_what_the_library_saves(folder: Path, tmp_path: Path) -> None:
    unshard.merge(folder / "ranks", tmp_path / "out")
    assert files_in(tmp_path / "out") == {*files_in(folder / "saved"), "unshard.json"}
    assert_trained(tmp_path / "out", folder)
    changed = {
        file
        for file in files_in(folder / "saved")
        if not filecmp.cmp(tmp_path / "out" / file, folder / "saved" / file, shallow=False)
    }
    assert changed <= {"2_Dense/model.safetensors"}  # which it writes without metadata


def test_dcp_and_a_base_become_what_the_library_loads(folder: Path, tmp_path: Path) -> None:
    unshard.merge(folder / "dcp", tmp_path / "out", base=folder / "base")
    assert files_in(tmp_path / "out") == {*files_in(folder / "base"), "unshard.json"}
    assert_trained(tmp_path / "out", folder)


def test_shards_are_of_the_transformer_alone(folder: Path, tmp_path: Path) -> None:
    """The other modules are looked for in one file each."""
    unshard.merge(folder / "ranks", tmp_path / "out", max_shard_size=8_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert not any(name.startswith("linear") for name in index["weight_map"])
    assert_trained(tmp_path / "out", folder)


def test_the_names_of_version_5_are_known(folder: Path, tmp_path: Path) -> None:
    tensors = {
        name.replace("0.model.", "0.auto_model.", 1): tensor
        for name, tensor in truth_of(folder).items()
    }
    unshard.merge(
        save_ranks(tmp_path / "ranks", tensors, 2), tmp_path / "out", base=folder / "base"
    )
    assert_trained(tmp_path / "out", folder)


def test_without_the_list_of_modules_no_model_is_written(folder: Path, tmp_path: Path) -> None:
    """Its library would load the tensors of none."""
    with pytest.warns(unshard.UnshardWarning, match=r"modules\.json"):
        made = unshard.merge(
            folder / "dcp", tmp_path / "out", config=folder / "base" / "config.json"
        )
    assert not made.loadable
