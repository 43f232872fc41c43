"""The numbers of the server's command lines are those of lm-eval's own, to the bit.

By hand, lm-eval evaluates what transformers saved, with its own options; ours evaluates the merged
checkpoint, or its shards. Groups, tags, several filters, few-shot, limit, seed, and the chat
template on and off.
"""

import json
import logging
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evaluation.local_tasks import run_evaluator
from ranks import save_ranks
from tiny_models import tiny_model, tiny_tokenizer
from unshard.evaluate.jobs import Arguments, Job, Request, Status
from unshard.evaluate.server.attempts.merging import Merger
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.work import (
    EvalInput,
    OwnArguments,
    Profile,
    Scores,
    TaskFacts,
)

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = "red green blue sun moon sky grass water stone fire bird fish".split()
_CHOICE = """\
task: mc_{name}
tag: choices
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}, train: {data}}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}} {name}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
metadata: {{version: {version}}}
"""
_GROUP = """\
group: mc_group
task: [mc_a, mc_b]
aggregate_metric_list:
  - metric: acc
    weight_by_size: true
  - metric: acc_norm
    weight_by_size: false
metadata: {version: 2.5}
"""
_FILTERS = """\
task: words
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}, train: {data}}}
test_split: test
fewshot_split: train
output_type: generate_until
doc_to_text: "{{{{question}}}}?"
doc_to_target: "{{{{letter}}}}"
generation_kwargs: {{until: ["</>"], max_gen_toks: 12, do_sample: false}}
filter_list:
  - name: first
    filter:
      - {{function: regex, regex_pattern: "([ -~])"}}
      - {{function: take_first}}
  - name: any
    filter:
      - {{function: regex, regex_pattern: "([a-e])", fallback: "a"}}
      - {{function: take_first}}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata: {{version: 3.0}}
"""
_SURPRISE = """\
task: surprise
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}, train: {data}}}
test_split: test
fewshot_split: train
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{letter}}}}"
metric_list:
  - metric: perplexity
  - metric: acc
metadata: {{version: 1.0}}
"""
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("mc_group,words,surprise", {}),
    "template": ("mc_group,words,surprise", {"apply_chat_template": True}),
    "fewshot": ("choices,words", {"num_fewshot": 2, "seed": 11, "batch_size": 3}),
    "turns": (
        "mc_group,words",
        {
            "apply_chat_template": True,
            "num_fewshot": 2,
            "system_instruction": "Answer with one word.",
            "limit": 7,
        },
    ),
    "one turn": (
        "choices,words",
        {
            "apply_chat_template": True,
            "num_fewshot": 2,
            "fewshot_as_multiturn": False,
            "seed": 3,
            "limit": 0.5,
        },
    ),
    "sampled": (
        "words,surprise",
        {"gen_kwargs": "do_sample=true,temperature=0.7", "seed": 5, "limit": 9},
    ),
}


def write_tasks(directory: Path) -> Path:
    directory.mkdir()
    drawn = random.Random(0)
    rows = [
        {
            "question": " ".join(drawn.sample(WORDS, 3)),
            "choices": drawn.sample(WORDS, 3),
            "label": drawn.randrange(3),
            "letter": drawn.choice("abcde"),
        }
        for _ in range(24)
    ]
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, version in ("a", 1.0), ("b", 2):
        text = _CHOICE.format(name=name, version=version, data=data)
        (directory / f"mc_{name}.yaml").write_text(text)
    (directory / "mc_group.yaml").write_text(_GROUP)
    (directory / "words.yaml").write_text(_FILTERS.format(data=data))
    (directory / "surprise.yaml").write_text(_SURPRISE.format(data=data))
    return directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tasks, a model that transformers saved, and its shards."""
    place = tmp_path_factory.mktemp("equal")
    write_tasks(place / "tasks")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512)
    tokenizer.save_pretrained(place / "whole")
    model.save_pretrained(place / "whole")
    step = place / "run" / "checkpoint-3"
    model.config.save_pretrained(step)
    tokenizer.save_pretrained(step)
    save_ranks(step / "pytorch_model_fsdp_0", model.state_dict(), 2)
    return place


def by_hand(place: Path, output: Path, tasks: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run lm-eval's own command line; return its document."""
    flags = [f"--{name}={value}" for name, value in options.items() if value not in (True, False)]
    flags += [f"--{name}" for name, value in options.items() if value is True]
    flags += [f"--{name}=false" for name, value in options.items() if value is False]
    command = [sys.executable, "-m", "lm_eval", "run", "--model=hf", f"--tasks={tasks}", *flags]
    command += [f"--model_args=pretrained={place / 'whole'}", f"--include_path={place / 'tasks'}"]
    output.mkdir()
    done = run_evaluator([*command, "--device=cpu", f"--output_path={output}/r.json"], output)
    assert done.returncode == 0, done.stdout
    (file,) = output.glob("*.json")
    document: dict[str, Any] = json.loads(file.read_bytes())
    return document


