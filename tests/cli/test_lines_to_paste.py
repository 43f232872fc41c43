"""Lines to paste are whole: each is taken from the message, pasted once, and gets further."""

import ast
import json
import os
import re
import shlex
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import unshard
from expert_copies import BLOCKS, save_experts, truth
from megatron_cases import ARCHIVE
from ranks import merged, rank_path, save_ranks, some_tensors
from unshard.cli.commands import merge, push
from unshard.cli.main import main as command_line
from unshard.cli.running import front_of
from unshard.compat import merge_fsdp, zero_to_fp32
from unshard.errors import UnshardError
from unshard.fronts import Text

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

SOURCE = Path(unshard.__file__).parent
_COMMAND = re.compile(r"\bunshard (merge|push|average|inspect|verify|reshard|eval|vllm|sglang)\b")
Main = Callable[[list[str]], None]


# Where each template applies: what makes the checkpoint in a directory, and returns the arguments.


def floats(place: Path, dtype: str = "", **config: object) -> Path:
    save_ranks(place, some_tensors(), 2)
    fields = {"model_type": "llama", **({"dtype": dtype} if dtype else {}), **config}
    (place / "config.json").write_text(json.dumps(fields))
    return place


def model(place: Path, names: dict[str, torch.Tensor], **config: object) -> Path:
    place.mkdir(parents=True)
    save_file(names, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(config))
    return place


def lora(
    place: Path, *, whole: bool = True, alpha: float | None = None, bias: str = "none"
) -> Path:
    head = {"lm_head.lora_A.default.weight": torch.ones(2, 6)}
    head |= {"lm_head.lora_B.default.weight": torch.ones(13, 2)}
    if whole:
        tensors = some_tensors()
        head["lm_head.base_layer.weight"] = tensors.pop("lm_head.weight")
        head |= tensors
    save_ranks(place, {f"base_model.model.{name}": one for name, one in head.items()}, 2)
    (place / "config.json").write_text('{"model_type": "llama"}')
    if alpha is not None:
        folder = place / "lora_adapter"
        folder.mkdir()
        fields = {"r": 2, "lora_alpha": alpha, "target_modules": ["lm_head"], "bias": bias}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
    return place


def adapter_beside(place: Path, kind: str = "LORA") -> Path:
    model(place, some_tensors(), model_type="llama")
    pair = {"A": torch.ones(2, 6), "B": torch.ones(13, 2)}
    tensors = {f"base_model.model.lm_head.lora_{key}.weight": one for key, one in pair.items()}
    save_file(tensors, place / "adapter_model.safetensors")
    fields = {"r": 2, "lora_alpha": 2, "target_modules": ["lm_head"], "peft_type": kind}
    (place / "adapter_config.json").write_text(json.dumps(fields))
    return place


def base_that_differs(top: Path) -> list[str]:
    tensors = {**some_tensors(), "model.extra.weight": torch.ones(6)}
    del tensors["lm_head.weight"]
    model(top / "base", tensors, model_type="llama")
    return ["merge", str(floats(top / "run")), str(top / "out"), "--base", str(top / "base")]


def newest_is_a_delta(top: Path) -> list[str]:
    model(top / "run" / "weight_v000011", some_tensors(), model_type="llama")
    (top / "run" / "weight_v000012").mkdir()
    (top / "run" / "weight_v000012" / "delta_manifest.json").write_text('{"base_version": 11}')
    return ["merge", str(top / "run"), str(top / "out")]


def bare(place: Path) -> Path:
    save_ranks(place, some_tensors(), 2)
    return place


def base_without_config(top: Path) -> list[str]:
    model(top / "base", some_tensors())
    (top / "base" / "config.json").unlink()
    return merging(bare, "--base", str(top / "base"))(top)


def on_two_nodes(top: Path, name: str) -> list[str]:
    """A DCP checkpoint of which a file is in another directory, DIR."""
    from trainers import dcp_under

    dcp_under()(top / "run", some_tensors())
    (top / "DIR").mkdir()
    (top / "run" / name).rename(top / "DIR" / name)
    return ["merge", str(top / "run"), str(top / "out")]


