"""`unshard verify` as a user meets it, and `unshard.verify`: what is compared, and exit codes."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import unshard
from ranks import save_ranks, snapshot, some_tensors
from unshard.cli.main import main
from unshard.keywords import Cast

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "checkpoint"


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; starting a new one takes longer than most of its work."""

    def verify(*arguments: str | Path) -> Done:
        with pytest.raises(SystemExit) as stopped:
            main(["verify", *map(str, arguments)])
        printed = capsys.readouterr()
        code = stopped.value.code
        assert isinstance(code, int)
        return Done(code, printed.out, printed.err)

    return verify


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "global_step_7" / "actor", some_tensors(), 2)


@pytest.fixture
def output(checkpoint: Path, tmp_path: Path) -> Path:
    unshard.merge(checkpoint, tmp_path / "out", config="none")
    return tmp_path / "out"


def change(output: Path, **tensors: torch.Tensor) -> None:
    path = output / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): t for name, t in tensors.items()}, path)


def test_a_merge_is_the_same_as_its_checkpoint(checkpoint: Path, output: Path) -> None:
    before = snapshot(checkpoint.parent), snapshot(output)
    command = ["verify", str(output), "--against", str(checkpoint.parent)]
    done = subprocess.run(
        [sys.executable, "-m", "unshard", *command], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "compared    3 tensors, bit by bit",
        "equal       3",
        "different   0",
        "the models are the same",
    ]
    first = f"comparing {output} with {checkpoint} (step 7, actor, model weights)"
    assert done.stderr.splitlines()[0] == first
    assert (snapshot(checkpoint.parent), snapshot(output)) == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_merge_equals_its_checkpoint_exactly(
    checkpoint: Path, tmp_path: Path, dtype: Cast
) -> None:
    unshard.merge(checkpoint, tmp_path / "out", dtype=dtype, config="none")
    found = unshard.verify(tmp_path / "out", checkpoint)
    assert found.equal
    assert all(one.cast and one.dtype_ours == dtype for one in found.tensors)


def test_differences_are_listed_worst_first_and_exit_with_1(
    run: Run, checkpoint: Path, output: Path
) -> None:
    tensors = some_tensors()
    norm, head = tensors["model.norm.weight"], tensors["lm_head.weight"]
    norm[0] = math.nan
    change(output, model__norm__weight=norm, lm_head__weight=head * 1.5, extra=torch.zeros(2))
    done = run(output, "--against", checkpoint)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[1:3] == ["equal       1", "different   2"]
    assert lines[3].startswith("  model.norm.weight: 1 of 6 elements, by up to 0 (0 relative), NaN")
    assert lines[4].startswith("  lm_head.weight: 78 of 78 elements, by up to ")
    assert "(0.5 relative), norm " in lines[4]
    assert lines[5:] == [
        "unexpected  1",
        "  extra",
        "NaN in      1",
        "  model.norm.weight",
        "the models are not the same",
    ]


def test_tolerances_let_small_differences_pass(run: Run, checkpoint: Path, output: Path) -> None:
    change(output, lm_head__weight=some_tensors()["lm_head.weight"] * 1.001)
    assert run(output, "--against", checkpoint).returncode == 1
    done = run(output, "--against", checkpoint, "--rtol", "0.01")
    assert done.returncode == 0
    assert "3 tensors, within the tolerances" in done.stdout
    assert run(output, "--against", checkpoint, "--atol", "1e-9").returncode == 1


def test_only_the_first_twenty_are_shown(run: Run, tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 1.0)):
        tensors = {f"layer.{n}": torch.full((2,), value + n + 1) for n in range(30)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    done = run(tmp_path / "a.safetensors", "--against", tmp_path / "b.safetensors")
    assert sum(line.startswith("  layer.") for line in done.stdout.splitlines()) == 20
    assert "  and 10 more" in done.stdout


def test_json_is_one_object_and_valid_even_with_nan(
    run: Run, checkpoint: Path, output: Path
) -> None:
    change(output, model__norm__weight=torch.full((6,), math.nan))
    done = run(output, "--against", checkpoint, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert (found["equal"], found["compared"], found["different"]) == (False, 3, 1)
    norm = next(one for one in found["tensors"] if one["name"] == "model.norm.weight")
    assert (norm["values"]["norm_ours"], norm["values"]["nans_ours"]) == ("nan", 6)


def test_quiet_says_it_by_the_exit_code_alone(run: Run, checkpoint: Path, output: Path) -> None:
    done = run(output, "--against", checkpoint, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    change(output, extra=torch.zeros(2))
    done = run(output, "--against", checkpoint, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_a_merge_in_place_is_compared_with_the_shards_next_to_it(
    run: Run, checkpoint: Path
) -> None:
    for limit in ("5GB", "500B"):
        unshard.merge(checkpoint, checkpoint, overwrite=True, max_shard_size=limit, config="none")
        assert run(checkpoint, "--against", checkpoint).returncode == 0
    files = sorted(checkpoint.glob("*.safetensors"))
    assert len(files) > 1
    tensors = load_file(files[0])
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, files[0])
    assert run(checkpoint, "--against", checkpoint).returncode == 1


def test_load_asks_transformers_too(run: Run, tmp_path: Path) -> None:
    unshard.merge(EXAMPLE, tmp_path / "out", dtype="config")
    done = run(tmp_path / "out", "--against", EXAMPLE, "--load")
    assert done.returncode == 0
    assert "as Qwen2ForCausalLM: every parameter is there, in its shape" in done.stdout
    config = tmp_path / "out" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"intermediate_size": fields["intermediate_size"] + 1}))
    done = run(tmp_path / "out", "--against", EXAMPLE, "--load")
    assert done.returncode == 1
    assert "loads       as Qwen2ForCausalLM, but:" in done.stdout
    assert "  model.layers.0.mlp.down_proj.weight: shape " in done.stdout


@pytest.mark.usefixtures("output")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{out}"], 2, "--against"),
        (["{out}", "--against", "{ckpt}", "--atol", "-1"], 2, "a tolerance must be a number"),
        (["{out}", "--against", "{ckpt}", "--rtol", "nan"], 2, "a tolerance must be a number"),
        (["{out}", "--against", "{ckpt}", "--memory", "1MB"], 2, "too little to compare"),
        (["{tmp}/nowhere", "--against", "{ckpt}"], 3, "nowhere: no such file or directory"),
        (["{ckpt}", "--against", "{ckpt}"], 3, "has no whole weights"),
        (["{out}", "--against", "{tmp}/nowhere"], 3, "no such file"),
        (["{out}", "--against", "{ckpt}", "--load"], 5, "has no config.json"),
    ],
)
def test_errors_have_their_exit_code_and_no_traceback(
    run: Run, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    checkpoint = tmp_path / "global_step_7" / "actor"
    names = {"ckpt": checkpoint, "out": tmp_path / "out", "tmp": tmp_path}
    done = run(*(argument.format(**names) for argument in arguments))
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
