"""A pin keeps a checkpoint's weights while its trainer removes them, and disturbs nothing."""

import errno
import itertools
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from transformers.trainer_utils import rotate_checkpoints

from evaluation.runs import files_in, lmms_checkpoint, rotate_like_lmms_engine
from unshard.evaluate.pins.files import ExpiredError, PinError
from unshard.evaluate.pins.pin import (
    Quota,
    enforce_quota,
    list_pins,
    pin_checkpoint,
    read_pin,
    unpin,
)
from unshard.read.beside.companions import find_companions
from unshard.read.finding.discover import discover
from unshard.read.format import Choice
from unshard.write.dirfd import Identity, identity

ANY = Quota(count=None, bytes=None)


def test_a_pin_links_weights_and_companions_and_leaves_the_training_state(tmp_path: Path) -> None:
    checkpoint = lmms_checkpoint(tmp_path, 10, ema=True)
    (checkpoint / "eval").mkdir()
    (checkpoint / "eval" / "results.json").write_text("{}")
    pin = pin_checkpoint(checkpoint, quota=ANY)
    weights = {f"model_world_size_2_rank_{rank}.pt" for rank in range(2)}
    assert files_in(pin.path) == {
        "config.json",
        "tokenizer.json",
        *(f"pytorch_model_fsdp_0/{name}" for name in weights),
        *(f"pytorch_ema_model_fsdp_0/{name}" for name in weights),
    }
    assert pin.path.name == "checkpoint-10"
    assert pin.directory.parent == tmp_path / "_unshard" / "pins"
    assert (pin.checkpoint, pin.step) == (checkpoint, 10)
    linked = pin.path / "config.json"
    assert linked.stat().st_ino == (checkpoint / "config.json").stat().st_ino
    assert pin.changed() == []


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (
            ["model.safetensors", "adapter_model.safetensors", "trainer_state.json"],
            ["optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "scaler.pt"],
        ),
        (
            ["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp"],
            ["optimizer_0/.metadata", "optimizer_0/__0_0.distcp"],
        ),
        (
            ["actor/model_world_size_2_rank_1.pt", "actor/huggingface/config.json"],
            ["actor/optim_world_size_2_rank_1.pt", "actor/extra_state_world_size_2_rank_1.pt"],
        ),
        (["actor/fsdp_config.json", "critic/model_world_size_1_rank_0.pt"], ["data.pt"]),
        (["model_and_optim/.metadata", "model_and_optim/__0_0.distcp"], ["train/rank0.pt"]),
        (["model/shard-00001-model-00001-of-00001.safetensors"], ["optim/.metadata", "rng/0.pt"]),
        ([".metadata", "__0_0.distcp"], ["dataloader/dataloader_dp_rank_0.pt"]),
        (["pytorch_model_fsdp_rank0.bin"], ["optimizer_0_rank0.bin", "optimizer.bin"]),
    ],
)
def test_what_writers_write_is_told_apart(tmp_path: Path, kept: list[str], left: list[str]) -> None:
    checkpoint = tmp_path / "global_step_7"
    for name in (*kept, *left):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(b"x")
    assert files_in(pin_checkpoint(checkpoint, quota=ANY).path) == set(kept)


def test_companions_of_the_run_are_next_to_the_pinned_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "global_step_3"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"x")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    pin = pin_checkpoint(checkpoint, quota=ANY)
    assert files_in(pin.directory) == {
        "pin.json",
        "config.json",
        "tokenizer.json",
        "global_step_3/model.safetensors",
    }


