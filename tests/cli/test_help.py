"""What `--help` and `-h` show: every example can be typed, and the short page is short."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.testing import assert_close as assert_tensors_close
from transformers import AutoModelForCausalLM

from command_tree import commands_of
from ranks import assert_same, save_ranks
from tiny_models import tiny_config, tiny_model
from trainers import dcp_under
from unshard.cli.main import app, main
from unshard.cli.parser.examples import EXAMPLES
from unshard.keywords import MOST_USED

LINES = EXAMPLES.strip().splitlines()


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield every command that is not a group, by the words that it is called with."""
    inner = commands_of(command)
    if not inner:
        yield name, command
    for word, one in inner.items():
        yield from commands(f"{name} {word}".strip(), one)


COMMANDS = dict(commands("", app))


def shown(command: str, option: str = "--help") -> str:
    words = [*command.split(), option]
    done = CliRunner().invoke(app, words, prog_name="unshard", terminal_width=80)
    assert done.exit_code == 0, done.output
    return done.stdout


def command_of(line: str) -> tuple[str, list[str]]:
    """Return the command of an example, and its arguments."""
    unshard, *words = shlex.split(line)
    assert unshard == "unshard"
    count = 2 if words[0] == "eval" else 1
    return " ".join(words[:count]), words[count:]


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_the_examples_of_its_command(command: str, option: str) -> None:
    _, found, examples = shown(command, option).partition("\nExamples:\n")
    assert found
    lines = re.findall(r"^  (unshard .*)$", examples, re.MULTILINE)
    assert lines == [line for line in LINES if command_of(line)[0] == command]
    assert 1 <= len(lines) <= 3
    assert len({*lines}) == len(lines)


def test_no_example_is_of_a_command_that_there_is_not() -> None:
    assert {command_of(line)[0] for line in LINES} == {*COMMANDS}


@pytest.mark.parametrize("line", LINES)
def test_the_parser_of_its_command_takes_every_example(line: str) -> None:
    command, words = command_of(line)
    context = COMMANDS[command].make_context(command, words)
    theirs = {"vllm", "sglang"}  # take the options of another program, too
    assert not context.args or command in theirs
    assert len(line) <= 76  # not wrapped where help is


def model_of(seed: int) -> Any:
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + seed / 8)
    return model


ACTOR, CRITIC, TRAINED, BASE = range(4)
"""The seeds of the models, each of its highest step; those of lower steps are larger by tens."""


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trees of verl, and of the HF Trainer, whose checkpoints have no config.json."""
    place = tmp_path_factory.mktemp("trees")
    for ten, step in enumerate((100, 90, 80)):
        for seed, role in ((ACTOR, "actor"), (CRITIC, "critic")):
            folder = place / f"checkpoints/my-run/global_step_{step}" / role
            save_ranks(folder, model_of(10 * ten + seed).state_dict(), 2)
            tiny_config().save_pretrained(folder / "huggingface")
        folder = place / f"outputs/checkpoint-{10 * step}"
        dcp_under("model")(
            folder / "pytorch_model_fsdp_0", model_of(10 * ten + TRAINED).state_dict()
        )
        (folder / "trainer_state.json").write_text("{}")
    model_of(BASE).save_pretrained(place / "Qwen" / "Qwen3-8B")
    return place


def run(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line)[1:])
    assert not ended.value.code, line


def mean(seeds: Sequence[int], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return the average of models, in float64."""
    models = [model_of(seed).state_dict() for seed in seeds]
    return {
        name: sum(w * one[name].double() for w, one in zip(weights, models, strict=True))
        for name in models[0]
    }


def assert_close(output: str, truth: Mapping[str, torch.Tensor]) -> None:
    found = loaded(output).state_dict()
    assert found.keys() == truth.keys()
    for name, tensor in found.items():
        assert_tensors_close(tensor, truth[name].float())


def loaded(output: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(output, dtype="auto")


MERGE, BASED, ROLES, AVERAGE, EMA = (
    line for line in LINES if line.split()[1] in {"merge", "average"}
)
(RESHARD,) = (line for line in LINES if line.startswith("unshard reshard"))
VERIFY, *_ = (line for line in LINES if line.startswith("unshard verify"))
INSPECT, _STORE = (line for line in LINES if line.startswith("unshard inspect"))


def test_the_examples_about_checkpoints_do_what_they_say(
    trees: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the trees of two trainers; transformers loads each output."""
    shutil.copytree(trees, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run(MERGE)
    assert_same(loaded("my-model").state_dict(), model_of(ACTOR).state_dict())
    run(INSPECT)
    assert "global_step_100" in capsys.readouterr().out
    run(VERIFY)
    run(RESHARD)
    run("unshard verify my-model --against resharded")
    shutil.rmtree("my-model")
    run(BASED)
    assert_same(loaded("my-model").state_dict(), model_of(TRAINED).state_dict())
    run(ROLES)
    for seed, role in ((ACTOR, "actor"), (CRITIC, "critic")):
        found = loaded(f"my-models/{role}")
        assert found.dtype == torch.bfloat16
        assert_same(found.state_dict(), model_of(seed).bfloat16().state_dict())
    run(AVERAGE)
    drops = [(1 / 3) ** 0.5, (2 / 3) ** 0.5 - (1 / 3) ** 0.5, 1 - (2 / 3) ** 0.5]
    assert_close("averaged", mean([20 + ACTOR, 10 + ACTOR, ACTOR], drops))
    shutil.rmtree("averaged")
    run(EMA)
    seeds = [20 + TRAINED, 10 + TRAINED, TRAINED]
    assert_close("averaged", mean(seeds, [0.81, 0.09, 0.1]))


@pytest.mark.parametrize("command", ["merge", "average"])
def test_short_help_has_the_options_that_people_use(command: str) -> None:
    short, whole = shown(command, "-h"), shown(command)
    options = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", short, re.MULTILINE)
    every = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", whole, re.MULTILINE)
    assert 12 <= len(options) <= 14
    assert {*options} < {*every}
    assert short.endswith(f"\n--help shows all {len(every)} options.\n")
    assert "--help shows" not in whole
    assert 2 * len(short.splitlines()) < len(whole.splitlines())


def test_short_help_of_merge_has_one_line_for_each_option() -> None:
    found = shown("merge", "-h").partition("\nOptions:\n")[2].partition("\nExamples:")[0]
    lines = [line for line in found.splitlines() if not re.match(r"  --\S+ \S{20,}$", line)]
    assert all(line.startswith("  --") or line.split("  ")[-1] for line in lines)
    wrapped = [line for line in lines if line and not line.startswith("  --")]
    assert len(wrapped) == 2  # below two options with many choices


def test_all_that_is_used_most_is_an_option() -> None:
    names = {one.name for command in ("merge", "average") for one in COMMANDS[command].params}
    assert names >= {*MOST_USED}


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("merge", "average")])
def test_of_other_commands_h_shows_all(command: str) -> None:
    assert shown(command, "-h") == shown(command, "--help")


@pytest.mark.parametrize("words", [["x", "-h"], ["-h", "x"], ["x", "--dtype", "keep", "-h"]])
def test_h_is_help_wherever_it_is(words: list[str]) -> None:
    found = CliRunner().invoke(app, ["merge", *words], prog_name="unshard", terminal_width=80)
    assert found.stdout == shown("merge", "-h")


def test_the_package_has_the_same_help_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unshard", "eval", "submit", "--help"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "  unshard eval submit outputs/checkpoint-1000 " in done.stdout
