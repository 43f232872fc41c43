"""`--base`: which tensors are expected, their dtypes and files; and what is like the base still."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unshard
from ranks import assert_same, merged, save_ranks, some_tensors
from unshard import ConversionError, CorruptError, NotMergeableError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def model(directory: Path, files: dict[str, dict[str, torch.Tensor]]) -> Path:
    """A Hugging Face directory of these files."""
    directory.mkdir()
    for name, tensors in files.items():
        save_file(tensors, directory / name, {"format": "pt"})
    if len(files) > 1:
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(index)
    (directory / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tensors = {name: tensor.bfloat16() for name, tensor in some_tensors(7).items()}
    tensors[NORM] = some_tensors(7)[NORM]
    return model(tmp_path / "base", {"model.safetensors": tensors})


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "ckpt", some_tensors(), 2)


def test_the_base_completes_config_and_tokenizer(ckpt: Path, base: Path, tmp_path: Path) -> None:
    report = unshard.merge(ckpt, tmp_path / "out", base=base)
    assert_same(merged(tmp_path / "out"), some_tensors())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert report.changed_from_base == (3, 3)


def test_what_the_checkpoint_has_itself_is_its_own(ckpt: Path, base: Path, tmp_path: Path) -> None:
    (ckpt / "config.json").write_text('{"model_type": "qwen2"}')
    (ckpt / "vocab.json").write_text("{}")
    unshard.merge(ckpt, tmp_path / "out", base=base)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen2"
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_dtypes_are_the_bases_tensor_by_tensor(ckpt: Path, base: Path, tmp_path: Path) -> None:
    unshard.merge(ckpt, tmp_path / "out", base=base, dtype="base")
    expected = {name: tensor.bfloat16() for name, tensor in some_tensors().items()}
    expected[NORM] = some_tensors()[NORM]
    assert_same(merged(tmp_path / "out"), expected)


ONE, TWO = "-00001-of-00002.safetensors", "-00002-of-00002.safetensors"
USUAL = {f"model{ONE}": [EMBED], f"model{TWO}": [NORM, HEAD]}
ODD = {f"model.safetensors{ONE}": [EMBED, NORM], f"model.safetensors{TWO}": [HEAD]}


@pytest.mark.parametrize(
    ("files", "shard_size", "expected"), [(USUAL, None, 2), (ODD, None, 2), (USUAL, "5GB", 1)]
)
def test_files_are_split_as_the_base_is_unless_a_size_is_given(
    ckpt: Path,
    tmp_path: Path,
    files: dict[str, list[str]],
    shard_size: str | None,
    expected: int,
) -> None:
    other = some_tensors(7)
    split = {file: {name: other[name] for name in names} for file, names in files.items()}
    base = model(tmp_path / "base", split)
    report = unshard.merge(ckpt, tmp_path / "out", base=base, max_shard_size=shard_size)
    assert len(report.files) == expected
    assert_same(merged(tmp_path / "out"), some_tensors())
    if shard_size is None:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: f for f, names in files.items() for name in names}


def test_missing_and_unexpected_tensors_are_errors_unless_allowed(
    ckpt: Path, tmp_path: Path
) -> None:
    tensors = some_tensors(7)
    tensors["model.extra.weight"] = tensors.pop(NORM)
    base = model(tmp_path / "base", {"model.safetensors": tensors})
    with pytest.raises(ConversionError) as raised:
        unshard.merge(ckpt, tmp_path / "out", base=base)
    text = str(raised.value)
    assert 'Missing key(s) in state_dict: "model.extra.weight"' in text
    assert f'Unexpected key(s) in state_dict: "{NORM}"' in text
    assert "allow_missing=True" in text
    assert not (tmp_path / "out").exists()
    report = unshard.merge(
        ckpt, tmp_path / "out", base=base, allow_missing=True, allow_unexpected=True
    )
    assert sum(f"tensor compared with {base}: " in warning for warning in report.warnings) == 2
    assert_same(merged(tmp_path / "out"), some_tensors())


def test_tensors_that_were_left_out_on_purpose_are_not_missed(
    ckpt: Path, base: Path, tmp_path: Path
) -> None:
    unshard.merge(ckpt, tmp_path / "out", base=base, exclude="lm_head")
    assert HEAD not in merged(tmp_path / "out")


def test_a_resized_vocabulary_is_reported(tmp_path: Path, base: Path) -> None:
    tensors = some_tensors()
    tensors[EMBED] = torch.randn(20, 6)
    save_ranks(tmp_path / "ckpt", tensors, 2)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=base)
    assert any(f"{EMBED} [13, 6] -> [20, 6]" in warning for warning in report.warnings)


def test_an_output_that_is_the_base_warns_loudly(tmp_path: Path, base: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(7), 2)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=base, dtype="base")
    assert report.changed_from_base == (0, 3)
    assert any("ALL 3 TENSORS EQUAL" in warning for warning in report.warnings)


def test_what_stayed_as_it_was_is_counted(tmp_path: Path, base: Path) -> None:
    tensors = some_tensors(7)
    tensors[HEAD] = tensors[HEAD] + 1
    save_ranks(tmp_path / "ckpt", tensors, 2)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=base)
    assert report.changed_from_base == (1, 3)


def test_a_base_of_names_only_says_what_is_expected(ckpt: Path, tmp_path: Path) -> None:
    directory = tmp_path / "base"
    directory.mkdir()
    index = {"weight_map": dict.fromkeys(some_tensors(), "model-00001-of-00001.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    report = unshard.merge(ckpt, tmp_path / "out", base=directory, config="none")
    assert report.changed_from_base is None
    assert list(report.files) == ["model.safetensors"]
    with pytest.raises(ConversionError, match=r"dtypes of .* are unknown"):
        unshard.merge(ckpt, tmp_path / "out2", base=directory, dtype="base", config="none")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/x.safetensors", ""])
def test_a_base_whose_files_are_elsewhere_is_refused(ckpt: Path, tmp_path: Path, file: str) -> None:
    directory = tmp_path / "base"
    directory.mkdir()
    index = {"weight_map": dict.fromkeys(some_tensors(), file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptError):
        unshard.merge(ckpt, tmp_path / "out", base=directory)


@pytest.mark.parametrize(
    "spec", ["./nowhere", "/nowhere/at/all", "a/b/c", "models/qwen", "gone/", r"c:\\x"]
)
def test_a_base_that_is_not_there_is_refused_and_the_hub_is_not_asked(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConversionError, match=r"base=.*no such directory[\s\S]*the hub was not asked"
    ):
        unshard.merge(ckpt, tmp_path / "out", base=spec)


def test_a_hub_model_that_is_not_available_is_refused(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConversionError, match=r"base='nobody/nothing': is not a directory here"):
        unshard.merge(ckpt, tmp_path / "out", base="nobody/nothing")
    assert not (tmp_path / "out").exists()


def test_a_hub_model_in_the_cache_is_taken_from_there(
    ckpt: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "cache" / "models--org--name" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    base.rename(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    report = unshard.merge(ckpt, tmp_path / "out", base="org/name")
    assert report.changed_from_base == (3, 3)
    record = json.loads((tmp_path / "out" / "unshard.json").read_text())
    assert record["options"]["base"] == "org/name"


def plain_ranks(directory: Path, tensors: dict[str, torch.Tensor], world: int) -> Path:
    """Plain tensors that were cut along dimension 0, with nothing that says so."""
    parts = [
        {name: tensor.chunk(world)[rank].clone() for name, tensor in tensors.items()}
        for rank in range(world)
    ]
    return save_ranks(directory, {}, world, plain=parts)


def test_plain_shards_are_joined_where_the_base_knows_their_shape(
    base: Path, tmp_path: Path
) -> None:
    tensors = some_tensors() | {NORM: torch.ones(6)}
    plain_ranks(tmp_path / "ckpt", tensors, 2)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=base)
    assert_same(merged(tmp_path / "out"), tensors)
    assert any("3 plain tensors taken as shards" in warning for warning in report.warnings)
    with pytest.raises(NotMergeableError):
        unshard.merge(tmp_path / "ckpt", tmp_path / "without")


def test_equal_plain_tensors_of_the_bases_shape_are_copies(base: Path, tmp_path: Path) -> None:
    tensors = some_tensors()
    plain = [{NORM: tensors[NORM]} for _ in range(2)]
    sharded = {name: tensor for name, tensor in tensors.items() if name != NORM}
    save_ranks(tmp_path / "ckpt", sharded, 2, plain=plain)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=base)
    assert_same(merged(tmp_path / "out"), tensors)


def test_leaving_some_out_does_not_excuse_others(base: Path, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in some_tensors().items() if name != NORM}
    save_ranks(tmp_path / "ckpt", tensors, 2)
    for options in ({"exclude": "lm_head"}, {"include": "."}):
        with pytest.raises(ConversionError, match=f'Missing key.s. in state_dict: "{NORM}"'):
            unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=base, **options)  # type: ignore[arg-type]


def test_another_model_is_not_a_base(ckpt: Path, tmp_path: Path) -> None:
    wider = {name: torch.cat([tensor, tensor], -1) for name, tensor in some_tensors(7).items()}
    base = model(tmp_path / "base", {"model.safetensors": wider})
    with pytest.raises(ConversionError, match="3 tensors have another shape"):
        unshard.merge(ckpt, tmp_path / "out", base=base)


def test_a_config_of_the_base_gets_the_vocabulary_of_the_checkpoint(
    tmp_path: Path, base: Path
) -> None:
    (base / "config.json").write_text('{"model_type": "llama", "vocab_size": 13}')
    tensors = some_tensors()
    tensors[EMBED], tensors[HEAD] = torch.randn(20, 6), torch.randn(20, 6)
    save_ranks(tmp_path / "ckpt", tensors, 2)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=base)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 20


@pytest.mark.parametrize("of_base", [True, False])
def test_a_tied_head_is_excused_on_either_side(tmp_path: Path, of_base: bool) -> None:  # noqa: FBT001
    whole = some_tensors()
    without = {name: tensor for name, tensor in whole.items() if name != HEAD}
    base = model(tmp_path / "base", {"model.safetensors": whole if of_base else without})
    save_ranks(tmp_path / "ckpt", without if of_base else whole, 2)
    config = '{"model_type": "llama", "tie_word_embeddings": true}'
    (tmp_path / "ckpt" / "config.json").write_text(config)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=base)
    assert_same(merged(tmp_path / "out"), without if of_base else whole)


def test_training_names_and_a_base_contradict_each_other(ckpt: Path, base: Path) -> None:
    with pytest.raises(UsageError, match="names='training' excludes base"):
        unshard.merge(ckpt, base=base, names="training")


def test_a_model_verifies_against_itself_though_it_repeats_a_tied_head(tmp_path: Path) -> None:
    tensors = some_tensors()
    tensors[HEAD] = tensors[EMBED].clone()
    base = model(tmp_path / "base", {"model.safetensors": tensors})
    (base / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    assert unshard.verify(base, base).equal
    unshard.merge(base, tmp_path / "out")
    assert unshard.verify(tmp_path / "out", base).equal


@pytest.mark.parametrize("options", [{"include": "model"}, {"exclude": "norm"}])
def test_what_a_merge_was_told_is_read_from_its_record(
    ckpt: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    unshard.merge(ckpt, tmp_path / "out", config="none", **options)  # type: ignore[arg-type]
    assert unshard.verify(tmp_path / "out", ckpt).equal
