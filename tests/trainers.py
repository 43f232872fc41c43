"""The trees that trainers leave, with real files of their formats: one checkpoint of each.

Sources, by the commit that was read: SkyRL a9564572e, prime-rl 559b44772, NeMo-RL 7ea279abf,
lerobot 7427f3180, ms-swift 3602360a5, LLaMA-Factory ff6d4d12e, torchtune bd2a0fc7c, torchtitan
b5bcd76c6, AReaL 4aef98d8d, fairseq2 027bdebca, ROLL 8eb27cc2, VeOmni d9774494, xtuner b934f4620,
Composer 640518880, OLMo-core fa6c5014c, verl b178a3cd5, RLinf 716c59e2b. Those of cosmos-rl and
RLinf were read in its sources; those of cosmos-predict, DINOv3, lingua, Bagel, FastVideo and
finetrainers are from memory.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from item_files import save_item_files
from ranks import save_ranks
from safetensors_shards import cut, shard_path, write_shard
from zero_files import save_zero, zero_model

__all__ = ["TRAINERS", "Trainer", "dcp_under", "plant"]

Tensors = Mapping[str, torch.Tensor]
Write = Callable[[Path, Tensors], list[str]]


def ranks(place: Path, tensors: Tensors) -> list[str]:
    save_ranks(place, tensors, 2)
    return [f"model_world_size_2_rank_{rank}.pt" for rank in range(2)]


def cosmos_ranks(place: Path, tensors: Tensors) -> list[str]:
    names = [f"model_rank_{rank}.pth" for rank in range(2)]
    for old, new in zip(ranks(place, tensors), names, strict=True):
        (place / old).rename(place / new)
    return names


def dcp_under(*prefix: str, compressed: bool = False) -> Write:
    """Return what saves DCP with the model below some keys."""

    def write(place: Path, tensors: Tensors) -> list[str]:
        state: dict[str, object] = dict(tensors)
        for key in reversed(prefix):
            state = {key: state}
        place.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = FileSystemWriter(place, _extensions=[ZStandard()] if compressed else [])
            save(state, storage_writer=writer, no_dist=True)
        return [".metadata", "__0_0.distcp"]

    return write


def shards(place: Path, tensors: Tensors) -> list[str]:
    pieces = {name: cut(tensor, 2) for name, tensor in tensors.items()}
    for rank in range(2):
        write_shard(shard_path(place, rank), {name: cuts[rank] for name, cuts in pieces.items()})
    return [shard_path(place, rank).name for rank in range(2)]


def items(place: Path, tensors: Tensors) -> list[str]:
    save_item_files(place, tensors, 2)
    return ["metadata.pkl", "model_0.pt", "model_1.pt", "train_state_1.pt"]


def items_of_safetensors(place: Path, tensors: Tensors) -> list[str]:
    save_item_files(place, tensors, 2, suffix=".safetensors")
    return ["metadata.pkl", "model_0.safetensors", "model_1.safetensors"]


def whole(place: Path, tensors: Tensors) -> list[str]:
    from safetensors.torch import save_file

    place.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), place / "model.safetensors", {"format": "pt"})
    return ["model.safetensors"]


def torch_file(name: str, key: str, others: Mapping[str, object] | None = None) -> Write:
    """Return what saves one file of torch.save, with the model below a key."""

    def write(place: Path, tensors: Tensors) -> list[str]:
        place.mkdir(parents=True, exist_ok=True)
        torch.save({key: dict(tensors), **(others or {})}, place / name)
        return [name]

    return write


def zero(stage: int) -> Write:
    """Return what saves ZeRO partitions of a stage, and `latest` next to their tag."""

    def write(place: Path, tensors: Tensors) -> list[str]:
        save_zero(place, zero_model(tensors, order=list(tensors)), world=2, stage=stage)
        (place.parent / "latest").write_text(place.name)
        return [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]

    return write


@dataclass(frozen=True)
class Trainer:
    """The tree of one checkpoint.

    Attributes:
        weights: the directory of the weights, below the run's.
        write: saves the weights there and returns the names of the files that a user may name.
        step_dir: the step's directory below the run's.
        writer: who is reported.
        step: its number.
        role: whose weights are reported.
        others: files next to the weights that only need to be there.
        pickled: the same, but torch.save files of training state.
    """

    weights: str
    write: Write
    step_dir: str
    writer: str
    step: int = 100
    role: str | None = None
    others: tuple[str, ...] = ()
    pickled: tuple[str, ...] = field(default=())


model = dcp_under("model")
flat = dcp_under()

TRAINERS: dict[str, Trainer] = {
    "verl": Trainer(
        "global_step_100/actor",
        ranks,
        "global_step_100",
        "verl",
        role="actor",
        others=("latest_checkpointed_iteration.txt", "global_step_100/actor/huggingface/x.txt"),
        pickled=("global_step_100/data.pt", "global_step_100/actor/optim_world_size_2_rank_0.pt"),
    ),
    "SkyRL": Trainer(
        "global_step_100/policy",
        ranks,
        "global_step_100",
        "SkyRL",
        role="actor",
        others=("latest_ckpt_global_step.txt",),
        pickled=("global_step_100/data.pt", "global_step_100/trainer_state.pt"),
    ),
    "lmms-engine": Trainer(
        "checkpoint-100/pytorch_model_fsdp_0",
        ranks,
        "checkpoint-100",
        "lmms-engine",
        pickled=("checkpoint-100/optimizer/optimizer_world_size_2_rank_0.pt",),
    ),
    "prime-rl": Trainer(
        "checkpoints/step_100/trainer",
        dcp_under("app", "model"),
        "checkpoints/step_100",
        "prime-rl",
        pickled=("checkpoints/step_100/dataloader/rank_0.pt",),
    ),
    "NeMo-RL, sharded safetensors": Trainer(
        "step_100/policy/weights/model",
        shards,
        "step_100",
        "NeMo-RL",
        role="actor",
        others=("step_100/training_info.json", "step_100/config.yaml"),
        pickled=("step_100/train_dataloader.pt",),
    ),
    "NeMo-RL, DCP": Trainer(
        "step_100/policy/weights",
        model,
        "step_100",
        "NeMo-RL",
        role="actor",
        others=("step_100/training_info.json", "step_100/policy/optimizer/x.txt"),
    ),
    "NeMo AutoModel": Trainer(
        "epoch_0_step_100/model",
        shards,
        "epoch_0_step_100",
        "NeMo AutoModel",
        others=("epoch_0_step_100/model/.hf_metadata/x.txt",),
    ),
    "lerobot": Trainer(
        "checkpoints/005000/pretrained_model/pytorch_model_fsdp_0",
        model,
        "checkpoints/005000",
        "lerobot",
        step=5000,
        others=("checkpoints/005000/pretrained_model/train_config.json",),
    ),
    "lerobot, whole": Trainer(
        "checkpoints/005000/pretrained_model",
        whole,
        "checkpoints/005000",
        "lerobot",
        step=5000,
        others=("checkpoints/005000/pretrained_model/train_config.json",),
    ),
    "HF Trainer": Trainer(
        "checkpoint-100/pytorch_model_fsdp_0",
        model,
        "checkpoint-100",
        "HF Trainer (accelerate)",
        others=("checkpoint-100/trainer_state.json",),
    ),
    "accelerate": Trainer(
        "checkpoints/checkpoint_100/pytorch_model_fsdp_0",
        model,
        "checkpoints/checkpoint_100",
        "accelerate",
    ),
    "ms-swift": Trainer(
        "v0-20260101-120000/checkpoint-100/pytorch_model_fsdp_0",
        model,
        "v0-20260101-120000/checkpoint-100",
        "ms-swift",
        others=(
            "v0-20260101-120000/checkpoint-100/trainer_state.json",
            "v0-20260101-120000/checkpoint-100/args.json",
        ),
    ),
    "LLaMA-Factory": Trainer(
        "checkpoint-100/pytorch_model_fsdp_0",
        model,
        "checkpoint-100",
        "LLaMA-Factory",
        others=("checkpoint-100/trainer_state.json", "trainer_log.jsonl"),
    ),
    "LLaMA-Factory 1": Trainer(
        "checkpoint-100/model",
        flat,
        "checkpoint-100",
        "LLaMA-Factory",
        others=("checkpoint-100/metadata.json", "checkpoint-100/CHECKPOINT_COMPLETE"),
        pickled=("checkpoint-100/scheduler.pt", "checkpoint-100/dataloader/rank_0.pt"),
    ),
    "torchtitan": Trainer("checkpoint/step-100", flat, "checkpoint/step-100", "torch"),
    "torch_checkpointing": Trainer(
        "outputs/checkpoint/step-100", items, "outputs/checkpoint/step-100", "torch_checkpointing"
    ),
    "torch_checkpointing, safetensors": Trainer(
        "step-100", items_of_safetensors, "step-100", "torch_checkpointing"
    ),
    "torchtitan, last_save_in_hf": Trainer("step-100/sharded", shards, "step-100", "torchtitan"),
    "torchtune": Trainer("epoch_100", model, "epoch_100", "torchtune", others=("recipe_state/x",)),
    "Composer": Trainer("ep1-ba100", dcp_under("state", "model"), "ep1-ba100", "Composer"),
    "OLMo-core": Trainer(
        "step100/model_and_optim",
        model,
        "step100",
        "OLMo-core",
        others=("step100/.metadata.json",),
        pickled=("step100/train/rank0.pt",),
    ),
    "VeOmni": Trainer(
        "checkpoints/global_step_100",
        model,
        "checkpoints/global_step_100",
        "VeOmni",
        pickled=("checkpoints/global_step_100/extra_state/extra_state_rank_0.pt",),
    ),
    "ROLL": Trainer(
        "actor_train/checkpoint-100/dcp",
        flat,
        "actor_train/checkpoint-100",
        "ROLL",
        role="actor",
        others=("pipeline/checkpoint-100/pipeline/x.txt",),
    ),
    "AReaL, recover": Trainer(
        "default/recover_checkpoint",
        dcp_under("dcp", "model"),
        "default/recover_checkpoint",
        "torch",
        step=-1,
    ),
    "AReaL": Trainer(
        "default/epoch0epochstep9globalstep100",
        whole,
        "default/epoch0epochstep9globalstep100",
        "AReaL",
    ),
    "xtuner": Trainer(
        "20260101120000/checkpoints/ckpt-step-100/weights",
        model,
        "20260101120000/checkpoints/ckpt-step-100",
        "xtuner",
        others=(".xtuner",),
    ),
    "finetrainers": Trainer(
        "finetrainers_step_100", model, "finetrainers_step_100", "finetrainers"
    ),
    "FastVideo": Trainer("checkpoint-100/distributed_checkpoint", model, "checkpoint-100", "torch"),
    "lingua": Trainer(
        "checkpoints/0000000100",
        model,
        "checkpoints/0000000100",
        "lingua",
        others=(
            "checkpoints/0000000100/params.json",
            "checkpoints/0000000100/train_state_00000.json",
        ),
    ),
    "DINOv3": Trainer("ckpt/100", model, "ckpt/100", "torch"),
    "Bagel": Trainer("checkpoints/0000100", whole, "checkpoints/0000100", "unknown"),
    "fairseq2": Trainer(
        "step_100/hg",
        whole,
        "step_100",
        "fairseq2",
        pickled=("step_100/model/pp_00/tp_00/sdp_00.pt", "step_100/trainer/rank_00.pt"),
    ),
    "litgpt": Trainer(
        "step-00000100", torch_file("lit_model.pth", "model"), "step-00000100", "litgpt"
    ),
    "Fabric": Trainer("iter-000100-ckpt", model, "iter-000100-ckpt", "torch"),
    "MMEngine": Trainer(
        "",
        torch_file("iter_100.pth", "state_dict"),
        "",
        "MMEngine",
        others=("last_checkpoint",),
    ),
    "nanoGPT": Trainer("", torch_file("ckpt.pt", "model"), "", "unknown", step=-1),
    "Lightning, one file": Trainer(
        "version_0/checkpoints",
        torch_file("epoch=1-step=100.ckpt", "state_dict", {"pytorch-lightning_version": "2.5.0"}),
        "version_0/checkpoints",
        "Lightning",
    ),
    "RLinf": Trainer(
        "experiment/checkpoints/global_step_100/actor/dcp_checkpoint",
        dcp_under("fsdp_checkpoint", "model"),
        "experiment/checkpoints/global_step_100",
        "RLinf",
        role="actor",
        pickled=("experiment/checkpoints/global_step_100/actor/model_state_dict/full_weights.pt",),
    ),
    "cosmos-rl": Trainer(
        "20260101120000/checkpoints/step_100/policy",
        cosmos_ranks,
        "20260101120000/checkpoints/step_100",
        "cosmos-rl",
        role="actor",
        others=("20260101120000/checkpoints/step_100/policy/cosmos_config",),
        pickled=(
            "20260101120000/checkpoints/step_100/policy/optimizer_rank_0.pth",
            "20260101120000/checkpoints/step_100/policy/extra_info_rank_0.pth",
        ),
    ),
    "cosmos-predict": Trainer(
        "checkpoints/iter_000000100/model",
        flat,
        "checkpoints/iter_000000100",
        "torch",
        others=("checkpoints/latest_checkpoint.txt", "checkpoints/iter_000000100/optim/x.txt"),
        pickled=("checkpoints/iter_000000100/trainer/0.pt",),
    ),
    "Lightning": Trainer(
        "version_0/checkpoints/epoch=1-step=100.ckpt",
        dcp_under("state_dict"),
        "version_0/checkpoints/epoch=1-step=100.ckpt",
        "Lightning",
        pickled=("version_0/checkpoints/epoch=1-step=100.ckpt/meta.pt",),
    ),
    "TRL": Trainer(
        "checkpoint-100/pytorch_model_fsdp_0",
        model,
        "checkpoint-100",
        "HF Trainer (accelerate)",
        others=("checkpoint-100/trainer_state.json", "README.md"),
        pickled=("checkpoint-100/training_args.bin",),
    ),
    "axolotl": Trainer(
        "checkpoint-100/pytorch_model_fsdp_0",
        model,
        "checkpoint-100",
        "HF Trainer (accelerate)",
        others=("checkpoint-100/trainer_state.json", "debug.log", "tokenizer.json"),
    ),
    "torchforge": Trainer("checkpoint/step-100", flat, "checkpoint/step-100", "torch"),
    "OpenRLHF": Trainer(
        "ckpt/_actor/global_step100",
        zero(3),
        "ckpt/_actor/global_step100",
        "DeepSpeed",
        role="actor",
        others=("ckpt/_actor/zero_to_fp32.py", "ckpt/global_step90_hf/config.json"),
    ),
    "open-instruct": Trainer(
        "checkpoints/global_step100",
        zero(3),
        "checkpoints/global_step100",
        "DeepSpeed",
        others=("checkpoints/zero_to_fp32.py", "checkpoints/ref_policy/x.txt"),
    ),
    "accelerate, DeepSpeed": Trainer(
        "step_100/pytorch_model",
        zero(2),
        "step_100",
        "DeepSpeed",
        others=("step_100/zero_to_fp32.py", "step_100/COMPLETED"),
        pickled=("step_100/scheduler.bin", "step_100/random_states_0.pkl"),
    ),
    "HF Trainer, DeepSpeed": Trainer(
        "checkpoint-100/global_step100",
        zero(2),
        "checkpoint-100",
        "DeepSpeed",
        others=("checkpoint-100/trainer_state.json", "checkpoint-100/zero_to_fp32.py"),
        pickled=("checkpoint-100/training_args.bin",),
    ),
    "in-house": Trainer("my_run/save_100/shards", ranks, "my_run/save_100", "unknown"),
}


def plant(run: Path, name: str, tensors: Tensors) -> tuple[Path, Path, list[Path]]:
    """Write a trainer's tree; return the directories of weights and step, and the weight files."""
    trainer = TRAINERS[name]
    weights = run / trainer.weights
    files = [weights / file for file in trainer.write(weights, tensors)]
    for other in trainer.others:
        (run / other).parent.mkdir(parents=True, exist_ok=True)
        (run / other).write_text("{}", encoding="utf-8")
    for state in trainer.pickled:
        (run / state).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": trainer.step, "pytorch-lightning_version": "2.5.0"}, run / state)
    return weights, run / trainer.step_dir, files
