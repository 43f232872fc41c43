"""The base model that a trainer's file names: found on this machine, or named in the error."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from command import unshard as command
from hub_server import Hub, standing_in
from ranks import assert_same, merged, save_ranks
from tiny_models import logits, model_class, tiny_model, tiny_tokenizer
from unshard import ConversionError, NoConfigError
from unshard.progress import Chosen, Event

pytestmark = [
    pytest.mark.usefixtures("hub"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers, by peft
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
]
NAME = "org/tiny-base"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that nobody may ask, and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with standing_in(monkeypatch, tmp_path) as hub:
        yield hub
        assert hub.requests == []


def cached(tmp_path: Path, name: str = NAME, *, weights: bool = True, **fields: Any) -> Path:
    """Return a model in the hub's cache, as huggingface_hub lays it out."""
    place = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    model = tiny_model(**fields)
    model.save_pretrained(snapshot) if weights else model.config.save_pretrained(snapshot)
    tiny_tokenizer().save_pretrained(snapshot)
    return snapshot


def trained() -> dict[str, torch.Tensor]:
    return {name: one + 1 for name, one in tiny_model().state_dict().items()}


def save_like_trainer(step: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Save weights as accelerate does for transformers' Trainer: DCP, and no config."""
    save({"model": tensors}, checkpoint_id=step / "pytorch_model_fsdp_0", no_dist=True)
    return step


def write(run: Path, path: str, text: str) -> None:
    (run / path).parent.mkdir(parents=True, exist_ok=True)
    (run / path).write_text(text, encoding="utf-8")


def by_peft(run: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model()
    model.name_or_path = model.config._name_or_path = NAME
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(model, lora).save_pretrained(str(run / "peft"), save_embedding_layers=False)
    shutil.copy(run / "peft" / "README.md", run / "README.md")
    shutil.rmtree(run / "peft")


def by_trainer(run: Path) -> None:
    from transformers.modelcard import TrainingSummary

    summary = TrainingSummary("run", license="mit", finetuned_from=NAME, source="trainer")
    write(run, "README.md", summary.to_model_card())  # type: ignore[no-untyped-call]


def by_lightning(run: Path) -> None:
    from lightning.pytorch.core.saving import save_hparams_to_yaml

    version = run / "lightning_logs" / "version_1"
    version.mkdir(parents=True)
    hparams = {"lr": 1e-4, "model_name_or_path": NAME, "cache": Path("/x"), "layers": [1, 2]}
    save_hparams_to_yaml(version / "hparams.yaml", hparams)


VERL = f"""
actor_rollout_ref:
  hybrid_engine: true
  model:
    path: {NAME}
    override_config: {{}}
  ref:
    model: null
critic:
  model:
    path: org/critic
    tokenizer_path: {NAME}
reward_model:
  model:
    path: org/reward
"""
WANDB = f"""
_wandb:
    value:
        cli_version: 0.31.0
        python_version: 3.11.9
model_name_or_path:
    value: {NAME}
"""
WANDB_VERL = f"""
actor_rollout_ref:
    desc: null
    value:
        model:
            path: {NAME}
critic:
    desc: null
    value:
        model:
            path: org/critic
"""
TORCHTITAN = f'[model]\nname = "qwen3"\nflavor = "0.6B"\nhf_assets_path = "{NAME}"\n'
AUTOMODEL = f"""
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: {NAME}
"""
LMMS = f"model_config:\n  load_from_pretrained_path: {NAME}\n  attn_implementation: sdpa\n"
CARD = f"---\nlibrary_name: transformers\nbase_model:\n- {NAME}\ntags:\n- a/b\n---\n# Run\n- c/d\n"


def writing(path: str, text: str) -> Callable[[Path], None]:
    return lambda run: write(run, path, text)


# What a trainer leaves in a run, and the file that is to be named. The first three are written by
# the libraries themselves; the others have the form of their sources.
TREES: dict[str, tuple[Callable[[Path], None], str]] = {
    "PEFT's card": (by_peft, "README.md"),
    "the Trainer's card": (by_trainer, "README.md"),
    "Lightning": (by_lightning, "hparams.yaml"),
    "a card with a list": (writing("README.md", CARD), "README.md"),
    "the step's own card": (writing("checkpoint-10/README.md", CARD), "README.md"),
    "axolotl": (writing("config.yml", f"base_model: {NAME}\nadapter: lora\n"), "config.yml"),
    "LLaMA-Factory": (
        writing("sft.yaml", f"model_name_or_path: {NAME}\nstage: sft\nref_model: null\n"),
        "sft.yaml",
    ),
    "ms-swift": (
        writing("args.json", json.dumps({"model": NAME, "model_dir": "/gone", "ref_model": None})),
        "args.json",
    ),
    "torchtitan's TOML": (writing("job.toml", TORCHTITAN), "job.toml"),
    "torchtitan's JSON": (
        writing("config.json", json.dumps({"model": {"hf_assets_path": NAME}, "job": {}})),
        "config.json",
    ),
    "NeMo AutoModel": (writing("recipe.yaml", AUTOMODEL), "recipe.yaml"),
    "verl's Hydra": (writing(".hydra/config.yaml", VERL), "config.yaml"),
    "W&B": (writing("wandb/run-20260101_120000-ab/files/config.yaml", WANDB), "config.yaml"),
    "W&B of verl": (writing("wandb/run-1/files/config.yaml", WANDB_VERL), "config.yaml"),
    "MLflow": (
        writing("mlruns/0/95d2/params/model_name_or_path", f"{NAME}\n"),
        "model_name_or_path",
    ),
    "lmms-engine": (writing("train.yaml", LMMS), "train.yaml"),
}


@pytest.mark.parametrize("trainer", TREES)
def test_config_and_tokenizer_are_those_of_the_base_that_training_recorded(
    tmp_path: Path, trainer: str
) -> None:
    leave, file = TREES[trainer]
    run = tmp_path / "run"
    step = save_like_trainer(run / "checkpoint-10", trained())
    leave(run)
    with pytest.raises(NoConfigError, match=f"names {NAME}") as raised:
        unshard.merge(run, tmp_path / "out")
    assert raised.value.exit_code == 3
    assert raised.value.found.endswith(f"{file} names {NAME}, but it is not on this machine")
    assert f"base='{NAME}'" in str(raised.value)
    assert not (tmp_path / "out").exists()
    snapshot = cached(tmp_path, weights=False)
    said: list[Event] = []
    unshard.merge(run, tmp_path / "out", listener=said.append)
    chosen = next(event.message for event in said if isinstance(event, Chosen))
    assert chosen == (
        f"merging {step / 'pytorch_model_fsdp_0'} (step 10, model weights), "
        f"with the config of {NAME}, which {file} names"
    )
    record = json.loads((tmp_path / "out" / "unshard.json").read_text())
    assert record["output"]["config_of"] == NAME
    assert record["output"]["names_checked"] == "config"
    assert_same(merged(tmp_path / "out"), trained())
    loaded = model_class("qwen2").from_pretrained(tmp_path / "out")
    live = tiny_model()
    live.load_state_dict(trained())
    assert_same(loaded.state_dict(), live.state_dict())
    assert torch.equal(logits(loaded), logits(live))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (snapshot / name).read_bytes()


@pytest.mark.parametrize("where", ["run", "cwd", "absolute"])
def test_a_directory_is_found_where_it_is_meant(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, here = tmp_path / "run", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    base = {"run": run, "cwd": here, "absolute": tmp_path / "models"}[where] / "assets" / "my base"
    tiny_model().config.save_pretrained(base)
    save_like_trainer(run / "checkpoint-10", trained())
    name = str(base) if where == "absolute" else "./assets/my base"
    write(run, "job.toml", f"[model]\nhf_assets_path = '{name}'\n")
    write(run, "args.yaml", f'model_name_or_path: "{name}"\n')  # the same, and no second one
    report = unshard.merge(run, tmp_path / "out")
    assert report.loadable
    record = json.loads((tmp_path / "out" / "unshard.json").read_text())
    assert str(tmp_path) not in json.dumps(record)
    model_class("qwen2").from_pretrained(tmp_path / "out")


def test_a_torchtitan_job_starts_from_the_first_of_its_two_paths(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_like_trainer(run / "checkpoint-10", trained())
    tiny_model().config.save_pretrained(tmp_path / "assets")
    (tmp_path / "tokenizer-only").mkdir()
    job = '[model]\nhf_assets_path = "{}"\n[checkpoint]\ninitial_load_path = "{}"\n'
    write(run, "job.toml", job.format(tmp_path / "tokenizer-only", tmp_path / "assets"))
    assert unshard.merge(run, dry_run=True).loadable
    write(run, "job.toml", job.format(tmp_path / "assets", tmp_path / "gone"))
    assert unshard.merge(run, dry_run=True).loadable


def test_several_names_are_listed_and_none_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_like_trainer(run / "checkpoint-10", trained())
    cached(tmp_path, weights=False)
    write(run, "args.json", json.dumps({"model": NAME}))
    write(run, "README.md", "---\nbase_model: org/other\n---\n")
    done = command("merge", run)
    assert done.returncode == 3
    assert f"{run}/args.json names {NAME}" in done.stderr
    assert f"{run}/README.md names org/other" in done.stderr
    assert f"--base {NAME}" in done.stderr
    assert "--base org/other" in done.stderr
    assert not (run / "merged").exists()


# What a run may have that is no record of one base model, each with `org/wrong` in the cache, whose
# tensors have the same shapes. The texts are those that the error must have.
RIGHT, WRONG = "org/right", "org/wrong"
DOUBTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "a path that is gone": (
        {"args.json": '{"model": "/gone/right"}', "eval.yaml": f"model_name_or_path: {WRONG}"},
        ("names /gone/right, but it is not on this machine", f"names {WRONG}"),
    ),
    "a path below home": (
        {"a.yaml": "base_model: ~/gone/x", "README.md": f"---\nbase_model: {WRONG}\n---\n"},
        ("names ~/gone/x, but it is not on this machine", f"names {WRONG}"),
    ),
    "an address": (
        {
            "config.yaml": f"base_model: {WRONG}\nactor_rollout_ref: {{model: {{path: 'hdfs://a/b'}}}}"
        },
        ("names hdfs://a/b, but", f"names {WRONG}"),
    ),
    "a list of a card": (
        {"README.md": f"---\nbase_model:\n- {RIGHT}\n- {WRONG}\n---\n"},
        (f"names {RIGHT}, but", f"names {WRONG}"),
    ),
    "two documents": (
        {"sft.yaml": f"base_model: {WRONG}\n---\nbase_model: {RIGHT}\n"},
        (f"names {RIGHT}, but", f"names {WRONG}"),
    ),
    "a tag of Python": (
        {
            "args.json": json.dumps({"model": WRONG}),
            "hparams.yaml": "model_name_or_path: !!python/object/apply:pathlib.PosixPath [/, a]",
        },
        ("names !tag:yaml.org,2002:python/object/apply:pathlib.PosixPath, but", f"names {WRONG}"),
    ),
    "a revision": (
        {"config.yaml": f"base_model: {WRONG}\nrevision_of_model: v2\n"},
        (f"names {WRONG}, but its revision v2 is not on this machine",),
    ),
    "two logged runs": (
        {
            "wandb/run-1/files/config.yaml": f"model_name_or_path: {{value: {WRONG}}}",
            "wandb/run-2/files/config.yaml": "lr: {value: 1}",
        },
        (f"names {WRONG}, but", "wandb has 2 runs"),
    ),
    "results of lm-eval": (
        {"results_2025.json": json.dumps({"model_name": WRONG, "model_name_or_path": WRONG})},
        ("give it with --base MODEL",),
    ),
} | {
    f"YAML, {number}": (
        {"config.yaml": text + f"\njudge:\n  model_name: {WRONG}\n"},
        (f"names {RIGHT}, but it is not on this machine",),
    )
    for number, text in enumerate(
        (
            f"base: &b {RIGHT}\nbase_model: *b",
            f"model_name_or_path: >-\n  {RIGHT}",
            f"model_name_or_path: # the base\n  {RIGHT}",
            f"'model_name_or_path': {RIGHT}",
            f"\ufeffbase_model: {RIGHT}",
        )
    )
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_what_is_not_one_known_base_is_named_and_not_taken(tmp_path: Path, doubt: str) -> None:
    files, texts = DOUBTS[doubt]
    run = tmp_path / "run"
    save_like_trainer(run / "checkpoint-10", trained())
    cached(tmp_path, WRONG)
    for path, text in files.items():
        write(run, path, text)
    done = command("merge", run, tmp_path / "out")
    assert done.returncode == 3, done.stderr
    assert [text for text in texts if text not in done.stderr] == []
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_not_fused_into_a_base_that_its_own_config_does_not_name(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    train_adapter(run, "/gone/right")
    cached(tmp_path, WRONG)
    write(run, "README.md", f"---\nbase_model: {WRONG}\n---\n")
    with pytest.raises(ConversionError, match="has a LoRA adapter only") as raised:
        unshard.merge(run, tmp_path / "out")
    assert "names /gone/right, but it is not on this machine" in raised.value.found
    assert f"names {WRONG}" in raised.value.found


@pytest.mark.parametrize("name", ["exp#3", "exp,3", "my models", "exp}"])
def test_a_path_is_read_whole(tmp_path: Path, name: str) -> None:
    run, base = tmp_path / "run", tmp_path / name
    save_like_trainer(run / "checkpoint-10", trained())
    for place in (base, tmp_path / "exp", tmp_path / "my"):
        tiny_model(rope_theta=100.0 if place == base else 1.0).config.save_pretrained(place)
    write(run, "config.yaml", f"model_name_or_path: {base}\n")
    for number in range(40):  # of which none is read: they are too many
        write(run, f"other-{number}.yaml", "model_name_or_path: org/other\n")
    unshard.merge(run, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((base / "config.json").read_text()) | {"dtype": "float32"}


def test_a_critic_is_given_a_config_and_no_base(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        save_ranks(tmp_path / "run" / "global_step_1" / role, trained(), 2)
    write(tmp_path / "run", "config.yaml", VERL)
    done = command("merge", tmp_path / "run", tmp_path / "out", "--role", "critic")
    assert done.returncode == 3
    assert "names org/critic, but it is not on this machine" in done.stderr
    assert done.stderr.rstrip().endswith("--role critic --config FILE")


def test_an_adapter_without_alpha_gets_one_line_for_both(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_adapter(run, NAME)
    (run / "adapter_config.json").unlink()
    done = command("merge", run, tmp_path / "out")
    assert done.stderr.rstrip().endswith(f"{tmp_path}/out --base MODEL --lora-alpha N")
    done = command("merge", run, tmp_path / "out", "--names", "training")
    assert done.stderr.rstrip().endswith("--names training --lora keep")
    line = ["merge", str(run), str(tmp_path / "out"), "--names", "training", "--lora", "keep"]
    assert command(*line).returncode == 0


def test_a_model_that_does_not_fit_is_refused_with_the_file_that_names_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_like_trainer(run / "checkpoint-10", trained())
    cached(tmp_path, weights=False, num_hidden_layers=3)
    write(run, "args.json", json.dumps({"model": NAME}))
    with pytest.raises(ConversionError) as raised:
        unshard.merge(run, tmp_path / "out")
    assert "Missing key(s) in state_dict" in raised.value.subject
    assert f"{run}/args.json names {NAME} as the base model" in raised.value.hint
    assert "base=" in str(raised.value)
    shutil.rmtree(tmp_path / "cache")
    cached(tmp_path, weights=False, intermediate_size=28)
    with pytest.raises(ConversionError, match=r"another shape[\s\S]*args\.json names"):
        unshard.merge(run, tmp_path / "out")
    tiny_model().config.save_pretrained(tmp_path / "right")  # the user's config ends the search
    unshard.merge(run, tmp_path / "out", config=tmp_path / "right")


def test_the_config_of_the_run_is_checked_like_any_other(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_like_trainer(run / "checkpoint-10", trained())
    write(run, "args.json", json.dumps({"model": "org/other"}))
    tiny_model().config.save_pretrained(run)
    report = unshard.merge(run, tmp_path / "out")
    assert report.names_checked == "config"
    assert "config_of" not in json.loads((tmp_path / "out" / "unshard.json").read_text())["output"]
    tiny_model(num_hidden_layers=3).config.save_pretrained(run)
    with pytest.raises(ConversionError, match=r"Missing key"):
        unshard.merge(run, tmp_path / "other")


@pytest.mark.parametrize("offline", ["", "offline"])
def test_a_part_of_the_cache_is_used_and_nothing_is_asked(
    tmp_path: Path, offline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", bool(offline))
    run = tmp_path / "run"
    save_like_trainer(run / "checkpoint-10", trained())
    write(run, "args.json", json.dumps({"model": NAME}))
    snapshot = cached(tmp_path)
    for path in snapshot.glob("tokenizer*"):
        path.unlink()
    (snapshot / "model.safetensors").write_bytes(b"cut off")
    report = unshard.merge(run, tmp_path / "out")
    assert report.loadable
    assert any(f"no tokenizer on this machine; to download it: base='{NAME}'" in one
               for one in report.warnings)  # fmt: skip


def train_adapter(run: Path, base: str) -> dict[str, torch.Tensor]:
    """Save an adapter as the Trainer does under FSDP; return the weights that PEFT merges it to."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    model = tiny_model()
    model.name_or_path = base
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    for name, one in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=0.3)
    state = {
        name: one.detach()
        for name, one in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    save_like_trainer(run / "checkpoint-10", state)
    model.save_pretrained(str(run), save_embedding_layers=False)
    (run / "adapter_model.safetensors").unlink()
    return model.merge_and_unload().state_dict()


def test_an_adapter_alone_takes_weights_that_are_here(tmp_path: Path) -> None:
    run = tmp_path / "run"
    truth = train_adapter(run, NAME)
    for weights in (None, False):
        if weights is not None:
            cached(tmp_path, weights=weights)
        with pytest.raises(ConversionError, match="has a LoRA adapter only") as raised:
            unshard.merge(run, tmp_path / "out")
        lacks = "it is" if weights is None else "its weights are"
        assert f"names {NAME}, but {lacks} not on this machine" in raised.value.found
        assert f"base='{NAME}'" in str(raised.value)
    shutil.rmtree(tmp_path / "cache")
    cached(tmp_path)
    done: list[Event] = []
    report = unshard.merge(run, tmp_path / "out", listener=done.append)
    chosen = next(event.message for event in done if isinstance(event, Chosen))
    assert chosen.endswith(f", with the base {NAME}, which adapter_config.json names")
    assert report.names_checked == "base"
    found = merged(tmp_path / "out")
    assert found.keys() == truth.keys()
    for name, one in truth.items():
        torch.testing.assert_close(found[name], one, rtol=1e-6, atol=1e-6)
    assert unshard.verify(tmp_path / "out", run).equal


def test_a_checkpoint_with_a_config_looks_for_no_base(tmp_path: Path) -> None:
    checkpoint = save_ranks(tmp_path / "run" / "global_step_1" / "actor", trained(), 2)
    tiny_model().config.save_pretrained(checkpoint / "huggingface")
    write(tmp_path / "run", "config.yaml", f"base_model: {NAME}\n")
    cached(tmp_path, weights=False, num_hidden_layers=3)
    assert unshard.merge(tmp_path / "run", dry_run=True).names_checked == "config"


def test_without_a_config_on_purpose_no_base_is_looked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_like_trainer(run / "checkpoint-10", trained())
    write(run, "args.json", json.dumps({"model": NAME}))
    cached(tmp_path, weights=False)
    assert not unshard.merge(run, dry_run=True, config="none").loadable
    assert not unshard.merge(run, dry_run=True, names="training").loadable
    assert unshard.inspect(run).would_write.endswith(f"the config of {NAME}, which args.json names")
    with unshard.virtual(run) as files:
        assert "config.json" in files


@pytest.mark.parametrize(
    "text",
    [
        "base_model: " + "x" * 5000,
        "base_model: a/b\0c",
        "base_model: [",
        "judge:\n  model_name_or_path: org/judge",
        "stages:\n- {model_name_or_path: org/a}\n- {model_name_or_path: org/b}",
        "description: |\n  base_model: org/other",
        "draft_model: {base_model: org/draft}",
    ],
)
def test_what_names_no_model_is_passed_over(tmp_path: Path, text: str) -> None:
    run = tmp_path / "run"
    save_like_trainer(run / "checkpoint-10", trained())
    write(run, "config.yaml", text)
    with pytest.raises(NoConfigError) as raised:
        unshard.merge(run, tmp_path / "out")
    assert raised.value.found == ""
    assert "base=… or config=…" in str(raised.value)
