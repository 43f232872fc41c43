"""Run all contenders of one checkpoint in turns, and compare what each wrote with the truth."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from peers.cells import EMBEDDINGS, HEAD, Cell, Made
from peers.checkpoints import make
from peers.contenders import CONTENDERS, FLOORS, Contender
from peers.environments import install

__all__ = ["measure", "probe", "read_once"]

_PROBE = Path(__file__).with_name("probe.py")
Taken = dict[str, Any]


def measure(cell: Cell, directory: Path, rounds: int) -> Taken:
    """Return what every contender took, in each round, and whether its output is right.

    The checkpoint is removed afterwards; the truth stays, for the next layout.
    """
    made = make(cell, directory)
    write_pieces(made)
    chosen = [one for one in CONTENDERS if cell.layout in one.layouts]
    results: dict[str, Taken] = {}
    for one in chosen:
        error = install(one.environment) if one.environment else None
        results[one.name] = {"error": error, "rounds": []}
    for number in range(rounds):
        first = number % len(chosen)
        for one in (*chosen[first:], *chosen[:first]):
            if results[one.name]["error"] is None:
                run(one, made, directory / "output", results[one.name])
    stored = sum(path.stat().st_size for path in made.files)
    shutil.rmtree(made.root)
    return {"cell": asdict(cell), "stored_bytes": stored, "contenders": results}


def run(contender: Contender, made: Made, output: Path, result: Taken) -> None:
    """Run a contender once and add what it took; the first time, check its output."""
    shutil.rmtree(output, ignore_errors=True)
    if not contender.name.startswith("unshard"):  # which makes its output itself
        output.mkdir()
    read_once(made.files)
    taken = probe(contender.command(made, output), output)
    if taken.pop("exit_code"):
        log = output.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
        result["error"] = ([line for line in log.splitlines() if line.strip()] or ["failed"])[-1]
    else:
        result["rounds"].append(taken)
        if "verdict" not in result and contender.name not in FLOORS:
            result["verdict"] = compare(output, made.truth)
            result["has_config"] = (output / "config.json").exists()
    shutil.rmtree(output, ignore_errors=True)


def probe(command: object, output: Path) -> Taken:
    """Run a command, and return what it took; see `probe.py`."""
    os.sync()
    line = [sys.executable, "-I", "-S", str(_PROBE), str(output.with_suffix(".log")), str(output)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # nobody compiles its modules in each run
    done = subprocess.run(
        [*line, *list(command)],  # type: ignore[call-overload]
        stdout=subprocess.PIPE,
        check=True,
        env=environment,
    )
    taken: Taken = json.loads(done.stdout)
    return taken


def read_once(files: list[Path]) -> None:
    """Bring files into the page cache: everyone reads from memory."""
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)


def write_pieces(made: Made) -> None:
    """Write what a merge copies: rows of (source, offset, offset in the output, length)."""
    from unshard.api.making import PlannedMerge
    from unshard.api.merging import merge_checkpoint
    from unshard.api.options import MergeOptions
    from unshard.plan.operations import CopyRange
    from unshard.progress import ignore

    pieces: list[tuple[str, int, int, int]] = []

    def note(prepared: PlannedMerge) -> PlannedMerge:
        sizes = [file.size for file in prepared.plan.layout.files]
        for one in prepared.plan.operations():
            if isinstance(one, CopyRange) and one.count == 1:  # all but some short vectors
                place = sum(sizes[: one.file]) + one.target
                pieces.append((str(one.source), one.start, place, one.length))
        copied = sum(piece[3] for piece in pieces)
        if copied < 0.95 * prepared.plan.bytes_written:
            raise RuntimeError(f"{made.checkpoint}: only {copied:,} bytes are merged by copying")
        return prepared

    options = MergeOptions(dry_run=True)
    merge_checkpoint(made.checkpoint, made.root / "none", options, ignore, before=note)
    (made.root / "pieces.json").write_text(json.dumps(pieces), encoding="utf-8")


def compare(output: Path, truth: Path) -> str:
    """Return whether an output has the truth's tensors, bit for bit: "exact" or what is wrong."""
    found = load(output)
    with safe_open(truth, framework="pt") as file:
        names = set(file.keys())
        missing, more = names - found.keys(), found.keys() - names - {HEAD}
        if missing or more:
            return f"wrong: {len(missing)} tensors are missing, {len(more)} are unknown"
        differ, cast = 0, False
        for name, tensor in found.items():
            expected = file.get_tensor(EMBEDDINGS if name == HEAD else name)
            cast |= tensor.dtype != expected.dtype
            differ += not same(tensor, expected.to(tensor.dtype))
    if differ:
        return f"wrong: {differ} of {len(found)} tensors differ"
    dtypes = {str(one.dtype).removeprefix("torch.") for one in found.values()}
    return f"exact, cast to {dtypes.pop()}" if cast and len(dtypes) == 1 else "exact"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype have the same shape and bits."""
    if one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def load(output: Path) -> dict[str, torch.Tensor]:
    """Map all tensors of an output: safetensors files, or one file of torch."""
    tensors: dict[str, torch.Tensor] = {}
    for path in output.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for path in output.glob("*.pt"):
        stored = torch.load(path, mmap=True, weights_only=True)
        tensors |= stored.get("model", stored)
    return tensors
