"""`open_checkpoint` and its options, and whole state dicts of torch."""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from adapters import adapted
from ranks import assert_same, bits, merged, rank_path, save_ranks, some_tensors
from unshard import ConversionError, CorruptError, UnknownFormatError, UsageError
from unshard.errors import how_to_install

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of an actor."""
    for step, seed in ((7, 0), (9, 1)):
        save_ranks(tmp_path / "run" / f"global_step_{step}" / "actor", some_tensors(seed), 2)
    return tmp_path / "run"


def test_a_state_dict_is_the_whole_checkpoint(run: Path) -> None:
    found = unshard.load_state_dict(run)
    assert_same(found, some_tensors(1))
    assert list(found) == list(some_tensors())


def test_the_options_of_reading_are_those_of_a_merge(run: Path, tmp_path: Path) -> None:
    assert_same(unshard.load_state_dict(run, step=7), some_tensors())
    save_ranks(run / "global_step_7" / "critic", some_tensors(5), 2)
    assert_same(unshard.load_state_dict(run, step=7, role="actor"), some_tensors())
    assert_same(unshard.load_state_dict(run, step=7, role="critic"), some_tensors(5))
    with pytest.raises(UnknownFormatError, match="has no judge"):
        unshard.open_checkpoint(run, role="judge")
    with pytest.raises(UsageError, match="names"):
        unshard.open_checkpoint(run, names="mine")  # type: ignore[call-overload]
    with pytest.raises(UnknownFormatError):
        unshard.open_checkpoint(tmp_path / "nowhere")
    other = tmp_path / "node1" / "global_step_9" / "actor"
    other.mkdir(parents=True)
    actor = run / "global_step_9" / "actor"
    rank_path(actor, 2, 1).rename(rank_path(other, 2, 1))
    assert_same(unshard.load_state_dict(actor, also=[other]), some_tensors(1))


def test_options_that_are_not_there_are_refused(run: Path) -> None:
    with pytest.raises(TypeError, match="dtype"):
        unshard.load_state_dict(run, dtype="bfloat16")  # type: ignore[call-arg]  # that is tested


@pytest.mark.parametrize("framework", ["jax", "torch", "numpy", ""])
def test_other_frameworks_are_refused(run: Path, framework: Any) -> None:
    with pytest.raises(UsageError, match=f"framework '{framework}'") as caught:
        unshard.open_checkpoint(run, framework=framework)
    assert caught.value.expected == '"np" or "pt"'


def test_without_torch_there_are_arrays_and_a_clear_error(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with unshard.open_checkpoint(run) as one:
        assert one.get_tensor("lm_head.weight").shape == (13, 6)
        with pytest.raises(UsageError, match="torch is not installed"):
            one.load_into(None)  # type: ignore[arg-type]  # it is refused before
    with pytest.raises(UsageError, match="torch is not installed") as caught:
        unshard.open_checkpoint(run, framework="pt")
    assert caught.value.hint == how_to_install("torch", "torch")
    with pytest.raises(UsageError, match="torch is not installed"):
        unshard.load_state_dict(run)


# names


def test_names_of_training_are_those_that_were_saved(tmp_path: Path) -> None:
    """Without those of wrappers; adapters apart; tied weights under both names."""
    adapter = adapted(tmp_path / "ckpt")
    found = unshard.load_state_dict(tmp_path / "ckpt")
    for name, tensor in adapter.items():
        assert bits(found[f"base_model.model.lm_head.{name}"]) == bits(tensor)
    assert "base_model.model.lm_head.base_layer.weight" in found
    tensors = some_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    wrapped = {f"_orig_mod.{name}": one for name, one in tensors.items()}
    save_ranks(tmp_path / "tied", wrapped, 2)
    (tmp_path / "tied" / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "tie_word_embeddings": True})
    )
    assert_same(unshard.load_state_dict(tmp_path / "tied"), tensors)
    hub = unshard.load_state_dict(tmp_path / "tied", names="hub")
    assert hub.keys() == tensors.keys() - {"lm_head.weight"}


def test_names_of_the_hub_are_what_a_merge_writes_bit_for_bit(tmp_path: Path) -> None:
    """Also what is computed, and parts of it."""
    adapted(tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    theirs = merged(tmp_path / "out")
    assert_same(unshard.load_state_dict(tmp_path / "ckpt", names="hub"), theirs)
    with unshard.open_checkpoint(tmp_path / "ckpt", framework="pt", names="hub") as one:
        for index in ((slice(None, None, -3), slice(1, 4)), 5, (..., -1)):
            part = one.get_slice("lm_head.weight")[index]
            whole = theirs["lm_head.weight"].numpy()[index]
            assert bits(part) == np.ascontiguousarray(whole).tobytes()


def test_an_adapter_needs_its_alpha_for_names_of_the_hub_only(tmp_path: Path) -> None:
    adapted(tmp_path / "ckpt", alpha=None)
    assert len(unshard.load_state_dict(tmp_path / "ckpt")) == 5
    with pytest.raises(ConversionError, match="lora_alpha=…"):
        unshard.open_checkpoint(tmp_path / "ckpt", names="hub")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora_alpha=3.0)
    found = unshard.load_state_dict(tmp_path / "ckpt", names="hub", lora_alpha=3.0)
    assert_same(found, merged(tmp_path / "out"))


def test_a_base_gives_its_names(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file(some_tensors(3), base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    short = {name.removeprefix("model."): one for name, one in some_tensors().items()}
    save_ranks(tmp_path / "ckpt", short, 2)
    found = unshard.load_state_dict(tmp_path / "ckpt", names="hub", base=base)
    assert_same(found, some_tensors())
    with pytest.raises(UsageError, match="names='training' excludes base"):
        unshard.open_checkpoint(tmp_path / "ckpt", base=base)


# compressed checkpoints


@pytest.fixture
def compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compressed checkpoint, and a temporary directory of its own: `tmp_path / "scratch"`."""
    writer = FileSystemWriter(tmp_path / "step-3", sync_files=False, _extensions=[ZStandard()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save({"model": some_tensors()}, storage_writer=writer, no_dist=True)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "step-3"


def left(compressed: Path) -> list[str]:
    return [path.name for path in (compressed.parent / "scratch").iterdir()]


def test_what_is_decompressed_is_there_until_it_is_closed(compressed: Path) -> None:
    one = unshard.open_checkpoint(compressed, framework="pt")
    assert len(left(compressed)) == 1
    assert_same({name: one.get_tensor(name) for name in one}, some_tensors())
    one.close()
    assert left(compressed) == []
    assert_same(unshard.load_state_dict(compressed), some_tensors())
    assert left(compressed) == []


def test_what_is_decompressed_is_removed_if_opening_fails(
    compressed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unshard.read.dcp import items

    def failing(*_: object) -> None:
        raise CorruptError("broken")

    monkeypatch.setattr(items, "inflate", failing)
    with pytest.raises(CorruptError, match="broken"):
        unshard.open_checkpoint(compressed)
    assert left(compressed) == []


def test_a_fork_does_not_remove_what_its_parent_reads(compressed: Path) -> None:
    with unshard.open_checkpoint(compressed, framework="pt") as one:
        child = os.fork()
        if child == 0:
            one.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert_same({name: one.get_tensor(name) for name in one}, some_tensors())


def test_errors_of_reading_name_the_checkpoint_as_ever(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    rank_path(tmp_path / "ckpt", 2, 1).unlink()
    with pytest.raises(unshard.IncompleteError, match="rank 1"):
        unshard.open_checkpoint(tmp_path / "ckpt")
