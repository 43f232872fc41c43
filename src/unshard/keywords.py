"""The options of each function, as keywords: the command line has the same.

`merge` explains each. The defaults that are more than "nothing" are here, once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypedDict, get_args

Rule = Literal["keep", "config", "base"]
Cast = Literal["bfloat16", "float16", "float32"]
Alias = Literal["bf16", "fp16", "half", "fp32", "float"]
Names = Literal["hub", "training"]
Lora = Literal["fuse", "adapter", "both", "keep", "ignore"]
Quantize = Literal["fp8-block"]
Weights = Literal["model", "ema", "module"]
Verify = Literal["light", "full", "off"]
Engine = Literal["ray"]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": (*get_args(Rule), *get_args(Cast)),
    "names": get_args(Names),
    "lora": get_args(Lora),
    "quantize": get_args(Quantize),
    "weights": get_args(Weights),
    "verify": get_args(Verify),
    "engine": get_args(Engine),
}
"""The values of each option that takes a name; `dtype` has more spellings (see `merge`)."""
SHARD_SIZE = "5GB"
"""The largest weight file, where neither a size nor a base model is given."""


class ElementType(Protocol):
    """A dtype of numpy, ml_dtypes or torch."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""


DtypeLike = Rule | Cast | Alias | type | ElementType
"""What callers may give as a dtype: a name, or a dtype of numpy, ml_dtypes or torch."""


class SavedConfig(Protocol):
    """A config object of transformers."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write config.json into a directory."""


class ReadKeywords(TypedDict, total=False):
    """Which checkpoint is meant, and how to read it."""

    weights: Weights | None
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

    names: Names
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
    quantize: Quantize | None
    lora_alpha: float | None
    config: str | Path | None
    workers: int | None
    memory: str | int
    engine: Engine | None


class PushKeywords(OpenKeywords, total=False):
    """Everything that shapes the model that a merge writes."""

    dtype: DtypeLike
    keep_fp32: str | None
    quantize: Quantize | None
    include: str | None
    exclude: str | None
    lora: Lora | None
    allow_missing: bool
    allow_unexpected: bool
    max_shard_size: str | int | None


class VirtualKeywords(PushKeywords, total=False):
    """Everything that shapes the files of a merge."""

    extra_state: bool
    optimizer: bool


class MergeKeywords(VirtualKeywords, total=False):
    """Everything that can be chosen for a merge."""

    overwrite: bool | Literal["all"]
    resume: bool
    push_to_hub: str | None
    private: bool
    dry_run: bool
    verify: Verify
    workers: int | None
    memory: str | int
    engine: Engine | None


class ReshardKeywords(TypedDict, total=False):
    """Which checkpoint is resharded, and how to work."""

    role: str | None
    step: int | None
    verify: Verify
    workers: int | None
    memory: str | int


DEFAULTS = MergeKeywords(dtype="keep", names="hub", verify="light", memory="64MB")
"""The defaults of all options that have one; other options are left out unless they are given."""