def megatron(top: Path) -> list[str]:
    with tarfile.open(ARCHIVE) as opened:
        opened.extractall(top, filter="data")
    run = str(top / "llama_tp1")
    with pytest.raises(SystemExit):
        command_line(["merge", run, str(top / "good")])
    shutil.copy(top / "good" / "config.json", top / "FILE")
    fields = json.loads((top / "FILE").read_text()) | {"hidden_act": "gelu"}
    (top / "wrong.json").write_text(json.dumps(fields))
    return ["merge", run, str(top / "out"), "--config", str(top / "wrong.json")]


def scaled_experts(top: Path) -> list[str]:
    start = "model.layers.0.mlp.experts"
    tensors = {
        f"{start}.gate_up_proj": torch.randn(2, 256, 128).to(torch.float8_e4m3fn),
        f"{start}.gate_up_proj_scale_inv": torch.rand(2, 2, 1),
        f"{start}.down_proj": torch.randn(2, 128, 128).to(torch.float8_e4m3fn),
        f"{start}.down_proj_scale_inv": torch.rand(2, 1, 1),
    }
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 2}
    return ["merge", str(model(top / "run", tensors, model_type="qwen3_moe", **sizes)), "out"]


def experts(top: Path, count: int, hidden: int = 4) -> list[str]:
    """Experts in one tensor each, which are not those of config.json, or could be turned."""
    start, width = "model.layers.0.mlp.experts", 4
    tensors = {
        f"{start}.gate_up_proj": torch.ones(3, hidden, 2 * width),
        f"{start}.down_proj": torch.ones(3, width, hidden),
    }
    sizes = {"hidden_size": 4, "moe_intermediate_size": width, "num_experts": count}
    return ["merge", str(model(top / "run", tensors, model_type="qwen3_moe", **sizes)), "out"]


def half_of_fp8(top: Path) -> list[str]:
    tensors = {"model.a.weight": torch.randn(8, 8).to(torch.float8_e4m3fn)}
    tensors["model.a.weight_scale_inv"] = torch.ones(3, 2)
    quantised = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    place = model(top / "run", tensors, model_type="llama", quantization_config=quantised)
    return ["merge", str(place), str(top / "out"), "--dtype", "bfloat16"]


