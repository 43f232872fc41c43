"""The commands of the tools that unshard replaces, as documented, on checkpoints of real runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2ForCausalLM,
    get_linear_schedule_with_warmup,
)

import unshard
from oracle.writers.engine import TRAINING_STEPS, lmms_run, verl_run
from oracle.writers.trainer import trainer_fsdp2
from oracle.writers.workers import WorkerPool
from ranks import assert_same, bits, made, merged, rank_path, snapshot
from tiny_models import tiny_config, tiny_model
from unshard.merger import CheckpointMerger, FSDP2Merger

pytestmark = [
    pytest.mark.xdist_group("drop-ins"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

ROOT = Path(__file__).parent.parent.parent
WORLD = 2
COMPANIONS = {"config.json", "tokenizer.json", "tokenizer_config.json", "unshard.json"}
GENERATES = {*COMPANIONS, "generation_config.json"}  # which the originals add
STATE = {"extra_state_merged.pt", "lr_scheduler_state.json"}
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def written(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a run of each trainer; they are copied, never written to."""
    runs = {}
    for name, scenario in (("lmms", lmms_run), ("verl", verl_run), ("hf", trainer_fsdp2)):
        runs[name] = tmp_path_factory.mktemp(name)
        worker_pool.run(scenario, WORLD, runs[name])
    return runs


@pytest.fixture
def lmms(written: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written["lmms"], tmp_path / "output"))


@pytest.fixture
def verl(written: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written["verl"], tmp_path / "run"))


@pytest.fixture
def hf(written: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written["hf"], tmp_path / "trainer"))


def truth(run: Path, step: int, *, ema: bool = False) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = torch.load(run / f"truth-{'ema-' * ema}{step}.pt")
    return {name: tensor.bfloat16() for name, tensor in whole.items()}


def python(*arguments: str, expected: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def assert_loads(directory: Path, expected: Tensors) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert bits(state[name]) == bits(tensor), name


# python -m unshard.merger


def test_merger_into_the_checkpoint_itself(lmms: Path) -> None:
    checkpoint = lmms / "checkpoint-10"
    before, mtime = snapshot(checkpoint), checkpoint.stat().st_mtime_ns
    done = python("-m", "unshard.merger", "--checkpoint_path", str(checkpoint))
    assert f"Merging regular checkpoint from {checkpoint}\n" in done.stdout
    assert f"Merged checkpoint saved to: {checkpoint}\n" in done.stdout
    assert_loads(checkpoint, truth(lmms, 10))
    after = snapshot(checkpoint)
    assert after.keys() - before.keys() == {
        *("model.safetensors", "unshard.json", "generation_config.json")
    }
    assert before.items() <= after.items()
    assert checkpoint.stat().st_mtime_ns == mtime


def test_merger_regular_then_ema_then_regular_again_in_place(lmms: Path) -> None:
    checkpoint = lmms / "checkpoint-20"
    before = snapshot(checkpoint)
    for kind in ("regular", "ema", "regular"):
        command = ("-m", "unshard.merger", "--checkpoint_path", str(checkpoint))
        done = python(*command, "--checkpoint_type", kind)
        assert f"Merging {kind} checkpoint" in done.stdout
        assert_same(merged(checkpoint), truth(lmms, 20, ema=kind == "ema"))
        assert before.items() <= snapshot(checkpoint).items()


def test_merger_takes_the_highest_of_a_run_and_writes_into_the_run(lmms: Path) -> None:
    before = snapshot(lmms)
    python("-m", "unshard.merger", "--checkpoint_path", str(lmms))
    assert_loads(lmms, truth(lmms, 20))
    assert before.items() <= snapshot(lmms).items()
    assert names(lmms) - {name.split("/")[0] for name in before} == {
        *GENERATES, "model.safetensors"
    }  # fmt: skip
    assert AutoTokenizer.from_pretrained(lmms).convert_tokens_to_ids("c") == 3


def test_merger_to_another_place(lmms: Path, tmp_path: Path) -> None:
    before = snapshot(lmms)
    for _ in range(2):  # the original writes over what is there
        done = python(
            *("-m", "unshard.merger", "--checkpoint_path", str(lmms / "checkpoint-10")),
            *("--output_path", str(tmp_path / "merged_checkpoint")),
            *("--model_general_type", "causal_lm"),
        )
        assert f"saved to: {tmp_path / 'merged_checkpoint'}\n" in done.stdout
    assert names(tmp_path / "merged_checkpoint") == {*GENERATES, "model.safetensors"}
    assert_loads(tmp_path / "merged_checkpoint", truth(lmms, 10))
    assert snapshot(lmms) == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--checkpoint_path", "nowhere"), 1, "Checkpoint path does not exist: nowhere"),
        ((), 2, "the following arguments are required: --checkpoint_path"),
        (("--checkpoint_path", ".", "--checkpoint_type", "best"), 2, "invalid choice: 'best'"),
    ],
)
def test_merger_says_what_is_wrong(arguments: tuple[str, ...], code: int, message: str) -> None:
    assert message in python("-m", "unshard.merger", *arguments, expected=code).stderr


