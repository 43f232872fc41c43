"""Web servers, and what fsspec reads: the bytes of a merge of the same files on disk."""

import functools
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
import torch

import unshard
from megatron_cases import unpack
from ranks import save_ranks
from unshard import CorruptError, StoreError, UnknownFormatError, UsageError
from unshard.stores import buckets
from zero_files import save_zero, zero_model

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

WEIGHTS = "model.safetensors"


class Handler(SimpleHTTPRequestHandler):
    """Serves files and ranges of them; `listing` decides whether folders have pages."""

    listing, ranges = True, True

    def log_message(self, *_: object) -> None:
        pass

    def list_directory(self, path):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        if not self.listing:
            self.send_error(403)
            return None
        return super().list_directory(path)

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
        data = path.read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def end_headers(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_file():
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


def test_a_run_below_a_page_of_links_is_merged(web: tuple[str, Path], tmp_path: Path) -> None:
    address, root = web
    save_ranks(root / "a run" / "global_step_4" / "actor", some_matrices(), 3)
    unshard.merge(root / "a run", tmp_path / "local")
    report = unshard.merge(f"{address}/a run", tmp_path / "remote")
    assert report.source == f"{address}/a run/global_step_4/actor"
    truth = (tmp_path / "local" / WEIGHTS).read_bytes()
    assert (tmp_path / "remote" / WEIGHTS).read_bytes() == truth


@pytest.mark.parametrize("given", ["folder", "file"])
def test_without_pages_files_are_found_by_known_names(
    web: tuple[str, Path], handler: type[Handler], tmp_path: Path, given: str
) -> None:
    address, root = web
    save_ranks(tmp_path / "ckpt", some_matrices(), 2)
    unshard.merge(tmp_path / "ckpt", root / "model", max_shard_size="200KB")
    unshard.merge(tmp_path / "ckpt", root / "one")
    handler.listing = False
    place = f"{address}/model" if given == "folder" else f"{address}/one/{WEIGHTS}"
    assert unshard.inspect(place).parameters == sum(one.numel() for one in some_matrices().values())
    unshard.merge(place, tmp_path / "remote")
    truth = (root / "one" / WEIGHTS).read_bytes()
    assert (tmp_path / "remote" / WEIGHTS).read_bytes() == truth


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("kind", ["Megatron", "ZeRO 2", "ZeRO 3"])
def test_without_pages_the_files_of_ranks_are_found_by_their_numbers(
    web: tuple[str, Path], handler: type[Handler], megatron: Path, tmp_path: Path, kind: str
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
    handler.listing = False
    unshard.merge(f"{address}/step", tmp_path / "remote", names="training")
    truth = (tmp_path / "local" / WEIGHTS).read_bytes()
    assert (tmp_path / "remote" / WEIGHTS).read_bytes() == truth


def test_a_file_that_is_replaced_is_noticed(web: tuple[str, Path]) -> None:
    address, root = web
    place = save_ranks(root / "ckpt", {"w": torch.ones(300, 400)}, 2)
    with unshard.open_checkpoint(f"{address}/ckpt") as checkpoint:
        save_ranks(place, {"w": torch.zeros(300, 400)}, 2)
        with pytest.raises(CorruptError, match=r"rank_0\.pt: has changed while it was being read"):
            checkpoint["w"]


def test_a_server_without_ranges_is_an_error_that_says_so(
    web: tuple[str, Path], handler: type[Handler], tmp_path: Path
) -> None:
    address, root = web
    save_ranks(root / "ckpt", some_matrices(), 2)
    handler.ranges = False
    with pytest.raises(StoreError, match="sends the whole file for a part of it"):
        unshard.merge(f"{address}/ckpt", tmp_path / "out")


def test_what_is_not_there_and_what_cannot_be_written(
    web: tuple[str, Path], tmp_path: Path
) -> None:
    address, root = web
    save_ranks(root / "ckpt", some_matrices(), 2)
    with pytest.raises(UnknownFormatError):
        unshard.merge(f"{address}/nothing", tmp_path / "out")
    with pytest.raises(UsageError, match="nothing can be written there"):
        unshard.merge(f"{address}/ckpt", f"{address}/out")
    with pytest.raises(UsageError, match="with credentials"):
        unshard.merge(address.replace("http://", "http://me:secret@"), tmp_path / "out")


def test_any_file_system_of_fsspec_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(buckets, "_buckets", {})
    place = save_ranks(tmp_path / "ckpt" / "global_step_2" / "actor", some_matrices(), 2)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "ckpt"), "/shards/run", recursive=True)
    try:
        unshard.merge(place, tmp_path / "local")
        unshard.merge("memory://shards/run", tmp_path / "remote", dtype="keep")
        truth = (tmp_path / "local" / WEIGHTS).read_bytes()
        assert (tmp_path / "remote" / WEIGHTS).read_bytes() == truth
    finally:
        memory.rm("/shards", recursive=True)
