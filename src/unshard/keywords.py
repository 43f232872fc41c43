"""The options of all functions and commands.

`merge` documents each option. `--help`, messages, the record of an output and the merge that
`verify` repeats derive from here, so a new option is a keyword in a type and a row of `GROUPS`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypedDict, get_args

Rule = Literal["keep", "config", "base"]
Cast = Literal["bfloat16", "float16", "float32"]
Alias = Literal["bf16", "fp16", "half", "fp32", "float"]
Names = Literal["hub", "training"]
Lora = Literal["fuse", "adapter", "both", "keep", "ignore"]
Quantize = Literal["fp8-block"]
Weights = Literal["model", "ema", "module"]
Verify = Literal["light", "full", "off"]
Engine = Literal["ray"]

SHARD_SIZE = "5GB"
"""Largest weight file, if neither a size nor a base model is given."""


class ElementType(Protocol):
    """A dtype of numpy, ml_dtypes or torch."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""


DtypeLike = Rule | Cast | Alias | type | ElementType
"""A dtype: a name, or an object of numpy, ml_dtypes or torch."""


class SavedConfig(Protocol):
    """A config object of transformers."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write config.json into a directory."""


class ReadKeywords(TypedDict, total=False):
    """Options that select a checkpoint, and how to read it."""

    weights: Weights | None
    role: str | None
    step: int | None
    also: Sequence[str | Path]
    ep_size: int | None
    assume_dim0: bool
    allow_globals: Sequence[str]


class EngineKeywords(ReadKeywords, total=False):
    """Options that read a checkpoint for an engine, which needs the names of the hub."""

    base: str | Path | None
    lora_alpha: float | None
    config: str | Path | None


class OpenKeywords(EngineKeywords, total=False):
    """Options that read a checkpoint, and choose the names of its tensors."""

    names: Names


class PretrainedKeywords(ReadKeywords, total=False):
    """Options that read a checkpoint for transformers, and permit differences from its model."""

    base: str | Path | None
    lora_alpha: float | None
    config: str | Path | SavedConfig | None
    allow_missing: bool
    allow_unexpected: bool


class VerifyKeywords(EngineKeywords, total=False):
    """Options that read a checkpoint and repeat its merge, and resources."""

    include: str | None
    exclude: str | None
    quantize: Quantize | None
    workers: int | None
    memory: str | int
    engine: Engine | None


class DiffKeywords(OpenKeywords, total=False):
    """Options that read two checkpoints and select their tensors, and resources."""

    include: str | None
    exclude: str | None
    workers: int | None
    memory: str | int
    engine: Engine | None


class PushKeywords(OpenKeywords, total=False):
    """Options that change the model that a merge writes."""

    dtype: DtypeLike
    keep_fp32: str | None
    quantize: Quantize | None
    include: str | None
    exclude: str | None
    lora: Lora | None
    allow_missing: bool
    allow_unexpected: bool
    max_shard_size: str | int | None


class ChecksumKeywords(PushKeywords, total=False):
    """Options that change the model, and resources."""

    workers: int | None
    memory: str | int


class VirtualKeywords(PushKeywords, total=False):
    """Options that change the files that a merge writes."""

    extra_state: bool
    optimizer: bool


class MergeKeywords(VirtualKeywords, total=False):
    """All options of a merge."""

    overwrite: bool | Literal["all"]
    resume: bool
    reuse: bool
    push_to_hub: str | None
    private: bool
    dry_run: bool
    verify: Verify
    checksums: bool
    workers: int | None
    memory: str | int
    engine: Engine | None


class DeltaKeywords(OpenKeywords, total=False):
    """Options that read and merge a model to which a delta belongs, and resources."""

    dtype: DtypeLike
    keep_fp32: str | None
    include: str | None
    exclude: str | None
    max_shard_size: str | int | None
    overwrite: bool | Literal["all"]
    workers: int | None
    memory: str | int


class ReshardKeywords(TypedDict, total=False):
    """Options that select the checkpoint to reshard, and resources."""

    role: str | None
    step: int | None
    verify: Verify
    workers: int | None
    memory: str | int


DEFAULTS = MergeKeywords(dtype="keep", names="hub", verify="light", memory="64MB")
"""The defaults; an option that is not listed has none."""


class OptionRow(NamedTuple):
    """An option of a merge: facts that its type in the keywords does not contain.

    Attributes:
        text: its text in `--help`.
        metavar: the placeholder for its value there.
        kind: the type of its value on the command line.
        choices: its values, if it takes a name.
        shapes: whether it changes the output: then the output records it, and `verify` merges
            with it.
    """

    text: str
    metavar: str = ""
    kind: type = str
    choices: tuple[str, ...] = ()
    shapes: bool = False


