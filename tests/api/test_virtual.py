"""`unshard.virtual`: the files of a merge that is not made."""

import gc
import io
import json
import re
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from ranks import assert_same, merged, rank_path, save_ranks, snapshot, some_tensors
from tiny_models import logits, tiny_model
from unshard import ConversionError, CorruptError, NoSuchFileError, UsageError
from unshard.progress import Event, Warned, ignore

WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(3)
    tensors = {f"w{n}": torch.randn(900, 700, generator=generator) for n in range(3)}
    save_ranks(tmp_path / "run" / "global_step_4" / "actor", tensors, 2)
    return tmp_path / "run"


def test_it_is_a_collection_of_the_files_of_a_merge(checkpoint: Path) -> None:
    with unshard.virtual(checkpoint, max_shard_size="6MB", listener=ignore, config="none") as files:
        assert isinstance(files, Mapping)
        names = list(files)
        assert names[:2] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert names[-1] == "unshard.json"
        assert len(files) == len(names) == 4
        assert "model.safetensors.index.json" in files
        assert "config.json" not in files
        assert files.sizes[names[0]] == files[names[0]].size
        assert files.get("config.json") is None
        first, second = files.open(names[0]), files[names[0]]
        assert first.read(10) == second.read(10)  # each has a position of its own
        assert files == files  # noqa: PLR0124 (that it does not read everything)
        assert len({files}) == 1
        where = checkpoint / "global_step_4" / "actor"
        shown = f"<VirtualFiles of '{where}': 4 files, 7.6 MB"
        assert repr(files) == f"{shown}>"
        with pytest.raises(NoSuchFileError, match=r"no file config\.json") as caught:
            files["config.json"]
        assert isinstance(caught.value, KeyError)
        assert "there are model-00001-of-00002.safetensors, " in caught.value.hint
    assert repr(files) == f"{shown}, closed>"


def test_nothing_is_written_and_nothing_left(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    before = snapshot(tmp_path)
    with unshard.virtual(checkpoint, dtype="bfloat16", listener=ignore, config="none") as files:
        assert len(files[WEIGHTS].read()) == files.sizes[WEIGHTS]
    assert snapshot(tmp_path) == before


def test_options_that_write_are_refused(checkpoint: Path) -> None:
    for option in ("overwrite", "dry_run", "verify", "push_to_hub"):
        with pytest.raises(TypeError, match=rf"virtual\(\) .* '{option}'"):
            unshard.virtual(checkpoint, **{option: True})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="empty path"):
        unshard.virtual("")


def test_what_a_merge_refuses_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    rank_path(checkpoint / "global_step_4" / "actor", 2, 1).unlink()
    with pytest.raises(unshard.IncompleteError, match="rank 1"):
        unshard.virtual(checkpoint)
    save_ranks(tmp_path / "odd", some_tensors(), 2)
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConversionError):
        unshard.virtual(tmp_path / "odd", base=tmp_path / "odd", exclude="(")


