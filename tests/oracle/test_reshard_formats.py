"""Checkpoints resharded into other formats: torch, accelerate and trainers resume from them."""

import tarfile
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
)

import unshard
from megatron_cases import unpack
from oracle.writers.accelerate import accelerate_load
from oracle.writers.resuming import Run, resume, resume_dcp, save_dcp, train
from oracle.writers.samples import Samples
from oracle.writers.starting import start_dcp, start_ranks
from oracle.writers.workers import WorkerPool
from properties import examples
from ranks import assert_same, merged, save_ranks, some_tensors
from saved_values import loaded, parts_of, same
from tiny_models import tiny_model
from unshard import NotMergeableError, UsageError

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (unavailable|disabled)"),
]


DEEPSPEED = Path(__file__).parents[1] / "data" / "deepspeed.tar.xz"
ON_TWO = Run("uneven", (2,), ("fsdp",))


@pytest.fixture(scope="module")
def trained(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a run of 4 ranks, as verl saves it and as DCP; not to be changed."""
    directory = tmp_path_factory.mktemp("trained")
    run = Run("uneven", (4,), ("fsdp",))
    worker_pool.run(partial(train, run=run), 4, directory)
    worker_pool.run(partial(save_dcp, run=run), 4, directory)
    return directory


def actor(trained: Path) -> Path:
    return trained / "global_step_3" / "actor"


def assert_goes_on(trained: Path, resumed: Path, world: int, parts: tuple[str, ...]) -> None:
    """Assert that a run was resumed bit for bit, and that its next step is the original's."""
    before, found = loaded(trained / "before.pt"), loaded(resumed / f"resumed-{world}.pt")
    assert all(same(found[part], before[part]) for part in parts)
    after, gone_on = loaded(trained / "after.pt"), loaded(resumed / f"trained-{world}.pt")
    for part in ("model", "state"):
        torch.testing.assert_close(gone_on[part], after[part], rtol=1e-5, atol=1e-7)
    assert not same(gone_on["model"], before["model"])


@pytest.mark.parametrize("source", ["ranks", "dcp"])
def test_torch_goes_on_from_dcp(
    trained: Path, worker_pool: WorkerPool, tmp_path: Path, source: str
) -> None:
    given = actor(trained) if source == "ranks" else trained / "dcp"
    unshard.reshard(given, tmp_path / "resharded-dcp", world_size=3, to="dcp", verify="full")
    files = sorted(path.name for path in (tmp_path / "resharded-dcp").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    worker_pool.run(partial(resume_dcp, run=ON_TWO), 2, tmp_path)
    assert_goes_on(trained, tmp_path, 2, ("model", "state", "groups", "scheduler"))


def test_torch_goes_on_from_files_of_ranks_made_of_dcp(
    trained: Path, worker_pool: WorkerPool, tmp_path: Path
) -> None:
    report = unshard.reshard(
        trained / "dcp",
        tmp_path / "resharded-2",
        world_size=2,
        to="verl",
        device="cpu",
        verify="full",
    )
    assert any("no random state" in note for note in report.notes)
    worker_pool.run(partial(resume, run=ON_TWO), 2, tmp_path)
    assert_goes_on(trained, tmp_path, 2, ("model", "state", "groups", "scheduler"))


@pytest.mark.parametrize("through", ["dcp", "accelerate", "lmms"])
def test_there_and_back_again_gives_the_same_bits(
    trained: Path, tmp_path: Path, through: str
) -> None:
    unshard.reshard(actor(trained), tmp_path / "other", world_size=3, to=through)
    unshard.reshard(tmp_path / "other", tmp_path / "back", world_size=4, to="verl", verify="full")
    for kind in ("model", "optim"):
        for rank in range(4):
            name = f"{kind}_world_size_4_rank_{rank}.pt"
            assert same(parts_of(tmp_path / "back" / name), parts_of(actor(trained) / name)), name
    extra = "extra_state_world_size_4_rank_0.pt"
    scheduler = loaded(tmp_path / "back" / extra)["lr_scheduler"]
    assert same(scheduler, loaded(actor(trained) / extra)["lr_scheduler"])


@pytest.mark.slow
def test_accelerate_goes_on(samples: Samples, worker_pool: WorkerPool, tmp_path: Path) -> None:
    sample = samples.write("accelerate_fsdp2", 2)
    source = sample.directory / "checkpoint_1"
    moments = _load_state_dict_from_keys(checkpoint_id=source / "optimizer_0")["optimizer"]
    again, anew = tmp_path / "again" / "resharded", tmp_path / "anew" / "resharded"
    unshard.reshard(source, again, world_size=3, verify="full")
    unshard.reshard(source, tmp_path / "verl", world_size=2, to="verl", device="cpu")
    unshard.reshard(tmp_path / "verl", anew, world_size=1, to="accelerate", verify="full")
    for place in (again, anew):
        worker_pool.run(accelerate_load, 3, place.parent)
        whole, found = (loaded(place.parent / f"loaded-{rank}.pt") for rank in (0, 1))
        assert_same(whole["model"], dict(sample.truth))
        assert same(whole["optimizer"]["state"], moments["state"])
        assert same(found["scheduler"], loaded(source / "scheduler.bin"))
        kept = loaded(source / f"random_states_{1 if place is again else 0}.pkl")
        assert same(found["rng"], kept["torch_manual_seed"])


@pytest.mark.parametrize("to", ["verl", "dcp"])
def test_a_run_starts_from_a_model_of_the_hub(
    worker_pool: WorkerPool, tmp_path: Path, to: str
) -> None:
    model = tiny_model("llama", tie_word_embeddings=True).bfloat16()
    model.save_pretrained(tmp_path / "hub")
    unshard.reshard(
        tmp_path / "hub",
        tmp_path / "resharded",
        world_size=3,
        to=to,
        device="cpu" if to == "verl" else None,
        verify="full",
    )
    worker_pool.run(start_ranks if to == "verl" else start_dcp, 3, tmp_path)
    started = loaded(tmp_path / "started.pt")  # float32, as masters are
    assert_same(started, {name: one.float() for name, one in model.state_dict().items()})
    unshard.merge(tmp_path / "resharded", tmp_path / "out")
    again = merged(tmp_path / "out")
    assert_same(again, {name: one for name, one in model.state_dict().items() if name in again})
    assert "lm_head.weight" not in again  # tied, as the config that went along says


def test_a_model_of_the_hub_gets_its_names_in_training(tmp_path: Path) -> None:
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path / "hub")
    unshard.reshard(tmp_path / "hub", tmp_path / "lmms", world_size=2, to="lmms")
    file = tmp_path / "lmms" / "pytorch_model_fsdp_0" / "model_world_size_2_rank_0.pt"
    assert loaded(file).keys() == tiny_model("qwen2_5_vl").state_dict().keys()


@pytest.mark.parametrize("case", ["zero1_fp32", "zero2_bf16"])
def test_all_parameters_of_deepspeed_are_sharded(tmp_path: Path, case: str) -> None:
    """Also frozen and tied ones, which ZeRO has whole up to stage 2, as it has buffers."""
    with tarfile.open(DEEPSPEED) as archive:
        archive.extractall(tmp_path, filter="data")
    place = tmp_path / "deepspeed" / case
    unshard.reshard(place, tmp_path / "out", world_size=2, to="verl")
    found = loaded(tmp_path / "out" / "model_world_size_2_rank_0.pt")
    (stated,) = place.rglob("mp_rank_00_model_states.pt")
    with unshard.open_checkpoint(place, framework="pt") as opened:
        floating = {name for name, one in opened.items() if one.is_floating_point() and one.ndim}
    sharded = {name for name, one in found.items() if isinstance(one, DTensor)}
    assert sharded == floating - set(loaded(stated)["buffer_names"])
    assert {"frozen_one", "frozen_proj.weight"} <= sharded


def scheduler_of(name: str, *, is_tensor: bool) -> LRScheduler:
    """Return a scheduler; a rate that is a tensor is what torch.compile needs."""
    rate = torch.tensor(0.1) if is_tensor else 0.1
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=rate)
    if name == "milestones":
        return MultiStepLR(optimizer, milestones=[2, 2, 4], gamma=0.5)
    parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 10)]
    return SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.parametrize("name", ["milestones", "one after another"])
