"""What of a tree is meant, of random trees that are mappings: no file is made but to compare."""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.errors import UnshardError
from unshard.read.finding.discover import discover, find
from unshard.read.format import Choice, Location
from unshard.read.tree import Tree

Folder = Mapping[str, "str | Folder"]

EMA = "pytorch_ema_model_fsdp_0"
PLACE = Path("/nowhere/runs/mine")
SETS = {
    "ranks": ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"),
    "cosmos-rl": ("model_rank_0.pth", "cosmos_config"),
    "DCP": (".metadata", "__0_0.distcp"),
    "Megatron": ("metadata.json", ".metadata", "__0_0.distcp"),
    "shards": ("shard-00001-model-00001-of-00001.safetensors",),
    "items": ("metadata.pkl", "model_0.pt", "model_1.pt"),
    "ZeRO": ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "whole": ("model.safetensors",),
    "alone": ("last.ckpt",),
    "none": ("config.json", "trainer_state.json"),
}
INNER = (
    *("actor", "policy", "critic", "ref", "pytorch_model_fsdp_0", "pytorch_model_fsdp_1"),
    *(EMA, "model", "ema", "weights", "dcp", "optimizer", "huggingface"),
)
PATTERNS = ("global_step_{}", "checkpoint-{}", "ep0-ba{}", "{:07}", "epoch=1-step={}.ckpt")
LOOSE = ("save_{}", "lr_{}", "agent_{}", "{}")
OTHERS = ("checkpoints", "outputs", "my-run", "actor_train", "critic_train", "merged", "logs")

files = st.sampled_from(sorted(SETS)).map(
    lambda name: dict.fromkeys(SETS[name], '{"sharded_backend": 1}')
)
marked = st.sampled_from(("10", "global_step_20", "actor")).map(lambda text: {"latest": text})
steps = st.one_of(
    files,
    st.dictionaries(st.sampled_from(INNER), files, max_size=3),
    st.builds(lambda *parts: parts[0] | parts[1], st.dictionaries(st.just("actor"), files), files),
    st.builds(lambda *parts: parts[0] | parts[1], st.dictionaries(st.just("actor"), files), marked),
)


def runs(patterns: tuple[str, ...]) -> st.SearchStrategy[Folder]:
    numbers = st.dictionaries(st.integers(1, 30).map((10).__mul__), steps, min_size=1, max_size=4)
    return st.builds(
        lambda pattern, held: {pattern.format(number): one for number, one in held.items()},
        st.sampled_from(patterns),
        numbers,
    )


named = st.one_of(steps, runs(PATTERNS), runs(LOOSE))
trees = st.one_of(
    named,
    st.dictionaries(st.sampled_from((*OTHERS, *INNER)), named, max_size=3),
    st.builds(lambda *parts: parts[0] | parts[1], runs(PATTERNS), runs(PATTERNS + LOOSE)),
    st.builds(lambda *parts: parts[0] | parts[1], runs(PATTERNS), st.one_of(files, marked)),
)
choices = st.builds(
    Choice,
    st.sampled_from((None, None, None, 10, 20)),
    st.sampled_from((None, None, None, "actor", "critic", "weights")),
    st.sampled_from((None, None, "model", "ema", "module")),
)


class Mapped(Tree):
    """A mapping in the place of a directory: names to texts, or to other mappings."""

    def __init__(self, folder: Folder, place: Path = PLACE) -> None:
        super().__init__()
        self.texts: dict[Path, str] = {}
        self.folders: dict[Path, dict[str, Path]] = {one: {} for one in place.parents}
        self._add(place, folder)
        self.is_dir = self.folders.__contains__
        self.is_file = self.texts.__contains__
        self.is_link = lambda _: False
        self.size = lambda path: len(self.texts[path])
        self.text = self.texts.get
        self.fields = lambda path: json.loads(self.texts[path])
        self.exists = lambda path: path in self.folders or path in self.texts
        self.resolve = lambda path: path

    def _add(self, place: Path, folder: Folder) -> None:
        self.folders[place] = {name: place / name for name in sorted(folder)}
        for name, inner in folder.items():
            if isinstance(inner, str):
                self.texts[place / name] = inner
            else:
                self._add(place / name, inner)

    def inside(self, folder: Path) -> Mapping[str, Path]:
        return self.folders.get(folder, {})


