"""Which library a model is for, and that nothing is called a model that no library loads."""

import json
import re
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import unshard
from ranks import save_ranks, some_tensors
from unshard.cli.main import main
from unshard.compat import verl_omni
from unshard.errors import (
    CheckpointError,
    ConversionError,
    CorruptError,
    IncompleteError,
    OutputError,
    UsageError,
)
from unshard.read.model_config import TYPES_OF_LMMS_ENGINE

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

DIFFUSERS = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.42.1"}
TIMM = {"architecture": "resnet50", "num_classes": 2, "pretrained_cfg": {"tag": "a1"}}
OPEN_CLIP = {"model_cfg": {"embed_dim": 4}, "preprocess_cfg": {"mean": [0, 0, 0]}}
LEROBOT = {"type": "act", "input_features": {}, "output_features": {}}
SIT = {"model_type": "sit", "architectures": ["SiT"]}
CUSTOM = {"hidden": 4, "dropout": 0.1}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]


def save_with(place: Path, config: Mapping[str, object]) -> Path:
    save_ranks(place, some_tensors(), 2)
    (place / "huggingface").mkdir()
    (place / "huggingface" / "config.json").write_text(json.dumps(config, indent=4))
    return place


@pytest.mark.parametrize(
    ("config", "library", "last"),
    [
        (TIMM, "timm", "weights only: not tested with timm"),
        (OPEN_CLIP, "open_clip", "weights only: not tested with open_clip"),
        (LEROBOT, "lerobot", "weights only: not tested with lerobot"),
        (SIT, "lmms_engine", "weights only: not tested with lmms_engine"),
        (CUSTOM, "", "weights only: the library of config.json is unknown"),
    ],
)
def test_what_no_library_is_known_to_load_is_called_weights(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: Mapping[str, object],
    library: str,
    last: str,
) -> None:
    checkpoint = save_with(tmp_path / "ckpt", config)
    main_of("merge", checkpoint, tmp_path / "out")
    assert capsys.readouterr().out.splitlines()[-1] == last
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    added = {"torch_dtype": "float32"} if library == "lmms_engine" else {}
    assert written == {**config, **added}
    report = unshard.merge(checkpoint, tmp_path / "again")
    assert (report.loadable, report.library) == (False, library)
    with pytest.raises((UsageError, OutputError), match=r"is not of transformers|does not load"):
        unshard.verify(tmp_path / "out", checkpoint, load=True)


def test_the_types_of_lmms_engine_are_those_that_transformers_lacks() -> None:
    from transformers.models.auto import configuration_auto

    known: Mapping[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]

    package = find_spec("lmms_engine")
    assert package is not None
    assert package.origin is not None
    stated = {
        name
        for path in Path(package.origin).parent.glob("models/**/configuration_*.py")
        for name in re.findall(r'^    model_type\b.*= "([^"]+)"', path.read_text(), re.MULTILINE)
    }
    parts = {"rice_vit", "LLaVAOneVision1_5_text", "aero_realtime_audio_encoder"}
    found = stated - known.keys() - parts
    assert found | {"bagel"} == TYPES_OF_LMMS_ENGINE  # whose config is in another file


def main_of(*arguments: object) -> None:
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    assert end.value.code == 0


def test_a_config_of_transformers_makes_a_model(tmp_path: Path) -> None:
    timm_in_transformers = {"model_type": "timm_wrapper", **TIMM}
    checkpoint = save_with(tmp_path / "ckpt", timm_in_transformers)
    report = unshard.merge(checkpoint, tmp_path / "out")
    assert (report.loadable, report.library) == (True, "transformers")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_model_of_diffusers_has_its_own_names_of_files(tmp_path: Path) -> None:
    checkpoint = save_with(tmp_path / "ckpt", DIFFUSERS)
    report = unshard.merge(checkpoint, tmp_path / "out", max_shard_size=100)
    assert (report.loadable, report.library) == (True, "diffusers")
    index = tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values())
    assert names == set(report.files)
    assert {one[: len("diffusion_pytorch_model-0")] for one in names} == {
        "diffusion_pytorch_model-0"
    }
    assert unshard.diff(checkpoint, tmp_path / "out").equal
    config = tmp_path / "ckpt" / "huggingface" / "config.json"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        config.read_text()
    )
    again = unshard.merge(checkpoint, tmp_path / "out", overwrite=True)  # in one file now
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {*again.files, "config.json", "unshard.json"}