@pytest.mark.parametrize("is_tensor", [False, True], ids=["number", "tensor"])
def test_schedulers_of_any_form_are_carried(tmp_path: Path, name: str, *, is_tensor: bool) -> None:
    truth = scheduler_of(name, is_tensor=is_tensor).state_dict()
    saved = {"model": {"w": torch.rand(4, 3)}, "lr_scheduler": truth}
    save(saved, checkpoint_id=tmp_path / "source", no_dist=True)
    report = unshard.reshard(tmp_path / "source", tmp_path / "verl", world_size=2, to="verl")
    assert not any("left out" in note for note in report.notes)
    file = tmp_path / "verl" / "extra_state_world_size_2_rank_1.pt"
    found = loaded(file)["lr_scheduler"]
    assert same(found, truth)
    assert type(found.get("milestones")) is type(truth.get("milestones"))
    unshard.reshard(tmp_path / "verl", tmp_path / "dcp", world_size=3, to="dcp")
    for place in ("source", "dcp"):  # torch itself makes words of the milestones
        again = {"lr_scheduler": scheduler_of(name, is_tensor=is_tensor).state_dict()}
        load(again, checkpoint_id=tmp_path / place, no_dist=True)
        again["lr_scheduler"].pop("milestones", None)
        assert same(again["lr_scheduler"], {k: v for k, v in truth.items() if k != "milestones"})


