"""Rank files for another number of ranks: torch resumes from them, and nothing changes."""

import json
import shutil
import tempfile
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Shard

import unshard
from optimizers import KEYS, like, save_optimizer
from oracle.writers.resuming import Run, resume, train
from oracle.writers.workers import WorkerPool
from other_versions import unpack_rank_files
from properties import examples
from ranks import as_rank, assert_same, contents, merged, save_ranks, some_tensors
from saved_values import loaded, parts_of, same
from unshard import IncompleteError, NotMergeableError, OutputError, UsageError

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]


@pytest.fixture(scope="module")
def trained(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a checkpoint of 4 ranks, not to be changed."""
    directory = tmp_path_factory.mktemp("trained")
    run = partial(train, run=Run("uneven", (4,), ("fsdp",)))
    worker_pool.run(run, 4, directory)
    return directory


@pytest.fixture(scope="module")
def parallel(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same of a model with tensor parallelism."""
    directory = tmp_path_factory.mktemp("parallel")
    run = partial(train, run=Run("tensor parallel", (2, 2), ("fsdp", "tp")))
    worker_pool.run(run, 4, directory)
    return directory


def resumes_equal(
    worker_pool: WorkerPool,
    source: Path,
    place: Path,
    *,
    kind: str,
    mesh: tuple[int, ...],
    names: tuple[str, ...] = ("ddp", "fsdp"),
    device: str | None = None,
) -> None:
    """Reshard, go on with torch, and compare with the run that was not interrupted."""
    world, own = prod(mesh), names[-len(mesh) :]
    output = place / f"resharded-{world}"
    options: dict[str, Any] = {"mesh": mesh, "mesh_names": own, "device": device}
    unshard.reshard(source, output, world_size=world, verify="full", **options)
    worker_pool.run(partial(resume, run=Run(kind, mesh, own)), world, place)
    before, resumed = loaded(source / "before.pt"), loaded(place / f"resumed-{world}.pt")
    assert same(resumed, before)
    after, gone_on = loaded(source / "after.pt"), loaded(place / f"trained-{world}.pt")
    for part in ("model", "state"):
        torch.testing.assert_close(gone_on[part], after[part], rtol=1e-5, atol=1e-7)
    assert not same(gone_on["model"], before["model"])


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_torch_goes_on_as_if_nothing_had_happened(
    trained: Path, worker_pool: WorkerPool, tmp_path: Path, mesh: tuple[int, ...]
) -> None:
    resumes_equal(worker_pool, trained, tmp_path, kind="uneven", mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frozen, all given", "frozen, not given"])
def test_frozen_and_tied_parameters_need_no_names(
    worker_pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    """Three layers are equal and one is frozen: which two were trained is not recorded."""
    source = tmp_path / "run"
    source.mkdir()
    run = partial(train, run=Run(kind, (2, 2), ("ddp", "fsdp")))
    worker_pool.run(run, 4, source)
    resumes_equal(worker_pool, source, tmp_path, kind=kind, mesh=(3,))
    there_and_back_again(source, tmp_path, mesh=(2, 2), mesh_names=("ddp", "fsdp"))


def there_and_back_again(trained: Path, place: Path, **options: Any) -> None:
    """Reshard from 4 ranks over 2, 8 and 3 to 4; every file must have the same tensors again."""
    source = trained / "global_step_3" / "actor"
    last = source
    for number, world in enumerate((2, 8, 3, 4)):
        meant = options if world == 4 else {}
        unshard.reshard(last, place / str(number), world_size=world, verify="full", **meant)
        last = place / str(number)
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in last.iterdir()) == names
    for name in names:
        if not name.startswith("extra_state"):
            assert same(parts_of(last / name), parts_of(source / name)), name


def test_there_and_back_again_gives_the_same_bits(trained: Path, tmp_path: Path) -> None:
    there_and_back_again(trained, tmp_path)


@pytest.mark.parametrize("mesh", [(2,), (3,)], ids=str)
def test_tensor_parallelism_ends(
    parallel: Path, worker_pool: WorkerPool, tmp_path: Path, mesh: tuple[int, ...]
) -> None:
    """Tensors that FSDP and tensor parallelism cut go on with FSDP alone."""
    resumes_equal(worker_pool, parallel, tmp_path, kind="tensor parallel", mesh=mesh)


@pytest.mark.parametrize("version", ["2.5", "2.6", "2.8", "2.10", "2.12", "2.15"])
def test_tensor_parallelism_of_other_versions_ends(tmp_path: Path, version: str) -> None:
    source = unpack_rank_files(tmp_path) / f"torch-{version}" / "fsdp2_tp"
    unshard.reshard(source, tmp_path / "three", world_size=3, verify="full")
    unshard.merge(source, tmp_path / "one", config="none")
    unshard.merge(tmp_path / "three", tmp_path / "two", verify="full", config="none")
    assert_same(merged(tmp_path / "two"), merged(tmp_path / "one"))
    for path in (tmp_path / "three").glob("model_*.pt"):
        for tensor in loaded(path).values():
            assert not isinstance(tensor, DTensor) or tensor.placements == (Shard(0),)


def test_names_that_torch_recorded_stay(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_ranks(tmp_path / "a", tensors, 2)
    recorded = {"param_names": list(tensors)}
    save_optimizer(tmp_path / "a", {"exp_avg": like(tensors, 1)}, 2, group=recorded)
    unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=3)
    (group,) = loaded(tmp_path / "out" / "optim_world_size_3_rank_1.pt")["param_groups"]
    assert group["param_names"] == list(tensors)


@pytest.mark.parametrize("to", ["verl", "lmms"])
def test_a_missing_file_of_the_optimizer_is_named(tmp_path: Path, to: str) -> None:
    save_ranks(tmp_path / "a", some_tensors(), 2)
    save_optimizer(tmp_path / "a", {"exp_avg": like(some_tensors(), 1)}, 2)
    (tmp_path / "a" / "optim_world_size_2_rank_1.pt").unlink()
    with pytest.raises(IncompleteError, match=r"missing: .*optim_world_size_2_rank_1\.pt"):
        unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=3, to=to)


def test_what_one_rank_saved_without_dtensors_is_sharded(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    source = tmp_path / "run"
    source.mkdir()
    worker_pool.run(partial(train, run=Run("FSDP1 alone", (1,), ("fsdp",))), 1, source)
    (file,) = source.rglob("model_*.pt")
    assert not any(isinstance(one, DTensor) for one in loaded(file).values())
    resumes_equal(worker_pool, source, tmp_path, kind="FSDP1 alone", mesh=(3,), device="cpu")
    unshard.reshard(source, tmp_path / "resharded-1", world_size=1, verify="full")
    worker_pool.run(partial(resume, run=Run("FSDP1 alone", (1,), ("fsdp",))), 1, tmp_path)
    assert same(loaded(tmp_path / "resumed-1.pt"), loaded(source / "before.pt"))


def test_one_rank_of_fsdp1_gets_no_dtensors(tmp_path: Path) -> None:
    """torch does not shard there, and copies no DTensor into a tensor."""
    tensors = some_tensors()
    save_ranks(tmp_path / "a", tensors, 2)
    save_optimizer(tmp_path / "a", {"exp_avg": like(tensors, 1)}, 2)
    config = tmp_path / "a" / "fsdp_config.json"
    for version in (1, 2):
        config.write_text(json.dumps({"FSDP_version": version, "world_size": 2}))
        output = tmp_path / str(version)
        unshard.reshard(tmp_path / "a", output, world_size=1, verify="full")
        found = loaded(output / "model_world_size_1_rank_0.pt")
        state = loaded(output / "optim_world_size_1_rank_0.pt")["state"]
        for one in (*found.values(), *(fields["exp_avg"] for fields in state.values())):
            assert isinstance(one, DTensor) is (version == 2)
        assert same(
            {key: getattr(one, "_local_tensor", one) for key, one in found.items()}, tensors
        )
        report = unshard.reshard(output, tmp_path / f"{version} again", world_size=3)
        assert any("continue with FSDP2" in note for note in report.notes) is (version == 1)


def test_what_every_rank_has_whole_stays_whole(tmp_path: Path) -> None:
    """As FSDP1 saves without sharding on several ranks, and DDP."""
    tensors = some_tensors()
    moments = {number: {"exp_avg": one + 1} for number, one in enumerate(tensors.values())}
    state = {"state": moments, "param_groups": [{"params": [*moments]}]}
    (tmp_path / "a").mkdir()
    for rank in range(2):
        torch.save(tensors, tmp_path / "a" / f"model_world_size_2_rank_{rank}.pt")
        torch.save(state, tmp_path / "a" / f"optim_world_size_2_rank_{rank}.pt")
    unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=3, verify="full")
    for rank in range(3):
        assert same(loaded(tmp_path / "out" / f"model_world_size_3_rank_{rank}.pt"), tensors)
        assert same(loaded(tmp_path / "out" / f"optim_world_size_3_rank_{rank}.pt"), state)


def test_flat_parameters_of_one_rank_are_named(tmp_path: Path) -> None:
    tensors = some_tensors()
    (tmp_path / "a").mkdir()
    torch.save(tensors, tmp_path / "a" / "model_world_size_1_rank_0.pt")
    elements = sum(one.numel() for one in tensors.values())
    flat = {"state": {0: {"exp_avg": torch.ones(elements)}}, "param_groups": [{"params": [0]}]}
    torch.save(flat, tmp_path / "a" / "optim_world_size_1_rank_0.pt")
    for to in (None, "dcp"):
        with pytest.raises(NotMergeableError, match="flat parameters of FSDP1"):
            unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=2, to=to)


