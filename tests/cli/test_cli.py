"""The command line as a user meets it: output, exit codes, errors without traceback."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from command import unshard
from ranks import assert_same, merged, rank_path, save_ranks, some_tensors
from unshard import __version__, api
from unshard.cli.main import app, main
from unshard.cli.reports import print_report
from unshard.write.dirfd import exchange
from waiting import LIMIT_S

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "checkpoint"

BARE = ["--config", "none"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "global_step_7" / "actor", some_tensors(), 2)


def test_merge_prints_what_it_did(checkpoint: Path, tmp_path: Path) -> None:
    done = unshard("merge", checkpoint, tmp_path / "out", *BARE)
    assert done.returncode == 0
    assert "merged 3 tensors of 2 ranks: 3 float32" in done.stdout
    assert f"saved to {tmp_path / 'out'}" in done.stdout
    first = f"merging {checkpoint} (step 7, actor, model weights)"
    assert done.stderr.splitlines()[0] == first
    assert_same(merged(tmp_path / "out"), some_tensors())


def test_a_quiet_upload_shows_no_progress_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []

    def push(*_: object, bars: bool, **__: object) -> str:
        shown.append(bars)
        return "https://example.org"

    monkeypatch.setattr("unshard.write.hub.push", push)
    monkeypatch.setattr("unshard.write.hub.check_repo", lambda *_, **__: None)
    monkeypatch.setattr("unshard.api.making.is_terminal", lambda: True)
    for name, *flags in (("loud",), ("quiet", "--quiet")):
        with pytest.raises(SystemExit) as ended:
            main(["merge", str(EXAMPLE), str(tmp_path / name), "--push-to-hub=me/model", *flags])
        assert ended.value.code == 0
    assert shown == [True, False]


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
def test_weights_without_a_config_are_not_announced_as_a_model(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = "weights only: not loadable by transformers without a config.json"
    report = api.merge(checkpoint, tmp_path / "bare", config="none")
    print_report(report, as_json=False, quiet=False)
    assert capsys.readouterr().out.splitlines()[-1] == last
    print_report(report, as_json=True, quiet=False)
    assert json.loads(capsys.readouterr().out)["loadable"] is False

    planned = api.merge(checkpoint, tmp_path / "planned", dry_run=True, config="none")
    print_report(planned, as_json=False, quiet=False)
    assert capsys.readouterr().out.splitlines()[-1] == last

    (checkpoint / "config.json").write_text('{"model_type": "of-our-own"}')
    report = api.merge(checkpoint, tmp_path / "whole")
    print_report(report, as_json=False, quiet=False)
    assert report.loadable
    assert last not in capsys.readouterr().out


def test_quiet_prints_nothing(checkpoint: Path, tmp_path: Path) -> None:
    done = unshard("merge", checkpoint, tmp_path / "out", "--quiet", *BARE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_json_is_one_object_on_stdout(checkpoint: Path, tmp_path: Path) -> None:
    done = unshard("merge", checkpoint, tmp_path / "out", "--json", *BARE)
    report = json.loads(done.stdout)
    assert report["tensors"] == 3
    assert report["files"].keys() == {"model.safetensors"}
    assert report["peak_memory_bytes"] > 0
    assert "writing" in done.stderr


@pytest.mark.parametrize("group", ["", "eval"])
def test_the_list_of_commands_cuts_no_summary(group: str) -> None:
    done = unshard(*group.split(), "--help")
    commands = done.stdout.partition("Commands:\n")[2].splitlines()
    assert len(commands) > 5
    assert [line for line in commands if line.endswith(("...", "…"))] == []
    assert all(line.endswith((".", ").")) for line in commands)


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
def test_one_tensor_is_counted_as_one(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    report = api.merge(
        tmp_path, tmp_path / "out", allow_missing=True, allow_unexpected=True, config="none"
    )
    for one in (report, api.inspect(tmp_path)):
        assert re.search(r"\b1 tensor\b", repr(one))


def test_a_dry_run_prints_the_plan(checkpoint: Path, tmp_path: Path) -> None:
    done = unshard("merge", checkpoint, tmp_path / "out", "--dry-run", "--dtype", "bfloat16", *BARE)
    assert done.returncode == 0
    for words in (
        "model.safetensors",
        "\n  unshard.json\n",
        "3 (3 bfloat16)",
        "3 Cast",
        "reads:      648 bytes",
        "128 MB",
    ):
        assert words in done.stdout
    assert not (tmp_path / "out").exists()


def test_inspect_prints_for_people_and_for_programs(checkpoint: Path) -> None:
    done = unshard("inspect", checkpoint)
    assert done.returncode == 0
    for words in ("FSDP rank files, written by verl", "fsdp=2", "Shard(0)", "162 in 3 tensors"):
        assert words in done.stdout
    found = json.loads(unshard("inspect", checkpoint, "--json").stdout)
    assert found["tensors"][0]["placements"] == ["Shard(0)"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["merge"], 2, "Missing argument"),
        (["merge", "{ckpt}", "{out}", "--frobnicate"], 2, "No such option"),
        (["merge", "{ckpt}", "{out}", "--dtype", "int4"], 2, "--dtype int4: unknown"),
        (["merge", "{ckpt}", "{out}", "--role", "ref"], 3, "has no ref"),
        (["merge", "{out}"], 3, "no such file"),
        (["merge", "{ckpt}", "{out}"], 3, "no config.json was found"),
        (["merge", "{ckpt}", "{out}", *BARE, "--dtype", "config"], 4, "there is no config.json"),
        (["merge", "{ckpt}", "{ckpt}", *BARE], 5, "exists already"),
        (["inspect", "{tmp}/nowhere"], 3, "no such file"),
    ],
)
def test_errors_have_their_exit_code_and_no_traceback(
    checkpoint: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    names = {"ckpt": checkpoint, "out": tmp_path / "out", "tmp": tmp_path}
    done = unshard(*(argument.format(**names) for argument in arguments))
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_error_is_json_too(checkpoint: Path, tmp_path: Path) -> None:
    rank_path(checkpoint, 2, 1).unlink()
    done = unshard("merge", checkpoint, tmp_path / "out", "--json")
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert (error["type"], error["code"]) == ("IncompleteError", 3)
    assert "rank 1" in error["message"]
    assert error["hint"]


def test_an_unwritable_place_is_an_output_error(checkpoint: Path) -> None:
    done = unshard("merge", checkpoint, rank_path(checkpoint, 2, 0) / "out", *BARE)
    assert done.returncode == 5
    assert "cannot be written" in done.stderr


def test_the_version_is_printed() -> None:
    assert unshard("--version").stdout == f"unshard {__version__}\n"


INTERRUPTED = """
import os, signal
from unshard.__main__ import main
from unshard.write.execute import Executor

