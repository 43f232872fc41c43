"""`unshard push`: a merged model on the hub, of which nothing was written on this machine."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from adapters import adapted
from hub_server import TOKEN, Hub, Repo, serving, standing_in
from ranks import rank_path, save_ranks, snapshot, some_tensors
from unshard import CorruptError, OutputError, UsageError
from unshard.progress import Advanced, Event, Stage, Warned, ignore

# huggingface_hub sends files in a way that its own HTTP client warns of
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

WEIGHTS = "model.safetensors"
MEMORY = 256_000_000


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with standing_in(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {f"w{n}": torch.full((900, 400), float(n)) for n in range(3)}
    return save_ranks(tmp_path / "ckpt", tensors, 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "cast, in several files": {"dtype": "bfloat16", "max_shard_size": "300B"},
    "with its adapter": {"lora": "both"},
    "its adapter alone": {"lora": "adapter"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
def test_a_push_gives_the_repository_of_a_merge(
    hub: Hub, tmp_path: Path, options: dict[str, Any]
) -> None:
    adapted(tmp_path / "ckpt")
    old = {"model-00001-of-00009.safetensors": b"old", "notes.txt": b"theirs"}
    hub.repos["someone/a"], hub.repos["someone/b"] = (Repo(False, dict(old)) for _ in "ab")  # noqa: FBT003
    merged = unshard.merge(tmp_path / "ckpt", tmp_path / "out", push_to_hub="someone/a", **options)
    before = snapshot(tmp_path)
    report = unshard.push(tmp_path / "ckpt", "someone/b", **options)
    assert snapshot(tmp_path) == before
    theirs, ours = hub.repos["someone/a"].files, hub.repos["someone/b"].files
    assert theirs.pop("README.md").replace(b"# a", b"# b") == ours.pop("README.md")
    assert ours == theirs
    assert ours.keys() & old.keys() == {"notes.txt"}
    assert len(hub.repos["someone/b"].commits) == 1
    assert report.url == f"{hub.address}/someone/b"
    assert (report.output, report.files) == ("", merged.files)
    assert report.companions == merged.companions
    assert "to 'http" in repr(report)


def test_large_files_go_in_parts(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.part_bytes = 1_000_000
    unshard.push(checkpoint, "model", listener=ignore, config="none")
    unshard.merge(checkpoint, tmp_path / "out", listener=ignore, config="none")
    found = hub.repos["someone/model"].files[WEIGHTS]
    assert found == (tmp_path / "out" / WEIGHTS).read_bytes()
    assert sum(request.startswith("PUT") for request in hub.requests) == 5


@pytest.mark.slow
@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("size", ["1GB", "100MB"], ids=["one file", "several at once"])
def test_nothing_is_written_in_little_memory(tmp_path: Path, size: str) -> None:
    """A process that may write no byte to any file pushes more than it may have in memory."""
    tensors = {f"large{n}": torch.full((20_000, 1000), float(n)) for n in range(4)}
    save_ranks(tmp_path / "ckpt", tensors, 2)  # 320 MB
    (tmp_path / "home").mkdir()
    command = (sys.executable, "-m", "unshard")
    before = sorted(tmp_path.rglob("*"))
    with serving() as hub:
        settings = {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "0",  # it takes no file objects: this must not matter
            "PYTHONDONTWRITEBYTECODE": "1",
            **dict.fromkeys(("HF_HOME", "HOME", "TMPDIR"), str(tmp_path / "home")),
        }
        options = ("--config", "none", "--json", "--max-shard-size", size)
        done = subprocess.run(
            [*command, "push", "ckpt", "someone/model", *options],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=os.environ | settings,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        )
    assert done.returncode == 0, done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    report = json.loads(done.stdout)
    assert report["url"] == f"{hub.address}/someone/model"
    assert report["bytes_written"] > 320_000_000 > MEMORY > report["peak_memory_bytes"]
    assert "Xet" not in done.stderr
    found = hub.repos["someone/model"].files
    ckpt = tmp_path / "ckpt"
    with unshard.virtual(ckpt, max_shard_size=size, config="none", listener=ignore) as files:
        truth = {name: file_digest(file, "sha256").digest() for name, file in files.items()}
    assert {name: sha256(found[name]).digest() for name in truth} == truth


@pytest.mark.parametrize("change", ["written to", "removed"])
def test_a_checkpoint_that_changes_is_not_committed(
    hub: Hub, checkpoint: Path, change: str
) -> None:
    """Between its checksums and its upload."""
    hub.repos["someone/model"] = Repo(private=False, files={WEIGHTS: b"old"})
    path = rank_path(checkpoint, 2, 1)

    def disturb(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "uploading":
            if change == "removed":
                path.unlink()
            else:
                with path.open("r+b") as stream:
                    stream.seek(path.stat().st_size // 2)
                    stream.write(b"changed")

    words = "no longer exists" if change == "removed" else "has changed while it was being read"
    with pytest.raises(CorruptError, match=rf"rank_1\.pt: {words}"):
        unshard.push(checkpoint, "someone/model", listener=disturb, config="none")
    assert hub.repos["someone/model"].files == {WEIGHTS: b"old"}
    assert hub.repos["someone/model"].commits == []


def test_what_the_hub_did_not_take_is_not_called_pushed(hub: Hub, checkpoint: Path) -> None:
    hub.ignored.add(WEIGHTS)
    with pytest.raises(OutputError, match=rf"as they were sent: {WEIGHTS}") as caught:
        unshard.push(checkpoint, "model", listener=ignore, config="none")
    assert "a commit without them" in caught.value.found


@pytest.mark.parametrize("part", ["repos/create", "preupload", "/blob/", "/commit/"])
def test_a_refusal_leaves_nothing_here_or_there(
    hub: Hub, checkpoint: Path, tmp_path: Path, part: str
) -> None:
    hub.repos["someone/model"] = Repo(private=False, files={WEIGHTS: b"old"})
    hub.failing[part] = 500
    before = snapshot(tmp_path)
    words = r"was not pushed to the hub: the hub failed \(HTTP 500\)"
    with pytest.raises(OutputError, match=words) as caught:
        unshard.push(checkpoint, "someone/model", listener=ignore, config="none")
    assert "nothing was written on this machine" in caught.value.found
    assert caught.value.hint == "push it again"
    assert hub.repos["someone/model"].files == {WEIGHTS: b"old"}
    assert snapshot(tmp_path) == before


def test_what_cannot_be_pushed_is_not_read(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(UsageError, match=r"^a/b/c: (?s:.*)expected: NAME or OWNER/NAME"):
        unshard.push(nowhere, "a/b/c")
    with pytest.raises(
        OutputError, match=r"^of-others/model: the token belongs to .*, not to of-others"
    ):
        unshard.push(nowhere, "of-others/model")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OutputError, match=r"^model: there is no token") as caught:
        unshard.push(nowhere, "model")
    assert str(caught.value).endswith("`hf auth login`, or set HF_TOKEN")
    assert hub.repos == {}


def test_private_weights_never_go_to_a_public_repository(hub: Hub, checkpoint: Path) -> None:
    unshard.push(checkpoint, "mine", private=True, listener=ignore, config="none")
    assert hub.repos["someone/mine"].private
    hub.repos["someone/model"] = Repo(private=False)
    with pytest.raises(OutputError, match="exists already and is public"):
        unshard.push(checkpoint, "someone/model", private=True, listener=ignore, config="none")
    assert hub.repos["someone/model"].files == {}


def test_warnings_are_those_of_a_merge(hub: Hub, tmp_path: Path) -> None:
    """Values that become infinite too, each counted once though it is made twice."""
    tensors = {name: one * 1e5 for name, one in some_tensors().items()}
    save_ranks(tmp_path / "ckpt", tensors, 2)
    events: list[Event] = []
    unshard.merge(
        tmp_path / "ckpt", tmp_path / "out", dtype="float16", listener=events.append, config="none"
    )
    expected = [one for one in events if isinstance(one, Warned)]
    assert any("became infinite" in one.text for one in expected)
    events.clear()
    report = unshard.push(
        tmp_path / "ckpt", "model", dtype="float16", listener=events.append, config="none"
    )
    assert [one for one in events if isinstance(one, Warned)] == expected
    assert report.notes == tuple(one.text for one in expected)
    assert hub.repos["someone/model"].commits


def test_progress_is_reported_of_both_passes(hub: Hub, checkpoint: Path) -> None:
    events: list[Event] = []
    unshard.push(checkpoint, "model", listener=events.append, config="none")
    stages = [one for one in events if isinstance(one, Stage)]
    assert [one.name for one in stages][-2:] == ["hashing", "uploading"]
    at = events.index(stages[-1])
    size = len(hub.repos["someone/model"].files[WEIGHTS])
    for part in (events[:at], events[at:]):
        assert sum(one.written_bytes for one in part if isinstance(one, Advanced)) >= size


def test_the_command_prints_where_it_went(
    hub: Hub, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from unshard.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(
            [
                "push",
                str(checkpoint),
                "someone/model",
                "--private",
                "--dtype",
                "bf16",
                "--config",
                "none",
            ]
        )
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    assert "uploaded 2.2 MB in 1 file" in printed.out
    assert f"pushed to {hub.address}/someone/model" in printed.out
    assert "saved to" not in printed.out
    assert hub.repos["someone/model"].private


def run_merge(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    from unshard.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["merge", *map(str, arguments), "--config", "none"])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_a_merge_without_a_local_output_is_a_push(
    hub: Hub, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--push-to-hub", "someone/a", "--no-local", "--private", "--dtype", "bf16")
    before = snapshot(tmp_path)
    code, out, err = run_merge(capsys, checkpoint, *options, "--no-extra-state", "--include", "w")
    assert code == 0, err
    assert f"pushed to {hub.address}/someone/a" in out
    assert snapshot(tmp_path) == before
    unshard.push(checkpoint, "someone/b", dtype="bf16", include="w", listener=ignore, config="none")
    ours, theirs = hub.repos["someone/a"], hub.repos["someone/b"].files
    assert ours.private
    assert ours.files.pop("README.md").replace(b"# a", b"# b") == theirs.pop("README.md")
    assert ours.files == theirs


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["OUT"], "the output OUT"),
        (["--output", "OUT"], "the output OUT"),
        (["s3://models/x"], "the output s3://models/x"),
        (["--all-steps"], "--all-steps"),
        (["--dry-run"], "--dry-run"),
        (["--overwrite", "--verify", "full", "--workers", "2"], "--workers, --verify, --overwrite"),
        (["--memory", "1GB"], "--memory"),
    ],
)
def test_what_needs_a_local_output_is_refused_without_one(
    hub: Hub,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    given = (checkpoint, *arguments, "--push-to-hub", "someone/a", "--no-local")
    code, out, err = run_merge(capsys, *given)
    assert (code, out) == (2, "")
    assert f"--no-local writes no output, so it excludes {named}\n" in err
    assert not hub.requests
    assert not hub.repos


def test_no_local_alone_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_merge(capsys, checkpoint, "--no-local")
    assert code == 2
    assert "--no-local needs --push-to-hub" in err
