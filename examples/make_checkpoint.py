"""Train a tiny Qwen2 for one step on four CPU processes and save it as verl does.

Writes `checkpoint/`, `expected.json` and `expected_logits.npy` into DIRECTORY (default: next to
this script). Needs torch and transformers; everything is seeded: a second run with the same
versions writes the same tensors (torch adds hashes that change from process to process).

Usage: make_checkpoint.py [DIRECTORY]
"""

import hashlib
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORLD_SIZE = 4
STEP = 10
SEED = 20
INPUT_IDS = [[1, 2, 3, 4, 5]]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SENTENCES = [
    "A sharded checkpoint is a set of files that hold pieces of tensors.",
    "Every rank saves the rows that it holds, and the last rank may hold fewer rows.",
    "Merging puts the pieces back in their places: nothing is added and nothing is lost.",
    "What is the capital of France? The capital of France is Paris.",
    "How many rows do three ranks hold? Three ranks hold as many rows as the tensor has.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_config() -> Qwen2Config:
    """Describe a model of about 1 MB; few of its dimensions are multiples of four."""
    config = Qwen2Config(
        vocab_size=601,
        hidden_size=66,
        intermediate_size=150,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.dtype = torch.bfloat16  # the trainer keeps float32 master weights nevertheless
    return config


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on a few sentences; its tokens fit the model's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped in transformers
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        model_max_length=128,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def seed_everything(seed: int) -> None:
    """Seed the three generators whose states a trainer saves."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - trainers save the state of the old global generator
    random.seed(seed)


def shard(model: Qwen2ForCausalLM, mesh: DeviceMesh) -> None:
    """Apply FSDP2 as verl does: every decoder layer, then the whole."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train_one_step(model: nn.Module, vocab_size: int) -> LambdaLR:
    """Take one AdamW step on random tokens and return the learning rate's schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    tokens = torch.randint(3, vocab_size, (2, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    scheduler.step()
    return scheduler


def save_rank(actor: Path, rank: int, model: nn.Module, scheduler: LambdaLR) -> None:
    """Write the two files of one rank: the model's shards and the training state."""
    suffix = f"world_size_{WORLD_SIZE}_rank_{rank}.pt"
    extra_state = {
        "lr_scheduler": scheduler.state_dict(),
        "rng": {
            "cpu": torch.get_rng_state(),
            "numpy": np.random.get_state(),  # noqa: NPY002 - as trainers save it
            "random": random.getstate(),
        },
    }
    torch.save(model.state_dict(), actor / f"model_{suffix}")
    torch.save(extra_state, actor / f"extra_state_{suffix}")


def save_companions(checkpoint: Path, actor: Path, model: Qwen2ForCausalLM) -> None:
    """Write what rank 0 adds: configuration, tokenizer, and the step that was saved last."""
    fsdp_config = {"FSDP_version": 2, "world_size": WORLD_SIZE}
    (actor / "fsdp_config.json").write_text(json.dumps(fsdp_config, indent=4))
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    model.config.save_pretrained(actor / "huggingface")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(actor / "huggingface")
    build_tokenizer().save_pretrained(actor / "huggingface")


def describe(tensor: torch.Tensor) -> dict[str, object]:
    """Return dtype, shape and checksum; the bytes are those of a little-endian machine."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest(),
    }


def gather(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor whole; all ranks must take part."""
    state = model.state_dict().items()
    return {name: shards.full_tensor() for name, shards in state if isinstance(shards, DTensor)}


def save_expected(directory: Path, full: dict[str, torch.Tensor]) -> None:
    """Write what a right merge gives: the checksum of every tensor, and the model's logits."""
    expected = {name: describe(tensor) for name, tensor in full.items()}
    (directory / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")
    model = Qwen2ForCausalLM(build_config())
    model.load_state_dict(full)
    model.eval()  # type: ignore[no-untyped-call]  # untyped in transformers
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(INPUT_IDS)).logits
    np.save(directory / "expected_logits.npy", logits.numpy())


def train_and_save(rank: int, directory: str, meeting_point: str) -> None:
    """Be one rank: build, shard, train, save."""
    torch.set_num_threads(1)
    store = f"file://{meeting_point}"
    init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
    checkpoint = Path(directory, "checkpoint")
    actor = checkpoint / f"global_step_{STEP}" / "actor"
    seed_everything(SEED)
    model = Qwen2ForCausalLM(build_config())
    shard(model, init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",)))
    seed_everything(SEED + rank)
    scheduler = train_one_step(model, model.config.vocab_size)
    save_rank(actor, rank, model, scheduler)
    full = gather(model)
    if rank == 0:
        save_companions(checkpoint, actor, model)
        save_expected(Path(directory), full)
    destroy_process_group()


def main(directory: Path) -> None:
    """Write the checkpoint in four processes and list the files."""
    checkpoint = directory / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    (checkpoint / f"global_step_{STEP}" / "actor").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        arguments = (str(directory), str(Path(temporary, "store")))
        spawn(train_and_save, arguments, WORLD_SIZE)  # type: ignore[no-untyped-call]  # in torch
    written = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    written += [directory / "expected.json", directory / "expected_logits.npy"]
    for path in written:
        print(f"{path.stat().st_size:>9,}  {path.relative_to(directory)}")
    print(f"{sum(path.stat().st_size for path in written):>9,}  bytes in {len(written)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
