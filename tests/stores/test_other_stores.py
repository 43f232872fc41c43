"""Web servers and the Hugging Face hub: the bytes of a merge of the same files on disk."""

import functools
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import unshard
from hub_server import Repo, standing_in
from megatron_cases import unpack
from ranks import save_ranks
from unshard import CorruptError, StoreError, UnknownFormatError, UsageError
from unshard.stores import buckets
from zero_files import save_zero, zero_model

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

WEIGHTS, RANK = "model.safetensors", "model_world_size_3_rank_0.pt"


class Handler(SimpleHTTPRequestHandler):
    """Serves files and ranges of them; `pages` decides whether folders have pages.

    `heads` decides whether it answers HEAD, and `etags` whether files have tags.
    """

    pages, ranges, heads, etags = False, True, True, True

    def log_message(self, *_: object) -> None:
        pass

    def list_directory(self, path):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        if not self.pages:
            self.send_error(403)
            return None
        return super().list_directory(path)

    def do_HEAD(self) -> None:
        if self.heads:
            super().do_HEAD()
        else:
            self.send_error(405)

    def do_GET(self) -> None:
        given = self.headers.get("Range")
        path = Path(self.translate_path(self.path))
        if given is None or not self.ranges or not path.is_file():
            super().do_GET()
            return
        if self.headers.get("If-Match") not in (None, etag_of(path)):
            self.send_error(412)
            return
        first, last = map(int, given.removeprefix("bytes=").split("-"))
        data = path.read_bytes()
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)

    def end_headers(self) -> None:
        path = Path(self.translate_path(self.path))
        if self.etags and path.is_file():
            self.send_header("ETag", etag_of(path))
        super().end_headers()


def etag_of(path: Path) -> str:
    return f'"{path.stat().st_mtime_ns:x}"'


@pytest.fixture
def handler() -> type[Handler]:
    return type("ThisHandler", (Handler,), {})


