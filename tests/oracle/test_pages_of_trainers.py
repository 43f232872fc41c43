"""The line of each trainer's page, run on the tree that the trainer itself wrote.

What it makes is loaded by transformers, and its logits are those of the model that was trained. The
base is a directory instead of an id of the hub, and the number of the step is another one: nothing
else of a line is changed.
"""

import json
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command import unshard
from oracle.writers.samples import Samples
from oracle.writers.saving import equal_bits, logits_file, truth_file
from oracle.writers.workers import WorkerPool
from tiny_models import logits, tiny_model, tiny_tokenizer, with_adapter
from verl_runs import needs_verl, saved_by_verl

TESTS = Path(__file__).parents[1]
PAGES = TESTS.parent / "docs" / "trainers"

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore"),  # what transformers and peft say
]

BASES = ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B")
"""What stands for the model that training started from, in the pages."""

Model = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A trainer's run, and the line that is for it.

    Attributes:
        page: of docs/trainers.
        scenario: what trains and saves, as `module:function`; alone: a sample for all tests.
        step: where the scenario leaves the step that the line is for.
        model: makes the model that training started from.
        section: of the page.
        truth: the run's, or another next to it.
        needs: a package, without which the test is skipped.
        close: how near the live logits must be; 0: the same bits.
        recorded: whether a file of the run names the base, so that the line needs no `--base`.
    """

    page: str
    scenario: str
    step: str
    model: Model = tiny_model
    section: str = "Merge"
    truth: str = "run"
    needs: str = "torch"
    close: float = 0.0
    recorded: bool = False

    @property
    def lora(self) -> bool:
        return self.section == "LoRA"


def llama() -> Any:
    return tiny_model("llama")


def titans_llama() -> Any:
    return tiny_model("llama", rms_norm_eps=1e-5)


def one_layer() -> Any:
    return tiny_model("qwen2", num_hidden_layers=1)


EPOCH = "lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt"
SAMPLES = {
    "HF Trainer, FSDP2": Case("transformers", "trainer_fsdp2", "checkpoint-2"),
    "HF Trainer, FSDP1": Case("transformers", "trainer_fsdp1", "checkpoint-2"),
    "accelerate": Case("accelerate", "accelerate_fsdp2", "checkpoint_1", llama),
}
TRAINED = {
    "HF Trainer, LoRA": Case(
        "transformers", "trainer:trainer_lora", "checkpoint-2", section="LoRA"
    ),
    "TRL": Case("transformers", "trl:trl_sft", "checkpoint-2", needs="trl datasets"),
    "accelerate, LoRA": Case(
        "accelerate", "accelerate:accelerate_lora", "checkpoint_1", llama, section="LoRA"
    ),
    "Lightning": Case(
        "lightning", "lightning:lightning_fsdp2", EPOCH, needs="lightning", recorded=True
    ),
    "Lightning, LoRA": Case(
        "lightning", "lightning:lightning_lora", EPOCH, section="LoRA", needs="lightning"
    ),
    "torchtitan": Case(
        "torchtitan",
        "torchtitan:torchtitan_llama",
        "checkpoint/step-2",
        titans_llama,
        needs="torchtitan",
        close=1e-5,  # another way to rotate
    ),
    "lmms-engine": Case("lmms-engine", "lmms_engine:lmms_engine_qwen2", "checkpoint-2"),
    "lmms-engine, EMA": Case(
        "lmms-engine", "lmms_engine:lmms_engine_qwen2", "checkpoint-2", section="EMA", truth="ema"
    ),
    "lmms-engine, LoRA": Case(
        "lmms-engine", "lmms_engine:lmms_engine_lora", "checkpoint-2", section="LoRA"
    ),
}
OF_VERL = {
    "model": Case("verl", "", "global_step_2", one_layer),
    "lora": Case("verl", "", "global_step_2", one_layer, section="LoRA"),
}


def line_of(page: str, section: str) -> list[str]:
    """Return the words of the line that a section of a page begins with."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {section}\n.*?^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page}.md has no console block in {section!r}"
    (line,) = found[1].splitlines()
    words = shlex.split(line)
    assert words[:3] == ["$", "unshard", "merge"]
    return words[2:]


def numberless(path: str | Path) -> str:
    return re.sub(r"\d+", "N", Path(path).name)


def place(case: Case, run: Path, directory: Path) -> list[str]:
    """Put a run where the line of its page has it, and return the words of the line."""
    words = line_of(case.page, case.section)
    tree = Path(words[1])
    assert numberless(tree) == numberless(case.step)
    above = tree.parents[len(Path(case.step).parts) - 1]
    shutil.copytree(run, directory / above, dirs_exist_ok=True)
    words[1] = str(above / case.step)
    if not {"base", *BASES}.isdisjoint(words):
        base = case.model()
        base.save_pretrained(directory / "base")
        tiny_tokenizer().save_pretrained(directory / "base")
        words = ["base" if word in BASES else word for word in words]
    return words


def run_line(case: Case, run: Path, directory: Path) -> Path:
    """Run the line of a page on a run, and return its output."""
    return run_words(place(case, run, directory), directory)


def run_words(words: list[str], directory: Path) -> Path:
    done = unshard(*words, cwd=directory)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
    return directory / words[2]


def loaded(output: Path) -> Any:
    """Load a model as users do; nothing may be missing, left over or newly drawn."""
    auto: Any = import_module("transformers").AutoModelForCausalLM
    model, report = auto.from_pretrained(output, output_loading_info=True)
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= report.keys()
    assert not any(report.values()), report
    return model


