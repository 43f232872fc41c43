"""Nothing that users rely on changes unnoticed: names, flags, exit codes, HTTP, files, tables."""

import importlib
import json
import os
import pkgutil
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from difflib import unified_diff
from pathlib import Path

import pytest

import surface
import unshard
from evaluation.servers import Still, Stub, free_port, serving, still
from unshard import compat
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.submitter import Submitter
from unshard.evaluate.trainer.watcher import Watching
from waiting import wait_until as until

EXPECTED = Path(__file__).parent / "data" / "surface"
EXAMPLE = Path(__file__).parent.parent / "examples" / "checkpoint"
MODULES = (
    "unshard",
    "unshard.evaluate",
    "unshard.evaluate.callbacks.lightning",
    "unshard.evaluate.callbacks.transformers",
    "unshard.evaluate.lmms_engine",
    "unshard.integrations.lmms_engine",
    "unshard.integrations.transformers",
    "unshard.merger",
)
WHAT_TO_DO = (
    "The public surface differs from {}. If that is on purpose, list it in CHANGELOG.md with the"
    " reason, then run: UNSHARD_WRITE_SURFACE=1 pytest tests/test_surface.py"
)


def check(name: str, found: Sequence[str]) -> None:
    """Compare a part of the surface with the file that holds it; or write the file, if asked to."""
    file = EXPECTED / f"{name}.txt"
    if os.environ.get("UNSHARD_WRITE_SURFACE"):
        file.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    expected = file.read_text(encoding="utf-8").splitlines()
    changed = unified_diff(expected, found, "expected", "found", n=0, lineterm="")
    if expected != found:
        pytest.fail("\n".join([WHAT_TO_DO.format(file.name), *changed]), pytrace=False)


@pytest.mark.parametrize("module", MODULES)
def test_names_parameters_and_methods(module: str) -> None:
    if module.endswith(".lightning"):
        pytest.importorskip("lightning")
    check(module, surface.of_module(importlib.import_module(module)))


def test_flags_of_every_command() -> None:
    check("commands", surface.of_commands())


def test_flags_of_every_drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"unshard.compat.{one.name}" for one in pkgutil.iter_modules(compat.__path__)]
    modules = [importlib.import_module(name) for name in (*names, "unshard.merger.__main__")]
    programs = [module for module in modules if hasattr(module, "main")]
    parts = [surface.of_drop_in(program, monkeypatch) for program in programs]
    check("drop_ins", [line for part in parts for line in part])


def test_exit_codes() -> None:
    check("exit_codes", surface.of_errors())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Still]:
    with still(tmp_path) as made:
        yield made


def test_routes_and_fields_of_both_protocols(server: Still) -> None:
    check("http", surface.of_http(server.app))


def test_keys_of_the_record_of_a_merge(tmp_path: Path) -> None:
    unshard.merge(EXAMPLE, tmp_path / "out", dtype="config")
    unshard.average([EXAMPLE, EXAMPLE], tmp_path / "average", dtype="config")
    lines = []
    for name in ("out", "average"):
        record = json.loads((tmp_path / name / "unshard.json").read_text())
        lines += [f"{name}: {key}" for key in surface.of_record(record)]
    check("record", lines)


def test_tables_and_columns_of_the_database(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")):
        check("database", surface.of_database(tmp_path / "jobs.sqlite"))


class Refusing:
    """A tracker that takes nothing, so that a result stays in the spool."""

    name = "refusing"

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        raise OSError(f"{job_id} of step {step}: {len(metrics)}")

    def close(self) -> None:
        pass


def documents(run: Path) -> dict[str, list[str]]:
    """Return the keys of our records in a run, by path."""
    places = [run / "_unshard" / "results.jsonl", *(run / "_unshard" / "pins").glob("*/pin.json")]
    places += (run / "_unshard" / "spool").rglob("*.json")
    lines = {}
    for path in places:
        with suppress(FileNotFoundError):  # the submitter moves and removes them meanwhile
            lines[path] = path.read_text().splitlines()[0]
    return {path.relative_to(run).as_posix(): list(json.loads(lines[path])) for path in lines}


def test_files_in_a_runs_directory(tmp_path: Path, server: Still) -> None:
    """What `watch`, a trainer whose server is away or refuses, and a server's merge write there."""
    run, lines, port = tmp_path / "run", set[str](), free_port()
    shutil.copytree(EXAMPLE, run)
    fields = {"server_url": f"http://127.0.0.1:{port}", "profile": "p", "tasks": ["t"]}
    config = EvalConfig.from_dict({**fields, "poll_interval": 0.02})

    def look() -> None:
        lines.update(surface.of_files(run / "_unshard", documents(run)))

    def wait_for(folder: str) -> None:
        spool = run / "_unshard" / "spool"
        until(lambda: {path.parent.name for path in spool.rglob("*.json")} == {folder})

    with Watching(run, config) as watching:
        until(watching.look)
        wait_for("queue")
        look()
        with serving(Stub(refuses=(400, "no")), port):
            wait_for("refused")
            look()
    with serving(Stub(), port) as stub:
        submitter = Submitter(config, run, sinks=[Refusing()])
        wait_for("jobs")
        look()
        stub.finish("job1", **{"t/acc": 0.5})
        wait_for("results")
        submitter.stop()
        until(lambda: not list((run / "_unshard" / "pins").iterdir()))
    merged = server.client.post("/merge", json={"checkpoint_path": str(run / "global_step_10")})
    assert merged.json()["success"], merged.text
    look()
    check("run_directory", sorted(lines))