def test_a_mesh_without_names_stays_without(tmp_path: Path) -> None:
    save_ranks(tmp_path / "a", some_tensors(), 2, mesh_names=None)
    save_ranks(tmp_path / "truth", some_tensors(), 3, mesh_names=None)
    report = unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=3)
    unshard.reshard(tmp_path / "a", tmp_path / "named", world_size=3, mesh_names=["dp"])
    assert report.mesh_names == ()
    with as_rank(1, 3):
        found, truth, named = (
            loaded(tmp_path / place / "model_world_size_3_rank_1.pt")["model.norm.weight"]
            for place in ("out", "truth", "named")
        )
    assert found.device_mesh == truth.device_mesh
    assert found.device_mesh.mesh_dim_names is None
    assert named.device_mesh.mesh_dim_names == ("dp",)


def test_names_of_wrappers_stay_in_the_same_format(tmp_path: Path) -> None:
    """torch.compile's model loads no other names, and a trainer of another format has its own."""
    wrapped = {f"_orig_mod.{name}": one for name, one in some_tensors().items()}
    save_ranks(tmp_path / "a", wrapped, 2)
    same_format = unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=3, verify="full")
    assert list(loaded(tmp_path / "out" / "model_world_size_3_rank_1.pt")) == list(wrapped)
    other = unshard.reshard(tmp_path / "a", tmp_path / "lmms", world_size=3, to="lmms")
    file = tmp_path / "lmms" / "pytorch_model_fsdp_0" / "model_world_size_3_rank_1.pt"
    assert list(loaded(file)) == list(some_tensors())
    for report, is_told in ((same_format, False), (other, True)):
        assert any("wrappers were removed" in note for note in report.notes) is is_told


