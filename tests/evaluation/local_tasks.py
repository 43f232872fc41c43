"""A tiny random model with its tokenizer, and tasks on local data, for the real evaluators."""

import json
import os
import subprocess
from pathlib import Path

from tiny_models import tiny_model, tiny_tokenizer
from unshard.evaluate.jobs import Request
from unshard.evaluate.server.evaluators.work import EvalInput, Profile

__all__ = [
    "OFFLINE",
    "lm_eval_tasks",
    "lmms_eval_tasks",
    "run_evaluator",
    "save_tiny_model",
    "surprise_task",
    "work_at",
]

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_UNKNOWN = "<unk>"
_COLOURS = [("the sky is", "blue"), ("the grass is", "green"), ("the sun is", "yellow")]
_CHOICES = ["blue", "green", "yellow"]

_LM_TASK = """\
task: {name}
{tag}dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["blue", "green", "yellow"]
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 1.0
"""
_LM_GROUP = """\
group: sights
task: [colours_of_day, colours_of_night]
aggregate_metric_list:
  - metric: acc
    weight_by_size: true
metadata:
  version: 1.0
"""
_SURPRISE_TASK = """\
task: colours_surprise
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: " {{{{answer}}}}"
metric_list:
  - metric: perplexity
  - metric: acc
metadata:
  version: 1.0
"""
_LMMS_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_visual: !function visuals.none
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  max_new_tokens: 4
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  - version: 0.0
"""


def save_tiny_model(directory: Path) -> Path:
    """Save a random Qwen2 with its tokenizer."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(directory)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(directory)
    return directory


def lm_eval_tasks(directory: Path) -> Path:
    """Write three tasks of lm-eval: the group "sights" has two, the tag "dim" the third."""
    data = _write_data(directory)
    for name in ["colours_of_day", "colours_of_night", "colours_of_dusk"]:
        tag = "tag: dim\n" if name == "colours_of_dusk" else ""
        text = _LM_TASK.format(name=name, tag=tag, data=data)
        (directory / f"{name}.yaml").write_text(text)
    (directory / "sights.yaml").write_text(_LM_GROUP)
    return directory


def surprise_task(directory: Path) -> Path:
    """Write a task of lm-eval whose perplexity tells apart models that differ a little."""
    text = _SURPRISE_TASK.format(data=_write_data(directory))
    (directory / "colours_surprise.yaml").write_text(text)
    return directory


def lmms_eval_tasks(directory: Path) -> Path:
    """Write two tasks of lmms-eval, and the group "sights" of both."""
    data = _write_data(directory)
    (directory / "visuals.py").write_text("def none(doc):\n    return []\n")
    for name in ["colours_of_day", "colours_of_night"]:
        (directory / f"{name}.yaml").write_text(_LMMS_TASK.format(name=name, data=data))
    (directory / "sights.yaml").write_text(
        "group: sights\ntask: [colours_of_day, colours_of_night]\n"
    )
    return directory


def work_at(directory: Path, model: Path, request: Request, profile: Profile) -> EvalInput:
    """Make the directories of an attempt."""
    output = directory / "output"
    output.mkdir(parents=True)
    return EvalInput(model, output, directory, request, profile)


def run_evaluator(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as the server does: in the attempt's directory, with its output in a log."""
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **OFFLINE},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=600,
    )


def _write_data(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "colours.jsonl"
    rows = [
        {"text": text, "answer": answer, "label": _CHOICES.index(answer)}
        for text, answer in _COLOURS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
