"""Which trainer wrote a checkpoint, as far as the tree around it shows.

Several trainers write each format. The files that a trainer puts next to the weights, and the names
of its folders, show which one it was; otherwise what the format itself shows is kept, or "unknown".

Sources: the trainers in `tests/trainers`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from unshard.read.format import Location

_UPWARD = 3


@dataclass(frozen=True)
class _Tree:
    """The names around a set of weights."""

    at: Location

    @cached_property
    def weights(self) -> frozenset[str]:
        return _names(self.at.weights_dir)

    @cached_property
    def above_weights(self) -> frozenset[str]:
        return _names(self.at.weights_dir.parent)

    @cached_property
    def step(self) -> frozenset[str]:
        return _names(self.at.step_dir)

    @cached_property
    def run(self) -> frozenset[str]:
        return frozenset() if self.at.step is None else _names(self.at.step_dir.parent)

    @property
    def inner(self) -> tuple[str, ...]:
        """The folders between the step directory and the weights."""
        return self.at.weights_dir.relative_to(self.at.step_dir).parts

    @property
    def has_ranks(self) -> bool:
        return any(name.startswith("model_world_size_") for name in self.weights)

    @property
    def has_dcp(self) -> bool:
        return ".metadata" in self.weights

    def is_file_of(self, suffix: str) -> bool:
        return self.at.file is not None and self.at.file.suffix == suffix

    def is_below(self, name: str) -> bool:
        """Return whether a file is in one of the directories above the step."""
        return any((above / name).is_file() for above in list(self.at.step_dir.parents)[:_UPWARD])

    def has_step(self, pattern: str) -> bool:
        return re.fullmatch(pattern, self.at.step_dir.name) is not None


def _names(folder: Path) -> frozenset[str]:
    return frozenset(one.name for one in folder.iterdir()) if folder.is_dir() else frozenset()


_SKYRL_MARKS = {"trainer_state.pt", "latest_ckpt_global_step.txt"}
_Rule = tuple[str, Callable[[_Tree], bool]]

# The first that holds; each needs more than a name that another trainer might use.
_RULES: tuple[_Rule, ...] = (
    (
        "lerobot",
        lambda at: (
            "pretrained_model" in at.inner and "train_config.json" in at.weights | at.above_weights
        ),
    ),
    ("NeMo-RL", lambda at: "training_info.json" in at.step),
    (
        "SkyRL",
        lambda at: (
            at.has_ranks
            and at.inner in {("policy",), ("critic",)}
            and bool(_SKYRL_MARKS & (at.step | at.run))
        ),
    ),
    ("LLaMA-Factory", lambda at: "CHECKPOINT_COMPLETE" in at.step),
    (
        "LLaMA-Factory",
        lambda at: "trainer_state.json" in at.step and "trainer_log.jsonl" in at.run | at.step,
    ),
    ("ms-swift", lambda at: {"args.json", "trainer_state.json"} <= at.step),
    ("VeOmni", lambda at: at.has_dcp and at.has_step("global_.*") and "extra_state" in at.step),
    ("OLMo-core", lambda at: {"model_and_optim", ".metadata.json"} <= at.step),
    ("ROLL", lambda at: at.has_dcp and at.inner[-1:] == ("dcp",) and at.at.role is not None),
    ("xtuner", lambda at: at.inner == ("weights",) and at.is_below(".xtuner")),
    ("finetrainers", lambda at: at.has_step("finetrainers_step_.*")),
    ("AReaL", lambda at: at.has_step(r"epoch\d+epochstep\d+globalstep\d+")),
    ("torchtitan", lambda at: at.inner == ("sharded",) and at.has_step(r"step-\d+")),
    ("torchtune", lambda at: "recipe_state" in at.run or at.has_step(r"dist_epoch_\d+")),
    ("NeMo AutoModel", lambda at: ".hf_metadata" in at.weights and at.has_step("epoch_.*_step_.*")),
    ("fairseq2", lambda at: at.inner == ("hg",) and {"model", "trainer"} <= at.step),
    ("litgpt", lambda at: "lit_model.pth" in at.weights),
    ("MMEngine", lambda at: at.is_file_of(".pth") and "last_checkpoint" in at.weights),
    ("lingua", lambda at: at.has_dcp and {"params.json", "train_state_00000.json"} <= at.step),
)


def writer_by_tree(location: Location) -> str | None:
    """Return the trainer that the tree around the weights shows, or None."""
    tree = _Tree(location)
    return next((name for name, holds in _RULES if holds(tree)), None)