def by_us(place: Path, directory: Path, profile: Profile, tasks: str, asked: Arguments) -> Scores:
    """Do what an attempt does."""
    checkpoint = place / "run" / "checkpoint-3"
    request = Request(str(checkpoint), "lm", tuple(tasks.split(",")), arguments=asked)
    job = Job("job", request, Status.RUNNING, 0.0)
    (directory / "output").mkdir(parents=True)
    merger = Merger(directory / "merged", at_once=1)
    model = merger.prepare(job, profile, directory=directory, is_given_up=lambda: False)
    work = EvalInput(model, directory / "output", directory, request, profile)
    done = run_evaluator(profile.command_line(work), directory)
    assert done.returncode == 0, done.stdout
    return profile.read_scores(work, done.returncode)


def flat(document: Mapping[str, Any], *, errors: bool) -> dict[str, float]:
    """Return the numbers of lm-eval's document by the names that we give them."""
    return {
        f"{task}/{name.removesuffix(',none').replace('_stderr', '')}": value
        for task, values in document["results"].items()
        for name, value in values.items()
        if isinstance(value, int | float) and name != "sample_len" and ("_stderr" in name) == errors
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_lm_evals_command_line(place: Path, tmp_path: Path, case: str) -> None:
    tasks, options = CASES[case]
    document = by_hand(place, tmp_path / "hand", tasks, options)
    expected, errors = flat(document, errors=False), flat(document, errors=True)
    assert len(expected) >= 4
    paths = (place / "tasks",)
    asked = Arguments.model_validate(options)
    of_profile = LmEvalProfile(include_paths=paths, arguments=OwnArguments.model_validate(options))
    for name, profile, chosen in (
        ("submission", LmEvalProfile(include_paths=paths), asked),
        ("profile", of_profile.model_copy(update={"weights": "direct"}), Arguments()),
    ):
        measured = by_us(place, tmp_path / name, profile, tasks, chosen)
        assert measured.metrics == expected
        assert measured.errors == {key: errors[key] for key in expected if key in errors}
        assert measured.evaluator == f"lm_eval {document['lm_eval_version']}"
        facts = measured.tasks
        if "mc_group" in tasks:
            assert facts["mc_group"].version == "2.5"
        group_of = {
            task: group for group, members in document["group_subtasks"].items() for task in members
        }
        for task in document["n-samples"]:
            assert facts[task] == TaskFacts(
                str(document["versions"][task]),
                document["n-shot"][task],
                document["n-samples"][task]["effective"],
                group_of.get(task),
            )


@pytest.mark.slow
def test_the_template_makes_a_difference(place: Path, tmp_path: Path) -> None:
    """A submission can leave out what its profile applies."""
    own = OwnArguments(apply_chat_template=True)
    profile = LmEvalProfile(include_paths=(place / "tasks",), arguments=own)
    found = [
        by_us(place, tmp_path / str(applied), profile, "surprise", chosen).metrics
        for applied, chosen in (
            (True, Arguments()),
            (False, Arguments(apply_chat_template=False)),
        )
    ]
    assert found[0] != found[1]


def test_a_template_that_is_not_applied_is_reported_once(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(name: str, profile_name: str, **options: object) -> list[str]:
        caplog.clear()
        profile = LmEvalProfile(arguments=OwnArguments.model_validate(options))
        (tmp_path / name).mkdir()
        request = Request("/a", profile_name, ("t",))
        work = EvalInput(place / "whole", tmp_path / name, tmp_path / name, request, profile)
        profile.command_line(work)
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING):
        assert start("applied", "chat", apply_chat_template=True) == []
        assert start("decided", "chat", apply_chat_template=False) == []
        (message,) = start("first", "chat")
        assert message == (
            "profile chat: the model has a chat template, which the profile does not apply: set "
            "`arguments: apply_chat_template` to true, or to false to silence this"
        )
        assert start("second", "chat") == []
        assert len(start("another", "other")) == 1
        config = place / "whole" / "chat_template.jinja"
        assert config.is_file()
        text = config.read_text()
        config.unlink()
        assert start("none", "third") == []
        config.write_text(text)


@pytest.mark.slow
def test_code_that_a_model_wrote_runs_only_if_the_profile_says_so(
    place: Path, tmp_path: Path
) -> None:
    """lm-eval asks for it where a task says that it runs such code, as HumanEval does."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    text = (place / "tasks" / "surprise.yaml").read_text()
    (tasks / "unsafe.yaml").write_text(
        text.replace("task: surprise", "task: unsafe\nunsafe_code: true")
    )
    asked = Arguments(limit=2)
    refusing = LmEvalProfile(include_paths=(tasks,))
    with pytest.raises(AssertionError, match="confirm_run_unsafe_code"):
        by_us(place, tmp_path / "no", refusing, "unsafe", asked)
    own = OwnArguments(confirm_run_unsafe_code=True)
    allowing = refusing.model_copy(update={"arguments": own})
    measured = by_us(place, tmp_path / "yes", allowing, "unsafe", asked)
    assert measured.metrics.keys() == {"unsafe/perplexity", "unsafe/acc"}
    assert refusing.revision() == allowing.revision()
