"""`--verify full`: one flipped byte anywhere is found, and named with file, tensor and rank."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import unshard
import unshard.api.making
import unshard.write.verification.output
from ranks import merged, rank_path, save_ranks, some_tensors
from unshard import CorruptError, OutputError, UsageError
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.zip import read_torch_zip
from unshard.keywords import DtypeLike
from unshard.progress import Event, Stage
from unshard.read.torch_save.state_dict import rank_table

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

Hook = Callable[[Path], None]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def stored(path: Path, name: str) -> tuple[int, int]:
    """Where a tensor's bytes are in a rank file: offset and length."""
    file = read_torch_file(path)
    table = rank_table(file, rank=int(path.stem[-1]), file=0, allowed=frozenset())
    place = table.names.index(name)
    (box,) = table.cut_table[table.cuts[place]].boxes
    return int(table.starts[place]), box.length


def large() -> dict[str, torch.Tensor]:
    """Tensors that are copied (long runs) as well as gathered (short ones)."""
    return {"long": torch.rand(300, 200), "short": torch.rand(5, 3)}


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize("memory", ["64MB", "140KB"])
def test_an_undamaged_checkpoint_passes(tmp_path: Path, dtype: DtypeLike, memory: str) -> None:
    save_ranks(tmp_path / "ckpt", large(), 3)
    unshard.merge(
        tmp_path / "ckpt",
        tmp_path / "out",
        verify="full",
        dtype=dtype,
        memory=memory,
        config="none",
    )
    assert merged(tmp_path / "out").keys() == large().keys()


@pytest.mark.parametrize("name", ["long", "short"])
@pytest.mark.parametrize("last", ["first", "last"])
def test_a_flipped_byte_of_a_storage_is_found_by_its_checksum(
    tmp_path: Path, name: str, last: str
) -> None:
    save_ranks(tmp_path / "ckpt", large(), 2)
    path = rank_path(tmp_path / "ckpt", 2, 1)
    start, length = stored(path, name)
    flip(path, start + (length - 1 if last == "last" else 0))
    unshard.merge(tmp_path / "ckpt", tmp_path / "light", config="none")
    with pytest.raises(CorruptError, match="does not match its checksum") as error:
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", verify="full", config="none")
    assert str(path) in str(error.value)
    assert f"tensor {name} of rank 1" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_every_byte_of_a_pickle_is_guarded_even_without_full(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    path = rank_path(tmp_path / "ckpt", 2, 0)
    whole = path.read_bytes()
    pickle = read_torch_zip(path).pickle
    start = whole.index(pickle)
    for offset in range(0, len(pickle), 97):
        flip(path, start + offset)
        with pytest.raises(unshard.CheckpointError, match="rank_0"):
            unshard.merge(tmp_path / "ckpt", tmp_path / "out")
        path.write_bytes(whole)


def without_checksums(
    directory: Path, world: int, shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        save_ranks(directory, large(), world, mesh_shape=shape, mesh_names=names)
    finally:
        torch.serialization.set_crc32_options(before)


def test_files_that_have_no_checksums_are_named(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", large(), 2)
    first = unshard.merge(
        tmp_path / "ckpt", tmp_path / "first", verify="full", max_shard_size=300, config="none"
    )
    assert not any("checksums" in note for note in first.notes)
    light = unshard.merge(tmp_path / "first", tmp_path / "light", config="none")
    assert not any("checksums" in note for note in light.notes)
    again = unshard.merge(tmp_path / "first", tmp_path / "again", verify="full", config="none")
    (note,) = [one for one in again.notes if "checksums" in one]
    assert "bytes of model-00001-of-00002.safetensors, model-0000" in note
    assert note.endswith("these 2 files have no checksums")
    report = unshard.reshard(
        tmp_path / "light", tmp_path / "shards", world_size=2, to="verl", verify="full"
    )
    assert any(note.endswith("this file has no checksums") for note in report.notes)


@pytest.mark.parametrize("name", ["long", "short"])
def test_replicas_that_differ_are_found_without_checksums(tmp_path: Path, name: str) -> None:
    without_checksums(tmp_path / "ckpt", 4, (2, 2), ("ddp", "fsdp"))
    path = rank_path(tmp_path / "ckpt", 4, 3)
    flip(path, stored(path, name)[0] + 17)
    unshard.merge(tmp_path / "ckpt", tmp_path / "light", config="none")
    with pytest.raises(CorruptError, match=f"tensor {name}: the replicas") as error:
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", verify="full", config="none")
    assert "rank 1," in error.value.expected
    assert "rank 3" in error.value.found
    assert path.name in error.value.found


def damaging(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage the output after it was written, as a faulty disk would."""
    real = unshard.write.verification.output.verify_light

    def verify(directory: Path, layout: object) -> None:
        real(directory, layout)  # type: ignore[arg-type]
        hook(directory)

    monkeypatch.setattr(unshard.api.making, "verify_light", verify)


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize("offset", [0, 1000, 119_999, -1])
def test_a_flipped_byte_of_the_output_is_found(
    tmp_path: Path, dtype: DtypeLike, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_ranks(tmp_path / "ckpt", large(), 2)

    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        size = path.stat().st_size
        data_start = size - sum(t.numel() for t in large().values()) * (4 if dtype == "keep" else 2)
        flip(path, size - 1 if offset < 0 else data_start + offset)

    damaging(damage, monkeypatch)
    with pytest.raises(OutputError, match="differs from its source") as error:
        unshard.merge(
            tmp_path / "ckpt", tmp_path / "out", verify="full", dtype=dtype, config="none"
        )
    assert f"tensor {'short' if offset < 0 else 'long'}" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_flipped_byte_of_an_output_header_is_found_by_light_verification(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", large(), 2)

    def damaging(event: Event) -> None:
        if event == Stage("verifying"):
            (path,) = tmp_path.glob("_unshard-partial-*/output/model.safetensors")
            flip(path, path.read_bytes().index(b'"pt"') + 1)

    with pytest.raises(OutputError, match="its header differs from the plan"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", listener=damaging, config="none")


def test_verification_can_be_turned_off_and_is_one_of_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_ranks(tmp_path / "ckpt", large(), 2)
    monkeypatch.setattr(unshard.api.making, "verify_light", lambda *_: pytest.fail("verified"))
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", verify="off", config="none")
    with pytest.raises(UsageError, match="verify='some'"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out2", verify="some")  # type: ignore[arg-type]
