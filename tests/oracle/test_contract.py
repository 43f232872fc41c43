"""What every reader must do, shown on one model that every format holds.

A new format is one more entry of `contract_forms.FORMS`, and must pass the same tests.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import unshard
from file_reads import reads_of
from oracle.writers.contract import contract_tensors
from oracle.writers.contract_forms import FORMS, WORLD, Form
from oracle.writers.samples import Samples
from ranks import assert_same, merged, snapshot
from unshard import CheckpointError

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

TRUTH = contract_tensors()
SMALL = 1500  # bytes of a file: several files
DTYPES = {"float32": 10, "bfloat16": 2, "float16": 2, "int64": 1, "bool": 1}


def weight_files(directory: Path) -> dict[str, bytes]:
    """Everything that a merge wrote but its record, which names the source."""
    paths = (path for path in sorted(directory.iterdir()) if path.name != "unshard.json")
    return {path.name: path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | str], dict[str, bytes]]:
    """Return `expected(max_shard_size)`: the files that safetensors and huggingface_hub write."""
    from huggingface_hub import save_torch_state_dict

    def save(limit: int | str) -> dict[str, bytes]:
        directory = tmp_path_factory.mktemp("expected")
        save_torch_state_dict(contract_tensors(), directory, max_shard_size=limit)
        return weight_files(directory)

    return save


Expected = Callable[[int | str], dict[str, bytes]]


def essential(form: Form, run: Path) -> Iterator[Path]:
    """Every file without which the model is not whole."""
    files = (path for path in sorted((run / form.place).iterdir()) if path.stat().st_size)
    return (path for path in files if path.name not in form.unnoticed)


@pytest.mark.parametrize("name", FORMS)
class TestEveryFormat:
    def test_the_merged_tensors_are_the_model_bit_for_bit(
        self, samples: Samples, tmp_path: Path, name: str
    ) -> None:
        run = samples.form(name)
        before = snapshot(run)
        report = unshard.merge(
            run / FORMS[name].levels[0], tmp_path / "out", verify="full", config="none"
        )
        assert_same(merged(tmp_path / "out"), TRUTH)
        assert snapshot(run) == before
        assert report.tensors == len(TRUTH)
        assert report.dtypes == DTYPES

    @pytest.mark.skipif(sys.platform != "linux", reason="inotify counts")
    @pytest.mark.parametrize("place", ["next to the weights", "in the run"])
    def test_a_merge_reads_config_json_once(
        self, samples: Samples, tmp_path: Path, name: str, place: str
    ) -> None:
        form, run = FORMS[name], tmp_path / "run"
        if place == "in the run" and form.step is None:
            pytest.skip("a file that is a checkpoint of its own has no run")
        shutil.copytree(samples.form(name), run)
        config = (run if place == "in the run" else run / form.place) / "config.json"
        fields = {"model_type": "x", "dtype": "bfloat16", "transformers_version": "5.0.0"}
        config.write_text(json.dumps(fields))
        with reads_of(config) as count:
            unshard.merge(run / form.levels[0], tmp_path / "out", dtype="config")
            assert count() == 1
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert written == fields

    def test_the_bytes_are_those_that_safetensors_writes(
        self, samples: Samples, expected: Expected, tmp_path: Path, name: str
    ) -> None:
        unshard.merge(samples.form(name) / FORMS[name].levels[0], tmp_path / "out", config="none")
        assert weight_files(tmp_path / "out") == expected("5GB")

    def test_several_files_are_those_of_the_hub_where_the_order_is_known(
        self, samples: Samples, expected: Expected, tmp_path: Path, name: str
    ) -> None:
        source = samples.form(name) / FORMS[name].levels[0]
        report = unshard.merge(source, tmp_path / "out", max_shard_size=SMALL, config="none")
        assert len(report.files) > 2
        found, theirs = weight_files(tmp_path / "out"), expected(SMALL)
        assert (without_index(found) == without_index(theirs)) is FORMS[name].ordered
        assert_same(merged(tmp_path / "out"), TRUTH)

    def test_inspect_says_what_there_is(self, samples: Samples, name: str) -> None:
        form = FORMS[name]
        found = unshard.inspect(samples.form(name) / form.levels[0])
        assert (found.format, found.world_size, found.step) == (form.name, form.world, form.step)
        assert found.parameters == sum(tensor.numel() for tensor in TRUTH.values())
        assert found.size_bytes == sum(tensor.nbytes for tensor in TRUTH.values())
        assert found.dtypes == DTYPES
        assert {one.name: one.shape for one in found.tensors} == {
            name: tuple(tensor.shape) for name, tensor in TRUTH.items()
        }
        assert found.path in {str(samples.form(name) / at) for at in (form.place, form.levels[0])}
        assert found.missing == ()

    def test_the_order_of_the_state_dict_is_kept_where_it_is_recorded(
        self, samples: Samples, name: str
    ) -> None:
        found = unshard.inspect(samples.form(name) / FORMS[name].levels[0])
        assert ([one.name for one in found.tensors] == list(TRUTH)) is FORMS[name].ordered

    def test_tied_weights_that_are_stored_once_are_reported(
        self, samples: Samples, name: str
    ) -> None:
        found = unshard.inspect(samples.form(name) / FORMS[name].levels[0])
        tied = (("embed.weight", "head.weight"),)
        if FORMS[name].shared:
            assert found.shared == tied
        assert found.shared in {(), tied}

    def test_every_level_of_the_tree_means_the_same(self, samples: Samples, name: str) -> None:
        run = samples.form(name)
        found = [unshard.inspect(run / level) for level in FORMS[name].levels]
        for one in found[1:]:
            assert replace(one, would_write=found[0].would_write) == found[0]

    def test_the_default_output_is_next_to_the_checkpoint(
        self, samples: Samples, name: str
    ) -> None:
        form, run = FORMS[name], samples.form(name)
        outputs = {
            unshard.merge(run / level, dry_run=True, config="none").output for level in form.levels
        }
        assert outputs == {str(run / form.output)}

    def test_a_dry_run_writes_nothing(self, samples: Samples, tmp_path: Path, name: str) -> None:
        run = samples.form(name)
        shutil.copytree(run, tmp_path / "run")
        before = snapshot(tmp_path)
        report = unshard.merge(
            tmp_path / "run" / FORMS[name].levels[0], tmp_path / "out", dry_run=True, config="none"
        )
        assert report.dry_run
        assert report.bytes_written > report.parameters
        assert snapshot(tmp_path) == before
        assert not (tmp_path / "out").exists()

    def test_workers_and_memory_change_no_byte(
        self, samples: Samples, tmp_path: Path, name: str
    ) -> None:
        source = samples.form(name) / FORMS[name].levels[0]
        unshard.merge(
            source, tmp_path / "one", workers=1, memory="1MB", max_shard_size=SMALL, config="none"
        )
        unshard.merge(
            source, tmp_path / "four", workers=4, memory="64MB", max_shard_size=SMALL, config="none"
        )
        for path in (tmp_path / "one").iterdir():
            assert path.read_bytes() == (tmp_path / "four" / path.name).read_bytes(), path.name

    def test_the_record_says_where_it_comes_from(
        self, samples: Samples, tmp_path: Path, name: str
    ) -> None:
        form = FORMS[name]
        unshard.merge(samples.form(name) / form.levels[0], tmp_path / "out", config="none")
        source = json.loads((tmp_path / "out" / "unshard.json").read_text())["source"]
        assert source["format"] == form.name
        assert source["world_size"] == form.world
        assert source["step"] == form.step

    def test_what_is_not_a_weight_is_skipped_and_reported(
        self, samples: Samples, tmp_path: Path, name: str
    ) -> None:
        form = FORMS[name]
        report = unshard.merge(
            samples.form(name) / form.levels[0], tmp_path / "out", dry_run=True, config="none"
        )
        assert sorted(one.fqn for one in report.skipped) == sorted(form.skipped)
        assert all(one.reason for one in report.skipped)

    def test_a_missing_file_is_noticed(self, samples: Samples, tmp_path: Path, name: str) -> None:
        form, run = FORMS[name], samples.form(name)
        lost = list(essential(form, run))
        assert lost
        for number, path in enumerate(lost):
            if path.suffix == ".json":  # an index: numbered files do without
                continue
            copy = tmp_path / str(number)
            shutil.copytree(run, copy)
            (copy / path.relative_to(run)).unlink()
            with pytest.raises(CheckpointError):
                unshard.merge(copy / form.levels[0], tmp_path / "out")
            assert not (tmp_path / "out").exists()

    def test_a_file_cut_in_half_is_noticed(
        self, samples: Samples, tmp_path: Path, name: str
    ) -> None:
        form, run = FORMS[name], samples.form(name)
        for number, path in enumerate(essential(form, run)):
            copy = tmp_path / str(number)
            shutil.copytree(run, copy)
            with (copy / path.relative_to(run)).open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
            with pytest.raises(CheckpointError):
                unshard.merge(copy / form.levels[0], tmp_path / "out")
            assert not (tmp_path / "out").exists()

    def test_a_merged_model_merges_again_to_the_same_bytes(
        self, samples: Samples, tmp_path: Path, name: str
    ) -> None:
        unshard.merge(samples.form(name) / FORMS[name].levels[0], tmp_path / "out", config="none")
        unshard.merge(tmp_path / "out", tmp_path / "again", config="none")
        assert weight_files(tmp_path / "again") == weight_files(tmp_path / "out")


def without_index(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name.endswith(".safetensors")}


def test_the_model_holds_what_readers_stumble_over() -> None:
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in TRUTH.values()}
    assert names == DTYPES.keys()
    assert {0, 1, 2} <= {tensor.ndim for tensor in TRUTH.values()}
    assert TRUTH["scale"].shape == (1,)
    assert TRUTH["counter"].shape == ()
    assert all(TRUTH[name].shape[0] % WORLD for name in ("embed.weight", "block.linear.weight"))
    assert TRUTH["head.weight"].equal(TRUTH["embed.weight"])
    assert list(TRUTH) != sorted(TRUTH)