do, done = Executor.do, []

def interrupted(self, unit):
    if not done:
        done.append(unit)
        os.kill(os.getpid(), signal.SIGINT)
    return do(self, unit)

Executor.do = interrupted
main()
"""


def test_ctrl_c_exits_130_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    before = [path.name for path in tmp_path.iterdir()]
    command = [
        sys.executable,
        "-c",
        INTERRUPTED,
        "merge",
        str(checkpoint),
        str(tmp_path / "out"),
        *BARE,
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 130
    assert "writing" in child.stderr
    assert "interrupted" in child.stderr
    assert "Traceback" not in child.stderr
    assert [path.name for path in tmp_path.iterdir()] == before


def test_a_terminal_gets_a_progress_bar(checkpoint: Path, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "unshard", "merge", str(checkpoint), str(tmp_path / "out")]
    command += BARE
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=slave, env=os.environ | {"TERM": "xterm"}
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        shown += data
    os.close(master)
    assert child.wait(LIMIT_S) == 0
    assert b"/s" in shown or b"committing" in shown
    assert b"\rreading" in shown


def run_here(*arguments: str | Path) -> int:
    """Run the command line in this process; return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


Printed = pytest.CaptureFixture[str]


def test_verbose_tells_what_is_read_and_planned(
    checkpoint: Path, tmp_path: Path, capsys: Printed
) -> None:
    assert run_here("merge", checkpoint, tmp_path / "out", "-v", *BARE) == 0
    said = capsys.readouterr().err
    assert re.search(r"\d ms  unshard\.[\w.]+: .*rank files, written by verl.*step 7", said)
    assert "plan: 3 tensors in 1 file," in said
    assert "read w1" not in said
    assert run_here("merge", checkpoint, tmp_path / "more", "-vv", *BARE) == 0
    names = sorted(some_tensors())
    assert f"read {names[0]}: float32" in capsys.readouterr().err
    assert run_here("merge", checkpoint, tmp_path / "less", *BARE) == 0
    assert " ms  " not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "eval"])
def test_h_is_help_of_groups(command: str, capsys: Printed) -> None:
    assert run_here(*command.split(), "-h") == 0
    short = capsys.readouterr().out
    assert run_here(*command.split(), "--help") == 0
    assert capsys.readouterr().out == short
    assert "-h, --help" in short


def test_the_options_of_merge_are_in_groups(capsys: Printed) -> None:
    run_here("merge", "--help")
    headings = re.findall(r"^(\S.*):$", capsys.readouterr().out, re.MULTILINE)
    groups = ["Arguments", "Checkpoint", "Tensors", "Base model", "Output", "Running"]
    groups += ["Following a run", "Options"]
    assert headings == [*groups, "Examples"]


def test_the_output_of_merge_is_an_argument_or_an_option(checkpoint: Path, tmp_path: Path) -> None:
    assert run_here("merge", checkpoint, tmp_path / "first", *BARE) == 0
    assert run_here("merge", checkpoint, "-o", tmp_path / "second", *BARE) == 0
    assert_same(merged(tmp_path / "first"), merged(tmp_path / "second"))


def test_two_outputs_of_merge_are_refused(
    checkpoint: Path, tmp_path: Path, capsys: Printed
) -> None:
    assert run_here("merge", checkpoint, tmp_path / "a", "--output", tmp_path / "b") == 2
    assert "two outputs" in capsys.readouterr().err
    assert not list(tmp_path.glob("[ab]"))