GROUPS: Mapping[str, Mapping[str, OptionRow]] = {
    "Checkpoint": {
        "weights": OptionRow(
            "Set of weights. Trained, EMA, or DeepSpeed's 16-bit module weights.  [default: "
            f"{get_args(Weights)[0]}]",
            choices=get_args(Weights),
        ),
        "role": OptionRow(
            "Model of a step. actor (or policy), critic, or a folder (ref, reward). With all, "
            "merge writes each into OUTPUT/ROLE (OUTPUT/model without a role), or with all steps "
            "into OUTPUT/STEP-ROLE.  [default: first of actor, policy, model, trainer]",
            "NAME",
        ),
        "step": OptionRow("Step of a run.  [default: the highest complete step]", "N", kind=int),
        "also": OptionRow(
            "A directory of another node with more files of the same checkpoint; may be repeated. "
            "node:///path is that path on all nodes of a Ray cluster.",
            "DIR",
            kind=list[Path],
        ),
        "ep_size": OptionRow(
            "Size of expert parallelism, if the files do not record it (verl's VeOmni).",
            "N",
            shapes=True,
            kind=int,
        ),
        "assume_dim0": OptionRow(
            "Treat plain tensors that differ between ranks as shards along dimension 0.", kind=bool
        ),
        "allow_globals": OptionRow(
            "A tensor subclass to read as the plain tensor it stores; may be repeated.",
            "MODULE.NAME",
            kind=list[str],
        ),
    },
    "Tensors": {
        "dtype": OptionRow(
            "Dtype of floating point tensors. config: as in config.json; base: as in the base "
            "model, tensor by tensor. bf16, fp16 and fp32 are accepted.",
            choices=(*get_args(Rule), *get_args(Cast)),
            shapes=True,
        ),
        "quantize": OptionRow(
            "Write matrices in block FP8: float8_e4m3fn, and a float32 scale for each block of "
            "128 x 128.",
            choices=get_args(Quantize),
            shapes=True,
        ),
        "keep_fp32": OptionRow("Do not cast tensors with these names.", "REGEX", shapes=True),
        "names": OptionRow(
            "Tensor names and expert layout as on the Hugging Face hub, or as in training.",
            choices=get_args(Names),
            shapes=True,
        ),
        "include": OptionRow("Use only tensors with these names.", "REGEX", shapes=True),
        "exclude": OptionRow("Leave out tensors with these names.", "REGEX", shapes=True),
        "lora": OptionRow(
            "Fuse adapters, write them alone, or both. keep: leave their matrices among the "
            "weights; ignore: leave out an adapter next to the weights.  [default: fuse, but an "
            "adapter next to the weights is an error]",
            choices=get_args(Lora),
            shapes=True,
        ),
        "lora_alpha": OptionRow(
            "lora_alpha of the adapter, if the checkpoint does not record it.",
            "ALPHA",
            shapes=True,
            kind=float,
        ),
    },
    "Base model": {
        "base": OptionRow(
            "The model that training started from. A directory or hub id: it determines which "
            "tensors are expected, their names, dtypes and files, and completes config and "
            "tokenizer.",
            "MODEL",
            shapes=True,
        ),
        "allow_missing": OptionRow(
            "Accept that tensors of the base model or of config.json are missing.", kind=bool
        ),
        "allow_unexpected": OptionRow(
            "Write tensors that neither the base model nor config.json lists.", kind=bool
        ),
    },
    "Output": {
        "config": OptionRow(
            "config.json to use instead. A directory also provides the tokenizer. none: if there "
            "is no config.json, write only the weights.",
            "FILE|DIR|none",
        ),
        "extra_state": OptionRow("Leave out scheduler and random state.", kind=bool),
        "optimizer": OptionRow(
            "Also write the optimizer's state: optimizer.safetensors.", shapes=True, kind=bool
        ),
        "max_shard_size": OptionRow(
            f"Largest weight file.  [default: as in the base model, or {SHARD_SIZE}]", "SIZE"
        ),
        "overwrite": OptionRow(
            "Replace an earlier output of unshard. Other files there stay. all: also remove "
            "conflicting weights, adapters and other files that unshard did not write.",
            "[=all]",
        ),
        "resume": OptionRow(
            "Reuse files finished by an interrupted merge; keep finished files if this one is "
            "interrupted.",
            kind=bool,
        ),
        "reuse": OptionRow(
            "Use the output if it was made from this checkpoint with these options. If another "
            "process is making it, wait; if that process dies, continue with its files.",
            kind=bool,
        ),
        "push_to_hub": OptionRow("Also upload the output to this repository.", "REPO"),
        "private": OptionRow("Make that repository private if it is new.", kind=bool),
        "dry_run": OptionRow("Show the plan and write nothing.", kind=bool),
    },
    "Running": {
        "verify": OptionRow(
            "Check of the output. light: reopen it; full: also compare every byte, replicas and "
            "checksums.",
            choices=get_args(Verify),
        ),
        "checksums": OptionRow(
            "Reread the output, and write the SHA-256 of each tensor into unshard.json.",
            kind=bool,
        ),
        "workers": OptionRow(
            "Number of threads.  [default: one per core, at most 8]", "N", kind=int
        ),
        "memory": OptionRow("Largest total size of all buffers.", "SIZE"),
        "engine": OptionRow(
            "Run on a Ray cluster.  [default: local threads]",
            choices=get_args(Engine),
        ),
    },
}
"""All options, by group and in the order of `--help`."""
OPTIONS = {name: row for group in GROUPS.values() for name, row in group.items()}
CHOICES = {name: row.choices for name, row in OPTIONS.items() if row.choices}
"""The values of each option that takes a name; `dtype` has more spellings (see `merge`)."""
MOST_USED = (
    *("weights", "role", "step", "dtype", "lora", "base", "config", "overwrite", "push_to_hub"),
    *("dry_run", "verify", "all_steps", "follow", "quiet"),
    *("coefficients", "schedule", "last", "every"),
)
"""The options that `-h` shows for a command with many."""