class Unknown:
    """A hyper-parameter that is nothing that a reader knows."""


class Listed(list):  # type: ignore[type-arg]
    """As configurations have them."""


def test_hyper_parameters_that_are_left_out_are_reported(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_ranks(tmp_path / "a", tensors, 2)
    group = {"betas": Listed([0.8, 0.95]), "hook": Unknown()}
    save_optimizer(tmp_path / "a", {"exp_avg": like(tensors, 1)}, 2, group=group)
    for to in ("verl", "dcp"):
        report = unshard.reshard(tmp_path / "a", tmp_path / to, world_size=3, to=to)
        assert any("hook: an instance of" in note for note in report.notes)
    (written,) = loaded(tmp_path / "verl" / "optim_world_size_3_rank_1.pt")["param_groups"]
    assert written["betas"] == [0.8, 0.95]
    assert "hook" not in written
    merging = unshard.merge(tmp_path / "a", tmp_path / "out", optimizer=True, config="none")
    assert any("hook: an instance of" in note for note in merging.notes)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_ranks(tmp_path / "a", tensors, 2)
    save_optimizer(
        tmp_path / "a",
        {"exp_avg": like({**tensors, "one.more": next(iter(tensors.values()))}, 1)},
        2,
    )
    with pytest.raises(NotMergeableError, match="does not fit the model"):
        unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=3)
    assert not (tmp_path / "out").exists()


def test_the_output_is_merged_as_the_source_is(trained: Path, tmp_path: Path) -> None:
    unshard.reshard(trained, tmp_path / "six", world_size=6)
    unshard.merge(trained, tmp_path / "one", optimizer=True, config="none")
    unshard.merge(tmp_path / "six", tmp_path / "two", optimizer=True, verify="full", config="none")
    for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_scheduler_and_random_state_go_along(trained: Path, tmp_path: Path) -> None:
    report = unshard.reshard(trained, tmp_path / "six", world_size=6)
    source = trained / "global_step_3" / "actor"
    for rank in range(6):
        ours = torch.load(tmp_path / "six" / f"extra_state_world_size_6_rank_{rank}.pt")
        theirs = torch.load(source / f"extra_state_world_size_4_rank_{rank % 4}.pt")
        assert same(ours, theirs)
    assert any("random state of 4 ranks has no equivalent on 6" in note for note in report.notes)
    again = unshard.reshard(trained, tmp_path / "four", world_size=4)
    assert not any("random state" in note for note in again.notes)


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.dictionaries(st.sampled_from("abcdefgh"), shapes, min_size=1)


