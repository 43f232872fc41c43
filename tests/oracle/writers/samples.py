"""Checkpoints of every format and scenario, each written once by real tools, to be copied."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oracle.writers.contract_forms import FORMS
from oracle.writers.hub import HUB_SCENARIOS
from oracle.writers.saving import truth_file
from oracle.writers.scenarios import SCENARIOS
from oracle.writers.workers import WorkerPool
from ranks import some_tensors
from unshard.read.format import Choice, ReadOptions
from unshard.read.open import open_latest
from zero_files import save_zero, zero_model

__all__ = ["CHECKED", "FORMATS", "NAMES_UNGUARDED", "Sample", "Samples", "weight_ranges"]


@dataclass(frozen=True, eq=False)
class Sample:
    """A checkpoint on disk, not to be changed, and the tensors it was made from."""

    directory: Path
    truth: dict[str, torch.Tensor]


# Written by torch processes: scenario, world size, directory.
_BY_RANKS = {
    "rank files": ("fsdp2", 3, "."),
    "rank files, HSDP": ("fsdp2_hsdp", 4, "."),
    "rank files, ShardedTensors": ("fsdp1_sharded", 3, "."),
    "bins": ("accelerate_bins_fsdp2", 3, "step_1"),
    "bins, ShardedTensors": ("fsdp1_sharded_bin", 2, "."),
    "DCP": ("dcp_model", 3, "."),
    "DCP, no collectives": ("dcp_no_collectives", 3, "."),
    "DCP, many files": ("dcp_many_files", 2, "."),
    "DCP, zstd": ("dcp_zstd", 2, "."),
    "DCP, optimizer": ("dcp_model_optimizer", 2, "."),
    "DCP, object": ("dcp_not_flattened_plain", 1, "."),
    "DCP, Lightning": ("dcp_lightning", 2, "."),
    "Megatron": ("megatron", 3, "."),
    "shards": ("storage_shards", 3, "."),
    "shards, several files": ("storage_extras_files", 2, "."),
    "shards, transformers": ("pretrained_shards", 2, "."),
}

_Tensors = Mapping[str, torch.Tensor]


def _one_file(directory: Path, tensors: _Tensors) -> None:
    save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})


def _with_index(directory: Path, tensors: _Tensors) -> None:
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    listed = {name: files[place % 2] for place, name in enumerate(tensors)}
    for file in files:
        inside = {name: value for name, value in tensors.items() if listed[name] == file}
        save_file(inside, directory / file, {"format": "pt"})
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": listed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _torch_file(directory: Path, tensors: _Tensors) -> None:
    torch.save(dict(tensors), directory / "pytorch_model.bin")


def _legacy_file(directory: Path, tensors: _Tensors) -> None:
    path = directory / "pytorch_model.bin"
    torch.save(dict(tensors), path, _use_new_zipfile_serialization=False)


def _zero(directory: Path, tensors: _Tensors, *, stage: int) -> None:
    model = zero_model(tensors, order=list(tensors))
    save_zero(directory / "global_step1", model, world=3, stage=stage)


# Written by this process.
_WHOLE: dict[str, Callable[[Path, _Tensors], None]] = {
    "one safetensors": _one_file,
    "safetensors and index": _with_index,
    "pytorch_model.bin": _torch_file,
    "legacy torch": _legacy_file,
    "ZeRO-2": partial(_zero, stage=2),
    "ZeRO-3": partial(_zero, stage=3),
}

FORMATS = (*_BY_RANKS, *_WHOLE)
# No checksum guards the names in these, and one of their bytes may be in all uses of a name.
NAMES_UNGUARDED = ("DCP", "Megatron", "one safetensors", "safetensors and index", "legacy torch")
# Their weights have checksums.
_CHECKED = ("rank", "bins", "DCP", "Megatron", "pytorch", "ZeRO")
CHECKED = [name for name in FORMATS if name.startswith(_CHECKED)]


def whole_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes, none of which equals another."""
    return some_tensors() | {
        "half": torch.linspace(-2, 2, 12).half().reshape(3, 4),
        "narrow": torch.linspace(-1, 1, 9).bfloat16(),
        "counter": torch.tensor(2**40 + 1),
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
    }


class Samples:
    """All checkpoints of a session, written when they are first asked for."""

    def __init__(self, pool: WorkerPool, temporary: pytest.TempPathFactory) -> None:
        self._pool = pool
        self._temporary = temporary
        self._known: dict[str, Sample] = {}
        self._written: dict[tuple[str, int], Sample] = {}
        self._forms: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Sample:
        if name not in self._known:
            if name in _WHOLE:
                directory = self._temporary.mktemp("whole")
                _WHOLE[name](directory, whole_tensors())
                self._known[name] = Sample(directory, whole_tensors())
            else:
                scenario, world, inside = _BY_RANKS[name]
                written = self.write(scenario, world)
                self._known[name] = Sample(written.directory / inside, written.truth)
        return self._known[name]

    def write(self, scenario: str, world: int) -> Sample:
        """Return what a scenario writes in a number of ranks: `run`, alone next to `run.truth`.

        The truth are the whole tensors: contiguous, on the CPU, in the order of the state dict.
        """
        if (scenario, world) not in self._written:
            directory = self._temporary.mktemp(f"{scenario}-{world}") / "run"
            directory.mkdir()
            self._pool.run((SCENARIOS | HUB_SCENARIOS)[scenario], world, directory)
            truth = torch.load(truth_file(directory))
            self._written[scenario, world] = Sample(directory, truth)
        return self._written[scenario, world]

    def form(self, name: str) -> Path:
        """Return the run that holds the contract's model in a form."""
        if name not in self._forms:
            form = FORMS[name]
            run = self._temporary.mktemp("contract") / "run"
            (run / form.place).mkdir(parents=True)
            if form.world == 1:
                form.save(0, 1, run / form.place)
            else:
                self._pool.run(form.save, form.world, run / form.place)
            self._forms[name] = run
        return self._forms[name]


def weight_ranges(directory: Path) -> dict[Path, list[tuple[int, int]]]:
    """Return where the weights are in a good checkpoint: (start, end) in bytes, by file."""
    catalog = open_latest(directory, Choice(), ReadOptions()).catalog
    found: dict[Path, list[tuple[int, int]]] = {}
    for entry in catalog.tensors.values():
        for chunk in entry.chunks:
            source = chunk.source
            end = source.offset + source.length
            found.setdefault(source.path, []).append((source.offset, end))
    return found