class Attack:
    """What runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


def trained_state(top: Path) -> list[str]:
    place = floats(top / "run")
    for rank in range(2):
        state = {"lr_scheduler": Attack()}
        torch.save(state, place / f"extra_state_world_size_2_rank_{rank}.pt")
    return ["merge", str(place), str(top / "out")]


def zero_without_partitions(top: Path, *, stage0: bool = False) -> list[str]:
    from zero_files import save_zero, zero_model

    tensors = some_tensors()
    tag = save_zero(top / "step/tag", zero_model(tensors, order=list(tensors)), world=2, stage=1)
    for path in tag.glob("*optim_states.pt"):
        path.unlink()
    if not stage0:
        return ["merge", str(top / "step"), str(top / "out")]
    state = torch.load(tag / "mp_rank_00_model_states.pt")
    state["param_shapes"] = state["ds_config"] = None
    torch.save(state, tag / "mp_rank_00_model_states.pt")
    return [str(top / "step"), str(top / "out"), "-t", "tag"]


def plain_parts(top: Path) -> list[str]:
    parts = [{"w": torch.full((2,), float(rank))} for rank in range(2)]
    save_ranks(top / "run", some_tensors(), 2, plain=parts)
    return ["merge", str(top / "run"), str(top / "out"), "--names", "training"]


class Wrapped(torch.Tensor):
    """A tensor subclass, of which unshard does not know what it means."""


def unknown_class(top: Path) -> list[str]:
    wrapped = torch.ones(3).as_subclass(Wrapped)
    save_ranks(top / "run", some_tensors(), 2, extra={"w": wrapped})
    return ["merge", str(top / "run"), str(top / "out"), "--names", "training"]


def copies_of_experts(top: Path) -> list[str]:
    save_experts(top / "run", truth(), BLOCKS)
    return ["merge", str(top / "run"), str(top / "out"), "--names", "training"]


def roles(top: Path, *names: str) -> list[str]:
    for name in names:
        floats(top / "global_step_3" / name)
    return ["merge", str(top), str(top / "out"), "--workers", "1"]


def existing(top: Path) -> list[str]:
    arguments = ["merge", str(floats(top / "run")), str(top / "out"), "--max-shard-size", "1GB"]
    with pytest.raises(SystemExit):
        command_line(arguments)
    return arguments


def damaged(top: Path) -> list[str]:
    arguments = [*existing(top), "--reuse"]
    with (top / "out/model.safetensors").open("r+b") as file:
        file.write(bytes(8))
    return arguments


def incomplete_step(top: Path) -> list[str]:
    for step in (1, 2):
        floats(top / f"checkpoint-{step}" / "pytorch_model_fsdp_0")
    rank_path(top / "checkpoint-1" / "pytorch_model_fsdp_0", 2, 0).unlink()
    return ["--input_dir", str(top), "--output_dir", str(top / "out"), "--merge"]


class Row(NamedTuple):
    """Where a template applies.

    Attributes:
        template: a part of it, as the source has it, without what it fills in.
        make: makes what is there in a directory, and returns the arguments.
        main: the command.
    """

    template: str
    make: Callable[[Path], list[str]]
    main: Main = command_line


def drop_in(main: Callable[[], None]) -> Main:
    def run(arguments: list[str]) -> None:
        before, sys.argv = sys.argv, ["drop-in", *arguments]
        try:
            main()
        except UnshardError as error:
            sys.stderr.write(f"error: {error}\n")
        finally:
            sys.argv = before

    return run


def failing_at_last(arguments: list[str]) -> None:
    def fail(*_: object) -> None:
        raise unshard.StoreError("the store is away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unshard.api.completing.verify_output", fail)
        command_line(arguments)


def biased(top: Path) -> list[str]:
    place = lora(top / "run", alpha=2, bias="lora_only")
    return ["merge", str(place), str(top / "out"), "--lora", "adapter"]


def merging(make: Callable[[Path], Path], *options: str) -> Callable[[Path], list[str]]:
    return lambda top: ["merge", str(make(top / "run")), str(top / "out"), *options]


def tower(top: Path) -> Path:
    names = {"vision_tower.encoder.layers.0.weight": torch.ones(3)}
    return model(top, names, model_type="llava", vision_config={"model_type": "clip_vision_model"})


def of_family(model_type: str, name: str) -> Callable[[Path], Path]:
    return lambda top: model(top, {name: torch.ones(2, 4, 4)}, model_type=model_type)


ROWS = [
    Row("to cast them: ⟦+--dtype config⟧", merging(lambda top: floats(top, "bfloat16"))),
    Row(
        "⟦+--base MODEL⟧",
        merging(lambda top: floats(top, model_type="unheard-of")),
    ),
    Row("merge them with ⟦+--lora fuse⟧, or leave", merging(adapter_beside)),
    Row("leave it out with ⟦+--lora ignore⟧", merging(lambda top: adapter_beside(top, "IA3"))),
    Row("pass the alpha of the training: ⟦+--lora-alpha N⟧", merging(lora)),
    Row("⟦+--base ⟧", merging(lambda top: lora(top, whole=False, alpha=2))),
    Row("⟦+--allow-", base_that_differs),
    Row("⟦+--base ⟧", merging(bare)),
    Row("⟦+--config FILE⟧", base_without_config),
    Row("give that model and the adapter's alpha: ", merging(lambda top: lora(top, whole=False))),
    Row(
        "keep its matrices unchanged: ⟦+--lora keep⟧",
        merging(lambda top: lora(top, whole=False), "--names", "training"),
    ),
    Row("name it: ⟦+--base MODEL⟧", merging(floats, "--dtype", "base")),
    Row("or pass a config: ⟦+--config FILE|DIR⟧", merging(floats, "--dtype", "config")),
    Row("name that node's directory: ⟦+--also DIR⟧", lambda top: on_two_nodes(top, ".metadata")),
    Row("those nodes' directories: ⟦+--also DIR⟧", lambda top: on_two_nodes(top, "__0_0.distcp")),
    Row("pass the config of the model that was trained: ⟦+--config FILE|DIR⟧, ", megatron),
    Row("keep the names with ⟦+--names training⟧", scaled_experts),
    Row("keep the names with ⟦+--names training⟧", lambda top: experts(top, 3)),
    Row("check ⟦--config⟧, or keep the names", lambda top: experts(top, 5)),
    Row("write it unchanged: ⟦+--dtype keep⟧", half_of_fp8),
    Row("to merge the weights without reading it: ⟦+--no-extra-state⟧", trained_state),
    Row("in the dtype of training are whole: ⟦+--weights module⟧", zero_without_partitions),
    Row("are shards along dimension 0: ⟦+--assume-dim0⟧", plain_parts),
    Row("(if it does not: ⟦+--allow-global ", unknown_class),
    Row("they are parts of one tensor along dimension 0: ⟦+--ep-size ", copies_of_experts),
    Row(
        "if you want them: ⟦+--weights ema⟧",
        lambda top: [
            "merge",
            str(floats(top / "checkpoint-3" / "pytorch_ema_model_fsdp_0").parent),
            str(top / "out"),
        ],
    ),
    Row("if you want the ", lambda top: roles(top, "critic")),
    Row("to merge the newest whole step: ⟦+--step ", newest_is_a_delta),
    Row("choose with ⟦+--role ", lambda top: roles(top, "ref", "reward")),
    Row("fuse the adapter: ⟦+--lora fuse⟧", biased),
    Row("; rerun with ⟦+--resume⟧ to reuse them", merging(floats, "--resume"), failing_at_last),
    Row("with a warning: unshard average ", incomplete_step, drop_in(merge_fsdp.main)),
    Row("or replace the weights there: ⟦+--overwrite⟧", existing),
    Row("on a disk you can replace it: ⟦+--overwrite⟧", damaged),
    Row("the vision tower has the names of transformers 5; ", merging(tower)),
    Row(
        "each expert is written as a tensor, as transformers saves them; ",
        merging(of_family("qwen3_5_moe_text", "model.layers.0.mlp.experts.0.up_proj.weight")),
    ),
    Row(
        "the experts' matrices are kept as trained: ",
        merging(of_family("qwen3_vl_moe_text", "model.layers.0.mlp.experts.gate_up_proj")),
    ),
    Row(
        "for the weights in the dtype of training: ⟦+--names training⟧",
        lambda top: zero_without_partitions(top, stage0=True),
        drop_in(zero_to_fp32.main),
    ),
]
# Templates that are not pasted here, and why.
ENGINE = "printed by an engine's process, which does not know the command"
SERVER = "about a server's jobs or a run that it evaluates: see tests/evaluation"
PARSES = "of what no small checkpoint has; that its line parses is checked in test_fronts"
HINT = "a line of `unshard hint`: pasted in oracle/test_hints"
NOT_PASTED = {
    "write it with unshard average  OUTPUT, ": "tests/api/test_named_averages",
    "write the average with unshard average": SERVER,
    "unshard eval submit": HINT,
    "unshard eval watch": HINT,
    "on a server (`unshard eval serve`)": HINT,
    "unshard needs Python 3.11 or later": "printed before anything can be imported",
    "use SGLang 0.5.23, or merge the checkpoint": ENGINE,
    "use vLLM 0.32, or merge the checkpoint": ENGINE,
    "start it with `unshard sglang`": ENGINE,
    "start it with `unshard vllm`": ENGINE,
    "pass it with ⟦+--config FILE|DIR⟧ or ⟦--base MODEL⟧": ENGINE,
    "⟦+--allow-missing⟧ lets transformers": "of a function of Python: tests/api/test_pretrained",
    "⟦+--allow-unexpected⟧ leaves out": "of a function of Python: tests/api/test_pretrained",
    "With --push-to-hub: write no local output": "a text of --help",
    "unshard eval results lists all results": SERVER,
    "to cancel a job: unshard eval cancel": SERVER,
    "start the server with `unshard eval serve`": SERVER,
    "unshard eval cancel --profile ": SERVER,
    "submit it, or: unshard merge ": SERVER,
    " more: unshard eval compare ": SERVER,
    "to evaluate them again: unshard eval watch --again": SERVER,
    "fetches it, or `unshard eval watch ": SERVER,
    "to evaluate one of them: unshard eval submit": SERVER,
    "has no tokenizer on this machine; to download it": "needs the hub: api/test_recorded_bases",
    "upload the checkpoint: unshard push ": "needs an object store: tests/stores/test_outputs",
    "`unshard reshard` takes what was merged": "a statement, not advice",
    "`unshard merge` and unshard.merge_all take ⟦--role all⟧": "a statement, not advice",
    " merge checkpoints/my-run/global_step_100 my-model": "examples: tests/cli/test_help",
    "or its ⟦+--step N⟧": PARSES,
    "make smaller files: ⟦+--max-shard-size SIZE⟧": PARSES,
    "leave ⟦--base⟧ out, or write the adapter": PARSES,
    "write the adapter by itself (⟦+--lora adapter⟧)": PARSES,
    "write the adapter by itself: ⟦+--lora adapter⟧": PARSES,
    "keep the tensors as they were trained: ⟦+--names training⟧": PARSES,
    "for the names of its files: ⟦+--base MODEL⟧": PARSES,
    "first: ⟦+--dtype bfloat16⟧ ⟦+--names training⟧": PARSES,
    "pass the config of the model that was trained: ⟦+--config FILE|DIR⟧": PARSES,
    "copy it here from the node that wrote it, or name that node's directory: ": PARSES,
}


def templates() -> Iterator[str]:
    """Yield the texts of the source that advise to add an option, or contain a command."""
    for path in sorted(SOURCE.rglob("*.py")):
        skipped: set[int] = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr):
                skipped.add(id(node.value))  # a docstring
            elif isinstance(node, ast.JoinedStr):
                skipped |= {id(inner) for inner in ast.walk(node) if inner is not node}
        for node in ast.walk(tree):
            parts = [node] if isinstance(node, ast.Constant) else getattr(node, "values", [])
            if id(node) not in skipped and isinstance(node, ast.Constant | ast.JoinedStr):
                text = "".join(
                    str(getattr(one, "value", "")) for one in parts if isinstance(one, ast.Constant)
                )
                is_name = _COMMAND.fullmatch(text)  # of a call
                if "⟦+--" in text or (_COMMAND.search(text) and not is_name):
                    yield text


def test_every_template_is_in_the_table() -> None:
    found = list(templates())
    assert len(found) > 50
    known = [row.template for row in ROWS] + list(NOT_PASTED)
    assert [text for text in found if not any(one in text for one in known)] == []
    assert [one for one in known if not any(one in text for text in found)] == []


def printed(main: Main, arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command; return its exit code and what it printed."""
    capfd.readouterr()
    code: object = 1
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code
    shown = capfd.readouterr()
    assert isinstance(code, int)
    return code, shown.out + shown.err


