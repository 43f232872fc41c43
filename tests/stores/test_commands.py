"""Every command and function that reads a checkpoint reads it in a bucket, too."""

import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import unshard
from bucket_server import BUCKET, SECRETS, Store
from command import unshard as command
from hub_server import Hub, standing_in
from merged_layouts import contents
from ranks import save_ranks, some_tensors
from tiny_models import assert_same_model, tiny_model
from unshard import CorruptError, OutputError, StoreError, UnknownFormatError, UsageError
from unshard.api.hinting import hint
from unshard.cli.commands import merge
from unshard.cli.running import front_of
from unshard.errors import UnshardError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("a bucket"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def qwen() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def local(qwen: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, of which the second has other values."""
    run = tmp_path_factory.mktemp("run")
    for step, scale in ((10, 1), (20, 2)):
        tensors = {name: scale * tensor for name, tensor in qwen.state_dict().items()}
        place = save_ranks(run / f"global_step_{step}" / "actor", tensors, 2)
        qwen.config.save_pretrained(place / "huggingface")
    return run


@pytest.fixture(scope="module")
def run(served: Store, local: Path) -> str:
    return served.upload(local, "a run/of mine")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with standing_in(monkeypatch, tmp_path / "hub") as hub:
        yield hub


def test_the_command_merges_the_highest_step(
    store: Store, run: str, local: Path, tmp_path: Path
) -> None:
    unshard.merge(local, tmp_path / "local")
    done = command("merge", run, tmp_path / "remote", "--verify", "full")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "remote").keys() == contents(tmp_path / "local").keys()
    weights = "model.safetensors"
    assert contents(tmp_path / "remote")[weights] == contents(tmp_path / "local")[weights]
    assert not [word for word in SECRETS if word in done.stdout + done.stderr]
    assert store.requests


def test_a_path_made_of_an_address_is_one(run: str, tmp_path: Path) -> None:
    report = unshard.merge(Path(run), tmp_path / "out", step=10)
    assert report.source == f"{run}/global_step_10/actor"


def test_the_lines_of_a_run_in_a_bucket_work(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = {one.label: shlex.split(one.command) for one in hint(run)}
    assert lines["follow"][2] == lines["evaluate"][3] == run
    assert lines["merge"][2:] == [f"{run}/global_step_20"]
    for label in ("merge", "verify", "resume elsewhere"):
        words = ["2" if word == "N" else word for word in lines[label]]
        done = command(*words[1:])
        assert done.returncode == 0, done.stderr
        assert not [word for word in SECRETS if word in done.stdout + done.stderr]


def test_average_takes_steps_of_a_run(run: str, local: Path, tmp_path: Path) -> None:
    unshard.average([local], tmp_path / "local")
    done = command("average", run, tmp_path / "remote")
    assert done.returncode == 0, done.stderr
    remote, truth = contents(tmp_path / "remote"), contents(tmp_path / "local")
    assert remote["model.safetensors"] == truth["model.safetensors"]
    with unshard.virtual(f"{run}@last=2") as files:
        assert files["model.safetensors"].read() == truth["model.safetensors"]


def test_inspect_states_what_the_files_on_disk_have(run: str, local: Path) -> None:
    remote, here = (command("inspect", place, "--json") for place in (run, str(local)))
    assert remote.returncode == here.returncode == 0, remote.stderr
    truth = json.loads(here.stdout.replace(str(local), "RUN"))
    assert json.loads(remote.stdout.replace(run, "RUN")) == truth


def test_a_command_to_use_instead_has_the_address_as_it_was_given(
    store: Store, tmp_path: Path
) -> None:
    model = tiny_model()
    place = save_ranks(tmp_path / "float32", model.state_dict(), 2)
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(place / "huggingface")
    address = store.upload(place, "float32")
    done = command("inspect", address)
    assert f"use           unshard merge {address} OUTPUT --dtype config\n" in done.stdout
    given = {"checkpoint": Path("s3://key:pass@bucket/model")}
    assert "key:pass" not in str(front_of(merge, given))


def test_verify_compares_with_a_bucket_and_in_a_bucket(
    store: Store, run: str, local: Path, tmp_path: Path
) -> None:
    unshard.merge(local, tmp_path / "out")
    merged = store.upload(tmp_path / "out", "merged")
    for output in (tmp_path / "out", merged):
        assert unshard.verify(output, run).equal
        assert not unshard.verify(output, f"{run}/global_step_10").equal
    done = command("verify", merged, "--against", run)
    assert done.returncode == 0, done.stderr


def test_transformers_loads_names_and_shapes_of_an_output_in_a_bucket(
    store: Store, qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen.save_pretrained(tmp_path / "model")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    model, merged = store.upload(tmp_path / "model", "to load"), f"s3://{BUCKET}/loaded"
    unshard.merge(model, merged)
    found = unshard.verify(merged, model, load=True, dtype="bfloat16", names="hub")
    assert found.equal
    assert found.loading is not None
    assert found.loading.model_class == "Qwen2ForCausalLM"
    assert found.loading.complete
    done = command("verify", merged, "--against", model, "--load")
    assert done.returncode == 0, done.stderr
    assert "as Qwen2ForCausalLM" in done.stdout
    assert list(scratch.iterdir()) == []
    store.s3.delete_object(Bucket=BUCKET, Key="loaded/config.json")
    with pytest.raises(OutputError, match=f"{merged} has no config"):
        unshard.verify(merged, model, load=True)


def test_a_base_and_a_config_may_be_in_a_bucket(
    store: Store, run: str, local: Path, tmp_path: Path
) -> None:
    unshard.merge(local, tmp_path / "out")
    base = store.upload(tmp_path / "out", "base")
    report = unshard.merge(run, tmp_path / "again", base=base, config=base)
    assert report.changed_from_base == (0, report.tensors)


def test_the_files_of_two_machines_are_united(store: Store, tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "ckpt" / "model_world_size_2_rank_1.pt").rename(
        tmp_path / "other" / "model_world_size_2_rank_1.pt"
    )
    first, second = (store.upload(tmp_path / one, f"nodes/{one}") for one in ("ckpt", "other"))
    unshard.merge(tmp_path / "ckpt", tmp_path / "local", also=[tmp_path / "other"], config="none")
    unshard.merge(first, tmp_path / "remote", also=[second], config="none")
    unshard.merge(tmp_path / "ckpt", tmp_path / "mixed", also=[second], config="none")
    truth = (tmp_path / "local" / "model.safetensors").read_bytes()
    for output in ("remote", "mixed"):
        assert (tmp_path / output / "model.safetensors").read_bytes() == truth


def test_tensors_are_read_on_demand(run: str, local: Path) -> None:
    with unshard.open_checkpoint(run) as remote, unshard.open_checkpoint(local) as here:
        assert list(remote) == list(here)
        for name in remote:
            assert (remote[name] == here[name]).all()
        name = "model.embed_tokens.weight"
        assert (remote.get_slice(name)[3:40:2, 1:5] == here.get_slice(name)[3:40:2, 1:5]).all()


def test_transformers_builds_the_model(run: str, local: Path, tmp_path: Path) -> None:
    unshard.merge(local, tmp_path / "out")
    assert_same_model(
        unshard.from_pretrained(run, AutoModelForCausalLM),
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
    )


def test_the_files_of_a_merge_are_read_and_pushed(
    hub: Hub, run: str, local: Path, tmp_path: Path
) -> None:
    unshard.merge(local, tmp_path / "out")
    truth = (tmp_path / "out" / "model.safetensors").read_bytes()
    with unshard.virtual(run) as files:
        assert files["model.safetensors"].read() == truth
        files.check_sources()
    unshard.push(run, "someone/model")
    assert hub.repos["someone/model"].files["model.safetensors"] == truth


def test_an_object_that_is_replaced_is_noticed(store: Store, tmp_path: Path) -> None:
    place = save_ranks(tmp_path / "ckpt", {"w": torch.ones(300, 400)}, 2)
    address = store.upload(place, "replaced")
    with (
        unshard.virtual(address, config="none") as files,
        unshard.open_checkpoint(address) as checkpoint,
    ):
        files.check_sources()
        save_ranks(place, {"w": torch.zeros(300, 400)}, 2)
        store.upload(place, "replaced")
        with pytest.raises(CorruptError, match="changed while it was being read"):
            files.check_sources()
        with pytest.raises(CorruptError, match=r"rank_0\.pt: has changed while it was being read"):
            checkpoint["w"]


WRONG: dict[str, tuple[str, type[UnshardError], str]] = {
    "no such folder": (f"s3://{BUCKET}/nothing/here", UnknownFormatError, "no such file"),
    "no such bucket": ("s3://another/model", StoreError, "404 Not Found, NoSuchBucket"),
    "no bucket at all": ("s3://", UsageError, "has no bucket"),
    "a key in the address": ("s3://key:pass@bucket/model", UsageError, "with credentials"),
    "a token in the address": ("az://box/model?sig=abc", UsageError, "with credentials"),
}


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("address", "kind", "text"), WRONG.values(), ids=WRONG)
def test_an_address_that_leads_nowhere_is_an_error_that_says_so(
    tmp_path: Path, address: str, kind: type[UnshardError], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        unshard.merge(address, tmp_path / "out")
    said = str(caught.value)
    assert not [word for word in (*SECRETS, "key:pass", "sig=") if word in said]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("store")
def test_a_bucket_that_is_not_there_gets_a_hint_about_its_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="NoSuchBucket") as caught:
        unshard.merge("s3://another/model", tmp_path / "out")
    assert "check the name of the bucket" in caught.value.hint


@pytest.mark.usefixtures("store")
def test_an_endpoint_without_tls_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(StoreError, match="needs AWS_ALLOW_HTTP=true"):
        unshard.inspect(f"s3://{BUCKET}/model")


UNUSABLE = {
    "az://box/run": ("AZURE_STORAGE_ACCOUNT_KEY", "no key: a secret", "is not a key"),
    "gs://box/run": ("GOOGLE_APPLICATION_CREDENTIALS", "/no/secret", "cannot be read"),
    "http://127.0.0.1:9/run": ("HOME", "/no/secret", "the connection was refused"),
}


@pytest.mark.parametrize("address", UNUSABLE)
def test_credentials_and_servers_that_cannot_be_used_are_named(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value, text = UNUSABLE[address]
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "nobody")
    monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=text) as caught:
        unshard.inspect(address)
    assert "secret" not in str(caught.value)


def test_nothing_that_is_printed_has_a_secret(run: str, tmp_path: Path) -> None:
    for address in (run, f"s3://{BUCKET}/nothing", "s3://another/model"):
        done = command("merge", address, tmp_path / "out", "-vv", "--dry-run")
        assert not [word for word in SECRETS if word in done.stdout + done.stderr]


def test_a_bucket_is_resharded_to_a_disk(run: str, local: Path, tmp_path: Path) -> None:
    unshard.reshard(run, tmp_path / "ours", world_size=3, verify="full")
    unshard.reshard(local, tmp_path / "truth", world_size=3)
    assert contents(tmp_path / "ours") == contents(tmp_path / "truth")
    with pytest.raises(UsageError, match="a reshard cannot write to an object store"):
        unshard.reshard(local, f"{run}/out", world_size=3)