@pytest.fixture
def web(
    tmp_path: Path, handler: type[Handler], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Path]]:
    """Serve a folder on loopback; yield its address and path."""
    monkeypatch.setattr(buckets, "_buckets", {})
    (tmp_path / "www").mkdir()
    serve = functools.partial(handler, directory=str(tmp_path / "www"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", tmp_path / "www"
        finally:
            server.shutdown()
            thread.join()


def some_matrices() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"w{n}": torch.randn(300, 100 + n, generator=generator) for n in range(6)}


@pytest.mark.parametrize("without", ["nothing", "heads", "etags"])
@pytest.mark.parametrize("folder", ["a run", "a%20run"])
def test_the_files_of_all_ranks_are_found_by_the_name_of_one(
    web: tuple[str, Path], handler: type[Handler], tmp_path: Path, folder: str, without: str
) -> None:
    address, root = web
    place = save_ranks(root / "a run" / "global_step_4" / "actor", some_matrices(), 3)
    unshard.merge(place, tmp_path / "local", config="none")
    setattr(handler, without, False)
    report = unshard.merge(
        f"{address}/{folder}/global_step_4/actor/{RANK}", tmp_path / "remote", config="none"
    )
    assert report.source == f"{address}/{folder}/global_step_4/actor"
    truth = (tmp_path / "local" / WEIGHTS).read_bytes()
    assert (tmp_path / "remote" / WEIGHTS).read_bytes() == truth


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("given", ["folder", "file", "index"])
def test_files_are_found_by_known_names(
    web: tuple[str, Path], handler: type[Handler], tmp_path: Path, given: str, *, pages: bool
) -> None:
    address, root = web
    save_ranks(tmp_path / "ckpt", some_matrices(), 2)
    unshard.merge(tmp_path / "ckpt", root / "model", max_shard_size="200KB", config="none")
    unshard.merge(tmp_path / "ckpt", root / "one", config="none")
    handler.pages = pages
    names = {"folder": "model", "file": f"one/{WEIGHTS}", "index": f"model/{WEIGHTS}.index.json"}
    place = f"{address}/{names[given]}"
    assert unshard.inspect(place).parameters == sum(one.numel() for one in some_matrices().values())
    unshard.merge(place, tmp_path / "remote", config="none")
    truth = (root / "one" / WEIGHTS).read_bytes()
    assert (tmp_path / "remote" / WEIGHTS).read_bytes() == truth


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("kind", ["Megatron", "ZeRO 2", "ZeRO 3"])
def test_the_files_of_ranks_are_found_by_their_numbers(
    web: tuple[str, Path], megatron: Path, tmp_path: Path, kind: str
) -> None:
    address, root = web
    if kind == "Megatron":
        place = megatron / "llama_tp2_pp2" / "iter_0000003"
        shutil.copytree(place, root / "step")
    else:
        model = zero_model(some_matrices(), order=[f"w{n}" for n in range(6)])
        prefix, stage = ("bf16_", 2) if kind == "ZeRO 2" else ("", 3)
        place = root / "step"
        save_zero(place / "global_step4", model, world=3, stage=stage, prefix=prefix)
        (place / "latest").write_text("global_step4")
    unshard.merge(place, tmp_path / "local", names="training")
    unshard.merge(f"{address}/step", tmp_path / "remote", names="training")
    truth = (tmp_path / "local" / WEIGHTS).read_bytes()
    assert (tmp_path / "remote" / WEIGHTS).read_bytes() == truth


def test_a_file_that_is_replaced_is_noticed(web: tuple[str, Path]) -> None:
    address, root = web
    place = save_ranks(root / "ckpt", {"w": torch.ones(300, 400)}, 3)
    with unshard.open_checkpoint(f"{address}/ckpt/{RANK}") as checkpoint:
        save_ranks(place, {"w": torch.zeros(300, 400)}, 3)
        with pytest.raises(CorruptError, match=r"rank_0\.pt: has changed while it was being read"):
            checkpoint["w"]


def test_a_server_without_ranges_is_an_error_that_says_so(
    web: tuple[str, Path], handler: type[Handler], tmp_path: Path
) -> None:
    address, root = web
    save_ranks(root / "ckpt", some_matrices(), 3)
    handler.ranges = False
    with pytest.raises(StoreError, match="sends the whole file instead of a range") as caught:
        unshard.merge(f"{address}/ckpt/{RANK}", tmp_path / "out")
    assert "use a server that supports range requests" in caught.value.hint


@pytest.mark.parametrize("pages", [False, True])
def test_a_folder_that_would_have_to_be_listed_is_an_error_that_says_what_to_give(
    web: tuple[str, Path], handler: type[Handler], *, pages: bool
) -> None:
    address, root = web
    place = save_ranks(root / "ckpt" / "global_step_4", some_matrices(), 3)
    handler.pages = pages
    for folder in (f"{address}/ckpt", f"{address}/ckpt/global_step_4", f"{address}/nothing"):
        with pytest.raises(UnknownFormatError, match="no such file or directory") as caught:
            unshard.inspect(folder)
        assert "a web server cannot list folders: pass model.safetensors" in caught.value.hint
    (place / "config.json").write_text("{}")
    with pytest.raises(UnknownFormatError, match="no checkpoint found") as caught:
        unshard.inspect(f"{address}/ckpt/global_step_4")
    assert "a web server cannot list folders: pass model.safetensors" in caught.value.hint


def test_what_is_not_there_and_what_cannot_be_written(
    web: tuple[str, Path], tmp_path: Path
) -> None:
    address, root = web
    save_ranks(root / "ckpt", some_matrices(), 3)
    with pytest.raises(UsageError, match="is read-only"):
        unshard.merge(f"{address}/ckpt/{RANK}", f"{address}/out", config="none")
    with pytest.raises(UsageError, match="with credentials"):
        unshard.merge(address.replace("http://", "http://me:secret@"), tmp_path / "out")


@pytest.mark.parametrize("scheme", ["sftp", "ftp", "smb", "webdav", "hdfs"])
@pytest.mark.parametrize("kind", [str, Path])
def test_other_addresses_are_an_error_that_says_what_to_do(
    tmp_path: Path, scheme: str, kind: type[str | Path]
) -> None:
    address = kind(f"{scheme}://me:secret@host/run")
    for source, output in ((address, tmp_path / "out"), (tmp_path, address)):
        with pytest.raises(UsageError, match=f"^{scheme}://…: unsupported scheme") as caught:
            unshard.merge(source, output)
        assert "secret" not in str(caught.value)
        assert "https:// or hf://" in caught.value.expected
        assert "mount" in caught.value.hint


@pytest.mark.parametrize("given", ["", "/a folder/step", f"/{WEIGHTS}", "/nothing"])
def test_a_repository_of_the_hub_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    monkeypatch.setattr(buckets, "_buckets", {})
    place = save_ranks(tmp_path / "ckpt", some_matrices(), 3)
    unshard.merge(place, tmp_path / "local", dtype="keep", config="none")
    files = {WEIGHTS: (tmp_path / "local" / WEIGHTS).read_bytes(), "config.json": b"{}"}
    files |= {f"a folder/step/{path.name}": path.read_bytes() for path in place.iterdir()}
    with standing_in(monkeypatch, tmp_path) as hub:
        hub.repos["someone/model"] = Repo(private=True, files=files)
        if given == "/nothing":
            with pytest.raises(UnknownFormatError, match="no such file or directory"):
                unshard.inspect(f"hf://someone/model{given}")
            return
        unshard.merge(
            f"hf://someone/model{given}", tmp_path / "remote", dtype="keep", config="none"
        )
    assert (tmp_path / "remote" / WEIGHTS).read_bytes() == files[WEIGHTS]