def line_in(text: str) -> str:
    """Return the one line to paste in what was printed."""
    (line,) = re.findall(r"^ *use:? +(unshard .+)$", text, re.MULTILINE) or re.findall(
        r"unshard (?:merge|average) .+$", text, re.MULTILINE
    )
    return str(line)


@pytest.mark.parametrize("row", ROWS, ids=[row.template for row in ROWS])
def test_a_line_that_is_pasted_gets_further(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    top = tmp_path / "it's my dir"
    top.mkdir()
    monkeypatch.chdir(tmp_path)
    arguments = row.make(top)
    code, text = printed(row.main, arguments, capfd)
    assert str(Text(row.template)).removesuffix("⟦+--").split("⟦")[0] in text
    values = {"MODEL": top / "MODEL", "FILE": top / "FILE", "DIR": top / "DIR", "N": 2}
    model(top / "MODEL", some_tensors(), model_type="llama")
    if not (top / "FILE").exists():
        (top / "FILE").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    words = [str(values.get(word, word)) for word in shlex.split(line_in(text))]
    assert words[0] == "unshard"
    again, after = printed(command_line, words[1:], capfd)
    first = text.partition("error: ")[2].splitlines()[:1]
    assert again == 0 or after.partition("error: ")[2].splitlines()[:1] != first, after
    assert again not in (2, 5) or code == 0, after


# What a line repeats


def line_after(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Run a command; return the words of the line that it prints, but for `unshard`."""
    return shlex.split(line_in(printed(command_line, arguments, capfd)[1]))[1:]


def test_a_line_repeats_what_was_given(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / 'it\'s "my" run'
    for role in ("actor", "critic"):
        for step in (3, 4):
            floats(run / f"global_step_{step}" / role, "bfloat16", model_type="unheard-of")
    chosen = ["--role", "critic", "--step", "3", "--allow-global", "a.B", "--allow-global", "c.D"]
    words = line_after(["inspect", str(run), *chosen], capfd)
    added = ["--base", "MODEL", "--dtype", "config"]
    assert words == ["merge", str(run), "OUTPUT", *chosen, *added]
    made = ["merge", str(run), str(tmp_path / "out"), *chosen, "--exclude", "q|b c"]
    assert line_after(made, capfd) == [*made, *added, "--overwrite"]
    exists = [*made, "--dry-run"]
    assert line_after(exists, capfd) == [*exists, "--overwrite"]
    made[2] = str(tmp_path / "other")
    assert line_after([*made, "--dry-run"], capfd) == [*made, "--dry-run", *added]
    assert line_after([*made, "--overwrite=all"], capfd) == [*made, "--overwrite=all", *added]
    average = ["average", str(run / "global_step_3"), str(run / "global_step_4"), "--output"]
    average += [str(tmp_path / "mean"), "--coefficients", "1,3", "--role", "critic"]
    words = line_after([*average], capfd)
    assert words[0] == "average"
    assert {*words} == {*average, *added, "--overwrite"}
    code, text = printed(command_line, [*words, "--base", str(tmp_path / "none")], capfd)
    assert (code, "no such directory" in text) == (4, True)
    # An output that exists is only taken as the option.
    average[3:5] = [str(tmp_path / "another")]
    words = line_after(average, capfd)
    assert {*words} == {*average, "--output", *added, "--overwrite"}
    # A version of an archive is not replaced.
    archive = ["delta", str(tmp_path / "archive"), "--run", str(run), "--role", "critic"]
    words = line_after(archive, capfd)
    assert words == ["delta", "OUTPUT", *archive[2:], *added]


def test_ema_and_other_nodes_are_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    floats(tmp_path / "checkpoint-3" / "pytorch_ema_model_fsdp_0", "bfloat16")
    floats(tmp_path / "checkpoint-3" / "pytorch_model_fsdp_0")
    place, other = tmp_path / "checkpoint-3" / "pytorch_ema_model_fsdp_0", tmp_path / "b c"
    (other / "checkpoint-3" / "pytorch_ema_model_fsdp_0").mkdir(parents=True)
    moved = rank_path(place, 2, 1)
    moved.rename(other / "checkpoint-3" / "pytorch_ema_model_fsdp_0" / moved.name)
    chosen = ["--weights", "ema", "--also", str(other)]
    words = line_after(["inspect", str(tmp_path / "checkpoint-3"), *chosen], capfd)
    assert words[:7] == ["merge", str(tmp_path / "checkpoint-3"), "OUTPUT", *chosen]
    words[2] = str(tmp_path / "out")
    assert printed(command_line, words, capfd)[0] == 0
    assert {one.dtype for one in merged(tmp_path / "out").values()} == {torch.bfloat16}


def test_two_problems_give_one_line_that_solves_both(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = line_after(base_that_differs(tmp_path), capfd)
    assert words[-2:] == ["--allow-missing", "--allow-unexpected"]
    assert printed(command_line, words, capfd)[0] == 0


@pytest.mark.parametrize(
    "address", ["s3://key:secret@bucket/model", "https://host/model?token=secret"]
)
def test_credentials_are_never_printed(address: str) -> None:
    given = {"checkpoint": Path(address), "output": Path(address), "repo": "a/b", "base": address}
    for command in (merge, push):
        front = front_of(command, {**given, "also": [Path(address)], "config": Path(address)})
        assert "secret" not in front.line([])
        assert "secret" not in str(front)
        assert "--base ADDRESS" in front.line([])


def test_a_call_of_python_repeats_what_was_given(tmp_path: Path) -> None:
    run, heard = lora(tmp_path / "run"), list[object]()
    with pytest.raises(UnshardError) as caught:
        unshard.merge(run, tmp_path / "out", dtype="bf16", include="lm_head", listener=heard.append)
    call = str(caught.value).partition("\n  use:      ")[2]
    assert call == (
        f"unshard.merge({str(run)!r}, {str(tmp_path / 'out')!r}, listener=listener, dtype='bf16', "
        "include='lm_head', lora_alpha=...)"
    )
    listener = heard.append
    report = eval(call.replace("=...", "=2"), {"unshard": unshard, "listener": listener})  # noqa: S307
    assert report.dtypes == {"bfloat16": 1}
    assert caught.value.hint.endswith("lora_alpha=…")
    with pytest.raises(UnshardError) as caught:
        unshard.inspect(floats(tmp_path / "checkpoint-3" / "pytorch_ema_model_fsdp_0").parent)
    assert str(caught.value).endswith(
        f"unshard.inspect({str(tmp_path / 'checkpoint-3')!r}, weights='ema')"
    )
    with pytest.raises(UnshardError) as caught:
        unshard.open_checkpoint("s3://key:secret@bucket/x", weights="ema")
    assert "secret" not in str(caught.value)


def test_a_step_that_was_passed_over_needs_no_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from trainers import dcp_under

    for step in (1, 2):
        dcp_under()(tmp_path / f"step-{step}", some_tensors())
        (tmp_path / f"step-{step}" / "config.json").write_text('{"model_type": "unheard-of"}')
    (tmp_path / "step-2" / ".metadata").unlink()
    code, text = printed(command_line, ["inspect", str(tmp_path), "--step", "1"], capfd)
    assert code == 0
    code, text = printed(command_line, ["merge", str(tmp_path), str(tmp_path / "out")], capfd)
    assert code == 0, text
    assert "name that node's directory: --also DIR" in text
    assert "use: " not in re.sub(r"use: .* --base MODEL .*", "", text)


def test_the_line_of_a_drop_in_that_averages_can_be_pasted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        place = tmp_path / "my run" / f"checkpoint-{step}" / "pytorch_ema_model_fsdp_0"
        floats(place, model_type="unheard-of")
    arguments = ["--input_dir", str(tmp_path / "my run"), "--merge", "--output_dir"]
    arguments += [str(tmp_path / "out"), "--state_dict_dirname", "pytorch_ema_model_fsdp_0"]
    words = shlex.split(line_in(printed(drop_in(merge_fsdp.main), arguments, capfd)[1]))
    assert words[1:3] == ["average", str(tmp_path / "my run")]
    assert words[words.index("--weights") + 1] == "ema"
    base = model(tmp_path / "MODEL", some_tensors(), model_type="llama")
    words = [str(base) if word == "MODEL" else word for word in words]
    code, text = printed(command_line, words[1:], capfd)
    assert code == 0, text
