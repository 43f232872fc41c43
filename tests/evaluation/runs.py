"""Checkpoints as trainers lay them out, with small files, and rotation as trainers do it."""

import os
import shutil
from pathlib import Path

from ranks import save_ranks, some_tensors


def lmms_checkpoint(run: Path, step: int, *, ema: bool = False, size: int = 64) -> Path:
    """Lay out a checkpoint like lmms-engine's FSDP2 trainer, for two ranks."""
    place = run / f"checkpoint-{step}"
    folders = ["pytorch_model_fsdp_0"] + (["pytorch_ema_model_fsdp_0"] if ema else [])
    for folder in folders:
        (place / folder).mkdir(parents=True)
        for rank in range(2):
            file = place / folder / f"model_world_size_2_rank_{rank}.pt"
            file.write_bytes(os.urandom(size))
    for folder, start in (
        ("optimizer", "optimizer"),
        ("extra_state", "extra_state"),
        ("dataloader_state", "dataloader_state"),
    ):
        (place / folder).mkdir()
        for rank in range(2):
            (place / folder / f"{start}_world_size_2_rank_{rank}.pt").write_bytes(b"state")
    (place / "config.json").write_text('{"model_type": "qwen2"}')
    (place / "tokenizer.json").write_text("{}")
    return place


def checkpoint(run: Path, step: int, *, ema: bool = False) -> Path:
    """Write a checkpoint of two ranks with real torch, as lmms-engine lays it out."""
    place = run / f"checkpoint-{step}"
    save_ranks(place / "pytorch_model_fsdp_0", some_tensors(step), 2)
    if ema:
        save_ranks(place / "pytorch_ema_model_fsdp_0", some_tensors(step + 1000), 2)
    (place / "config.json").write_text('{"model_type": "qwen2"}')
    return place


def save_again(checkpoint: Path) -> None:
    """Write every file of a checkpoint again, into the same inodes, as `torch.save` does."""
    for path in checkpoint.rglob("*"):
        if path.is_file():
            before = path.stat()
            path.write_bytes(path.read_bytes())
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def rotate_like_lmms_engine(run: Path, limit: int) -> None:
    """Remove old checkpoints as lmms-engine 0.1.4 does."""
    checkpoints = [name for name in os.listdir(run) if name.startswith("checkpoint")]  # noqa: PTH208
    checkpoints.sort(key=lambda name: int(name.split("-")[1]))
    for checkpoint in checkpoints[:-limit]:
        shutil.rmtree(run / checkpoint)


def files_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
