"""What every stage does, on a disk or in a store: the contract that a merge relies on."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from bucket_server import BUCKET, Store
from sources import Sources, grid
from unshard.engines.crew import Threads
from unshard.engines.threads import Resources
from unshard.errors import CorruptError, OutputError
from unshard.plan.operations import Plan
from unshard.progress import Chosen, Event, Warned, ignore
from unshard.stores.remote_path import RemotePath, look_again, path_of
from unshard.write.bucket.stage import BucketStage
from unshard.write.record import add_companions
from unshard.write.stage import Finished, OutputStage, Overflows, Uploads, WorkDigests, Written
from unshard.write.staging.stage import Staging

FILES = 3
ADAPTER = "lora_adapter/adapter_model.safetensors"
SMALL = {"config.json": b"{}", "tokenizer.json": b"[]", "lora_adapter/adapter_config.json": b"{}"}
RECORD = b'{"unshard": "1", "output": {"files": {"%s": 1}}}\n'
WORK = WorkDigests("sources", "plan")
TWO = Resources(2, 64_000_000)

_numbers = count()


@pytest.fixture(params=["a disk", "a store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "a disk":
        return tmp_path / "deep" / "out"
    store: Store = request.getfixturevalue("store")
    assert store.endpoint
    return path_of(f"s3://{BUCKET}/contract-{next(_numbers)}/out")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Return what makes a file for each of three tensors, and one in a folder."""
    sources = Sources(tmp_path)
    for name in "abcd":
        sources.add(name, grid("float32", (40, 50), (4, 1)))
    made = sources.plan("float16", max_shard_size=4000)
    *files, last = made.layout.files
    assert len(files) == FILES
    layout = made.layout._replace(files=(*files, last._replace(filename=ADAPTER)))
    return replace(made, layout=layout)


def names_of(plan: Plan) -> list[str]:
    return [file.filename for file in plan.layout.files]


def stage_at(place: Path, plan: Plan, *, resume: bool = False) -> OutputStage:
    names = (*names_of(plan), *SMALL)
    if isinstance(place, RemotePath):
        return BucketStage(place, names=names, resume=resume)
    return Staging(place, 1_000_000, names=names, resume=resume)


def found_at(place: Path) -> dict[str, bytes]:
    """Return all that is there, and next to it, by its path."""
    look_again(place)
    if not place.parent.is_dir():
        return {}
    files = [path for path in place.parent.rglob("*") if path.is_file()]
    return {"/".join(path.parts[len(place.parts) :]): path.read_bytes() for path in files}


def merged(plan: Plan, tmp_path: Path) -> dict[str, bytes]:
    with Staging(tmp_path / "truth", 1000) as stage:
        stage.write(plan, Threads(TWO, ignore), WORK)
        return {name: (stage.directory / name).read_bytes() for name in names_of(plan)}


def record_of(plan: Plan) -> bytes:
    return RECORD % b'": 1, "'.join(name.encode() for name in names_of(plan))


def test_an_output_is_complete_after_its_commit(place: Path, plan: Plan, tmp_path: Path) -> None:
    truth = merged(plan, tmp_path)
    copied = tmp_path / "chat_template.jinja"
    copied.write_bytes(b"x" * 20_000_000)
    small: dict[str, bytes | Path] = {**SMALL, copied.name: copied}
    stage = stage_at(place, plan)
    stage.check()
    assert found_at(place) == {}
    with stage:
        (stage.scratch / "items").write_bytes(b"temporary")
        scratch = stage.scratch
        written = stage.write(plan, Threads(TWO, ignore), WORK)
        assert {file for file, _ in written.overflows} == {0, 1, 2, 3}
        assert (written.copied, written.refused) == (0, "")
        stage.add(small)
        read = stage.readable()
        assert {name: (read / name).read_bytes() for name in truth} == truth
        assert "config.json" not in found_at(place)
        assert stage.commit(record_of(plan)) == []
    sizes = {name: 20_000_000 if name == copied.name else 2 for name in sorted(small)}
    expected = {**truth, **SMALL, copied.name: copied.read_bytes()}
    found = found_at(place)
    assert found == expected | {"unshard.json": found["unshard.json"]}
    assert found["unshard.json"] == add_companions(record_of(plan), sizes)
    assert not scratch.exists()
    with pytest.raises(OutputError, match="exists already"):
        stage_at(place, plan).check()


