"""The options of each function, as keywords: the command line has the same.

`merge` explains each. The defaults that are more than "nothing" are here, once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypedDict

CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": ("keep", "config", "base", "bfloat16", "float16", "float32"),
    "names": ("hub", "training"),
    "lora": ("fuse", "adapter", "both", "keep"),
    "quantize": ("fp8-block",),
    "weights": ("model", "ema", "module"),
    "verify": ("light", "full", "off"),
    "engine": ("ray",),
}
"""The values of each option that takes a name; `dtype` has more spellings (see `merge`)."""
DEFAULTS: Mapping[str, str] = {
    "dtype": "keep",
    "names": "hub",
    "lora": "fuse",
    "verify": "light",
    "memory": "64MB",
}
"""The defaults of all options that have one; other options are left out unless they are given."""
SHARD_SIZE = "5GB"
"""The largest weight file, where neither a size nor a base model is given."""


class ElementType(Protocol):
    """A dtype of numpy, ml_dtypes or torch."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""


DtypeLike = str | type | ElementType
"""What callers may give as a dtype: a name, or a dtype of numpy, ml_dtypes or torch."""


class SavedConfig(Protocol):
    """A config object of transformers."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write config.json into a directory."""


class ReadKeywords(TypedDict, total=False):
    """Which checkpoint is meant, and how to read it."""

    weights: str | None
    role: str | None
    step: int | None
    also: Sequence[str | Path]
    ep_size: int | None
    assume_dim0: bool
    allow_globals: Sequence[str]


class EngineKeywords(ReadKeywords, total=False):
    """How to read a checkpoint for an engine, which needs the names of the hub."""

    base: str | Path | None
    lora_alpha: float | None
    config: str | Path | None


class OpenKeywords(ReadKeywords, total=False):
    """How to read a checkpoint, and what its tensors are called."""

    names: str
    base: str | Path | None
    lora_alpha: float | None
    config: str | Path | None


class PretrainedKeywords(ReadKeywords, total=False):
    """How to read a checkpoint that transformers loads, and what may differ from its model."""

    base: str | Path | None
    lora_alpha: float | None
    config: str | Path | SavedConfig | None
    allow_missing: bool
    allow_unexpected: bool


class VerifyKeywords(ReadKeywords, total=False):
    """How to read a checkpoint, how it was merged, and how to work."""

    base: str | Path | None
    include: str | None
    exclude: str | None
    quantize: str | None
    lora_alpha: float | None
    config: str | Path | None
    workers: int | None
    memory: str | int
    engine: str | None


class PushKeywords(OpenKeywords, total=False):
    """Everything that shapes the model that a merge writes."""

    dtype: DtypeLike
    keep_fp32: str | None
    quantize: str | None
    include: str | None
    exclude: str | None
    lora: str
    allow_missing: bool
    allow_unexpected: bool
    max_shard_size: str | int | None


class VirtualKeywords(PushKeywords, total=False):
    """Everything that shapes the files of a merge."""

    extra_state: bool
    optimizer: bool


class MergeKeywords(VirtualKeywords, total=False):
    """Everything that can be chosen for a merge."""

    overwrite: bool | str
    resume: bool
    push_to_hub: str | None
    private: bool
    dry_run: bool
    verify: str
    workers: int | None
    memory: str | int
    engine: str | None


class ReshardKeywords(TypedDict, total=False):
    """Which checkpoint is resharded, and how to work."""

    role: str | None
    step: int | None
    verify: str
    workers: int | None
    memory: str | int