def from_hub(output: Path, state: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Return a model of the same class that has the trained weights, cast as torch does it."""
    hub: Any = import_module("transformers")
    config = hub.AutoConfig.from_pretrained(output)
    model = hub.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(state)
    return model


def assert_live(case: Case, output: Path, run: Path) -> None:
    """Compare the logits of the merged model with those of the trained one."""
    trained = run.with_name(case.truth)
    truth, live = torch.load(truth_file(trained)), torch.load(logits_file(trained))
    assert not torch.allclose(logits(case.model()), live, atol=1e-2)  # training changed it
    if case.lora:
        assert_live_adapter(case, output, truth, live)
        return
    model = loaded(output)
    known = from_hub(output, truth, torch.float32)
    assert near(logits(known), live, case.close)
    assert equal_bits(logits(model), logits(from_hub(output, truth, model.dtype)))
    if model.dtype == torch.float32:
        assert near(logits(model), live, case.close)


def near(found: torch.Tensor, expected: torch.Tensor, close: float) -> bool:
    if not close:
        return equal_bits(found, expected)
    return torch.allclose(found, expected, rtol=0.0, atol=close)


def assert_live_adapter(
    case: Case, output: Path, truth: dict[str, torch.Tensor], live: torch.Tensor
) -> None:
    """Compare what was fused with what peft fuses, or an adapter with the live one."""
    known = with_adapter(case.model())
    known.load_state_dict(truth, strict=False)
    assert {name for name in known.state_dict() if "lora_" in name} <= truth.keys()
    assert equal_bits(logits(known), live)
    if (output / "adapter_config.json").exists():
        from peft import PeftModel

        assert equal_bits(logits(PeftModel.from_pretrained(case.model(), output)), live)
        return
    found = logits(loaded(output))
    assert equal_bits(found, logits(known.merge_and_unload()))
    assert torch.allclose(found, live, rtol=0.0, atol=1e-4)


def assert_tokenizer(output: Path) -> None:
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(output).get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("name", SAMPLES)
def test_the_line_makes_the_live_model_of_a_sample(
    samples: Samples, tmp_path: Path, name: str
) -> None:
    case = SAMPLES[name]
    run = samples.write(case.scenario, 2).directory
    assert not list(run.rglob("config.json"))  # as these trainers leave it
    output = run_line(case, run, tmp_path)
    assert_live(case, output, run)
    assert_tokenizer(output)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_the_line_makes_the_live_model(worker_pool: WorkerPool, tmp_path: Path, name: str) -> None:
    case = TRAINED[name]
    for package in case.needs.split():
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    module, function = case.scenario.split(":")
    run = tmp_path / "trained" / "run"
    run.mkdir(parents=True)
    worker_pool.run(getattr(import_module(f"oracle.writers.{module}"), function), 2, run)
    words = place(case, run, tmp_path)
    output = run_words(words, tmp_path)
    assert_live(case, output, run)
    if not case.lora:
        assert_tokenizer(output)
    if case.recorded:
        assert words[3:] == ["--base", "base"]
        output = run_words([*words[:2], "again"], tmp_path)
        assert_live(case, output, run)
        assert_tokenizer(output)


@pytest.mark.ray
@needs_verl
@pytest.mark.parametrize("kind", OF_VERL)
def test_the_line_makes_the_live_model_of_verl(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "trained" / "run"
    saved_by_verl(run, kind)
    case = OF_VERL[kind]
    output = run_line(case, run, tmp_path)
    assert_live(case, output, run)
    if not case.lora:
        assert_tokenizer(output)


def copied(sample: Path, directory: Path) -> Path:
    """Return a copy of a sample's run, to which files may be added, next to its truth."""
    run = directory / "trained" / "run"
    shutil.copytree(sample, run)
    for find in (truth_file, logits_file):
        shutil.copy(find(sample), find(run))
    return run


def test_the_line_takes_what_axolotl_puts_into_the_run(samples: Samples, tmp_path: Path) -> None:
    """axolotl saves config and tokenizer into the run before the Trainer begins."""
    run = copied(samples.write("trainer_fsdp2", 2).directory, tmp_path)
    tiny_model().config.save_pretrained(run)
    tiny_tokenizer().save_pretrained(run)
    case = Case("axolotl", "", "checkpoint-2")
    output = run_line(case, run, tmp_path)
    assert_live(case, output, run)
    assert_tokenizer(output)


def test_the_line_takes_the_model_that_ms_swift_records(samples: Samples, tmp_path: Path) -> None:
    run = copied(samples.write("trainer_fsdp2", 2).directory, tmp_path)
    base = tmp_path / "models" / "tiny"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    (run / "args.json").write_text(json.dumps({"model": str(base), "model_type": "qwen2"}))
    case = Case("axolotl", "", "checkpoint-2")
    output = run_line(case, run, tmp_path)
    assert_live(case, output, run)
    assert_tokenizer(output)


def test_the_line_makes_the_model_that_deepspeed_trained(tmp_path: Path) -> None:
    """transformers' Trainer wrote it with ZeRO 2, and its truth (tests/data/README.md)."""
    with tarfile.open(TESTS / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "deepspeed" / "hf_trainer_zero2"
    output = run_line(Case("deepspeed", "", "checkpoint-4"), run, tmp_path)
    model = loaded(output)
    with np.load(run / "truth.npz") as file:
        truth = {name: torch.from_numpy(file[name]) for name in file.files}
    known = from_hub(output, truth, model.dtype)
    assert model.dtype == torch.bfloat16
    assert equal_bits(logits(model), logits(known))