@pytest.mark.parametrize("place", ["huggingface", "."])
def test_companions_of_a_step_are_those_of_its_pinned_part(tmp_path: Path, place: str) -> None:
    """verl 0.4 and others: next to the actor, in the step's own directory."""
    step = tmp_path / "global_step_10"
    for folder in (step / "actor", step / place):
        folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        (step / "actor" / f"model_world_size_2_rank_{rank}.pt").write_bytes(b"weights")
    (tmp_path / "config.json").write_text('{"model_type": "of-the-run"}')
    (step / place / "config.json").write_text('{"model_type": "of-the-step"}')
    (step / place / "tokenizer.json").write_text("{}")
    pin = pin_checkpoint(step / "actor", quota=ANY, run=tmp_path)
    found, original = (
        find_companions(discover(one, Choice(None, None, None))[0], None)
        for one in (pin.path, step / "actor")
    )
    assert found.config is not None
    assert found.config.is_relative_to(pin.directory)
    assert "of-the-step" in found.config.read_text()
    assert found.files.keys() == original.files.keys() == {"tokenizer.json"}


def test_a_file_that_is_a_checkpoint_can_be_pinned(tmp_path: Path) -> None:
    file = tmp_path / "epoch=1-step=20.ckpt"
    file.write_bytes(b"weights")
    pin = pin_checkpoint(file, quota=ANY)
    file.unlink()
    assert (pin.path.read_bytes(), pin.step, pin.changed()) == (b"weights", 20, [])


def test_a_pin_outlives_the_rotation_of_lmms_engine(tmp_path: Path) -> None:
    first, contents = lmms_checkpoint(tmp_path, 10), {}
    pin = pin_checkpoint(first, quota=ANY)
    contents = {name: (first / name).read_bytes() for name in pin.files}
    lmms_checkpoint(tmp_path, 20)
    rotate_like_lmms_engine(tmp_path, 1)
    assert not first.exists()
    assert {name: (pin.path / name).read_bytes() for name in pin.files} == contents
    assert pin.changed() == []


def test_pinning_an_old_checkpoint_does_not_make_the_trainer_remove_a_newer_one(
    tmp_path: Path,
) -> None:
    old, new = lmms_checkpoint(tmp_path, 10), lmms_checkpoint(tmp_path, 20)
    for age, place in ((100, old), (50, new), (200, tmp_path)):
        then = time.time_ns() - age * 10**9
        os.utime(place, ns=(then, then))
    before = [path.stat().st_mtime_ns for path in (tmp_path, old, new)]
    pin_checkpoint(old, quota=ANY)
    assert [path.stat().st_mtime_ns for path in (tmp_path, old, new)] == before
    rotate_checkpoints(str(tmp_path), save_total_limit=1, use_mtime=True)
    assert (old.exists(), new.exists()) == (False, True)


