"""Paths that people give by mistake, and the whole error that each gets.

The messages are in `tests/data/mistakes.txt`; UNSHARD_WRITE_MISTAKES=1 writes them anew.
"""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from ranks import rank_path, save_ranks, some_tensors

MESSAGES = Path(__file__).parents[1] / "data" / "mistakes.txt"


def ranks(*places: Path, world: int = 2) -> None:
    for place in places:
        save_ranks(place, some_tensors(), world)


def model(place: Path) -> None:
    place.mkdir(parents=True)
    save_file(some_tensors(), place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def cache_of_the_hub(top: Path) -> None:
    for name in ("one", "two"):
        model(top / f"models--some--{name}" / "snapshots" / "abc")


def optimizer_only(top: Path) -> None:
    place = top / "checkpoint-10" / "optimizer_0"
    place.mkdir(parents=True)
    state = {"optimizer": {"state": {"a": {"exp_avg": torch.ones(3)}}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=place, no_dist=True)
    touch(top / "checkpoint-10" / "scheduler.pt", top / "checkpoint-10" / "trainer_state.json")


def a_lost_rank(top: Path) -> None:
    ranks(top / "global_step_7" / "actor", world=4)
    rank_path(top / "global_step_7" / "actor", 4, 2).unlink()


def several_roles(top: Path) -> None:
    ranks(top / "step_5" / "ref", top / "step_5" / "reward" / "shards")


def link_to_another_run(top: Path) -> None:
    ranks(top.parent / "other" / "step_5")
    top.mkdir()
    (top / "resumed_from").symlink_to(top.parent / "other")


# What is there, by the mistake; the path that is given is the top of it.
MISTAKES: dict[str, Callable[[Path], None]] = {
    "wrong directory": lambda top: touch(top / "README.md", top / "src" / "train.py"),
    "parent of runs": lambda top: ranks(
        top / "a" / "global_step_10" / "actor", top / "b" / "checkpoint-5" / "pytorch_model_fsdp_0"
    ),
    "cache of the hub": cache_of_the_hub,
    "an empty step": lambda top: (top / "global_step_10").mkdir(parents=True),
    "a step being written": lambda top: touch(
        top / "step-10" / ".metadata.tmp", top / "step-10" / "__0_0.distcp"
    ),
    "a step before its last rename": lambda top: ranks(top / "tmp_step_10" / "policy" / "weights"),
    "only the optimizer": optimizer_only,
    "only EMA": lambda top: ranks(top / "checkpoint-10" / "pytorch_ema_model_fsdp_0"),
    "two runs mixed": lambda top: ranks(top / "global_step_10", top / "checkpoint-20"),
    "a lost rank": a_lost_rank,
    "several roles, none of them known": several_roles,
    "Megatron, interrupted": lambda top: touch(
        top / "iter_0000100" / "common.pt", top / "iter_0000100" / "__0_0.distcp"
    ),
    "Orbax": lambda top: touch(top / "100" / "_CHECKPOINT_METADATA", top / "100" / "d" / "x"),
    "nanotron": lambda top: touch(
        *(top / "10" / name for name in ("checkpoint_metadata.json", "model_config.json")),
        top / "10" / "model" / "model_weight_pp-rank-0-of-1_tp-rank-0-of-1.safetensors",
    ),
    "Fast-LLM": lambda top: touch(
        *(top / "checkpoint" / "100" / name for name in ("metadata.yaml", "ok")),
        top / "checkpoint" / "100" / "rank_0.safetensors",
    ),
    "fairseq2": lambda top: touch(top / "step_100" / "model" / "pp_00" / "tp_00" / "sdp_00.pt"),
    "in-house files of ranks": lambda top: touch(top / "step_3" / "weights_rank_0.bin"),
    "a run and weights apart": lambda top: ranks(top / "a" / "checkpoint-10", top / "b"),
    "a link to another run": link_to_another_run,
    "an adapter alone": lambda top: touch(
        top / "adapter_model.safetensors", top / "adapter_config.json"
    ),
}


def messages() -> dict[str, str]:
    sections = MESSAGES.read_text(encoding="utf-8").split("\n## ")[1:]
    return {name: text.strip() for name, text in (one.split("\n", 1) for one in sections)}


def error_of(tmp_path: Path, mistake: str) -> str:
    """Return the whole error of `unshard merge`, with the test's own directory as TOP."""
    top = tmp_path / "top"
    MISTAKES[mistake](top)
    with pytest.raises(unshard.UnshardError) as refused:
        unshard.merge(top, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    sizes = re.compile(r"\(\d[\d.]* k?B\)")  # of what torch saves: its versions differ
    text = refused.value.text.replace(str(top), "TOP").replace(str(tmp_path), "ABOVE")
    return sizes.sub("(SIZE)", text)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained(tmp_path: Path, mistake: str) -> None:
    found = error_of(tmp_path, mistake)
    if os.environ.get("UNSHARD_WRITE_MISTAKES"):
        known = messages() | {mistake: found}
        parts = [f"## {name}\n\n{text}\n" for name, text in known.items() if name in MISTAKES]
        MESSAGES.write_text("# What a mistaken path is told\n\n" + "\n".join(parts), "utf-8")
    assert messages()[mistake] == found


@pytest.mark.filterwarnings("ignore:made by unshard from base:unshard.UnshardWarning")
def test_a_model_and_an_output_of_ours_can_be_merged_again(tmp_path: Path) -> None:
    """Both are whole: what comes out is the same."""
    model(tmp_path / "base")
    for source, output in (("base", "first"), ("first", "second")):
        unshard.merge(tmp_path / source, tmp_path / output, names="training")
    record = (tmp_path / "second" / "unshard.json").read_text(encoding="utf-8")
    assert '"writer": "unshard ' in record
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
