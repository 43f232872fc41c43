"""Checkpoints that are recognised and refused: of other engines, with the tool that reads them.

Told by names alone; nothing of them is opened.
"""

import re
from pathlib import Path

from unshard.errors import NotMergeableError
from unshard.read.format import Format, Location, ReadOptions, has_file
from unshard.tensors.catalog import Catalog

__all__ = ["DEEPSPEED", "MEGATRON"]

_ZERO = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_(?:model|optim)_states\.pt")
_DEEPSPEED = re.compile(r"mp_rank_\d+_model_states\.pt|zero_to_fp32\.py")
_MEGATRON_LEGACY = re.compile(r"model_optim_rng\.pt|distrib_optim\.pt")


def _holds_megatron(directory: Path) -> bool:
    """Megatron-core's `torch_dist` is a DCP checkpoint with another file next to it."""
    if not any((directory / name).is_file() for name in ("metadata.json", "common.pt")):
        return next(directory.glob("mp_rank_*/model_optim_rng.pt"), None) is not None
    return next(directory.glob("*.distcp"), None) is not None or (directory / "common.pt").is_file()


def _is_deepspeed(name: str) -> bool:
    return bool(_ZERO.fullmatch(name) or _DEEPSPEED.fullmatch(name))


def _refuse_megatron(location: Location, options: ReadOptions) -> Catalog:
    del options
    raise NotMergeableError(
        f"{location.weights_dir}: a Megatron-core distributed checkpoint (torch_dist)",
        expected="a checkpoint of the FSDP family",
        found="tensors cut and stacked by Megatron's own model parallelism",
        hint="convert it with Megatron-Bridge (or NeMo's export to Hugging Face)",
    )


def _refuse_deepspeed(location: Location, options: ReadOptions) -> Catalog:
    del options
    raise NotMergeableError(
        f"{location.weights_dir}: a DeepSpeed ZeRO checkpoint",
        expected="a checkpoint of the FSDP family",
        found="flat partitions, which only DeepSpeed's own files describe",
        hint="convert it with the zero_to_fp32.py that DeepSpeed put next to it: "
        "python zero_to_fp32.py . OUTPUT",
    )


MEGATRON = Format(
    "Megatron-core distributed checkpoint",
    _holds_megatron,
    _refuse_megatron,
    lambda name: bool(_MEGATRON_LEGACY.fullmatch(name)),
)
# Whole models are tried first: one next to DeepSpeed's partitions (ZeRO 1 and 2) can be read.
DEEPSPEED = Format(
    "DeepSpeed ZeRO checkpoint",
    has_file(_is_deepspeed),
    _refuse_deepspeed,
    _is_deepspeed,
    sharded=False,
)