@pytest.mark.parametrize("until", ["entered", "written", "added"])
@pytest.mark.parametrize("error", [CorruptError("no"), OutputError("no"), KeyboardInterrupt()])
def test_without_a_commit_nothing_remains(
    place: Path, plan: Plan, until: str, error: BaseException
) -> None:
    with pytest.raises(type(error)), stage_at(place, plan) as stage:
        scratch = stage.scratch
        if until != "entered":
            stage.write(plan, Threads(TWO, ignore), WORK)
        if until == "added":
            stage.add(SMALL)
        raise error
    assert found_at(place) == {}
    assert not scratch.exists()
    with stage_at(place, plan):
        pass
    assert found_at(place) == {}
    assert not place.parent.exists()


@pytest.mark.parametrize(
    "work", [WORK, WorkDigests("others", "plan"), WorkDigests("sources", "another")]
)
def test_what_is_finished_is_not_made_again_if_the_work_is_the_same(
    place: Path, plan: Plan, tmp_path: Path, work: WorkDigests
) -> None:
    """Also a file in a folder; what is not finished, or not of this work, is removed."""
    with pytest.raises(CorruptError), stage_at(place, plan, resume=True) as stage:
        stage.write(plan.only([0, FILES]), Threads(TWO, ignore), WORK)
        stage.add({"tokenizer.json": b"of the first"})
        raise CorruptError("no")
    assert ADAPTER in "".join(found_at(place))
    events: list[Event] = []
    made: list[int] = []

    class Counted(Threads):
        def make(self, plan: Plan, directory: Path, finished: Finished) -> Overflows:
            made.extend(plan.numbers)
            return super().make(plan, directory, finished)

        def upload(self, plan: Plan, stage: Uploads, finished: Finished) -> Written:
            made.extend(plan.numbers)
            return super().upload(plan, stage, finished)

    with stage_at(place, plan, resume=True) as stage:
        stage.write(plan, Counted(TWO, events.append), work)
        stage.add(SMALL)
        assert stage.commit(record_of(plan)) == []
    is_same = work == WORK
    assert made == ([1, 2] if is_same else [0, 1, 2, 3])
    told = [one for one in events if isinstance(one, Chosen | Warned)]
    resumed = Chosen("resuming: 2 of 4 files were finished by an earlier merge")
    assert told == [resumed] if is_same else "starts over" in str(told)
    found = found_at(place)
    del found["unshard.json"]
    assert found == {**merged(plan, tmp_path), **SMALL}


def test_overflows_of_finished_files_are_still_known(place: Path, tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    for name in "ab":
        values = sources.random.random((40, 50), "float32") + 1e6
        sources.add(name, grid("float32", (40, 50), (4, 1)), values)
    plan = sources.plan("float16", max_shard_size=4000)
    counts = {}
    for number in range(2):
        with pytest.raises(CorruptError), stage_at(place, plan, resume=True) as stage:
            written = stage.write(
                plan.only([0]) if not number else plan, Threads(TWO, ignore), WORK
            )
            counts = {file: n for (file, _), n in written.overflows.items()}
            raise CorruptError("no")
    assert counts == {0: 2000, 1: 2000}


def test_two_outputs_of_one_place_exclude_each_other(place: Path, plan: Plan) -> None:
    with pytest.raises(OutputError), stage_at(place, plan) as first:
        first.write(plan, Threads(TWO, ignore), WORK)
        with stage_at(place, plan) as second:
            second.write(plan, Threads(TWO, ignore), WORK)
            second.commit(record_of(plan))
        first.commit(record_of(plan))
