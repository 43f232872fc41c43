"""Checkpoints that cannot be evaluated however often it is tried, and what makes one of them fit.

A sharded checkpoint of transformers' Trainer has no config.json.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import Qwen2ForCausalLM

from evaluation.local_tasks import OFFLINE, save_tiny_model, surprise_task
from evaluation.servers import Live, live
from ranks import save_ranks, some_tensors

pytestmark = pytest.mark.xdist_group("eval-lasting")  # one server for all


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two profiles of the real lm-eval; one has a config for checkpoints that have none."""
    place = tmp_path_factory.mktemp("server")
    save_tiny_model(place / "base")
    bare = {
        "kind": "lm-eval",
        "include_paths": [str(surprise_task(place / "tasks"))],
        "environment": {**OFFLINE, "OMP_NUM_THREADS": "1"},
        "gpus": 0,
        "retries": 2,
    }
    profiles = {"bare": bare, "fitted": {**bare, "config": str(place / "base")}}
    with live(place, profiles=profiles) as started:
        yield started


def save_like_trainer(step: Path, model: Path) -> Path:
    """Save weights as accelerate does for transformers' Trainer: DCP, and no config."""
    weights = Qwen2ForCausalLM.from_pretrained(model).state_dict()
    folder = step / "pytorch_model_fsdp_0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch saves in a single process
        save({"model": weights}, checkpoint_id=folder, no_dist=True)
    (step / "trainer_state.json").write_text(f'{{"global_step": {step.name.split("-")[1]}}}')
    return step


def test_shards_of_trainer_are_evaluated_with_the_config_of_the_profile(server: Live) -> None:
    place = save_like_trainer(server.root / "trainer" / "checkpoint-5", server.directory / "base")
    asked = {"tasks": ["colours_surprise"], "profile": "bare"}
    failed = server.ended(server.submit(place, **asked), "failed")
    assert failed["attempts"] == 1
    said = str(failed["error"])
    assert said.startswith(f"no config.json was found in or next to {place}/pytorch_model_fsdp_0:")
    assert said.endswith(
        "set `config` of the profile, in the server's YAML, to that file or its directory"
    )
    asked["profile"] = "fitted"
    done = server.ended(server.submit(place, **asked))
    assert isinstance(done["metrics"], dict)
    assert done["metrics"]["colours_surprise/perplexity"] > 0


class _Runs:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("true",)


def _malicious(place: Path) -> None:
    save_ranks(place, {}, 1, extra={"model.norm.weight": _Runs()})


def _of_another_model(place: Path) -> None:
    save_ranks(place, {**some_tensors(), "model.strange.weight": torch.zeros(3)}, 1)


def _incomplete(place: Path) -> None:
    save_ranks(place, some_tensors(), 2)
    (place / "model_world_size_2_rank_1.pt").unlink()


def _nothing(place: Path) -> None:
    place.mkdir(parents=True)
    (place / "notes.txt").write_text("nothing")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_malicious, "its pickle refers to posix.system"),
        (_of_another_model, "model.strange.weight"),
        (_incomplete, "rank 1"),
        (_nothing, "no checkpoint found"),
    ],
)
def test_what_merge_refuses_is_not_tried_again(
    server: Live, make: Callable[[Path], None], why: str
) -> None:
    """The job says what `unshard merge` says, of the checkpoint as it was submitted."""
    step = server.root / make.__name__ / "checkpoint-5"
    make(step)
    (step / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 0}')
    job = server.submit(step, "colours_surprise", profile="bare")
    failed = server.ended(job, "failed")
    assert (failed["attempts"], why in str(failed["error"])) == (1, True), failed["error"]
    assert str(step) in str(failed["error"])
    assert "_unshard" not in str(failed["error"])
