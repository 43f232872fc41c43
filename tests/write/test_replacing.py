"""What others do in a target while it is replaced: none of it is lost.

Their edits are made in this process at the very step between carrying over and the exchange.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import unshard.write.staging.commit
import unshard.write.staging.journal
import unshard.write.staging.replacing
import unshard.write.staging.stage
from commits import (
    FRESH,
    IN_PLACE,
    KEPT,
    OLD,
    REPLACED,
    Texts,
    age,
    alone,
    checkpoint,
    merge_into,
    read,
    staged,
    survives,
    worlds,
    write,
)
from unshard.errors import OutputError
from unshard.write.dirfd import status_of
from unshard.write.staging.recovery import recover
from unshard.write.staging.stage import Staging

Edit = Callable[[Path], None]


def save(path: Path, text: str) -> None:
    """Save a file as editors do: written apart, then renamed."""
    draft = path.with_name(f"{path.name}~")
    draft.write_text(text)
    draft.rename(path)


def saves(out: Path) -> None:
    save(out / "notes.txt", "newer")
    save(out / "sub" / "deep.txt", "newer too")


def writes(out: Path) -> None:
    (out / "notes.txt").write_text("newer")


def removes(out: Path) -> None:
    (out / "notes.txt").unlink()
    shutil.rmtree(out / "sub")


def adds(out: Path) -> None:
    (out / "new.txt").write_text("new")
    write(out, {"folder/in/it.txt": "new"})
    (out / "link").symlink_to("new.txt")


def saves_ours(out: Path) -> None:
    save(out / "config.json", "edited")


def saves_what_is_removed(out: Path) -> None:
    save(out / "pytorch_model.bin", "theirs")


def adds_an_adapter(out: Path) -> None:
    (out / "adapter_model.safetensors").write_text("theirs")


EDITS: list[tuple[Edit, Texts, set[str]]] = [
    (saves, {"notes.txt": "newer", "sub/deep.txt": "newer too"}, set()),
    (writes, {"notes.txt": "newer"}, set()),
    (removes, {}, {"notes.txt", "sub/deep.txt"}),
    (adds, {"new.txt": "new", "folder/in/it.txt": "new", "link": "new"}, set()),
    (saves_ours, {"config.json.kept": "edited"}, set()),
    (saves_what_is_removed, {"pytorch_model.bin": "theirs"}, set()),
    (adds_an_adapter, {"adapter_model.safetensors": "theirs"}, set()),
]
NAMES = [edit.__name__ for edit, _, _ in EDITS]


def edit_between(monkeypatch: pytest.MonkeyPatch, edit: Callable[[], None]) -> None:
    """Let another program edit the target when all is carried over, and nothing is exchanged."""
    real = unshard.write.staging.journal.write_journal

    def write_journal(*args: object) -> None:
        edit()
        real(*args)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(unshard.write.staging.stage, "write_journal", write_journal)


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system have no hard links; Linux says first that a name is taken."""

    def link(_: str, name: str, *, dst_dir_fd: int, **__: object) -> None:
        taken = status_of(name, within=dst_dir_fd) is not None
        raise OSError(errno.EEXIST if taken else errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", link)


def merge_over(target: Path, sources: tuple[Path, ...] = ()) -> list[str]:
    with Staging(target, 100, sources=sources, overwrite=True) as stage:
        write(stage.directory, FRESH)
        return stage.commit()


@pytest.mark.parametrize(("edit", "there", "gone"), EDITS, ids=NAMES)
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("swap", ["exchange", "aside"])
def test_what_changes_between_carrying_over_and_the_exchange_is_not_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edit: Edit,
    there: Texts,
    gone: set[str],
    *,
    links: bool,
    swap: str,
) -> None:
    target = tmp_path / "out"
    write(target, OLD)
    if swap == "aside":
        monkeypatch.setattr(unshard.write.staging.commit, "exchange", lambda *_: False)
    if not links:
        no_links(monkeypatch)
    edit_between(monkeypatch, lambda: edit(target))
    said = merge_over(target)
    expected = {name: text for name, text in REPLACED.items() if name not in gone} | there
    assert read(target) == expected
    kept = [name for name in there if name.endswith(".kept")]
    assert all(any(name in sentence for sentence in said) for name in kept)
    assert len(said) == len(kept)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_in_place_a_file_that_is_saved_meanwhile_is_kept_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    write(target, OLD)
    sources = (checkpoint(target),)

    def edit() -> None:
        saves_what_is_removed(target)
        save(target / "model.safetensors.index.json", "their index")
        save(target / "model.safetensors", "their weights")

    edit_between(monkeypatch, edit)
    said = merge_over(target, sources)
    found = read(target)
    assert found["model.safetensors"] == "new weights"
    assert found["model.safetensors.kept"] == "their weights"
    assert found["pytorch_model.bin.kept"] == "theirs"
    assert found["model.safetensors.index.json.kept"] == "their index"
    assert {name: found[name] for name in IN_PLACE} == IN_PLACE
    assert len(said) == 3