@settings(max_examples=examples(60))
@given(tensors, st.integers(1, 4), st.integers(1, 7), st.integers(0, 2), st.data())
def test_any_tensors_on_any_number_of_ranks(
    forms: dict[str, tuple[int, ...]], before: int, after: int, dim: int, data: st.DataObject
) -> None:
    truth = {name: torch.randn(shape).bfloat16() for name, shape in forms.items()}
    cut = {name: one for name, one in truth.items() if one.ndim > dim}
    if not cut or not any(one.numel() for one in truth.values()):
        return
    whole = {name: one for name, one in truth.items() if one.ndim <= dim}
    version = data.draw(st.sampled_from(["2.4", "2.6", "2.8", "2.10", "2.13"]))
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        save_ranks(root / "a", cut, before, placements=[Shard(dim)], plain=[whole] * before)
        unshard.reshard(root / "a", root / "b", world_size=after, torch=version, verify="full")
        assert len(list((root / "b").iterdir())) == after
        unshard.merge(root / "b", root / "out", verify="full", config="none")
        assert_same(merged(root / "out"), truth)


@pytest.mark.parametrize("version", ["2.4", "2.6", "2.8", "2.10"])
def test_checkpoints_of_other_versions_come_back_equal(tmp_path: Path, version: str) -> None:
    source = unpack_rank_files(tmp_path) / f"torch-{version}" / "fsdp2_1d"
    unshard.reshard(source, tmp_path / "two", world_size=2, torch=version, verify="full")
    unshard.reshard(tmp_path / "two", tmp_path / "three", world_size=3, torch=version)
    for path in sorted(source.glob("model_*.pt")):
        assert same(parts_of(tmp_path / "three" / path.name), parts_of(path))


RESHARDED = json.loads((Path(__file__).parents[1] / "data" / "resharded.json").read_text())


@pytest.mark.parametrize("version", RESHARDED["written"])
def test_the_files_that_older_torch_has_loaded_are_still_written(
    tmp_path: Path, version: str
) -> None:
    """torch 2.6.0 and 2.8.0 loaded these bytes, by hand; see tests/data/README.md."""
    tensors = some_tensors()
    save_ranks(tmp_path / "a", tensors, 2)
    moments = {key: like(tensors, number) for number, key in enumerate(KEYS)}
    save_optimizer(tmp_path / "a", moments, 2)
    unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=3, torch=version)
    found = {name: sha256(data).hexdigest() for name, data in contents(tmp_path / "out").items()}
    assert found == RESHARDED["written"][version]


def test_what_cannot_be_resharded_is_refused(tmp_path: Path) -> None:
    known = unpack_rank_files(tmp_path / "known") / "torch-2.8"
    cuts = [Shard(0), Shard(1)]
    save_ranks(
        tmp_path / "ep",
        {"w": torch.ones(4, 4)},
        4,
        mesh_shape=(2, 2),
        mesh_names=("ep", "fsdp"),
        placements=cuts,
    )
    with pytest.raises(NotMergeableError, match=r"cut along several dimensions \(0, 1\).*ep, fsdp"):
        unshard.reshard(tmp_path / "ep", tmp_path / "out", world_size=2)
    with pytest.raises(NotMergeableError, match=r"not DTensors|no device mesh"):
        unshard.reshard(known / "fsdp1_sharded", tmp_path / "out", world_size=4)
    save_ranks(tmp_path / "a", some_tensors(), 2)
    unshard.merge(tmp_path / "a", tmp_path / "merged", config="none")
    with pytest.raises(NotMergeableError, match="expected: rank files"):
        unshard.reshard(tmp_path / "merged", tmp_path / "out", world_size=2)
    for path in (tmp_path / "a").iterdir():  # as accelerate names them
        path.rename(path.with_name(f"pytorch_model_fsdp_rank{path.stem[-1]}.bin"))
    with pytest.raises(NotMergeableError, match="expected: rank files"):
        unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 4, "mesh": (2, 3)}, "--mesh 2x3 has 6 ranks, not --world-size 4"),
        ({"world_size": 0}, "--world-size 0: is not possible"),
        ({"world_size": "2"}, "--world-size 2: is not possible"),
        ({"world_size": 10**9}, "--world-size 1000000000: is not possible"),
        ({"world_size": 4, "mesh": (2, 2)}, r"the mesh of the checkpoint has 1 \(fsdp\)"),
        ({"world_size": 4, "mesh": (2, 2), "mesh_names": ["a"]}, "1 name for 2 dimensions"),
        ({"world_size": 4, "mesh": (2, 2), "mesh_names": ["a", "a"]}, "a name of its own"),
        ({"world_size": 4, "torch": "1.0"}, "--torch 1.0: unknown"),
        ({"world_size": 2, "mesh_names": ["tp"]}, "tensor parallelism is not written"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    save_ranks(tmp_path / "a", some_tensors(), 2)
    with pytest.raises(UsageError, match=message):
        unshard.reshard(tmp_path / "a", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists_is_left(tmp_path: Path) -> None:
    save_ranks(tmp_path / "a", some_tensors(), 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(OutputError, match="exists") as raised:
        unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=3)
    assert raised.value.hint == "give another output"  # it has no --overwrite
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    shutil.rmtree(tmp_path / "out")
    unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=3)
