"""Every format that is read, as `test_contract` wants it: a new one is one more entry."""

from dataclasses import dataclass

from oracle.writers import contract as writers
from oracle.writers.scenarios import Scenario

__all__ = ["FORMS", "WORLD", "Form"]

WORLD = 3


@dataclass(frozen=True)
class Form:
    """A way to save the model.

    Attributes:
        save: what writes it.
        place: where in the run it is written.
        name: the format's name.
        output: the default output, in the run.
        levels: places in the run that mean this checkpoint.
        skipped: names of what is saved beside the model.
        world: how many ranks' work it shows.
        ordered: whether it records the order of the state dict.
        step: what the directory's name says.
        shared: whether it stores tied weights once.
        unnoticed: files whose loss leaves no trace.
    """

    save: Scenario
    place: str
    name: str
    output: str
    levels: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    world: int = WORLD
    ordered: bool = True
    step: int | None = 7
    shared: bool = False
    unnoticed: tuple[str, ...] = ()


ACTOR = "global_step_7/actor"
CHECKPOINT = "checkpoint-7/pytorch_model_fsdp_0"
RANKS, DCP, HUB, WHOLE = "FSDP rank files", "torch DCP", "sharded safetensors", "whole files"
RANK_FILE = f"model_world_size_{WORLD}_rank_1.pt"
SHARD = "shard-00001-model-00001-of-00001.safetensors"
ITEMS = "torch_checkpointing"
ZERO = "DeepSpeed ZeRO"
OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
FORMS = {
    "rank files, FSDP2": Form(
        writers.fsdp2_ranks,
        ACTOR,
        RANKS,
        "merged/global_step_7",
        (".", "global_step_7", ACTOR, f"{ACTOR}/{RANK_FILE}"),
        ("note",),
    ),
    "rank files, FSDP1": Form(
        writers.fsdp1_ranks,
        CHECKPOINT,
        RANKS,
        "merged/checkpoint-7",
        (".", "checkpoint-7", CHECKPOINT, f"{CHECKPOINT}/{RANK_FILE}"),
        ("note",),
    ),
    "accelerate files, FSDP2": Form(
        writers.fsdp2_bins,
        "checkpoint-7",
        RANKS,
        "merged/checkpoint-7",
        (".", "checkpoint-7", f"{CHECKPOINT}_rank2.bin"),
        ("note",),
    ),
    "accelerate files, FSDP1": Form(
        writers.fsdp1_bins,
        "checkpoint_7",
        RANKS,
        "merged/checkpoint_7",
        (".", "checkpoint_7", "checkpoint_7/pytorch_model_fsdp_0_rank0.bin"),
        ("note",),
    ),
    "DCP, under model": Form(
        writers.dcp_model,
        CHECKPOINT,
        DCP,
        "merged/checkpoint-7",
        (".", "checkpoint-7", CHECKPOINT, f"{CHECKPOINT}/.metadata", f"{CHECKPOINT}/__1_0.distcp"),
        ("step",),
    ),
    "DCP, flat": Form(
        writers.dcp_flat,
        "step-7",
        DCP,
        "merged/step-7",
        (".", "step-7", "step-7/.metadata"),
        ("optimizer.scale", "train_state.step"),
    ),
    "DCP, no collectives": Form(
        writers.dcp_no_collectives,
        "step-7",
        DCP,
        "merged/step-7",
        (".", "step-7", "step-7/__2.metadata"),
        ("step",),
    ),
    "DCP, zstd": Form(
        writers.dcp_zstd,
        "step7/model_and_optim",
        DCP,
        "merged/step7",
        (".", "step7", "step7/model_and_optim", "step7/model_and_optim/__0_0.distcp"),
        ("step",),
    ),
    "DCP, many files": Form(
        writers.dcp_many_files,
        "epoch_0_step_7/model",
        DCP,
        "merged/epoch_0_step_7",
        (".", "epoch_0_step_7", "epoch_0_step_7/model", "epoch_0_step_7/model/.metadata"),
    ),
    "Megatron-core": Form(
        writers.megatron,
        "iter_0000007",
        "Megatron-core distributed checkpoint",
        "merged/iter_0000007",
        (".", "iter_0000007", "iter_0000007/.metadata", "iter_0000007/common.pt"),
        ordered=False,
        unnoticed=("common.pt",),  # which has the arguments of the training
    ),
    "sharded safetensors": Form(
        writers.hub_shards,
        "step-7",
        HUB,
        "merged/step-7",
        (".", "step-7", f"step-7/{SHARD}"),
        ordered=False,
        unnoticed=("shard-00003-model-00001-of-00001.safetensors",),
    ),
    "torch_checkpointing": Form(
        writers.item_files,
        "step-7",
        ITEMS,
        "merged/step-7",
        (".", "step-7", "step-7/metadata.pkl", "step-7/model_1.pt"),
        ("note",),
        unnoticed=("metadata.pkl",),  # which repeats what the files of torch.save state
    ),
    "torch_checkpointing, safetensors": Form(
        writers.item_files_of_safetensors,
        "step-7",
        ITEMS,
        "merged/step-7",
        (".", "step-7", "step-7/metadata.pkl", "step-7/model_1.safetensors"),
        ordered=False,
    ),
    "ZeRO-2": Form(
        writers.zero2,
        "global_step7",
        ZERO,
        "merged/global_step7",
        (".", "global_step7", f"global_step7/{OPTIM}"),
        ("note",),
        shared=True,
    ),
    "ZeRO-3": Form(
        writers.zero3,
        "checkpoint-7/global_step7",
        ZERO,
        "merged/checkpoint-7",
        (".", "checkpoint-7", "checkpoint-7/global_step7", f"checkpoint-7/global_step7/{OPTIM}"),
        ("note",),
        shared=True,
    ),
    "safetensors, one file": Form(
        writers.whole_file,
        "checkpoint-7",
        WHOLE,
        "merged/checkpoint-7",
        (".", "checkpoint-7"),
        world=1,
        ordered=False,
    ),
    "safetensors, several files": Form(
        writers.whole_files,
        "checkpoint-7",
        WHOLE,
        "merged/checkpoint-7",
        (".", "checkpoint-7", "checkpoint-7/model.safetensors.index.json"),
        world=1,
        ordered=False,
    ),
    "pytorch_model.bin": Form(
        writers.whole_bin,
        "checkpoint-7",
        WHOLE,
        "merged/checkpoint-7",
        (".", "checkpoint-7"),
        ("note",),
        world=1,
        shared=True,
    ),
    "nested": Form(
        writers.whole_nested,
        "weights",
        WHOLE,
        "weights/merged/last",
        ("weights/last.pt",),
        ("epoch", "optimizer"),
        world=1,
        step=None,
        shared=True,
    ),
    "torch's old container": Form(
        writers.whole_legacy,
        "checkpoint-7",
        WHOLE,
        "merged/checkpoint-7",
        (".", "checkpoint-7"),
        ("note",),
        world=1,
        shared=True,
    ),
}