def test_where_both_were_saved_both_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the old directory before the exchange, and in the new one after it."""
    target = tmp_path / "out"
    write(target, OLD | {"notes.txt.kept": "kept before"})
    edit_between(monkeypatch, lambda: save(target / "notes.txt", "before"))
    real = unshard.write.staging.replacing.settle

    def settle(*args: object) -> list[str]:
        save(target / "notes.txt", "after")
        return real(*args)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(unshard.write.staging.replacing, "settle", settle)
    (said,) = merge_over(target)
    found = read(target)
    assert found["notes.txt"] == "after"
    assert found["notes.txt.kept-2"] == "before"
    assert "notes.txt.kept-2" in said


@pytest.mark.slow
@pytest.mark.parametrize("swap", ["exchange", "aside"])
@alone
def test_killed_at_any_step_an_edit_is_there_after_recovery(
    tmp_path: Path, swap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if swap == "aside":
        monkeypatch.setattr(unshard.write.staging.commit, "exchange", lambda *_: False)
    places: list[Path] = []

    def edit() -> None:
        saves(places[-1] / "out")
        saves_ours(places[-1] / "out")
        (places[-1] / "edited").touch()

    edit_between(monkeypatch, edit)
    seen = set()
    for number, world in worlds(tmp_path):
        places.append(world)
        target, edited = world / "out", world / "edited"
        write(target, OLD)

        def merge() -> None:
            merge_over(target)  # noqa: B023 (called in this very round)

        alive = survives(number, merge)
        age(world)
        recover(world)
        assert staged(world) == []
        found = read(target)
        if edited.exists():
            assert found["notes.txt"] == "newer"
            assert found["sub/deep.txt"] == "newer too"
            assert "edited" in (found["config.json"], found.get("config.json.kept"))
        seen.add((found["unshard.json"], edited.exists()))
        if alive:
            break
    assert seen >= {("old", False), ("old", True), ("new", True)}


def test_what_another_merge_made_meanwhile_is_replaced_as_if_it_had_been_there(
    tmp_path: Path,
) -> None:
    """A trainer is started again while a merge of the one before goes on."""
    with Staging(tmp_path / "out", 100, overwrite=True) as stage:
        write(stage.directory, FRESH, is_placed=False)
        merge_into(tmp_path / "out", texts={name: OLD[name] for name in OLD if name not in KEPT})
        (tmp_path / "out" / "notes.txt").write_text("mine")
        stage.commit()
    assert read(tmp_path / "out") == FRESH | {"notes.txt": "mine"}
    assert staged(tmp_path) == []


def test_weights_of_others_that_appear_meanwhile_are_not_replaced(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"model\.safetensors"),
        Staging(tmp_path / "out", 100, overwrite=True) as stage,
    ):
        write(stage.directory, FRESH, is_placed=False)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model.safetensors").write_text("theirs")
        stage.commit()
    assert read(tmp_path / "out") == {"model.safetensors": "theirs"}
    assert staged(tmp_path) == []