SAMPLES = {
    "dcp_flat": 3,
    "dcp_app": 2,
    "dcp_composer": 2,
    "dcp_fsdp1": 3,
    "dcp_no_collectives": 3,
    "dcp_strides": 2,
    "dcp_tensors": 2,
    "dcp_zstd": 2,
    "fsdp1_sharded": 3,
    "fsdp2_bin": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SAMPLES)
def test_what_any_tool_saved_becomes_dcp_and_files_of_ranks(
    samples: Samples, tmp_path: Path, scenario: str
) -> None:
    sample = samples.write(scenario, SAMPLES[scenario])
    for to, world in (("dcp", 5), ("lmms", 2)):
        unshard.reshard(sample.directory, tmp_path / to, world_size=world, to=to, verify="full")
        with unshard.open_checkpoint(tmp_path / to, framework="pt") as opened:
            assert_same(dict(opened.items()), dict(sample.truth))


@pytest.mark.parametrize("scenario", ["dcp_flat", "dcp_app", "dcp_composer", "dcp_zstd"])
def test_dcp_again_has_everything_under_its_own_name(
    samples: Samples, tmp_path: Path, scenario: str
) -> None:
    source = samples.write(scenario, 2).directory
    unshard.reshard(source, tmp_path / "again", world_size=5)
    found, truth = (
        _load_state_dict_from_keys(checkpoint_id=place) for place in (tmp_path / "again", source)
    )
    assert same(found, truth)


def test_dcp_again_need_not_know_what_it_has(tmp_path: Path) -> None:
    """Two optimizers, of which nothing says which is the model's, and an average next to it."""
    moments = {"state": {"w": {"exp_avg": torch.rand(4, 3)}}, "param_groups": [{"params": ["w"]}]}
    saved = {
        "model": {"w": torch.rand(4, 3)},
        "ema": {"w": torch.rand(4, 3)},
        "generator": {"optimizer": moments},
        "critic": {"optimizer": moments},
        "losses": [{"step": 1, "loss": 0.5}, torch.rand(2)],
    }
    save(saved, checkpoint_id=tmp_path / "source", no_dist=True)
    unshard.reshard(tmp_path / "source", tmp_path / "again", world_size=3, verify="full")
    assert same(_load_state_dict_from_keys(checkpoint_id=tmp_path / "again"), saved)
    with pytest.raises(NotMergeableError, match="the state of 2 optimizers"):
        unshard.reshard(tmp_path / "source", tmp_path / "verl", world_size=3, to="verl")


@pytest.mark.parametrize("is_flat", [False, True])
def test_lists_in_the_state_of_an_optimizer_in_dcp_are_reported(
    tmp_path: Path, *, is_flat: bool
) -> None:
    """As SOAP and Shampoo have them; torch makes an item of each tensor inside."""
    state = {"exp_avg": torch.rand(4, 3), "GG": [torch.rand(4, 4), torch.rand(3, 3)]}
    optimizer: dict[str, object] = {"state": {"w": state}, "param_groups": [{"params": ["w"]}]}
    if is_flat:
        optimizer = {f"state.w.{key}": one for key, one in state.items()}
        optimizer["param_groups.w.lr"] = 0.5
    saved = {"model": {"w": torch.rand(4, 3)}, "optimizer": optimizer}
    save(saved, checkpoint_id=tmp_path / "source", no_dist=True)
    report = unshard.reshard(tmp_path / "source", tmp_path / "verl", world_size=2, to="verl")
    merging = unshard.merge(tmp_path / "source", tmp_path / "merged", optimizer=True, config="none")
    for notes in (report.notes, merging.notes):
        assert any("optimizer.state.w.GG.1: inside a list or dict" in note for note in notes)
    unshard.reshard(tmp_path / "source", tmp_path / "again", world_size=2)
    found, truth = (
        _load_state_dict_from_keys(checkpoint_id=tmp_path / name) for name in ("again", "source")
    )
    assert same(found, truth)


