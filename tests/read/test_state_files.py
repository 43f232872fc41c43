"""Which files hold scheduler and random state, by names alone: the files here are empty."""

from pathlib import Path

from unshard.console import listed
from unshard.read.format import Location
from unshard.read.rank_files.reader import RANK_FILES
from unshard.read.training_state.reader import StateFiles, find_state_files
from unshard.read.training_state.rng_states import StateWriter


def found(step: Path, inside: str, world: int, also: tuple[Path, ...] = ()) -> StateFiles | None:
    location = Location(step / inside, step, 7, None, "model", RANK_FILES, also=also)
    return find_state_files(location, world)


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def extra(world: int, *ranks: int) -> list[str]:
    return [f"extra_state_world_size_{world}_rank_{rank}.pt" for rank in ranks]


def names_of(files: StateFiles | None) -> list[str]:
    assert files is not None
    return [path.name for path in files.paths]


def test_without_such_files_there_is_nothing(tmp_path: Path) -> None:
    make(tmp_path, "model.safetensors", "optimizer.pt", "extra_state_merged.pt", "scheduler.json")
    assert found(tmp_path, ".", 1) is None


def test_verl_keeps_them_next_to_the_weights_of_a_role(tmp_path: Path) -> None:
    make(tmp_path / "actor", *extra(2, 0, 1))
    make(tmp_path / "critic", *extra(2, 0))
    files = found(tmp_path, "actor", 2)
    assert files is not None
    assert (files.writer, files.world_size, files.missing) == (StateWriter.EXTRA_STATE, 2, ())
    assert {rank: path.parent.name for rank, path in files.ranks.items()} == {
        0: "actor",
        1: "actor",
    }


def test_lmms_engine_keeps_them_in_a_folder_of_the_step(tmp_path: Path) -> None:
    make(tmp_path, *(f"extra_state/{name}" for name in extra(12, *range(12))))
    files = found(tmp_path, "pytorch_model_fsdp_0", 12)
    assert names_of(files) == extra(12, *range(12))  # 10 and 11 last


def test_stale_files_of_another_world_size_are_not_taken(tmp_path: Path) -> None:
    make(tmp_path / "actor", *extra(2, 0, 1), *extra(4, 0, 1, 2, 3))
    for world in (2, 4):
        files = found(tmp_path, "actor", world)
        assert names_of(files) == extra(world, *range(world))
        assert files is not None
        assert files.notes == ()
    stale = found(tmp_path, "actor", 3)
    assert stale is not None
    assert stale.paths == ()
    assert stale.notes == ("left out the extra_state files of world size 2, 4: expected 3",)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    make(tmp_path / "actor", *extra(4, 0, 2))
    files = found(tmp_path, "actor", 4)
    assert files is not None
    assert list(files.missing) == extra(4, 1, 3)


def test_trainers_files_are_in_the_step(tmp_path: Path) -> None:
    make(tmp_path, "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")
    files = found(tmp_path, "pytorch_model_fsdp_0", 2)
    assert names_of(files) == ["scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"]
    assert files is not None
    assert files.writer is StateWriter.TRAINER


def test_a_trainer_of_one_process_does_not_number_its_file(tmp_path: Path) -> None:
    files = found(make(tmp_path, "rng_state.pth"), ".", 1)
    assert files is not None
    assert (files.world_size, list(files.ranks), files.missing) == (1, [0], ())


def test_there_may_be_more_ranks_than_the_weights_tell(tmp_path: Path) -> None:
    """Whole models are saved by one rank, replicas by some."""
    make(tmp_path, "rng_state_0.pth", "rng_state_3.pth")
    files = found(tmp_path, ".", 1)
    assert files is not None
    assert files.world_size == 4
    assert files.missing == ("rng_state_1.pth", "rng_state_2.pth")


def test_accelerate_numbers_its_schedulers_from_the_second_on(tmp_path: Path) -> None:
    numbered = [f"scheduler_{number}.bin" for number in range(1, 11)]
    make(tmp_path, "scheduler.bin", *numbered, "random_states_0.pkl")
    files = found(tmp_path, ".", 1)
    assert names_of(files) == ["scheduler.bin", *numbered, "random_states_0.pkl"]
    assert files is not None
    assert files.writer is StateWriter.ACCELERATE
    (tmp_path / "scheduler.bin").unlink()
    files = found(tmp_path, ".", 1)
    assert files is not None
    assert files.missing == ("scheduler.bin",)


def test_of_two_layouts_one_is_taken_and_the_other_named(tmp_path: Path) -> None:
    make(tmp_path, "scheduler.pt", *extra(1, 0))
    files = found(tmp_path, ".", 1)
    assert names_of(files) == extra(1, 0)
    assert files is not None
    assert files.notes == ("scheduler.pt: left out, extra_state files are used",)


def test_a_number_that_no_rank_has_is_not_believed(tmp_path: Path) -> None:
    make(tmp_path, "rng_state_999999999999.pth", "scheduler_999999999999.bin")
    assert found(tmp_path, ".", 1) is None


def test_every_node_may_hold_some(tmp_path: Path) -> None:
    first = make(tmp_path / "a", *(f"extra_state/{name}" for name in extra(2, 0)))
    second = make(tmp_path / "b", *(f"extra_state/{name}" for name in extra(2, 1)))
    files = found(first, "pytorch_model_fsdp_0", 2, (second / "pytorch_model_fsdp_0",))
    assert names_of(files) == extra(2, 0, 1)
    make(second, "rng_state_1.pth")
    make(tmp_path / "c", "rng_state_0.pth")
    files = found(tmp_path / "c", "pytorch_model_fsdp_0", 2, (second / "pytorch_model_fsdp_0",))
    assert files is not None
    assert files.notes
    files = found(tmp_path / "c", ".", 2, (make(tmp_path / "d", "rng_state_1.pth"),))
    assert names_of(files) == ["rng_state_0.pth", "rng_state_1.pth"]


def test_of_many_names_a_few_are_shown() -> None:
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