def test_a_link_that_leads_nowhere_is_left_out(tmp_path: Path) -> None:
    checkpoint = lmms_checkpoint(tmp_path, 10)
    before = pin_checkpoint(checkpoint, quota=ANY)
    (checkpoint / "latest").symlink_to("nowhere")
    (checkpoint / "loop").symlink_to("loop")
    assert files_in(pin_checkpoint(checkpoint, quota=ANY).path) == files_in(before.path)
    (checkpoint / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(ExpiredError, match=r"broken links\n  found:    model\.safetensors"):
        pin_checkpoint(checkpoint, quota=ANY)


def test_a_checkpoint_that_is_gone_cannot_be_pinned(tmp_path: Path) -> None:
    with pytest.raises(ExpiredError, match="does not exist"):
        pin_checkpoint(tmp_path / "checkpoint-5", quota=ANY)
    (tmp_path / "checkpoint-6").mkdir()
    with pytest.raises(ExpiredError, match="nothing to evaluate"):
        pin_checkpoint(tmp_path / "checkpoint-6", quota=ANY)
    assert files_in(tmp_path) == set()


def test_a_pin_is_whole_or_not_there_when_the_trainer_removes_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real rmtree in another thread, begun at every link, and every other time awaited there."""
    whole, count, link = [], 2 + 2 + 40, os.link
    for number in range(count + 4):
        checkpoint = lmms_checkpoint(tmp_path, number)
        for extra in range(40):
            (checkpoint / f"model-{extra:05}-of-00040.safetensors").write_bytes(b"x")
        remover, links = (
            threading.Thread(target=shutil.rmtree, args=[checkpoint]),
            itertools.count(),
        )

        def link_and_remove(source: Path, target: Path) -> None:
            link(source, target)
            if next(links) == number:  # noqa: B023  (called in this round only)
                remover.start()  # noqa: B023
                if number % 2:  # noqa: B023
                    remover.join()  # noqa: B023

        monkeypatch.setattr(os, "link", link_and_remove)
        try:
            pin = pin_checkpoint(checkpoint, quota=Quota(count=1, bytes=None))
            whole.append(number)
            assert len(files_in(pin.path)) == count
            assert pin.changed() == []
        except ExpiredError:
            assert number < count
        if remover.ident is not None:
            remover.join()
    assert {count, count + 1, count + 2, count + 3} <= set(whole)
    assert not {number for number in whole if number % 2 and number < count}
    assert not list((tmp_path / "_unshard" / "pins").glob("*.partial"))


def test_a_checkpoint_that_loses_a_file_after_it_was_listed_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = lmms_checkpoint(tmp_path, 10)
    link = os.link

    def remove_and_link(source: Path, target: Path) -> None:
        link(source, target)
        (checkpoint / "config.json").unlink(missing_ok=True)

    monkeypatch.setattr(os, "link", remove_and_link)
    with pytest.raises(ExpiredError, match="removed while"):
        pin_checkpoint(checkpoint, quota=ANY)
    assert list_pins(tmp_path) == []


def test_what_is_written_meanwhile_is_pinned_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = lmms_checkpoint(tmp_path, 10)
    link = os.link

    def write_and_link(source: Path, target: Path) -> None:
        link(source, target)
        (checkpoint / "late.safetensors").write_bytes(b"late")

    monkeypatch.setattr(os, "link", write_and_link)
    pin = pin_checkpoint(checkpoint, quota=ANY)
    assert (pin.path / "late.safetensors").read_bytes() == b"late"


def test_writing_in_place_shows(tmp_path: Path) -> None:
    checkpoint = lmms_checkpoint(tmp_path, 10)
    pin = pin_checkpoint(checkpoint, quota=ANY)
    name = "pytorch_model_fsdp_0/model_world_size_2_rank_0.pt"
    with (checkpoint / name).open("r+b") as stream:
        stream.write(b"other")
    (pin.path / "tokenizer.json").unlink()
    replaced = checkpoint / "config.json"
    replaced.unlink()
    replaced.write_text("{}")
    assert sorted(read_pin(pin.directory).changed()) == [name, "tokenizer.json"]


@pytest.mark.parametrize(
    ("numbers", "grain", "is_changed"),
    [
        ((1000, 1000), 1, False),  # a mount that numbers files by itself
        ((1000, 1000), 10**9, False),
        ((0, 0), 10**9, False),
        ((0, 0), 100, False),
        ((1000, 0), 1, True),  # some numbers are the same: this file is another
    ],
)
def test_another_machine_may_number_files_by_itself_and_know_coarser_times(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, int],
    grain: int,
    is_changed: bool,  # noqa: FBT001
) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    for name in ("a.pt", "b.pt"):
        (tmp_path / "checkpoint-1" / name).write_bytes(b"weights")
    pin = pin_checkpoint(tmp_path / "checkpoint-1", quota=ANY)
    inodes = ((pin.path / name).stat().st_ino for name in ("a.pt", "b.pt"))
    more = dict(zip(inodes, numbers, strict=True))

    def elsewhere(status: os.stat_result) -> Identity:
        inode, size, mtime = identity(status)
        return inode + more[inode], size, mtime // grain * grain

    monkeypatch.setattr("unshard.evaluate.pins.files.identity", elsewhere)
    assert bool(pin.changed()) == is_changed
    (pin.path / "b.pt").write_bytes(b"longer than it was")
    assert "b.pt" in pin.changed()


def test_clients_and_servers_remove_none_of_the_others_pins(tmp_path: Path) -> None:
    few = Quota(1, None)
    for step in (1, 2, 3):
        pin_checkpoint(lmms_checkpoint(tmp_path, step), quota=ANY)
    for step, owner in ((4, "server"), (5, "another")):  # the first may be gone for good
        pin_checkpoint(lmms_checkpoint(tmp_path, step), quota=few, owner=owner)
    assert [(pin.step, pin.owner) for pin in list_pins(tmp_path)] == [
        (1, ""),
        (2, ""),
        (3, ""),
        (5, "another"),
    ]
    enforce_quota(tmp_path, few)
    assert [pin.step for pin in list_pins(tmp_path)] == [3, 5]


def test_the_quota_removes_the_oldest(tmp_path: Path) -> None:
    quota = Quota(count=2, bytes=None)
    pins = [pin_checkpoint(lmms_checkpoint(tmp_path, step), quota=quota) for step in (1, 2, 3)]
    assert [pin.step for pin in list_pins(tmp_path)] == [2, 3]
    size = sum(size for _, size, _ in pins[2].files.values())
    enforce_quota(tmp_path, Quota(None, size))
    assert [pin.step for pin in list_pins(tmp_path)] == [3]
    again = pin_checkpoint(tmp_path / "checkpoint-3", quota=Quota(None, size))
    assert {pin.name for pin in list_pins(tmp_path)} == {pins[2].name, again.name}


def test_a_checkpoint_larger_than_the_quota_is_not_kept(tmp_path: Path) -> None:
    kept = pin_checkpoint(lmms_checkpoint(tmp_path, 1), quota=ANY)
    large = lmms_checkpoint(tmp_path, 2, size=10_000)
    with pytest.raises(PinError, match="at most 20000 bytes"):
        pin_checkpoint(large, quota=Quota(None, 20_000))
    assert [pin.name for pin in list_pins(tmp_path)] == [kept.name]


def test_abandoned_beginnings_are_removed_and_fresh_ones_stay(tmp_path: Path) -> None:
    pin = pin_checkpoint(lmms_checkpoint(tmp_path, 1), quota=ANY)
    old, fresh = (pin.directory.with_name(f"{name}.partial") for name in ("old", "fresh"))
    old.mkdir()
    fresh.mkdir()
    os.utime(old, (0, 0))
    enforce_quota(tmp_path, ANY)
    assert (old.exists(), fresh.exists()) == (False, True)
    assert [one.name for one in list_pins(tmp_path)] == [pin.name]


def test_unpinning_twice_is_fine_and_frees_the_bytes(tmp_path: Path) -> None:
    checkpoint = lmms_checkpoint(tmp_path, 1)
    pin = pin_checkpoint(checkpoint, quota=ANY)
    assert read_pin(pin.path) == read_pin(pin.directory) == pin
    unpin(pin)
    unpin(pin)
    assert (checkpoint / "config.json").stat().st_nlink == 1
    with pytest.raises(ExpiredError, match="not a pin"):
        read_pin(pin.directory)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EXDEV, "another file system"),
        (errno.EPERM, "another user's"),
        (errno.EMLINK, "as many links"),
        (errno.EIO, "cannot be linked"),
    ],
)
def test_where_linking_fails_the_error_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(PinError, match=said) as caught:
        pin_checkpoint(lmms_checkpoint(tmp_path, 1), quota=ANY)
    assert "merge it at once" in caught.value.hint
    assert list_pins(tmp_path) == []


def test_another_file_system_is_refused(tmp_path: Path) -> None:
    """The kernel's own answer, where the machine has a second file system."""
    shm = Path("/dev/shm")  # noqa: S108
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one file system")
    with pytest.raises(PinError, match="another file system"):
        place = shm / f"unshard-{os.getpid()}"
        try:
            pin_checkpoint(lmms_checkpoint(tmp_path, 1), quota=ANY, run=_made(place))
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _made(place: Path) -> Path:
    place.mkdir()
    return place