def test_other_commands_write_them_alike(tmp_path: Path) -> None:
    for step in (10, 20):
        save_with(tmp_path / "run" / f"global_step_{step}" / "actor", DIFFUSERS)
    run, last = tmp_path / "run", tmp_path / "run" / "global_step_20"
    unshard.merge(last, tmp_path / "out")
    weights = tmp_path / "out" / "diffusion_pytorch_model.safetensors"
    unshard.average(run, tmp_path / "mean", last=2)
    unshard.merge_all(run, tmp_path / "all")
    for place in ("mean", "all/global_step_20"):
        assert (tmp_path / place / weights.name).read_bytes() == weights.read_bytes()
    with unshard.virtual(last) as files:
        assert files.open(weights.name).read() == weights.read_bytes()
    unshard.reshard(tmp_path / "out", tmp_path / "dcp", to="dcp", world_size=3)
    unshard.merge(tmp_path / "dcp", tmp_path / "again")
    assert (tmp_path / "again" / weights.name).read_bytes() == weights.read_bytes()


def pipeline_in(place: Path, *components: str) -> Path:
    stated: dict[str, object] = {
        "_class_name": "FluxPipeline",
        "vae": ["diffusers", "AutoencoderKL"],
    }
    for name in components:
        stated[name] = ["diffusers", "FluxTransformer2DModel"]
        unshard.merge(save_with(place.parent / f"ckpt-{name}", DIFFUSERS), place / name)
        (place / name / "unshard.json").unlink()
    (place / "vae").mkdir(parents=True)
    (place / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(bytes(1000))
    (place / "model_index.json").write_text(json.dumps(stated))
    return place


def test_of_two_transformers_the_first_is_replaced(tmp_path: Path) -> None:
    base = pipeline_in(tmp_path / "pipe", "transformer", "transformer_2")
    trained = {name: one + 1 for name, one in some_tensors().items()}
    save_ranks(tmp_path / "trained", trained, 2)
    unshard.merge(tmp_path / "trained", tmp_path / "out", base=base)
    unshard.verify(tmp_path / "out", tmp_path / "trained")
    for name in ("vae", "transformer_2"):
        file = f"{name}/diffusion_pytorch_model.safetensors"
        assert (tmp_path / "out" / file).read_bytes() == (base / file).read_bytes()
    assert not unshard.diff(base / "transformer", tmp_path / "out").equal
    assert unshard.diff(tmp_path / "trained", tmp_path / "out").equal


@pytest.mark.parametrize("components", [(), ("transformer", "unet")])
def test_a_pipeline_of_no_or_several_trained_components_is_refused(
    tmp_path: Path, components: tuple[str, ...]
) -> None:
    base = pipeline_in(tmp_path / "pipe", *components)
    checkpoint = save_with(tmp_path / "ckpt", DIFFUSERS)
    with pytest.raises(UsageError, match="of which one component is needed") as error:
        unshard.merge(checkpoint, tmp_path / "out", base=base)
    assert all(name in error.value.hint for name in components)
    assert not (tmp_path / "out").exists()


def sentences_in(place: Path) -> Path:
    """Make what lies beside the weights of a model of three modules."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "own"}))
    (place / "modules.json").write_text(json.dumps(MODULES))
    for folder in ("1_Pooling", "2_Dense"):
        (place / folder).mkdir()
        (place / folder / "config.json").write_text("{}")
    return place


@pytest.mark.parametrize("inner", ["auto_model", "model"])
def test_each_module_gets_its_file(tmp_path: Path, inner: str) -> None:
    own = {"model.layers.0.w": torch.ones(4, 3), "norm.weight": torch.ones(4)}
    dense = {"linear.weight": torch.randn(6, 4), "linear.bias": torch.randn(6)}
    trained = {
        **{f"0.{inner}.{name}": one for name, one in own.items()},
        **{f"2.{name}": one for name, one in dense.items()},
    }
    save_ranks(tmp_path / "ckpt", trained, 2)
    config = sentences_in(tmp_path / "config")
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", config=config)
    assert (report.loadable, report.library) == (True, "sentence_transformers")
    assert set(report.files) == {"model.safetensors", "2_Dense/model.safetensors"}
    assert {"modules.json", "1_Pooling/config.json"} <= set(report.companions)
    from safetensors.torch import load_file

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == own.keys()
    found = load_file(tmp_path / "out" / "2_Dense" / "model.safetensors")
    assert {name: one.tolist() for name, one in found.items()} == {
        name: one.tolist() for name, one in dense.items()
    }
    assert unshard.verify(tmp_path / "out", tmp_path / "ckpt").equal
    damaged = tmp_path / "out" / "2_Dense" / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    differing = unshard.verify(tmp_path / "out", tmp_path / "ckpt").different
    assert [one.name for one in differing] == ["2_Dense/linear.weight"]


def test_names_of_modules_without_their_list_are_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"0.model.w": torch.ones(4, 2), "2.linear.w": torch.ones(4)}
    save_ranks(tmp_path / "ckpt", names, 2)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "own"}))
    main_of("merge", tmp_path / "ckpt", tmp_path / "out", "--config", config)
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "weights only: the names are those of training"
    assert "are kept; for the names of its files: --base MODEL" in told.err
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "bare", config="none")
    assert report.tensors == 2


def test_the_checksums_of_all_modules_are_recorded(tmp_path: Path) -> None:
    names = {"0.model.w": torch.ones(4, 2), "2.linear.w": torch.ones(4)}
    save_ranks(tmp_path / "ckpt", names, 2)
    config = sentences_in(tmp_path / "config")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", config=config, checksums=True)
    record = tmp_path / "out" / "unshard.json"
    found = json.loads(record.read_text())["checksums"]
    assert found == unshard.checksums(tmp_path / "ckpt", config=config)
    assert found.keys() == {"w", "2_Dense/linear.w"}
    assert unshard.verify(tmp_path / "out", checksums=record).equal


def test_a_pipeline_is_copied_whole_or_refused(tmp_path: Path) -> None:
    base = pipeline_in(tmp_path / "pipe", "transformer")
    (base / "vae").rename(tmp_path / "elsewhere")
    (base / "vae").symlink_to(tmp_path / "elsewhere")
    checkpoint = save_with(tmp_path / "ckpt", DIFFUSERS)
    report = unshard.merge(checkpoint, tmp_path / "out", base=base)
    assert "vae/diffusion_pytorch_model.safetensors" in report.companions
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    with pytest.raises(IncompleteError, match="has no folder vae"):
        unshard.merge(checkpoint, tmp_path / "none", base=base)
    fields = json.loads((base / "model_index.json").read_text())
    fields["../ckpt"] = fields.pop("vae")
    (base / "model_index.json").write_text(json.dumps(fields))
    with pytest.raises(CorruptError, match="a component outside of the pipeline"):
        unshard.merge(checkpoint, tmp_path / "none", base=base)


def test_a_component_of_another_class_is_refused(tmp_path: Path) -> None:
    base = pipeline_in(tmp_path / "pipe", "transformer")
    vae = save_with(tmp_path / "ckpt", {**DIFFUSERS, "_class_name": "AutoencoderKL"})
    with pytest.raises(ConversionError, match="and the checkpoint a AutoencoderKL"):
        unshard.merge(vae, tmp_path / "out", base=base)


@pytest.mark.parametrize(
    ("name", "text"),
    [("model_index.json", '{"x": 1}')]
    + [("modules.json", one) for one in ('{"x": 1}', '["q_proj"]', "[]", "no JSON")],
)
def test_a_file_of_the_same_name_and_another_meaning_does_not_matter(
    tmp_path: Path, name: str, text: str
) -> None:
    checkpoint = save_with(tmp_path / "ckpt", {"model_type": "llama"})
    (checkpoint / "huggingface" / name).write_text(text)
    (checkpoint / name).write_text(text)
    report = unshard.merge(checkpoint, tmp_path / "out")
    assert report.library == "transformers"
    assert name not in report.companions
    (tmp_path / "out" / name).write_text(text)
    again = unshard.merge(tmp_path / "out", tmp_path / "again")
    assert name not in again.companions


def test_what_another_library_was_written_for_is_removed_with_it(tmp_path: Path) -> None:
    names = {"0.model.w": torch.ones(4, 2), "2.linear.w": torch.ones(4)}
    save_ranks(tmp_path / "sentences", names, 2)
    config = sentences_in(tmp_path / "config")
    unshard.merge(tmp_path / "sentences", tmp_path / "out", config=config)
    other = save_with(tmp_path / "ckpt", DIFFUSERS)
    unshard.merge(other, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "modules.json").exists()
    assert unshard.verify(tmp_path / "out", other).equal


@pytest.mark.parametrize("folder", ["../elsewhere", "/etc", "a/../../b"])
def test_a_module_outside_the_model_is_refused(tmp_path: Path, folder: str) -> None:
    save_ranks(tmp_path / "ckpt", {"0.model.w": torch.ones(4, 2), "2.w": torch.ones(4)}, 2)
    config = sentences_in(tmp_path / "config")
    listed = [{**one, "path": folder if one["idx"] == 2 else one["path"]} for one in MODULES]
    (config / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(CorruptError, match="a folder outside its own"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", config=config)
    shutil.rmtree(config)


def drop_in(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["verl_omni", *map(str, arguments)])
    verl_omni.main()


@pytest.mark.parametrize("form", ["pipeline", "transformer"])
def test_the_drop_in_of_verl_omni_merges_and_checks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    form: str,
) -> None:
    base = pipeline_in(tmp_path / "pipe", "transformer")
    checkpoint, out = save_with(tmp_path / "actor", DIFFUSERS), tmp_path / "out"
    common = ("--backend", "fsdp")
    given = ("--local_dir", checkpoint, "--base_model", base, "--target_dir", out)
    more = ("--output_format", form, "--max_shard_size", 400, "--trust-checkpoint")
    drop_in(monkeypatch, "merge", *common, *given, *more)
    told = json.loads(capsys.readouterr().out)
    assert told == {"output_dir": str(out), "manifest_path": str(out / "merge_manifest.json")}
    model = out / "transformer" if form == "pipeline" else out
    assert (out / "model_index.json").exists() == (form == "pipeline")
    assert unshard.verify(model, checkpoint).equal
    drop_in(monkeypatch, "test", *common, "--test_hf_dir", out)
    name = "FluxPipeline" if form == "pipeline" else "FluxTransformer2DModel"
    told = json.loads(capsys.readouterr().out)
    assert told == {"integrity": "passed", "architecture": name}
    weights = sorted(model.glob("*.safetensors"))
    assert len(weights) > 1
    for file in [*out.rglob("*")]:
        if file.is_dir() or file.name in ("unshard.json", "merge_manifest.json"):
            continue
        data = file.read_bytes()
        file.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        with pytest.raises(CheckpointError):
            drop_in(monkeypatch, "test", *common, "--test_hf_dir", out)
        file.write_bytes(data)
    drop_in(monkeypatch, "test", *common, "--test_hf_dir", out)
    (model / "more.py").symlink_to("/etc/passwd")
    with pytest.raises(CorruptError, match="differs from its record"):
        drop_in(monkeypatch, "test", *common, "--test_hf_dir", out)


def test_the_drop_in_of_verl_omni_needs_a_pipeline_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = pipeline_in(tmp_path / "pipe", "transformer") / "transformer"
    given = ("--local_dir", tmp_path, "--base_model", base, "--target_dir", tmp_path / "out")
    with pytest.raises(UsageError, match="is not a pipeline"):
        drop_in(monkeypatch, "merge", "--backend", "fsdp", *given)