def test_warnings_are_those_of_a_merge(checkpoint: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    unshard.merge(checkpoint, tmp_path / "out", listener=events.append, config="none")
    expected = [one for one in events if isinstance(one, Warned)]
    events.clear()
    unshard.virtual(checkpoint, listener=events.append, config="none").close()
    assert [one for one in events if isinstance(one, Warned)] == expected != []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unshard.virtual(checkpoint, config="none").close()
    assert [str(one.message) for one in caught] == [one.message for one in expected]


def test_several_threads_read_several_files_and_one(checkpoint: Path, tmp_path: Path) -> None:
    unshard.merge(checkpoint, tmp_path / "out", dtype="bfloat16", listener=ignore, config="none")
    truth = (tmp_path / "out" / WEIGHTS).read_bytes()
    with unshard.virtual(checkpoint, dtype="bfloat16", listener=ignore, config="none") as files:
        shared = files[WEIGHTS]

        def own(number: int) -> bool:
            with files[WEIGHTS] as file:
                file.seek(number * 10_000)
                return file.read(400_000) == truth[number * 10_000 :][:400_000]

        def of_shared(_: int) -> bytes:
            return shared.read(len(truth) // 40)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(own, range(60)))
            parts = list(pool.map(of_shared, range(41)))
    # Which thread got which part is open; together they are the file, and no byte came twice.
    assert sum(map(len, parts)) == len(truth)
    cuts = [truth[at : at + len(truth) // 40] for at in range(0, len(truth), len(truth) // 40)]
    assert sorted(cut for cut in parts if cut) == sorted(cuts)


def test_a_closed_checkpoint_is_not_read(checkpoint: Path) -> None:
    files = unshard.virtual(checkpoint, listener=ignore, config="none")
    file = files[WEIGHTS]
    files.close()
    files.close()
    for call in (lambda: file.read(1), files.check_sources):
        with pytest.raises(UsageError, match="were closed"):
            call()


def test_a_file_keeps_the_checkpoint_open(checkpoint: Path) -> None:
    file = unshard.virtual(checkpoint, listener=ignore, config="none")[WEIGHTS]
    gc.collect()
    assert len(file.read(1000)) == 1000


def test_a_checkpoint_that_changes_is_noticed(checkpoint: Path) -> None:
    path = rank_path(checkpoint / "global_step_4" / "actor", 2, 0)
    with unshard.virtual(checkpoint, listener=ignore, config="none") as files:
        (path.parent / "pin.pt").hardlink_to(path)
        files.check_sources()
        with path.open("r+b") as stream:
            stream.seek(-10, io.SEEK_END)
            stream.write(b"0123456789")
        with pytest.raises(CorruptError, match=r"rank_0\.pt: has changed while it was being read"):
            files.check_sources()
        path.unlink()
        with pytest.raises(CorruptError, match=r"rank_0\.pt: no longer exists"):
            files[WEIGHTS].read()


def test_compressed_items_are_decompressed_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = FileSystemWriter(tmp_path / "step-3", sync_files=False, _extensions=[ZStandard()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save({"model": some_tensors()}, storage_writer=writer, no_dist=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    unshard.merge(tmp_path / "step-3", tmp_path / "out", listener=ignore, config="none")
    with unshard.virtual(tmp_path / "step-3", listener=ignore, config="none") as files:
        assert len(list(scratch.iterdir())) == 1
        truth = {path: data for path, (_, _, data) in snapshot(tmp_path / "out").items()}
        assert {name: file.read() for name, file in files.items()} == truth
    assert list(scratch.iterdir()) == []


def test_training_state_is_there_unless_it_is_left_out(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "checkpoint"
    with unshard.virtual(example, listener=ignore) as files:
        file = files["extra_state_merged.pt"]
        state = torch.load(file, weights_only=True)  # type: ignore[arg-type]  # it takes any file
        assert "lr_scheduler" in state
        with zipfile.ZipFile(files["extra_state_merged.pt"]) as archive:
            assert archive.testzip() is None
        assert json.load(files["lr_scheduler_state.json"])
    unshard.merge(example, tmp_path / "out", extra_state=False, listener=ignore)
    with unshard.virtual(example, extra_state=False, listener=ignore) as files:
        truth = {path: data for path, (_, _, data) in snapshot(tmp_path / "out").items()}
        assert {name: file.read() for name, file in files.items()} == truth


def test_safetensors_and_transformers_read_what_they_take(tmp_path: Path) -> None:
    """safetensors takes bytes, no file objects; transformers takes what that makes of them."""
    model = tiny_model("qwen2")
    save_ranks(tmp_path / "ckpt", dict(model.state_dict()), 3)
    model.config.save_pretrained(tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", listener=ignore)
    with unshard.virtual(tmp_path / "ckpt", listener=ignore) as files:
        with pytest.raises(TypeError):
            safe_open(files[WEIGHTS], framework="pt")
        found = safetensors.torch.load(files[WEIGHTS].read())
        assert_same(found, merged(tmp_path / "out"))
        config = type(model.config).from_dict(json.load(files["config.json"]))
    loaded = type(model).from_pretrained(None, config=config, state_dict=found)
    assert torch.equal(logits(loaded), logits(model))


def test_the_guides_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    save_ranks(tmp_path / "checkpoint-1000", dict(model.state_dict()), 2)
    model.config.save_pretrained(tmp_path / "checkpoint-1000")
    unshard.merge(tmp_path / "checkpoint-1000", tmp_path / "out", listener=ignore)
    monkeypatch.chdir(tmp_path)
    guide = Path(__file__).parents[2] / "docs" / "guides" / "virtual.md"
    blocks = re.findall(
        r"^```python\n(.*?)^```$", guide.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 2
    for code in blocks:
        exec(compile(code, str(guide), "exec"), {})  # noqa: S102 (it is our own page)
    assert (tmp_path / "copy.safetensors").read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()
    with tarfile.open(tmp_path / "model.tar") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    unpacked, truth = (snapshot(tmp_path / place) for place in ("unpacked", "out"))
    assert {name: one[2] for name, one in unpacked.items()} == {
        name: one[2] for name, one in truth.items()
    }
