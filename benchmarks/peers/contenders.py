"""Every tool, how its own documentation calls it, and which layouts it reads."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.cells import LAYOUTS, Made
from peers.environments import python_of

__all__ = ["CONTENDERS", "FLOORS", "UNSHARD", "Contender"]

UNSHARD = "unshard"
UNSHARD_ASYNC = "unshard, fsync off"
FLOORS = ("copy loop", "cp", "cat")
_HERE = Path(__file__).parent

Command = Callable[[Made, Path], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to merge, or to copy, a checkpoint.

    Attributes:
        layouts: what it reads.
        command: its command line, for a checkpoint and an output directory.
        environment: which of `environments` it runs in; None: that of this process.
    """

    name: str
    layouts: tuple[str, ...]
    command: Command
    environment: str | None = None


def _python(environment: str, program: str) -> Command:
    """Return a command that runs a program, for tools without a command of their own."""
    return lambda made, output: [
        *(str(python_of(environment)), "-c", program),
        *(str(made.weights), str(output)),
    ]


def _unshard(*start: str) -> Command:
    """Return our command. On rank files it casts, because the tools for rank files always do."""

    def command(made: Made, output: Path) -> list[str]:
        has_rank_files = made.files[0].suffix == ".pt"
        dtype = ("--dtype", "bfloat16" if has_rank_files else "keep")
        arguments = ("merge", str(made.checkpoint), str(output), "--quiet", *dtype)
        return [sys.executable, *start, *arguments]

    return command


CONTENDERS = (
    Contender(UNSHARD, LAYOUTS, _unshard("-m", "unshard")),
    Contender(UNSHARD_ASYNC, LAYOUTS, _unshard(str(_HERE / "without_fsync.py"))),
    Contender(
        "verl.model_merger",
        ("verl",),
        lambda made, output: [
            *(str(python_of("verl")), "-m", "verl.model_merger", "merge", "--backend", "fsdp"),
            *("--local_dir", str(made.checkpoint), "--target_dir", str(output)),
        ],
        "verl",
    ),
    Contender(
        "lmms_engine.merger",
        ("lmms-engine",),
        lambda made, output: [
            *(str(python_of("lmms-engine")), "-m", "lmms_engine.merger"),
            *("--checkpoint_path", str(made.checkpoint), "--output_path", str(output)),
        ],
        "lmms-engine",
    ),
    Contender(
        "accelerate merge-weights",
        ("DCP",),
        lambda made, output: [
            *(str(python_of("huggingface").with_name("accelerate")), "merge-weights"),
            *(str(made.weights), str(output)),
        ],
        "huggingface",
    ),
    Contender(
        "torch dcp_to_torch_save",
        ("DCP",),
        lambda made, output: [
            *(str(python_of("huggingface")), "-m", "torch.distributed.checkpoint.format_utils"),
            *("dcp_to_torch", str(made.weights), str(output / "model.pt")),
        ],
        "huggingface",
    ),
    Contender(
        "torch consolidation",
        ("safetensors",),
        _python(
            "huggingface",
            "import sys; from torch.distributed.checkpoint import hf_storage as h, "
            "_consolidate_hf_safetensors as c; source, target = sys.argv[1:]; "
            "found = h.HuggingFaceStorageReader(source).read_metadata().state_dict_metadata; "
            "c.consolidate_safetensors_files(source, target, dict.fromkeys(found, 1), 1)",
        ),
        "huggingface",
    ),
    Contender(
        "transformers consolidation",
        ("safetensors",),
        _python(
            "huggingface",
            "import sys; from transformers.distributed import consolidate_distributed_checkpoint; "
            "consolidate_distributed_checkpoint(*sys.argv[1:])",
        ),
        "huggingface",
    ),
    Contender(
        "copy loop",
        LAYOUTS,
        lambda made, output: [
            *(sys.executable, "-I", "-S", str(_HERE / "copy_loop.py")),
            *(str(made.root / "pieces.json"), str(output / "model.safetensors")),
        ],
    ),
    Contender("cp", LAYOUTS, lambda made, output: ["cp", *map(str, made.files), str(output)]),
    Contender(
        "cat",
        LAYOUTS,
        lambda made, output: [
            *("sh", "-c", 'out=$1; shift; cat "$@" > "$out"', "cat"),
            *(str(output / "all"), *map(str, made.files)),
        ],
    ),
)
