"""Pushing an output, against a stand-in of the hub that speaks its HTTP interface."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import unshard
from hub_server import TOKEN, Hub, Repo, serving, standing_in
from ranks import save_ranks, snapshot, some_tensors
from unshard.errors import OutputError, UsageError
from unshard.progress import Event, ignore
from unshard.write.hub import check_repo, model_card, push

RECORD: dict[str, object] = {
    "unshard": "0.1.0",
    "source": {
        "name": "global_step_0",
        "format": "FSDP rank files",
        "writer": "verl",
        "step": 0,
        "world_size": 4,
        "role": "actor",
        "weights": "model",
    },
    "options": {"dtype": "bfloat16"},
    "output": {"tensors": 51, "parameters": 245_630},
}
FILES = {
    "model-00001-of-00002.safetensors": os.urandom(300_000),
    "model-00002-of-00002.safetensors": os.urandom(100_000),
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "config.json": b'{"model_type": "qwen2"}',
    "original/[1] notes.txt": b"a name with brackets",
    "unshard.json": json.dumps(RECORD).encode(),
}


# huggingface_hub sends files in a way that its own HTTP client warns of
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output in a directory that holds other things too, as after a merge in place."""
    directory = tmp_path / "out"
    for name, data in {**FILES, "optimizer.bin": b"not to be uploaded"}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The stand-in, which huggingface_hub uses."""
    with standing_in(monkeypatch, tmp_path) as hub:
        yield hub


def pushed(output: Path, repo: str = "someone/model", *, private: bool = False) -> str:
    return push(output, repo, FILES, private=private, bars=False)


def refused(output: Path, *, private: bool = False) -> OutputError:
    before = snapshot(output)
    with pytest.raises(OutputError) as caught:
        pushed(output, private=private)
    assert snapshot(output) == before
    assert caught.value.exit_code == 5
    assert f"the complete output in {output}" in caught.value.found
    assert f"hf upload someone/model {output} ." in caught.value.hint
    return caught.value


def test_every_byte_arrives_and_the_output_stays_as_it_is(hub: Hub, output: Path) -> None:
    before = snapshot(output)
    assert pushed(output) == f"{hub.address}/someone/model"
    repo = hub.repos["someone/model"]
    card = repo.files.pop("README.md")
    assert repo.files == FILES
    assert card.decode() == model_card(RECORD, title="model")
    assert not repo.private
    assert snapshot(output) == before


def test_a_name_alone_belongs_to_the_tokens_owner(hub: Hub, output: Path) -> None:
    assert pushed(output, "model") == f"{hub.address}/someone/model"
    assert "config.json" in hub.repos["someone/model"].files


def test_private_makes_a_private_repository(hub: Hub, output: Path) -> None:
    pushed(output, private=True)
    assert hub.repos["someone/model"].private
    pushed(output, private=True)  # again: it is there, and private
    pushed(output)  # and stays so
    assert hub.repos["someone/model"].private


def test_private_weights_never_go_to_a_public_repository(hub: Hub, output: Path) -> None:
    hub.repos["someone/model"] = Repo(private=False)
    error = refused(output, private=True)
    assert "exists already and is public" in error.subject
    assert hub.repos["someone/model"].files == {}


def test_old_weights_are_removed_and_other_files_stay(hub: Hub, output: Path) -> None:
    old = {
        "model.safetensors": b"old",
        "pytorch_model.bin": b"old",
        "README.md": b"their own words",
        "eval/model.safetensors": b"no weights of this model",
        "config.json": b"old",
    }
    hub.repos["someone/model"] = Repo(private=False, files=dict(old))
    pushed(output)
    kept = {name: old[name] for name in ("README.md", "eval/model.safetensors")}
    assert hub.repos["someone/model"].files == {**FILES, **kept}


def test_what_the_hub_did_not_take_is_not_called_pushed(hub: Hub, output: Path) -> None:
    hub.ignored.add("config.json")  # as a .gitignore in the repository does
    before = snapshot(output)
    with pytest.raises(OutputError, match="as they were sent: config") as caught:
        pushed(output)
    assert caught.value.found == "a commit without them, in someone/model"
    assert snapshot(output) == before


def test_large_files_go_in_parts(hub: Hub, output: Path) -> None:
    hub.part_bytes = 70_000
    pushed(output)
    assert hub.repos["someone/model"].files.items() >= FILES.items()
    assert sum(request.startswith("PUT") for request in hub.requests) == 5 + 2


def test_a_card_of_the_output_is_taken(hub: Hub, output: Path) -> None:
    (output / "README.md").write_bytes(b"my words")
    pushed(output)
    assert hub.repos["someone/model"].files["README.md"] == b"my words"


@pytest.mark.parametrize(
    ("part", "status", "words"),
    [
        ("repos/create", 401, "the token is not valid (HTTP 401)"),
        ("api/", 403, "the token may not write there (HTTP 403)"),
        ("preupload", 403, "the token may not write there (HTTP 403)"),
        ("repos/create", 500, "the hub failed (HTTP 500)"),
        ("preupload", 503, "the hub failed (HTTP 503)"),
        ("objects/batch", 500, "the hub failed (HTTP 500)"),
        ("commit", 500, "the hub failed (HTTP 500)"),
    ],
)
def test_a_refusal_says_why_and_how_to_go_on(
    hub: Hub, output: Path, part: str, status: int, words: str
) -> None:
    hub.failing[part] = status
    assert words in refused(output).subject


def test_a_failed_upload_says_so(hub: Hub, output: Path) -> None:
    hub.failing["/blob/"] = 500
    subject = refused(output).subject
    assert "the hub failed (HTTP 500)" in subject
    assert "Error while uploading 'model-0000" in subject


def test_no_network_says_so(hub: Hub, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    assert "refused" in refused(output).subject
    assert hub.requests == []


def test_a_wrong_token_is_refused(hub: Hub, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "(HTTP 401)" in refused(output).subject
    assert hub.repos == {}


def test_without_a_token_nothing_is_asked(
    hub: Hub, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    error = refused(output)
    assert "there is no token" in error.subject
    assert "hf auth login" in error.hint
    assert hub.requests == []


@pytest.mark.parametrize("bars", [True, False])
def test_progress_bars_are_shown_only_if_wanted(output: Path, tmp_path: Path, bars: bool) -> None:  # noqa: FBT001
    program = (
        "import sys; from pathlib import Path; from unshard.write.hub import push\n"
        f"push(Path(sys.argv[1]), 'someone/model', sys.argv[2:], private=True, bars={bars})"
    )
    with serving() as hub:
        settings = {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }
        done = subprocess.run(
            [sys.executable, "-c", program, str(output), *FILES],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | settings,
        )
    assert hub.repos["someone/model"].files.items() >= FILES.items()
    assert bool(done.stderr) is bars
    assert done.stdout == ""


@pytest.mark.parametrize("repo", ["a/b/c", "", "with space", "-x", "a--b", "x" * 200])
def test_a_name_that_no_repository_can_have_is_a_usage_error(repo: str) -> None:
    with pytest.raises(UsageError, match="push_to_hub="):
        check_repo(repo, may_ask=False)
    check_repo("someone/my-model.v2", may_ask=False)


def test_what_may_be_pushed_is_known_before_the_merge(hub: Hub) -> None:
    for repo in ("model", "someone/model", "their-org/model"):
        check_repo(repo, may_ask=True)
    hub.role = "fineGrained"  # the hub does not say for what
    check_repo("of-others/model", may_ask=True)
    assert hub.repos == {}


@pytest.mark.parametrize(
    "case",
    [
        ("someone/model", "read", "the token may only read"),
        ("of-others/model", "write", "the token belongs to someone, their-org, not to of-others"),
        ("someone/model", "wrong", r"the token is not valid \(HTTP 401\)"),
        ("someone/model", "none", "there is no token"),
    ],
)
def test_a_merge_that_could_not_be_pushed_does_not_begin(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str]
) -> None:
    repo, role, words = case
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    hub.role = role
    if role == "none":
        monkeypatch.delenv("HF_TOKEN")
    elif role == "wrong":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    events: list[Event] = []
    places = (tmp_path / "ckpt", tmp_path / "out")
    with pytest.raises(OutputError, match=words) as caught:
        unshard.merge(*places, push_to_hub=repo, listener=events.append, config="none")
    assert "leave out push_to_hub=…" in caught.value.hint
    assert (events, hub.repos) == ([], {})
    assert not (tmp_path / "out").exists()
    unshard.merge(*places, push_to_hub=repo, dry_run=True, listener=ignore, config="none")


def test_a_merge_is_pushed(hub: Hub, tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    report = unshard.merge(
        tmp_path / "ckpt",
        tmp_path / "out",
        push_to_hub="their-org/model",
        listener=ignore,
        config="none",
    )
    assert report.url == f"{hub.address}/their-org/model"
    assert "model.safetensors" in hub.repos["their-org/model"].files


def test_a_hub_that_is_out_of_reach_is_reported_before_the_merge(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.failing["whoami"] = 503
    with pytest.raises(OutputError, match=r"the hub failed \(HTTP 503\)"):
        check_repo("someone/model", may_ask=True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OutputError, match="nothing has been read or written yet"):
        check_repo("someone/model", may_ask=True)


def test_the_card_says_what_was_made_of_what() -> None:
    card = ModelCard(model_card(RECORD, title="my-model", base_model="Qwen/Qwen2-0.5B"))
    assert card.data.to_dict() == {  # type: ignore[no-untyped-call]  # no types
        "library_name": "transformers",
        "base_model": "Qwen/Qwen2-0.5B",
        "tags": ["unshard"],
    }
    for line in ("# my-model", "| step | 0 |", "| ranks | 4 |", "| parameters | 245,630 |"):
        assert line in card.text.splitlines() or line in card.text


def test_a_card_of_an_odd_record_is_still_a_card() -> None:
    card = model_card({"source": {"name": "a|b\n---\nc", "step": None}, "output": 3}, title="t")
    assert "| checkpoint | a\\|b --- c |" in card
    assert "| step" not in card
    assert ModelCard(card).content.startswith("---\nlibrary_name: transformers\n")