def test_the_output_of_average_is_an_argument_or_an_option(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = save_ranks(tmp_path / "other", some_tensors(seed=1), 2)
    assert run_here("average", checkpoint, other, tmp_path / "first", *BARE) == 0
    assert run_here("average", checkpoint, other, "-o", tmp_path / "second", *BARE) == 0
    assert_same(merged(tmp_path / "first"), merged(tmp_path / "second"))


def test_the_last_checkpoint_of_an_average_is_not_taken_for_its_output(
    checkpoint: Path, tmp_path: Path, capsys: Printed
) -> None:
    other = save_ranks(tmp_path / "other", some_tensors(), 2)
    for arguments in ([checkpoint], [checkpoint, other], [checkpoint, other, "--overwrite"]):
        assert run_here("average", *arguments) == 2
        assert "the output is missing" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_and_installed(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_here("--show-completion") == 0
    shown = capsys.readouterr().out
    assert run_here("--install-completion") == 0
    (script,) = (one for one in tmp_path.rglob("*unshard*") if one.is_file())
    assert f"{script} completes unshard" in capsys.readouterr().out
    assert script.read_text().strip() == shown.strip()
    if shell == "bash":
        asked = "COMP_WORDS=(unshard ver); COMP_CWORD=1; _unshard_completion unshard"
        ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = ["bash", "-c", f". {script}; {asked}; echo ${{COMPREPLY[@]}}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=ours)
        assert done.stdout == "verify\n"


def test_a_shell_without_completion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    with pytest.raises(SystemExit, match="no completion for the shell 'tcsh'"):
        app(["--install-completion"], prog_name="unshard")


@pytest.mark.parametrize(
    ("option", "values"),
    [("--dtype", ("keep", "bfloat16")), ("--lora", ("fuse", "both")), ("--verify", ("full",))],
)
def test_choices_are_shown_completed_and_named(
    option: str,
    values: tuple[str, ...],
    checkpoint: Path,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_here("merge", checkpoint, option, "nonsense") == 2
    refused = capsys.readouterr().err
    run_here("merge", "--help")
    shown = capsys.readouterr().out
    monkeypatch.setenv("_UNSHARD_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"unshard merge CKPT {option} ")
    monkeypatch.setenv("COMP_CWORD", "4")
    with pytest.raises(SystemExit):
        app([], prog_name="unshard")
    completed = re.split(r"[,\n]", capsys.readouterr().out)
    for value in values:
        assert value in refused
        assert re.search(rf"{option} [\w|]*\b{value}\b", shown)
        assert value in completed


class OnTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_inspect_breaks_lines_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    run_here("inspect", EXAMPLE)
    piped = capsys.readouterr().out
    assert max(map(len, piped.splitlines())) > 80
    shown = OnTerminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", "80")
    run_here("inspect", EXAMPLE)
    assert shown.getvalue().split() == piped.split()
    for line in shown.getvalue().splitlines():
        assert len(line) <= 80 or len(line.split()) == 1
        assert not line.startswith(" ") or line.startswith(" " * 14)


def test_one_is_not_a_plural(tmp_path: Path, capsys: Printed) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", {"w": torch.zeros(1)}, 1)
    run_here("inspect", checkpoint)
    assert "1 in 1 tensor, 4 B" in capsys.readouterr().out
    run_here("merge", checkpoint, tmp_path / "out", "--dry-run", *BARE)
    assert "tensors:    1 (1 float32), 1 parameter\n" in capsys.readouterr().out
    run_here("merge", checkpoint, tmp_path / "out", *BARE)
    printed = capsys.readouterr().out
    assert "merged 1 tensor of 1 rank: 1 float32" in printed
    assert " in 1 file, " in printed
    run_here("verify", tmp_path / "out", "--against", checkpoint)
    assert "1 tensor, bit by bit" in capsys.readouterr().out


def test_env_says_what_a_bug_report_needs(tmp_path: Path, capsys: Printed) -> None:
    assert run_here("env", tmp_path, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["torch"] == torch.__version__
    assert said["unshard"].startswith(__version__)
    assert said["renameat2"] == ("yes" if exchanged(tmp_path) else "no")
    assert run_here("env", tmp_path / "nowhere") == 0
    assert "nowhere: No such file or directory" in capsys.readouterr().out
    assert not list(tmp_path.glob("_unshard*"))


def exchanged(directory: Path) -> bool:
    """Return whether two directories here can be swapped."""
    for name in ("first", "second"):
        (directory / name).mkdir()
    fd = os.open(directory, os.O_RDONLY)
    try:
        return exchange(fd, "first", fd, "second")
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["merge", "", "out"], "an argument"),
        (["merge", "ckpt", ""], "an argument"),
        (["merge", "ckpt", "--base", ""], "the value of --base"),
        (["inspect", "--role=", "."], "the value of --role"),
        (["eval", "serve", "--config", ""], "the value of --config"),
    ],
)
def test_an_empty_argument_is_not_the_current_directory(
    arguments: list[str], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert f"error: {where} is empty\n" in capsys.readouterr().err
