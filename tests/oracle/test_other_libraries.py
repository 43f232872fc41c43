"""What a merge of a model of another library writes, every other way to it gives too."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import pytest

import unshard
from following import following, outputs_in, weights
from hub_server import Hub, Repo, standing_in
from oracle.writers.libraries import ADAPTED, SENTENCES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore"),
]


class Case(NamedTuple):
    """A model, and how it is merged."""

    name: str
    has_base: bool = False
    options: Mapping[str, Any] = {}


CASES = {
    "component": Case("flux"),
    "component, in several files": Case("wan", options={"max_shard_size": 20_000}),
    "component of a pipeline": Case("sd3", has_base=True),
    "adapter": Case(ADAPTED, options={"lora": "adapter"}),
    "sentences": Case(SENTENCES),
}


class Merged(NamedTuple):
    """A model's folder, the options of its merge, and what that wrote."""

    folder: Path
    options: Mapping[str, Any]
    output: Path

    @property
    def ranks(self) -> Path:
        return self.folder / "ranks"


@pytest.fixture(params=list(CASES))
def merged(request: pytest.FixtureRequest, libraries: Path, tmp_path: Path) -> Merged:
    case = CASES[request.param]
    folder = libraries / case.name
    base = {"base": folder / "base"} if case.has_base else {}
    found = Merged(folder, {**base, **case.options}, tmp_path / "merged")
    unshard.merge(found.ranks, found.output, **found.options)
    return found


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with standing_in(monkeypatch, tmp_path) as hub:
        yield hub


def test_virtual_files_are_those(merged: Merged) -> None:
    with unshard.virtual(merged.ranks, **merged.options) as files:
        found = {name: file.read() for name, file in files.items()}
    found.pop("unshard.json", None)
    assert found == weights(merged.output)


def test_a_push_gives_those(merged: Merged, hub: Hub) -> None:
    hub.repos["someone/model"] = Repo(False)  # noqa: FBT003 (as the hub's own repositories)
    unshard.push(merged.ranks, "someone/model", **merged.options)
    found = dict(hub.repos["someone/model"].files)
    found.pop("unshard.json")
    found.pop("README.md")
    assert found == weights(merged.output)


def test_a_follower_writes_those(merged: Merged, tmp_path: Path) -> None:
    copytree(merged.ranks, tmp_path / "run" / "global_step_1" / "actor")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in merged.options.items()]
    with following(tmp_path / "run", tmp_path / "outputs", "--until=1", *words) as follower:
        follower.wait()
    (output,) = outputs_in(tmp_path / "outputs").values()
    assert weights(output) == weights(merged.output)


@pytest.mark.parametrize("merged", [name for name in CASES if name != "adapter"], indirect=True)
def test_other_ranks_give_those(merged: Merged, tmp_path: Path) -> None:
    unshard.reshard(merged.ranks, tmp_path / "ranks", world_size=3, to="verl")
    unshard.merge(tmp_path / "ranks", tmp_path / "again", **merged.options)
    assert weights(tmp_path / "again") == weights(merged.output)


def test_the_output_is_verified(merged: Merged) -> None:
    is_adapter = merged.options.get("lora") == "adapter"  # a model is found by its directory
    output = merged.output / "pytorch_lora_weights.safetensors" if is_adapter else merged.output
    assert unshard.verify(output, merged.ranks, load=not is_adapter).equal