def test_merger_of_an_incomplete_checkpoint_leaves_it_as_it_was(lmms: Path) -> None:
    checkpoint = lmms / "checkpoint-10"
    rank_path(checkpoint / "pytorch_model_fsdp_0", WORLD, 1).unlink()
    before = snapshot(lmms)
    command = ("-m", "unshard.merger", "--checkpoint_path", str(checkpoint))
    assert "Missing checkpoint for rank 1" in python(*command, expected=1).stderr
    assert snapshot(lmms) == before


# the class FSDP2Merger


def test_the_documented_use_of_the_class(lmms: Path) -> None:
    merger = FSDP2Merger(checkpoint_type="regular")
    checkpoint_path = lmms / "checkpoint-10"
    output_path = merger.merge(checkpoint_path)
    assert isinstance(merger, CheckpointMerger)
    assert output_path == checkpoint_path
    assert_loads(output_path, truth(lmms, 10))
    output_path_ema = FSDP2Merger(checkpoint_type="ema").merge(checkpoint_path)
    assert_same(merged(output_path_ema), truth(lmms, 10, ema=True))


@pytest.mark.parametrize("given", ["object", "file"])
def test_a_config_is_what_gets_written(lmms: Path, tmp_path: Path, given: str) -> None:
    config = AutoConfig.from_pretrained(lmms / "checkpoint-10")
    config.rope_theta, config.mine = 12345.0, "kept"
    config.save_pretrained(tmp_path / "config")
    chosen: PretrainedConfig | Path = config if given == "object" else tmp_path / "config"
    FSDP2Merger().merge(lmms / "checkpoint-10", tmp_path / "out", config=chosen)
    found = AutoConfig.from_pretrained(tmp_path / "out")
    assert (found.mine, found.dtype) == ("kept", torch.bfloat16)
    expected = names(tmp_path / "out") >= COMPANIONS
    assert expected is (given == "object")  # a directory means all companions
    assert_same(merged(tmp_path / "out"), truth(lmms, 10))


