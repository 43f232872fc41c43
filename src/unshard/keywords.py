"""The options of each function, as keywords: the command line has the same.

`merge` explains each. Everything else derives from here: `--help`, messages, the record of an
output and how `verify` merges again. So a new option is a keyword of a type, and a row of `GROUPS`.
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


class DiffKeywords(OpenKeywords, total=False):
    """How to read two checkpoints, which tensors are compared, and how to work."""

    include: str | None
    exclude: str | None
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


class ChecksumKeywords(PushKeywords, total=False):
    """Everything that shapes the model, and how to work."""

    workers: int | None
    memory: str | int


class VirtualKeywords(PushKeywords, total=False):
    """Everything that shapes the files of a merge."""

    extra_state: bool
    optimizer: bool


class MergeKeywords(VirtualKeywords, total=False):
    """Everything that can be chosen for a merge."""

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
    """How to read a model that a delta changes, how it is merged, and how to work."""

    dtype: DtypeLike
    keep_fp32: str | None
    include: str | None
    exclude: str | None
    max_shard_size: str | int | None
    overwrite: bool | Literal["all"]
    workers: int | None
    memory: str | int


class ReshardKeywords(TypedDict, total=False):
    """Which checkpoint is resharded, and how to work."""

    role: str | None
    step: int | None
    verify: Verify
    workers: int | None
    memory: str | int


DEFAULTS = MergeKeywords(dtype="keep", names="hub", verify="light", memory="64MB")
"""The defaults of all options that have one; other options are left out unless they are given."""


class Option(NamedTuple):
    """An option of a merge: what its type in the keywords does not say.

    Attributes:
        text: its text in `--help`.
        metavar: how its value is written there.
        kind: the type of its value on the command line.
        choices: its values, where it takes a name.
        shapes: whether it shapes the output, which then records it, and `verify` merges by it.
    """

    text: str
    metavar: str = ""
    kind: type = str
    choices: tuple[str, ...] = ()
    shapes: bool = False


GROUPS: Mapping[str, Mapping[str, Option]] = {
    "Checkpoint": {
        "weights": Option(
            f"Which weights.  [default: {get_args(Weights)[0]}]", choices=get_args(Weights)
        ),
        "role": Option(
            "Which model of a step with several. actor (or policy), critic, or the name of its "
            "folder (ref, reward). merge only: all, each into OUTPUT/ROLE (OUTPUT/model, if it has "
            "none); of all steps, into OUTPUT/STEP-ROLE.  [default: actor, policy, model, trainer, "
            "the first there is]",
            "NAME",
        ),
        "step": Option("Which step of a run.  [default: the highest complete one]", "N", kind=int),
        "also": Option(
            "A directory of another node with more files of the same checkpoint; may be repeated. "
            "node:///path is that path on all nodes of a Ray cluster.",
            "DIR",
            kind=list[Path],
        ),
        "ep_size": Option(
            "Size of expert parallelism, if the files do not record it (verl's VeOmni).",
            "N",
            shapes=True,
            kind=int,
        ),
        "assume_dim0": Option(
            "Treat plain tensors that differ between ranks as shards along dimension 0.", kind=bool
        ),
        "allow_globals": Option(
            "A tensor subclass to read as the plain tensor it stores; may be repeated.",
            "MODULE.NAME",
            kind=list[str],
        ),
    },
    "Tensors": {
        "dtype": Option(
            "Dtype of floating point tensors. config: as config.json says; base: as in the base "
            "model, tensor by tensor. bf16, fp16 and fp32 are accepted.",
            choices=(*get_args(Rule), *get_args(Cast)),
            shapes=True,
        ),
        "quantize": Option(
            "Write matrices in block FP8: float8_e4m3fn, and a float32 scale for each block of "
            "128 x 128.",
            choices=get_args(Quantize),
            shapes=True,
        ),
        "keep_fp32": Option("Do not cast tensors with these names.", "REGEX", shapes=True),
        "names": Option(
            "Tensor names and expert layout as on the Hugging Face hub, or as in training.",
            choices=get_args(Names),
            shapes=True,
        ),
        "include": Option("Write only tensors with these names.", "REGEX", shapes=True),
        "exclude": Option("Leave out tensors with these names.", "REGEX", shapes=True),
        "lora": Option(
            "Fuse adapters, write them alone, or both. keep: leave their matrices among the "
            "weights; ignore: leave out an adapter next to the weights.  [default: fuse, but an "
            "adapter next to the weights is an error]",
            choices=get_args(Lora),
            shapes=True,
        ),
        "lora_alpha": Option(
            "lora_alpha of the adapter, if the checkpoint does not record it.",
            "ALPHA",
            shapes=True,
            kind=float,
        ),
    },
    "Base model": {
        "base": Option(
            "The model that training started from. A directory or hub id: it determines which "
            "tensors are expected, their names, dtypes and files, and completes config and "
            "tokenizer.",
            "MODEL",
            shapes=True,
        ),
        "allow_missing": Option(
            "Accept that tensors of the base model or of config.json are missing.", kind=bool
        ),
        "allow_unexpected": Option("Also write tensors that neither of them has.", kind=bool),
    },
    "Output": {
        "config": Option(
            "A config.json to use instead. Or a directory with config, tokenizer and the like; "
            "none: write the weights alone if none is found.",
            "FILE|DIR|none",
        ),
        "extra_state": Option("Leave out scheduler and random state.", kind=bool),
        "optimizer": Option(
            "Write the state of the optimizer too: optimizer.safetensors.", shapes=True, kind=bool
        ),
        "max_shard_size": Option(
            f"Largest weight file.  [default: as in the base model, or {SHARD_SIZE}]", "SIZE"
        ),
        "overwrite": Option(
            "Replace an earlier output of unshard. Other files there stay. all: also remove "
            "weights, adapters and other files in the way that unshard did not write.",
            "[=all]",
        ),
        "resume": Option(
            "Go on with the finished files of an interrupted merge to the same output, and leave "
            "them if this one is interrupted.",
            kind=bool,
        ),
        "reuse": Option(
            "Use the output if it was made from this checkpoint with these options. If another "
            "process is making it, wait for it; if that one dies, go on with its files.",
            kind=bool,
        ),
        "push_to_hub": Option("Upload the output to this repository, too.", "REPO"),
        "private": Option("Make that repository private if it is new.", kind=bool),
        "dry_run": Option("Show the plan and write nothing.", kind=bool),
    },
    "Running": {
        "verify": Option(
            "How the output is checked. light: it is reopened; full: also every byte, replicas and "
            "checksums are compared.",
            choices=get_args(Verify),
        ),
        "checksums": Option(
            "Read the output again, and write the SHA-256 of each tensor into unshard.json.",
            kind=bool,
        ),
        "workers": Option("Number of threads.  [default: one per core, at most 8]", "N", kind=int),
        "memory": Option("Total size of all buffers, at most.", "SIZE"),
        "engine": Option(
            "Work on the nodes of a Ray cluster.  [default: the threads of this process]",
            choices=get_args(Engine),
        ),
    },
}
"""All options, by their groups in `--help` and in its order."""
OPTIONS = {name: one for group in GROUPS.values() for name, one in group.items()}
CHOICES = {name: one.choices for name, one in OPTIONS.items() if one.choices}
"""The values of each option that takes a name; `dtype` has more spellings (see `merge`)."""
MOST_USED = (
    *("weights", "role", "step", "dtype", "lora", "base", "config", "overwrite", "push_to_hub"),
    *(
        "dry_run",
        "verify",
        "all_steps",
        "follow",
        "quiet",
        "coefficients",
        "schedule",
        "last",
        "every",
    ),
)
"""The options that `-h` shows of a command with many."""