def test_small_files_next_to_dcp_are_copied_or_named(tmp_path: Path) -> None:
    save({"model": {"w": torch.rand(4, 3)}}, checkpoint_id=tmp_path / "source", no_dist=True)
    small = ("scaler.pt", "dl_state_dict.bin", "dl_state_dict_1.bin")
    for name in (*small, "notes.txt"):
        (tmp_path / "source" / name).write_bytes(name.encode())
    report = unshard.reshard(tmp_path / "source", tmp_path / "out", world_size=2)
    assert all((tmp_path / "out" / name).read_bytes() == name.encode() for name in small)
    assert "not copied from source: notes.txt" in report.notes


def test_a_missing_file_of_random_state_next_to_dcp_is_reported(tmp_path: Path) -> None:
    save({"model": {"w": torch.rand(4, 3)}}, checkpoint_id=tmp_path / "source", no_dist=True)
    for rank in (0, 2):
        (tmp_path / "source" / f"random_states_{rank}.pkl").write_bytes(b"")
    report = unshard.reshard(tmp_path / "source", tmp_path / "out", world_size=3)
    assert report.notes == ("rank 1 gets no random state: the file is missing",)
    assert sorted(path.name for path in (tmp_path / "out").glob("random_states_*")) == [
        f"random_states_{rank}.pkl" for rank in (0, 2)
    ]


def test_names_of_megatron_are_not_written_for_other_trainers(tmp_path: Path) -> None:
    source = unpack(tmp_path) / "llama_tp2_pp2"
    for to in ("verl", "lmms", "accelerate"):
        with pytest.raises(NotMergeableError, match="merge it first"):
            unshard.reshard(source, tmp_path / "out", world_size=2, to=to)
    assert not (tmp_path / "out").exists()
    unshard.merge(source, tmp_path / "merged")
    unshard.reshard(tmp_path / "merged", tmp_path / "out", world_size=2, to="verl")


def test_what_cannot_be_written_is_refused(samples: Samples, tmp_path: Path) -> None:
    save_ranks(tmp_path / "a", some_tensors(), 2)
    with pytest.raises(UsageError, match="--to hf: unknown"):
        unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=2, to="hf")
    with pytest.raises(UsageError, match="exclude DCP"):
        unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=2, to="dcp", mesh=(1, 2))
    with pytest.raises(UsageError, match="is not a type of device"):
        unshard.reshard(tmp_path / "a", tmp_path / "out", world_size=2, device="cuda:1")
    unshard.merge(tmp_path / "a", tmp_path / "whole", config="none")
    with pytest.raises(NotMergeableError, match="name the format to write: --to verl"):
        unshard.reshard(tmp_path / "whole", tmp_path / "out", world_size=2)
    (tmp_path / "whole" / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    with pytest.raises(NotMergeableError, match="its weights are quantised"):
        unshard.reshard(tmp_path / "whole", tmp_path / "out", world_size=2, to="dcp")
    place = samples.write("dcp_not_flattened_plain", 1).directory
    with pytest.raises(NotMergeableError, match="saved without flattening"):
        unshard.reshard(place, tmp_path / "out", world_size=2)
    assert not (tmp_path / "out").exists()


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=examples(20))
@given(st.dictionaries(st.sampled_from("abcdef"), shapes, min_size=1), st.data())
def test_any_tensors_in_any_format(forms: dict[str, tuple[int, ...]], data: st.DataObject) -> None:
    truth = {name: torch.randn(shape).bfloat16() for name, shape in forms.items()}
    cut = {name: one for name, one in truth.items() if one.ndim}
    if not cut or not any(one.numel() for one in truth.values()):
        return
    whole = {name: one for name, one in truth.items() if not one.ndim}
    world = st.integers(1, 6)
    before = data.draw(world)
    version = data.draw(st.sampled_from(["2.4", "2.6", "2.8", "2.10", "2.13"]))
    with tempfile.TemporaryDirectory() as place:
        last = Path(place) / "ranks"
        save_ranks(last, cut, before, plain=[whole] * before)
        for number in range(2):
            to = data.draw(st.sampled_from(["verl", "lmms", "dcp", "accelerate"]))
            output = Path(place) / f"{number}"
            unshard.reshard(
                last, output, world_size=data.draw(world), to=to, torch=version, verify="full"
            )
            last = output
        with unshard.open_checkpoint(last, framework="pt") as opened:
            assert_same(dict(opened.items()), truth)