def write(place: Path, folder: Folder) -> None:
    place.mkdir(parents=True)
    for name, inner in folder.items():
        if isinstance(inner, str):
            (place / name).write_text(inner)
        else:
            write(place / name, inner)


def outcome(look: Callable[[], list[Location]]) -> list[Location] | str:
    try:
        return look()
    except UnshardError as error:
        return str(error)


def found(folder: Folder, choice: Choice = Choice()) -> list[Location]:  # noqa: B008 - frozen
    result = outcome(lambda: discover(PLACE, choice, Mapped(folder)))
    return [] if isinstance(result, str) else result


@given(trees, choices)
def test_a_mapping_and_a_directory_mean_the_same(folder: Folder, choice: Choice) -> None:
    with tempfile.TemporaryDirectory() as above:
        place = Path(above).resolve() / "runs" / "mine"
        write(place, folder)
        levels = [place, *sorted(place.rglob("*"))[:6]]
        for level in levels:
            in_memory = outcome(lambda: discover(level, choice, Mapped(folder, place)))  # noqa: B023
            assert in_memory == outcome(lambda: discover(level, choice))  # noqa: B023


@given(trees, choices)
def test_what_is_found_is_there_once_and_the_highest_step_first(
    folder: Folder, choice: Choice
) -> None:
    locations, tree = found(folder, choice), Mapped(folder)
    assert len({at.place for at in locations}) == len(locations)
    for at in locations:
        is_empty_ema = at.weights_dir.name == EMA  # of lmms-engine: the reader says what it lacks
        assert at.place in tree.texts or at.format.holds(tree, at.weights_dir) or is_empty_ema
        assert at.weights_dir.is_relative_to(at.step_dir)
        assert choice.step in (None, at.step) or at.step_dir.parent != PLACE
        assert choice.role is None or at.is_called(choice.role)
        assert at.weights == choice.weights or choice.weights is None
    known = [at.step for at in locations if at.step_dir.parent == PLACE and at.step is not None]
    assert known == sorted(known, reverse=True)


@given(trees)
def test_the_shards_that_were_found_can_be_given(folder: Folder) -> None:
    tree = Mapped(folder)
    for at in [one for one in found(folder) if one.format.sharded]:
        if not at.format.holds(tree, at.weights_dir):
            continue  # see above
        again = next(find(at.place, Choice(), Mapped(folder)))
        assert (again.place, again.step, again.weights) == (at.place, at.step, at.weights)


@given(trees, choices)
def test_a_folder_without_weights_changes_nothing(folder: Folder, choice: Choice) -> None:
    before = found(folder, choice)
    if before:
        assert found({**folder, "notes": {"notes.txt": "x"}}, choice) == before


@given(runs(PATTERNS[:1]), trees)
def test_an_older_step_does_not_change_which_is_first(folder: Folder, older: Folder) -> None:
    before = outcome(lambda: [next(find(PLACE, Choice(), Mapped(folder)))])
    after = outcome(
        lambda: [next(find(PLACE, Choice(), Mapped({**folder, "global_step_1": older})))]
    )
    if not isinstance(before, str) and before[0].format.sharded:
        assert after == before


@given(runs(PATTERNS))
def test_a_step_can_be_chosen_by_its_number(folder: Folder) -> None:
    for at in found(folder):
        if at.step is not None:
            (only,) = found(folder, Choice(at.step))
            assert only.place == at.place


@pytest.mark.parametrize("name", SETS)
def test_a_mapping_can_be_found_in(name: str) -> None:
    """The tests above say nothing if nothing is found."""
    folder = {"global_step_10": {"actor": dict.fromkeys(SETS[name], '{"sharded_backend": 1}')}}
    assert len(found(folder)) == (name != "none")
