"""A real vLLM on the shards of six layouts, and 20 checkpoints through one engine.

Everything is in one process of vLLM: from the second on, the start of an engine is cheap there.
"""

import errno
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from oracle.writers.workers import WorkerPool
from served_layouts import (
    RANKS,
    greedy,
    hybrid_model,
    matrices,
    model_with_experts,
    save_layouts,
    save_lora,
    save_verl_step,
    served_model,
)
from unshard.keywords import MergeKeywords
from unshard.plugins.vllm import WORKER_EXTENSION
from unshard.progress import ignore
from vllm_child import FILE_BYTES, PROMPTS
from vllm_runs import Answers, needs_vllm, run_vllm

pytestmark = [
    needs_vllm,
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),  # a gigabyte and two cores each
]

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
LAYOUTS = {
    "verl": "verl",
    "EMA of lmms-engine": "lmms",
    "DCP of HF Trainer": "dcp",
    "FSDP1": "fsdp1",
    "sharded safetensors": "shards",
    "LoRA": "lora",
}
CHECKPOINTS = 20
PREFIXES = [f"model.layers.{number}." for number in range(4)]

Order = dict[str, object]


@dataclass
class Talk:
    """What an engine is asked for, and what came of it, by name."""

    orders: list[Order] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    answers: Answers = field(default_factory=list)

    def ask(self, name: str, do: str, **given: object) -> None:
        self.names.append(name)
        self.orders.append({"do": do, **given})

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.answers[self.names.index(name)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a run of each layout, and one of many steps."""
    directory = tmp_path_factory.mktemp("runs")
    WorkerPool(RANKS).run(save_layouts, RANKS, directory)
    save_lora(directory / "lora")
    for step, model in enumerate(steps_of_a_run(), start=1):
        save_verl_step(directory / "many", model, step)
    for step, model in enumerate(steps_of(model_with_experts(), 2), start=1):
        save_verl_step(directory / "experts", model, step)
    for step, model in enumerate(steps_of(hybrid_model(), 2), start=1):
        save_verl_step(directory / "hybrid", model, step)
    return directory


def steps_of_a_run() -> Iterator[Any]:
    """Yield a model with a tied head, step by step."""
    return steps_of(served_model(tie_word_embeddings=True), CHECKPOINTS)


def steps_of(model: Any, count: int) -> Iterator[Any]:
    """Yield a model that is trained, step by step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        yield model


def options_of(layout: str) -> MergeKeywords:
    return {"weights": "ema"} if layout == "EMA of lmms-engine" else {}


@pytest.fixture(scope="module")
def talk(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Talk:
    """Return what one process of vLLM answered to all orders of this module."""
    directory, talk = tmp_path_factory.mktemp("vllm"), Talk()
    merged: dict[bytes, str] = {}
    for layout, folder in LAYOUTS.items():
        output = directory / "merged" / folder
        unshard.merge(runs / folder, output, listener=ignore, **options_of(layout))
        # Layouts of the same weights have the same merged model: one start is enough for them.
        merged.setdefault((output / "model.safetensors").read_bytes(), str(output))
    assert len(merged) == 3
    # They come first: the first answer of a process compiles kernels, and writes those.
    for model in merged.values():
        plain = {"model": model, "worker_extension_cls": WORKER_EXTENSION}
        talk.ask(f"start {Path(model).name}", "start", arguments=plain)
        talk.ask(f"merged {Path(model).name}", "answer")
    talk.ask("not ours", "reload", checkpoint=str(runs / "lora"), options={})
    talk.ask("forbid files", "forbid_files")
    for layout, folder in LAYOUTS.items():
        path, options = str(runs / folder), options_of(layout)
        talk.ask(f"start {layout}", "serve", checkpoint=path, options=options, arguments={})
        talk.ask(layout, "answer")
    _ask_for_reloads(talk, runs / "many")
    talk.ask("allow files", "allow_files")
    _ask_with_experts(talk, runs / "experts")
    _ask_for_refusals(talk, runs)
    talk.answers = run_vllm(directory / "child", talk.orders, **IN_PROCESS)
    return talk


def _ask_for_reloads(talk: Talk, run: Path) -> None:
    """Start on the config's directory of the first step, take all others, then lose reloads."""
    paths = [run / f"global_step_{step + 1}" for step in range(CHECKPOINTS)]
    plain = {
        "model": str(paths[0] / "actor" / "huggingface"),
        "load_format": "unshard",
        "worker_extension_cls": WORKER_EXTENSION,
    }
    talk.ask("start step 1", "start", arguments=plain)
    talk.ask("answer 1", "answer")
    for step, path in enumerate(paths[1:], start=2):
        talk.ask(f"reload {step}", "reload", checkpoint=str(path), options={})
        talk.ask(f"answer {step}", "answer")
    random.seed(0)
    for number in range(CHECKPOINTS):
        path, skip = paths[number], random.choice(["all", *PREFIXES])
        talk.ask(f"skip {number}", "reload", checkpoint=str(path), options={}, skip=skip)
    talk.ask("reload again", "reload", checkpoint=str(paths[0]), options={})
    talk.ask("answer again", "answer")
    talk.ask("other model", "reload", checkpoint=str(run.parent / "verl"), options={})
    talk.ask("unknown option", "reload", checkpoint=str(paths[0]), options={"colour": "red"})
    talk.ask("after refusals", "answer")


def _ask_with_experts(talk: Talk, run: Path) -> None:
    """Take the second step, lose experts on the way, take it again."""
    first, second = (str(run / f"global_step_{step}") for step in (1, 2))
    plain = {"skip_tokenizer_init": False}  # vLLM's class for this model reads it
    talk.ask("start experts", "serve", checkpoint=first, options={}, arguments=plain)
    talk.ask("experts 1", "answer")
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts"
        talk.ask(f"no experts {layer}", "reload", checkpoint=second, options={}, skip=experts)
        talk.ask("back", "reload", checkpoint=first, options={})
    stale = ["model.layers.0.mlp.experts.routed_experts", 2]
    talk.ask("one expert", "reload", checkpoint=second, options={}, stale=stale)
    talk.ask("reload experts", "reload", checkpoint=second, options={})
    talk.ask("experts 2", "answer")


def _ask_for_refusals(talk: Talk, runs: Path) -> None:
    """Ask engines for a reload that they would not survive, and then whether they did."""
    quantised = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    for name, run, given in (("hybrid", "hybrid", {}), ("quantised", "many", quantised)):
        first, second = (str(runs / run / f"global_step_{step}") for step in (1, 2))
        talk.ask(f"start {name}", "serve", checkpoint=first, options={}, arguments=given)
        talk.ask(f"{name} before", "answer")
        talk.ask(f"{name} reload", "reload", checkpoint=second, options={})
        talk.ask(f"{name} after", "answer")
    talk.ask("change interface", "change_interface")
    talk.ask("unfit", "serve", checkpoint=str(runs / "verl"), options={}, arguments={})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_on_shards_answers_as_on_the_merged_model(talk: Talk, layout: str) -> None:
    folder = LAYOUTS[layout]
    same = folder if folder in {"lmms", "lora"} else "verl"
    assert talk[layout]["result"] == talk[f"merged {same}"]["result"]


def test_the_layouts_have_three_models(talk: Talk) -> None:
    """Otherwise the test above could not fail for averaged and for fused weights."""
    assert len({str(talk[layout]["result"]) for layout in LAYOUTS}) == 3


def test_engines_on_shards_write_no_weights(talk: Talk) -> None:
    """No file can have the bytes of a matrix, and all that is written is less than a tenth."""
    assert min(matrices()) > FILE_BYTES
    assert talk["forbid files"]["result"] == errno.EFBIG
    first, last = talk.names.index("forbid files"), talk.names.index("allow files")
    for name in talk.names[first:last]:
        is_refused = name.startswith("skip ") or name in {"other model", "unknown option"}
        assert ("error" in talk[name]) is is_refused, name
        assert talk[name]["written"] < sum(matrices()) / 10, name


def test_twenty_checkpoints_go_through_one_engine(talk: Talk) -> None:
    """The first is found from the directory of config and tokenizer alone."""
    for step, model in enumerate(steps_of_a_run(), start=1):
        found = talk[f"answer {step}"]["result"]
        assert [tokens for tokens, _ in found] == [greedy(model, one) for one in PROMPTS], step
        if step > 1:
            (checked,) = talk[f"reload {step}"]["result"]
            assert checked["step"] == step
            assert checked["elements"] > sum(matrices()) / 4 / 3  # 64 columns of packed ones
            assert checked["unchecked"] == []


def test_a_reload_reads_each_byte_once_although_it_compares(talk: Talk, runs: Path) -> None:
    step = runs / "many" / "global_step_9" / "actor"
    size = sum(path.stat().st_size for path in step.glob("model_*.pt"))
    assert size < talk["reload 9"]["read"] < 1.3 * size  # and metadata


def test_a_reload_that_lost_something_is_always_noticed(talk: Talk) -> None:
    """Twenty times at random: all of it, or a layer."""
    errors = [talk[f"skip {number}"].get("error", "") for number in range(CHECKPOINTS)]
    assert ["does not hold this checkpoint" in one for one in errors] == [True] * CHECKPOINTS
    assert "error" not in talk["reload again"]
    assert talk["answer again"]["result"] == talk["answer 1"]["result"]


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(talk: Talk) -> None:
    assert "head and embedding, which differ" in talk["other model"]["error"]
    assert "colour" in talk["unknown option"]["error"]
    assert talk["after refusals"]["result"] == talk["answer 1"]["result"]


def test_experts_are_taken_and_compared(talk: Talk) -> None:
    for step, model in enumerate(steps_of(model_with_experts(), 2), start=1):
        tokens = [found for found, _ in talk[f"experts {step}"]["result"]]
        assert tokens == [greedy(model, one) for one in PROMPTS], step
    (checked,) = talk["reload experts"]["result"]
    assert checked["unchecked"] == []


@pytest.mark.parametrize("lost", [*(f"no experts {layer}" for layer in range(4)), "one expert"])
def test_experts_that_a_reload_lost_are_noticed(talk: Talk, lost: str) -> None:
    assert "RoutedExperts.w13_weight" in talk[lost]["error"]


def test_a_reload_that_would_be_wrong_is_refused_and_nothing_is_changed(talk: Talk) -> None:
    assert "--load-format auto, not unshard" in talk["not ours"]["error"]
    assert "vllm-project/vllm#48284" in talk["hybrid reload"]["error"]
    assert "quantises the weights (fp8_per_channel)" in talk["quantised reload"]["error"]
    for name in ("hybrid", "quantised"):
        assert talk[f"{name} after"]["result"] == talk[f"{name} before"]["result"]


def test_another_interface_of_vllm_is_an_error_where_the_format_is_asked_for(talk: Talk) -> None:
    assert "error" not in talk["change interface"]
    assert "does not fit the interface of this version of vLLM" in talk["unfit"]["error"]
    assert "has no get_all_weights" in talk["unfit"]["error"]