def test_the_name_of_a_class_is_refused_in_a_sentence(lmms: Path, tmp_path: Path) -> None:
    name: type = "Qwen2ForCausalLM"  # type: ignore[assignment]
    with pytest.raises(unshard.UsageError, match="model_cls: 'Qwen2ForCausalLM' is not a class"):
        FSDP2Merger().merge(lmms / "checkpoint-10", tmp_path / "out", model_cls=name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_cls", [Qwen2ForCausalLM, AutoModelForCausalLM])
def test_a_class_that_fits_is_accepted(lmms: Path, tmp_path: Path, model_cls: type) -> None:
    FSDP2Merger().merge(lmms / "checkpoint-10", tmp_path / "out", model_cls=model_cls)
    assert_same(merged(tmp_path / "out"), truth(lmms, 10))


def test_a_class_that_does_not_fit_is_refused_before_anything_is_written(
    lmms: Path, tmp_path: Path
) -> None:
    before = snapshot(tmp_path)
    config = AutoConfig.from_pretrained(lmms / "checkpoint-10")
    config.intermediate_size *= 2
    with pytest.raises(unshard.ConversionError, match="another shape than in") as error:
        FSDP2Merger().merge(lmms, model_cls=Qwen2ForCausalLM, config=config)
    assert "model.layers.1.mlp.up_proj.weight [24, 16] instead of [48, 16]" in str(error.value)
    config.auto_map = {"AutoModelForCausalLM": "ours.Qwen2ForCausalLM"}  # only the class knows then
    with pytest.raises(unshard.ConversionError, match="does not fit Qwen2ForCausalLM") as error:
        FSDP2Merger().merge(lmms, model_cls=Qwen2ForCausalLM, config=config)
    assert "model.layers.1.mlp.up_proj.weight: shape" in str(error.value)
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    with pytest.raises(unshard.ConversionError, match=r"Missing key\(s\) .*layers\.2"):
        FSDP2Merger().merge(lmms, model_cls=Qwen2ForCausalLM, config=config)
    with pytest.raises(unshard.ConversionError, match=r"Unexpected key\(s\) .*q_proj\.bias"):
        FSDP2Merger().merge(
            lmms,
            model_cls=LlamaForCausalLM,
            config=tiny_config("llama"),  # without biases
        )
    with pytest.raises(unshard.UsageError, match="Linear is not a model class"):
        FSDP2Merger().merge(lmms, model_cls=torch.nn.Linear)
    assert snapshot(tmp_path) == before


def test_a_type_that_is_unknown() -> None:
    with pytest.raises(ValueError, match="neither regular nor ema"):
        FSDP2Merger("best")  # type: ignore[arg-type]  # as a user might


# tools/merge_fsdp.py

MERGE_FSDP = str(ROOT / "tools" / "merge_fsdp.py")


def test_merge_fsdp_of_rank_files_takes_the_latest_into_the_run(lmms: Path) -> None:
    done = python(MERGE_FSDP, "--input_dir", str(lmms), "--type", "fsdp2")
    assert f"Using latest checkpoint: {lmms / 'checkpoint-20'}" in done.stdout
    assert_loads(lmms, truth(lmms, 20))
    assert "extra_state_merged.pt" not in names(lmms)


def test_merge_fsdp_of_a_step_and_of_ema_weights(lmms: Path, tmp_path: Path) -> None:
    command = (MERGE_FSDP, "--input_dir", str(lmms), "--type", "fsdp2", "--step", "10")
    python(*command, "--output_dir", str(tmp_path / "ten"))
    assert_same(merged(tmp_path / "ten"), truth(lmms, 10))
    folder = ("--state_dict_dirname", "pytorch_ema_model_fsdp_0")
    python(*command, "--output_dir", str(tmp_path / "ema"), *folder)
    assert_same(merged(tmp_path / "ema"), truth(lmms, 10, ema=True))


def test_merge_fsdp_of_a_folder_of_any_name(lmms: Path, tmp_path: Path) -> None:
    for step in (10, 20):
        folder = lmms / f"checkpoint-{step}" / "pytorch_model_fsdp_0"
        folder.rename(folder.with_name("other"))
    command = [MERGE_FSDP, "--input_dir", str(lmms), "--type", "fsdp2"]
    command += ["--state_dict_dirname", "other"]
    python(*command, "--output_dir", str(tmp_path / "out"))
    assert_same(merged(tmp_path / "out"), truth(lmms, 20))
    python(*command, "--output_dir", str(tmp_path / "ten"), "--step", "10")
    assert_same(merged(tmp_path / "ten"), truth(lmms, 10))
    assert "no checkpoint-N/other" in python(*command, "--step", "11", expected=1).stderr


def mean(several: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.stack([one[name].float() for one in several]).mean(0).bfloat16()
        for name in several[0]
    }


def test_merge_fsdp_averages_all_checkpoints(lmms: Path, tmp_path: Path) -> None:
    whole = [torch.load(lmms / f"truth-{step}.pt") for step in (10, 20)]
    command = (MERGE_FSDP, "--input_dir", str(lmms), "--type", "fsdp2", "--merge")
    done = python(*command, "--output_dir", str(tmp_path / "out"))
    assert "Merging 2 checkpoints" in done.stdout
    assert_loads(tmp_path / "out", mean(whole))


def test_merge_fsdp_of_a_trainers_checkpoints(hf: Path, tmp_path: Path) -> None:
    """DCP, without config: names, config and tokenizer come from a model's directory."""
    tiny_model().save_pretrained(tmp_path / "Qwen2-tiny")
    command = (MERGE_FSDP, "--input_dir", str(hf), "--model_name_or_class")
    done = python(*command, str(tmp_path / "Qwen2-tiny"), "--output_dir", str(tmp_path / "out"))
    assert f"Using latest checkpoint: {hf / 'checkpoint-2'}" in done.stdout
    last = unshard.merge(hf / "checkpoint-2", tmp_path / "reference", config="none").output
    expected = {name: one.bfloat16() for name, one in merged(Path(last)).items()}
    assert_loads(tmp_path / "out", expected)
    done = python(*command, str(tmp_path / "Qwen2-tiny"), "--merge")
    assert "Merging 2 checkpoints" in done.stdout
    unshard.merge(hf / "checkpoint-1", tmp_path / "first")
    both = [merged(tmp_path / "first"), merged(tmp_path / "reference")]
    assert_loads(hf, mean(both))


def test_merge_fsdp_with_a_config_alone_and_with_a_class_name(
    hf: Path, lmms: Path, tmp_path: Path
) -> None:
    tiny_config().save_pretrained(tmp_path / "config")
    command = (MERGE_FSDP, "--output_dir", str(tmp_path / "out"), "--input_dir", str(hf))
    python(*command, "--model_name_or_class", str(tmp_path / "config"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    refused = python(*command, "--model_name_or_class", "Qwen2ForCausalLM", expected=1)
    assert "is the name of a class, but" in refused.stderr
    python(
        *(MERGE_FSDP, "--output_dir", str(tmp_path / "named"), "--input_dir", str(lmms)),
        *("--model_name_or_class", "MyQwen2ForCausalLM", "--type", "fsdp2"),
    )
    assert AutoConfig.from_pretrained(tmp_path / "named").architectures == ["MyQwen2ForCausalLM"]


def test_merge_fsdp_runs_as_a_module_too(lmms: Path, tmp_path: Path) -> None:
    command = ("-m", "unshard.compat.merge_fsdp", "--input_dir", str(lmms), "--type", "fsdp2")
    python(*command, "--output_dir", str(tmp_path / "out"))
    assert_same(merged(tmp_path / "out"), truth(lmms, 20))
    missing = python(*command[:3], str(tmp_path / "nowhere"), expected=1)
    assert "No checkpoint found in" in missing.stderr


# scripts/convert_checkpoint_simple.py

SIMPLE = str(ROOT / "scripts" / "convert_checkpoint_simple.py")


@pytest.mark.parametrize("how", [(SIMPLE,), ("-m", "unshard.compat.convert_checkpoint_simple")])
def test_the_simple_script_prints_its_transcript(verl: Path, how: tuple[str, ...]) -> None:
    step, count = verl / "global_step_20", len(truth(verl, 20))
    before = snapshot(step)
    done = python(*how, str(step))
    rule, output = "=" * 70, f"{step}_merged"
    expected = f"""\
{rule}
FSDP Checkpoint Converter (Simple Version)
{rule}
Checkpoint:    {step}
Actor dir:     {step}/actor
Output:        {output}
Dtype:         bfloat16
{rule}
✓ Detected world_size=2 from checkpoint

Loading 2 checkpoint shards...
  [1/2] Loading model_world_size_2_rank_0.pt... ({count} keys)
  [2/2] Loading model_world_size_2_rank_1.pt... ({count} keys)

Merging shards into full state dict...
✓ Merged {count} parameters:
  - 0 replicated parameters
  - {count} sharded parameters

Saving merged model to {output}
  Creating model from config... (not needed: bytes are moved, config.json is kept)
  Saving model with dtype=bfloat16...
  Copying tokenizer files...
✓ Model saved successfully

Merging extra_state files...
✓ Saved extra_state to {output}/extra_state_merged.pt
✓ Saved lr_scheduler state to {output}/lr_scheduler_state.json

{rule}
✅ Conversion complete!
{rule}
"""
    assert done.stdout.startswith(expected)
    assert names(Path(output)) == {*GENERATES, *STATE, "model.safetensors"}
    assert_loads(Path(output), truth(verl, 20))
    assert snapshot(step) == before


def test_the_simple_scripts_options(verl: Path, tmp_path: Path) -> None:
    (verl / "global_step_10" / "actor").rename(verl / "global_step_10" / "critic")
    command = (SIMPLE, str(verl / "global_step_10"), "--output", str(tmp_path / "mine"))
    missing = python(*command, expected=1)
    assert f"❌ Error: Actor directory does not exist: {verl}" in missing.stderr
    done = python(*command, "--actor-dir", "critic", "--dtype", "float32")
    assert "Dtype:         float32" in done.stdout
    whole = torch.load(verl / "truth-10.pt")
    assert_same(merged(tmp_path / "mine"), whole)
    nowhere = python(SIMPLE, str(tmp_path / "nowhere"), expected=1)
    assert "❌ Error: Checkpoint path does not exist" in nowhere.stderr


def test_the_simple_script_says_which_rank_is_missing(verl: Path) -> None:
    rank_path(verl / "global_step_20" / "actor", WORLD, 1).unlink()
    done = python(SIMPLE, str(verl / "global_step_20"), expected=1)
    assert re.search(r"❌ Error: .*Missing checkpoint for rank 1", done.stderr)
    command, one = [sys.executable, SIMPLE, str(verl / "global_step_20")], subprocess.STDOUT
    log = subprocess.run(command, stdout=subprocess.PIPE, stderr=one, text=True, check=False).stdout
    assert log.index("FSDP Checkpoint Converter") < log.index("❌ Error: ")
    assert not (verl / "global_step_20_merged").exists()


def test_the_simple_script_joins_plain_tensors_as_its_guide_says(tmp_path: Path) -> None:
    actor = tmp_path / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    (actor / "config.json").write_text('{"model_type": "mine"}')
    parts = [{"w": torch.randn(3, 2), "same": torch.arange(4)} for _ in range(2)]
    for rank, part in enumerate(parts):
        torch.save(part, rank_path(actor, 2, rank))
    done = python(SIMPLE, str(actor.parent), "--dtype", "float32")
    assert "  - 1 replicated parameters\n  - 1 sharded parameters\n" in done.stdout
    found = merged(tmp_path / "global_step_1_merged")
    assert torch.equal(found["w"], torch.cat([part["w"] for part in parts]))
    assert torch.equal(found["same"], torch.arange(4))  # and still integers


def test_no_output_is_put_among_checkpoints_under_their_name(lmms: Path) -> None:
    command = (SIMPLE, str(lmms / "checkpoint-10"), "--actor-dir", "pytorch_model_fsdp_0")
    assert "give another output" in python(*command, expected=1).stderr


# scripts/convert_fsdp_to_hf.py

FSDP_TO_HF = str(ROOT / "scripts" / "convert_fsdp_to_hf.py")


def test_convert_fsdp_to_hf_alone(verl: Path) -> None:
    step = verl / "global_step_20"
    done = python(FSDP_TO_HF, "--checkpoint_path", str(step), "--trust_remote_code")
    for line in (
        "FSDP to HuggingFace Checkpoint Converter",
        f"Checkpoint path: {step}",
        f"Actor directory: {step / 'actor'}",
        f"Output path:     {step}_merged",
        "Torch dtype:     bfloat16",
        "Detected world_size=2 from checkpoint",
        "  Copied tokenizer.json",
        f"  Saved merged extra_state to {step}_merged/extra_state_merged.pt",
        f"✅ Successfully saved merged checkpoint to {step}_merged",
        "✅ Conversion complete!",
    ):
        assert f"{line}\n" in done.stdout
    assert_loads(Path(f"{step}_merged"), truth(verl, 20))
    assert names(Path(f"{step}_merged")) == {*GENERATES, *STATE, "model.safetensors"}


@pytest.mark.slow
def test_convert_fsdp_to_hf_under_torchrun(verl: Path, tmp_path: Path) -> None:
    """Any number of processes, whatever the world size of training was (2)."""
    unshard.merge(verl / "global_step_10", tmp_path / "alone", dtype="float16")
    done = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", FSDP_TO_HF),
        *("--checkpoint_path", str(verl / "global_step_10"), "--output_path", str(tmp_path / "o")),
        *("--torch_dtype", "float16"),
    )
    assert done.stdout.count("✅ Conversion complete!") == 1
    written = tmp_path / "o" / "generation_config.json"  # which `merge` does not derive
    fields = json.loads(written.read_text())
    assert fields["_from_model_config"]
    record = json.loads((tmp_path / "o" / "unshard.json").read_text())
    assert record["output"]["companions"].pop(written.name) == written.stat().st_size
    written.unlink()
    (tmp_path / "o" / "unshard.json").write_text(json.dumps(record))
    assert made(tmp_path / "o") == made(tmp_path / "alone")  # whose fingerprint has one file less


def test_the_documented_resumption_of_training(verl: Path) -> None:
    merged_dir = Path(f"{verl / 'global_step_20'}_merged")
    python(SIMPLE, str(verl / "global_step_20"))
    model = AutoModelForCausalLM.from_pretrained(merged_dir)
    tokenizer = AutoTokenizer.from_pretrained(merged_dir)
    inputs = tokenizer("a b c", return_tensors="pt", return_token_type_ids=False)
    assert model(**inputs).logits.shape == (1, 3, 37)

    extra_state = torch.load(merged_dir / "extra_state_merged.pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = get_linear_schedule_with_warmup(  # type: ignore[no-untyped-call]  # no types
        optimizer, 5, TRAINING_STEPS
    )
    scheduler.load_state_dict(extra_state["lr_scheduler"])
    assert scheduler.last_epoch == 20
    torch.set_rng_state(extra_state["rng"]["cpu"])
    states = extra_state["rng"]["cuda"]  # what torch.cuda.set_rng_state_all takes
    assert [state.tolist() for state in states] == [[0] * 16, [1] * 16]
    assert {state.dtype for state in states} == {torch.uint8}


# installed from a wheel


@pytest.mark.slow
def test_everything_is_in_the_wheel(lmms: Path, verl: Path, tmp_path: Path) -> None:
    """Whatever a user types works where only the package is: no scripts, no source tree."""
    site = tmp_path / "site"
    python("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(ROOT))
    env = os.environ | {"PYTHONPATH": str(site)}

    def installed(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=True, env=env,
            cwd=tmp_path,
        )  # fmt: skip
        return done.stdout

    assert str(site) in installed("-c", "import unshard; print(unshard.__file__)")
    installed("-m", "unshard.merger", "--checkpoint_path", str(lmms), "--output_path", "a")
    installed("-m", "unshard.compat.merge_fsdp", "--input_dir", str(lmms), "--output_dir", "b")
    installed("-m", "unshard.compat.convert_checkpoint_simple", str(verl / "global_step_20"))
    step = ("--checkpoint_path", str(verl / "global_step_20"), "--output_path", "c")
    installed("-m", "unshard.compat.convert_fsdp_to_hf", *step)
    assert "merge" in installed("-m", "unshard.compat.verl", "--help")
    for name in ("a", "b"):
        assert_same(merged(tmp_path / name), truth(lmms, 20))
    for path in (tmp_path / "c", verl / "global_step_20_merged"):
        assert_same(merged(path), truth(verl, 20))


# python -m unshard.compat.verl


def test_verl_merge(verl: Path, tmp_path: Path) -> None:
    actor = verl / "global_step_20" / "actor"
    before = snapshot(verl)
    done = python(
        *("-m", "unshard.compat.verl", "merge", "--backend", "fsdp"),
        *("--local_dir", str(actor), "--target_dir", str(tmp_path / "merged_hf_model")),
        *("--trust-remote-code", "--use_cpu_initialization"),
    )
    assert f"Saving model to {tmp_path / 'merged_hf_model'}\n" in done.stdout
    assert names(tmp_path / "merged_hf_model") == {*GENERATES, "model.safetensors"}
    assert_loads(tmp_path / "merged_hf_model", truth(verl, 20))
    assert snapshot(verl) == before


def test_verl_test_compares_with_a_model(verl: Path, tmp_path: Path) -> None:
    command = ("-m", "unshard.compat.verl", "test", "--backend", "fsdp", "--test_hf_dir")
    for step in (10, 20):
        unshard.merge(verl / f"global_step_{step}", tmp_path / f"{step}", dtype="bfloat16")
    local = ("--local_dir", str(verl / "global_step_20" / "actor"))
    done = python(*command, str(tmp_path / "20"), *local)
    assert "FSDP checks passed: The merged state_dict matches" in done.stdout
    unshard.merge(verl / "global_step_20", tmp_path / "float32")
    assert "FSDP checks passed" in python(*command, str(tmp_path / "float32"), *local).stdout
    done = python(*command, str(tmp_path / "10"), *local, expected=1)
    assert "FSDP checks passed" not in done.stdout
    assert "the models are not the same" in done.stdout


def test_verl_says_what_it_does_not_read() -> None:
    command = ("-m", "unshard.compat.verl", "merge", "--backend")
    assert "--local_dir is missing" in python(*command, "fsdp", expected=1).stderr
    assert "invalid choice" in python(*command, "deepspeed", expected=2).stderr
